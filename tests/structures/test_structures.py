"""Kinds of curvature of networks and of parts of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pretend_cuda
import pytest
import torch
from problems.seeds import seeded
from problems.tiny_networks import losses_of, tiny_target
from torch import Tensor, nn

from bnncli import registry
from bnncli.errors import NumericError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.mode import covariance_at
from bnncli.inference.prior_search import search
from bnncli.inference.prior_variants import choose_layer_precisions
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import ggn, network_sums
from bnncli.structures.low_rank import LowRank, _trace_outside, largest_eigenpairs
from bnncli.structures.low_rank import NetworkLowRank as LowRankCurvature
from bnncli.structures.subnetwork import Subnetwork
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import NetworkTarget

every_output = pytest.mark.parametrize("outputs", [3, 1])


@every_output
def test_the_hessian_is_autograds(outputs: int) -> None:
    target = tiny_target(outputs, choice=CurvatureChoice("hessian"))
    theta = target.layout.trained()
    expected = torch.autograd.functional.hessian(lambda one: losses_of(target, one).sum(), theta)
    torch.testing.assert_close(ggn(target, theta, "full")["hessian.full"], expected)
    assert not torch.allclose(expected, ggn(tiny_target(outputs), theta, "full")["hessian.full"], rtol=1e-2)


@pytest.mark.parametrize("kind", ["ggn", "hessian", "fisher"])
@pytest.mark.parametrize("structure", ["full", "subnetwork", "diag"])
def test_the_scale_of_the_likelihood_multiplies_every_kind(structure: str, kind: str) -> None:
    """Against the same examples three times, and for the full Hessian autograd of the scaled log joint."""
    choice = CurvatureChoice(kind, size=9)
    if structure == "diag" and kind == "hessian":
        return  # there is none
    plain = tiny_target(choice=choice, prior=Prior(1.0))  # one precision, under which variances keep their order
    theta = plain.layout.trained()
    thrice = replace(plain, inputs=plain.inputs.repeat(3, 1), labels=plain.labels.repeat(3))
    scaled = replace(plain, likelihood_scale=3.0)
    found, expected = (ggn(target, theta, structure) for target in (scaled, thrice))
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, msg=name)
    if (structure, kind) == ("full", "hessian"):
        joint = torch.autograd.functional.hessian(lambda one: 3 * losses_of(plain, one).sum(), theta)
        torch.testing.assert_close(found["hessian.full"], joint)


@every_output
@pytest.mark.parametrize("at_once", [1, 10**9])
def test_the_fisher_matrix_sums_the_gradients_products(
    outputs: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(network_sums._ROW_ELEMENTS, "cpu", at_once)
    target = tiny_target(outputs, choice=CurvatureChoice("fisher"))
    theta = target.layout.trained()
    rows = torch.autograd.functional.jacobian(lambda one: losses_of(target, one), theta)
    torch.testing.assert_close(ggn(target, theta, "full")["hessian.full"], rows.T @ rows)
    torch.testing.assert_close(ggn(target, theta, "diag")["hessian.diag"], rows.square().sum(dim=0))


def test_the_fisher_matrix_is_the_ggn_where_labels_are_drawn_from_the_model() -> None:
    target = tiny_target(examples=4000, choice=CurvatureChoice("fisher"))
    theta = target.layout.trained()
    probs = target.layout.logits(target.inputs, theta[None])[0].softmax(1)
    drawn = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    target = target._changed(labels=drawn)
    found, expected = (
        ggn(one, theta, "diag")["hessian.diag"] for one in (target, target.with_choice(CurvatureChoice()))
    )
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.0)  # of 4000 examples: a relative error of 2 % each


def test_the_evidence_beside_a_mode_is_there_with_the_exact_hessian_alone() -> None:
    plain = tiny_target(prior=Prior(5.0))
    mode = fit_gaussian(plain, start=plain.layout.trained()).mode
    exact = plain.with_choice(CurvatureChoice("hessian"))
    fit = fit_gaussian(exact, start=mode.theta, center="checkpoint")
    precision = torch.autograd.functional.hessian(lambda one: losses_of(plain, one).sum(), mode.theta)
    precision = precision + plain.prior.diagonal(plain.layout).diag()
    expected = mode.log_joint + 0.5 * (len(precision) * torch.log(torch.tensor(2 * torch.pi)) - torch.logdet(precision))
    assert fit.log_marginal_likelihood == pytest.approx(float(expected), abs=1e-3)
    assert fit_gaussian(plain, start=mode.theta, center="checkpoint").log_marginal_likelihood is None


def test_an_indefinite_hessian_is_told() -> None:
    target = tiny_target(prior=Prior(1e-3), choice=CurvatureChoice("hessian"))
    theta = torch.randn(target.layout.num_params, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.raises(NumericError, match="not positive definite"):
        fit_gaussian(target, start=theta, center="checkpoint")


class Rooted(nn.Module):
    """Logits that are finite where their derivatives by two parameters are 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.zeros = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) + self.zeros.square().sum().sqrt() * x[:, :2]


@pytest.mark.parametrize("structure", registry.names("network_curvature"))
def test_derivatives_that_are_not_finite_are_an_error_of_every_structure(structure: str) -> None:
    layout = ModuleLayout.of(ModuleNetwork(Rooted().eval()), num_outputs=2, input_shape=(4,))
    inputs = torch.randn(6, 4, generator=seeded(0), dtype=torch.float64)
    choice = CurvatureChoice(size=4)
    target = NetworkTarget(inputs, torch.tensor([0, 1] * 3), layout, Prior(1.0), choice=choice)
    with pytest.raises(NumericError, match="not finite"):
        covariance_at(target, layout.trained(), structure)


@pytest.mark.parametrize("structure", ["diag", "full", "low-rank", "subnetwork"])
def test_on_a_gpu_the_logits_covariance_is_made_and_kept_there(structure: str) -> None:
    def made(target: NetworkTarget) -> Tensor:
        covariance = covariance_at(target, target.layout.trained(), structure).covariance
        gaussian = Gaussian(target.layout.trained(), covariance, target.layout, target.prior)
        return gaussian.logit_moments(target.inputs.to(target.device))[1]

    choice = CurvatureChoice(rank=4, size=9)
    expected = made(tiny_target(choice=choice))
    with pretend_cuda.pretend() as gpu:
        there = tiny_target(choice=choice)
        there.layout.network.module.to(gpu.device)
        found = made(replace(there, labels=there.labels.to(gpu.device)))
        assert found.device == gpu.device
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-9)
    assert not gpu.problems(), "\n".join(gpu.problems())


CPU = torch.device("cpu")
PRIORS = (Prior(1.0), Prior(2.0, 0.5), Prior(1e-2))


def parts(rank: int) -> tuple[dict[str, Tensor], Tensor]:
    target = tiny_target(choice=CurvatureChoice(rank=rank))
    theta = target.layout.trained()
    return ggn(target, theta, "low-rank"), ggn(target, theta, "full")["hessian.full"]


def eigenpairs(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return largest_eigenpairs(lambda vector: matrix @ vector, len(matrix), count, seeded(0), CPU)


@pytest.mark.parametrize("rank", [1, 8, 1000])
def test_the_eigenvalues_are_the_largest_of_the_dense_matrix(rank: int) -> None:
    found, dense = parts(rank)
    rank = min(rank, len(dense))
    values, vectors = torch.linalg.eigh(dense)
    vectors = vectors.T.flip(0)[:rank]
    torch.testing.assert_close(
        found["hessian.low-rank.values"], values.flip(0)[:rank].clamp_min(0), rtol=1e-5, atol=1e-9
    )
    own = found["hessian.low-rank.vectors"]
    torch.testing.assert_close(own @ own.T, torch.eye(rank, dtype=torch.float64))
    if rank == 8:  # the subspace, whatever the signs
        torch.testing.assert_close(own.T @ own, vectors.T @ vectors, rtol=0, atol=1e-2)


def test_equal_eigenvalues_are_all_found() -> None:
    basis = torch.linalg.qr(torch.randn(40, 40, generator=seeded(1), dtype=torch.float64))[0]
    values = torch.tensor([5.0] * 3 + [2.0] * 2 + [0.0] * 35, dtype=torch.float64)
    found, vectors = eigenpairs(basis @ values.diag() @ basis.T, 6)
    torch.testing.assert_close(found, values[:6], rtol=0, atol=1e-9)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_the_covariance_is_the_dense_inverse(prior: Prior) -> None:
    found, _ = parts(8)
    layout = tiny_target().layout
    covariance = LowRank.from_hessian(found, prior, layout)
    vectors, values = found["hessian.low-rank.vectors"], found["hessian.low-rank.values"]
    precision = vectors.T @ values.diag() @ vectors + prior.diagonal(layout).diag()
    units = torch.eye(len(precision), dtype=torch.float64)
    root = covariance.unwhiten(units).T
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(covariance.whiten(root.T), units, rtol=0, atol=1e-8)
    torch.testing.assert_close(covariance.pull_back(units), root)
    assert covariance.log_det_scale() == pytest.approx(-0.5 * float(torch.logdet(precision)))
    torch.testing.assert_close(
        covariance.marginal_variances(), torch.linalg.inv(precision).diagonal(), rtol=1e-6, atol=1e-9
    )
    again = LowRank.from_tensors(covariance.to_tensors(), layout)
    torch.testing.assert_close(again.unwhiten(units), covariance.unwhiten(units))
    single = covariance.to(dtype=torch.float32).unwhiten(units)
    torch.testing.assert_close(
        single.double(), covariance.unwhiten(units), rtol=1e-3, atol=1e-3 * float(root.abs().max())
    )


def test_all_eigenvalues_are_the_full_covariance() -> None:
    found, dense = parts(1000)
    layout = tiny_target().layout
    covariance = LowRank.from_hessian(found, PRIORS[1], layout)
    root = covariance.unwhiten(torch.eye(len(dense), dtype=torch.float64))
    expected = torch.linalg.inv(dense + PRIORS[1].diagonal(layout).diag())
    torch.testing.assert_close(root.T @ root, expected, rtol=1e-6, atol=1e-8)


def test_the_captured_share_of_the_trace_is_told_with_its_error() -> None:
    found, dense = parts(8)
    told = LowRankCurvature.metrics(found)
    share = float(found["hessian.low-rank.values"].sum() / dense.trace())
    assert 0.5 < share < 0.999
    assert told["rank"] == 8
    assert told["captured_trace"] < 1 - 0.2 * (1 - share)
    assert abs(told["captured_trace"] - share) <= 4 * told["captured_trace_standard_error"] + 1e-9
    assert LowRankCurvature.metrics(parts(1000)[0])["captured_trace"] == pytest.approx(1.0)


def test_the_rest_of_the_trace_is_without_bias_and_has_the_error_that_is_told() -> None:
    _, dense = parts(1)
    vectors = torch.linalg.eigh(dense)[1].T[-8:]
    rest = float(dense.trace() - (vectors @ dense @ vectors.T).trace())
    found = [_trace_outside(lambda some: some @ dense, vectors, seeded(seed)) for seed in range(300)]
    values, errors = torch.tensor(found).T
    wrong = values - rest
    assert abs(float(wrong.mean())) < 4 * float(wrong.std()) * 300**-0.5
    assert float(errors.square().mean() / wrong.square().mean()) == pytest.approx(1, abs=0.3)


SIZE = 12
PRIOR = Prior(2.0, 0.5)


def target_of(size: int = SIZE, kind: str = "ggn", prior: Prior = PRIOR) -> NetworkTarget:
    return tiny_target(prior=prior, choice=CurvatureChoice(kind, size=size))


def fitted(size: int = SIZE, prior: Prior = PRIOR, **others: Any) -> LaplaceFit:
    target = target_of(size, prior=prior)
    given = {"structure": "subnetwork", "center": "checkpoint", **others}
    return fit_gaussian(target, start=target.layout.trained(), **given)


def varying(fit: LaplaceFit) -> Tensor:
    assert isinstance(fit.gaussian.covariance, Subnetwork)
    return fit.gaussian.covariance.varying


def evidence_by_hand(fit: LaplaceFit, target: NetworkTarget) -> float:
    """Of the model whose parameters are those that vary, all others being known numbers."""
    theta, places = fit.gaussian.mean, varying(fit)
    precisions = target.prior.diagonal(target.layout)[places]
    log_prior = torch.distributions.Normal(0.0, precisions.rsqrt()).log_prob(theta[places]).sum()
    dense = ggn(target, theta, "full")["hessian.full"][places][:, places] + precisions.diag()
    log_joint = log_prior - losses_of(target, theta).sum()
    return float(log_joint + 0.5 * len(places) * math.log(2 * math.pi) - 0.5 * torch.logdet(dense))


@pytest.mark.parametrize("kind", ["ggn", "hessian", "fisher"])
def test_the_widest_parameters_vary_by_the_dense_matrix_between_them(kind: str) -> None:
    target = target_of(kind=kind)
    theta = target.layout.trained()
    found = ggn(target, theta, "subnetwork")
    dense = ggn(target, theta, "full")["hessian.full"]
    if kind == "hessian":
        dense = torch.autograd.functional.hessian(lambda one: losses_of(target, one).sum(), theta)
    order = ggn(target_of(kind="ggn" if kind == "hessian" else kind), theta, "full")["hessian.full"].diagonal()
    widest = (1 / (order + PRIOR.diagonal(target.layout))).argsort(descending=True)[:SIZE].sort().values
    assert torch.equal(found["hessian.subnetwork.indices"], widest)
    torch.testing.assert_close(found["hessian.subnetwork.values"], dense[widest][:, widest])


def test_the_covariance_is_the_dense_inverse_and_nothing_elsewhere() -> None:
    fit = fitted()
    covariance, places = fit.gaussian.covariance, varying(fit)
    dense = fit.hessian["hessian.subnetwork.values"] + PRIOR.diagonal(target_of().layout)[places].diag()
    size = covariance.num_params
    expected = torch.zeros(size, size, dtype=torch.float64)
    expected[places.unsqueeze(1), places] = torch.linalg.inv(dense)
    units = torch.eye(SIZE, dtype=torch.float64)
    root = covariance.unwhiten(units).T
    torch.testing.assert_close(root @ root.T, expected)
    torch.testing.assert_close(covariance.whiten(root.T), units)
    torch.testing.assert_close(covariance.pull_back(torch.eye(size, dtype=torch.float64)), root)
    assert covariance.log_det_scale() == pytest.approx(-0.5 * float(torch.logdet(dense)))
    torch.testing.assert_close(covariance.marginal_variances(), expected.diagonal())  # type: ignore[attr-defined]
    again = Subnetwork.from_tensors(covariance.to_tensors(), target_of().layout)
    assert torch.equal(again.unwhiten(units), covariance.unwhiten(units))
    assert covariance.to(dtype=torch.float32).unwhiten(units).dtype == torch.float32


def test_draws_move_the_chosen_parameters_alone_and_have_their_density() -> None:
    fit = fitted()
    gaussian, places = fit.gaussian, varying(fit)
    theta, log_density = gaussian.from_noise(gaussian.noise(6, seeded()))
    others = torch.ones(gaussian.layout.num_params, dtype=torch.bool).index_fill(0, places, False)
    assert torch.equal(theta[:, others], gaussian.mean[others].expand(6, -1))
    covariance = torch.linalg.inv(
        fit.hessian["hessian.subnetwork.values"] + PRIOR.diagonal(gaussian.layout)[places].diag()
    )
    inner = torch.distributions.MultivariateNormal(gaussian.mean[places], covariance)
    torch.testing.assert_close(log_density, inner.log_prob(theta[:, places]))
    torch.testing.assert_close(gaussian.log_density(theta), log_density)
    assert gaussian.entropy == pytest.approx(float(inner.entropy()))
    meta = gaussian.to_tensors()[1]
    assert (meta["structure"], meta["num_varying"]) == ("subnetwork", SIZE)


def test_the_logits_spread_by_the_chosen_columns_of_the_jacobian() -> None:
    fit, target = fitted(), target_of()
    places = varying(fit)
    inputs = target.inputs[:5]
    jacobian = target.layout.jacobian(inputs, fit.gaussian.mean)[:, :, places]
    dense = fit.hessian["hessian.subnetwork.values"] + PRIOR.diagonal(target.layout)[places].diag()
    gaussian: Gaussian[Any] = fit.gaussian
    torch.testing.assert_close(
        gaussian.logit_moments(inputs)[1], jacobian @ torch.linalg.inv(dense) @ jacobian.mT, rtol=1e-9, atol=1e-12
    )


def test_all_parameters_are_the_full_covariance() -> None:
    target = target_of(1000)
    whole, full = fitted(1000), fitted(structure="full")
    units = torch.eye(target.layout.num_params, dtype=torch.float64)
    torch.testing.assert_close(whole.gaussian.covariance.unwhiten(units), full.gaussian.covariance.unwhiten(units))
    assert "num_varying" not in whole.gaussian.to_tensors()[1]
    curves = [
        dict(
            search(
                target, start=target.layout.trained(), generator=seeded(0), structure=structure, center="checkpoint",
                criterion="marglik", bounds=(0.1, 10.0),
            ).curve
        )
        for structure in ("subnetwork", "full")
    ]  # fmt: skip
    assert curves[0] == pytest.approx(curves[1])


def test_the_evidence_is_that_of_the_parameters_that_vary() -> None:
    target = target_of(prior=Prior(5.0))
    at_mode = fitted(prior=Prior(5.0), center="mode")
    assert at_mode.log_marginal_likelihood == pytest.approx(evidence_by_hand(at_mode, target))
    found = search(
        target, start=target.layout.trained(), generator=seeded(0), structure="subnetwork", center="checkpoint",
        criterion="marglik", bounds=(0.1, 10.0),
    )  # fmt: skip
    under = target.with_prior(Prior(found.best))
    assert dict(found.curve)[found.best] == pytest.approx(-evidence_by_hand(found.fit, under))


def test_each_layer_has_the_precision_of_the_largest_evidence() -> None:
    target = target_of(prior=Prior(1.0))
    start = fitted(prior=Prior(1.0))
    chosen = choose_layer_precisions(target, start, "subnetwork")
    layers = {"0": slice(0, 25), "2": slice(25, 43)}
    assert list(chosen.precisions) == [
        module
        for module, place in layers.items()
        if any(place.start <= int(one) < place.stop for one in varying(start))
    ]

    def evidence(logs: Tensor) -> float:
        found = dict(zip(chosen.precisions, logs.tolist(), strict=True))
        own = [math.exp(found.get(part.name.split(".")[0], 0.0)) for part in target.layout.parts]
        return evidence_by_hand(start, target.with_prior(Prior.of_parts(own, target.layout)))

    best = torch.tensor(list(chosen.precisions.values())).log()
    highest = evidence(best)
    assert chosen.gain == pytest.approx(highest - evidence(0 * best), abs=1e-5)
    for index in range(len(best)):
        for change in (-0.05, 0.05):
            assert evidence(best + change * torch.eye(len(best))[index]) < highest


def test_a_prior_that_outweighs_the_data_is_told() -> None:
    weak, strong = fitted(), fitted(prior=Prior(1e6))
    assert isinstance(weak.gaussian.covariance, Subnetwork)
    assert isinstance(strong.gaussian.covariance, Subnetwork)
    layout = target_of().layout
    told = strong.gaussian.covariance.metrics(Prior(1e6), layout)
    assert (told["subnetwork_size"], told["subnetwork_as_prior"]) == (SIZE, SIZE)
    assert sum(told["subnetwork_params"].values()) == SIZE
    share = weak.gaussian.covariance.inner.marginal_variances() * PRIOR.diagonal(layout)[varying(weak)]
    assert weak.gaussian.covariance.metrics(PRIOR, layout)["subnetwork_as_prior"] == int((share > 0.95).sum()) < SIZE

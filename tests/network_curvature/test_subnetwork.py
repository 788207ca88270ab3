"""The subnetwork of the largest marginal variances: which parameters vary, and their Gaussian, against dense matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems.seeds import seeded
from problems.tiny_networks import losses_of, tiny_target
from torch import Tensor

from bnncli.covariances.subnetwork import Subnetwork
from bnncli.curvature import ggn
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.prior_search import search
from bnncli.inference.prior_variants import choose_layer_precisions
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.curvature_choice import CurvatureChoice
from bnncli.targets.network import NetworkTarget

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

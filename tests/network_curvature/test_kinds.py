"""The exact Hessian and the empirical Fisher matrix of a whole network, against autograd."""

from __future__ import annotations

from dataclasses import replace

import pretend_cuda
import pytest
import torch
from problems.seeds import seeded
from problems.tiny_networks import losses_of, tiny_target
from torch import Tensor, nn

from bnncli import registry
from bnncli.curvature import ggn
from bnncli.errors import NumericError
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.mode import covariance_at
from bnncli.network_curvature import _rows
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
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
    monkeypatch.setitem(_rows._ELEMENTS, "cpu", at_once)
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
    assert mode is not None
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
        assert there.layout.network is not None
        there.layout.network.module.to(gpu.device)
        found = made(replace(there, labels=there.labels.to(gpu.device)))
        assert found.device == gpu.device
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-9)
    assert not gpu.problems(), "\n".join(gpu.problems())

"""Every integrator on a linearised network: as with the logits' moments by finite differences, and with draws put into the network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from problems.seeds import seeded
from torch import Tensor, nn

from bnncli.integrators import load_integrator
from bnncli.integrators._moments import energy_and_max_logit, mean_theta, representative_draws
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.samples import Samples
from bnncli.structures import ggn
from bnncli.structures.full import Full
from bnncli.structures.logits import LogitRoot
from bnncli.targets.network import NetworkTarget

STEP = 1e-5
# Outputs, and the likelihood by name: classes, two classes by one logit and by two, several labels.
CASES = {"classes": (3, None), "one logit": (1, None), "two logits": (2, None), "labels": (2, "multilabel")}
every_case = pytest.mark.parametrize("case", CASES)


@dataclass(frozen=True)
class ByDifferences:
    """The moments of the logits of a Gaussian over a network, by central differences and the covariance multiplied out."""

    gaussian: Gaussian

    @property
    def layout(self) -> ModuleLayout:
        return self.gaussian.layout

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean, features = self.gaussian.mean, features.double()
        steps = STEP * torch.eye(len(mean), dtype=torch.float64)
        sides = [self.layout.logits(features, mean + sign * steps) for sign in (1, -1)]
        jacobian = (sides[0] - sides[1]).permute(1, 2, 0) / (2 * STEP)
        root = self.gaussian.covariance.unwhiten(torch.eye(len(mean), dtype=torch.float64)).T
        return self.layout.logits(features, mean[None])[0], jacobian @ root @ root.T @ jacobian.mT

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        mean, covariance = self.logit_moments(features)
        contrast = torch.eye(mean.shape[1], dtype=torch.float64) - (1 / mean.shape[1] if is_projected else 0)
        return mean @ contrast, (contrast @ covariance @ contrast).diagonal(dim1=1, dim2=2)

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        mean, covariance = self.logit_moments(features)
        return mean, LogitRoot(torch.linalg.cholesky(covariance))

    def pushes(self, num_draws: int) -> bool:
        return False


def make_target(case: str) -> NetworkTarget:
    outputs, likelihood = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ModuleNetwork(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).eval())
    layout = ModuleLayout.of(network, num_outputs=outputs, input_shape=(4,), likelihood_name=likelihood)
    shape = (30, 2) if likelihood else (30,)
    labels = torch.randint(0, layout.num_classes if not likelihood else 2, shape, generator=seeded(1))
    return NetworkTarget(inputs(30, 2), labels, layout, Prior(2.0))


def make_gaussian(case: str) -> Gaussian:
    target = make_target(case)
    mean = target.layout.trained()
    covariance = Full.from_hessian(ggn(target, mean, "full"), target.prior, target.layout)
    return Gaussian(mean, covariance, target.layout)


def inputs(count: int = 5, seed: int = 3) -> Tensor:
    return torch.randn(count, 4, generator=seeded(seed), dtype=torch.float64)


@every_case
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("probit", {}), ("probit", {"projection": "sum-zero"}), ("bridge", {}), ("bridge", {"projection": "conditional"}),
        ("mean-field", {}), ("mean-field", {"order": 2}), ("logit-mc", {}), ("logit-mc", {"qmc": True}), ("quadrature", {}),
    ],
)  # fmt: skip
def test_moments_are_integrated_as_those_by_differences(case: str, name: str, settings: dict[str, object]) -> None:
    if name == "quadrature" and case == "classes":
        return
    gaussian, integrator = make_gaussian(case), load_integrator(name, **settings)
    found, expected = (
        integrator.predict(posterior, inputs(), num_samples=64, generator=seeded(4))
        for posterior in (gaussian, ByDifferences(gaussian))
    )
    for value, other in ((getattr(found, of), getattr(expected, of)) for of in ("probs", "mutual_info", "interval")):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@every_case
def test_draws_are_put_into_the_network_itself(case: str) -> None:
    gaussian, target = make_gaussian(case), make_target(case)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, CASES[case][0])).double()
    for name in ("mc", "importance"):
        asked = {"num_samples": 200, "generator": seeded(5)}
        ready = load_integrator(name).prepare(gaussian, **asked, target=target)  # type: ignore[arg-type]
        drawn = getattr(ready, "drawn", ready)
        weights = torch.full((200,), 1 / 200, dtype=torch.float64) if drawn.weights is None else drawn.weights
        probs = torch.zeros_like(ready.predict(gaussian, inputs(), **asked).probs, dtype=torch.float64)  # type: ignore[arg-type]
        for theta, weight in zip(drawn.theta.double(), weights, strict=True):
            torch.nn.utils.vector_to_parameters(theta, module.parameters())
            logits = module(inputs()).detach()
            one = torch.softmax(logits, 1) if case in ("classes", "two logits") else torch.sigmoid(logits)
            probs += weight * (one if case != "one logit" else torch.cat([1 - one, one], 1))
        found = ready.predict(gaussian, inputs(), **asked).probs  # type: ignore[arg-type]
        torch.testing.assert_close(found.double(), probs, rtol=0, atol=1e-6)
        if name == "importance" and drawn.weights is not None:
            ratio = target.log_joint(drawn.theta.double()) - gaussian.log_density(drawn.theta.double())
            assert torch.corrcoef(torch.stack([ratio.softmax(0), weights]))[0, 1] > 0.9  # but for the smoothed tail


@every_case
def test_scores_of_the_logits_are_those_of_the_network_at_the_mean(case: str) -> None:
    gaussian = make_gaussian(case)
    shifted = replace(gaussian, mean=gaussian.mean + 0.3)
    energy, largest = energy_and_max_logit(inputs(), mean_theta(shifted, seeded()), shifted.layout)
    logits = gaussian.layout.logits(inputs(), shifted.mean[None])[0]
    if case == "labels":
        expected = -nn.functional.softplus(logits).sum(1)
    elif case == "one logit":
        logits = torch.cat([-logits / 2, logits / 2], 1)
        expected = -logits.logsumexp(1)
    else:
        expected = -logits.logsumexp(1)
    torch.testing.assert_close(energy.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(largest.double(), logits.amax(1), rtol=1e-5, atol=1e-6)


def test_scores_of_draws_in_two_modes_are_of_the_mean_logits_not_of_a_network_between_them() -> None:
    layout = make_gaussian("classes").layout
    theta = layout.trained() + 1
    flip = torch.ones_like(theta)  # of all that goes into and out of the hidden units: the same network
    flip[: 4 * 3 + 3] = -1
    flip[4 * 3 + 3 : -layout.num_outputs] = -1
    draws = torch.stack([theta, theta * flip]).repeat(200, 1)
    torch.testing.assert_close(*layout.logits(inputs(), draws[:2]))
    samples = Samples(draws.float().unsqueeze(0), layout)
    found = energy_and_max_logit(inputs(), representative_draws(samples, seeded()), layout)
    one = energy_and_max_logit(inputs(), theta, layout)
    torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)
    between = energy_and_max_logit(inputs(), mean_theta(samples, seeded()), layout)
    assert (between[0] - one[0]).abs().max() > 0.1


@pytest.mark.parametrize("is_quasi", [False, True])
def test_fewer_draws_than_classes_are_of_theta(is_quasi: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gaussian = make_gaussian("classes")
    integrator = load_integrator("logit-mc", qmc=is_quasi)
    assert not integrator.prepare(gaussian, num_samples=3, generator=seeded()).is_of_theta  # type: ignore[attr-defined]
    assert integrator.prepare(gaussian, num_samples=2, generator=seeded()).is_of_theta  # type: ignore[attr-defined]
    monkeypatch.setattr(Gaussian, "pushes", lambda self, num_draws: True)
    ready = integrator.prepare(gaussian, num_samples=4096, generator=seeded(6))
    mean, covariance = ByDifferences(gaussian).logit_moments(inputs())
    logits = ready._draws(gaussian, inputs()).at(inputs()).logits(slice(0, 4096))  # type: ignore[attr-defined]
    sd = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((logits.mean(0).T - mean) / sd).abs().max() < 4.5 / 64
    for n, expected in enumerate(covariance):
        assert ((torch.cov(logits[:, :, n].T) - expected) / sd[n].outer(sd[n])).abs().max() < 4.5 * (2 / 4096) ** 0.5
    probs = ready.predict(gaussian, inputs(), num_samples=None, generator=seeded()).probs
    torch.testing.assert_close(probs.double(), logits.softmax(1).mean(0).T, rtol=0, atol=1e-6)


def test_a_product_with_the_jacobian_is_that_of_differences() -> None:
    gaussian = make_gaussian("classes")
    directions = torch.randn(4, len(gaussian.mean), generator=seeded(7), dtype=torch.float64)
    sides = [gaussian.layout.logits(inputs(), gaussian.mean + sign * STEP * directions) for sign in (1, -1)]
    found = gaussian.layout.push(inputs(), gaussian.mean, directions)
    torch.testing.assert_close(found, (sides[0] - sides[1]) / (2 * STEP), rtol=1e-6, atol=1e-8)

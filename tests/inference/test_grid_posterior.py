"""A posterior in two dimensions, known everywhere on a grid, judges whatever claims to approximate it.

The logistic log posterior is written out here once more, so that it is independent of the code it judges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from problems.long_run import long_but
from problems.seeds import seeded
from torch import Tensor

from bnncli import registry
from bnncli.flows import build_layers, choose_space
from bnncli.inference.elbo import diagnose_importance, elbo, measure_gain
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget

LAYOUT = HeadLayout(1, 1)  # theta = (slope, intercept)
PRIOR = Prior(0.3)
TWO = Prior(0.3, 2.5)  # an intercept that 12 examples would put elsewhere
QUADRATURE = 1e-3  # nats; what the grid itself may be off by
SPREAD = 0.3  # of a flow's parameters: enough to bend it, and to keep its mass on the grid
some_flows = pytest.mark.parametrize("kind", long_but(registry.names("flows"), "affine", "radial", "iaf"))
every_structure = pytest.mark.parametrize("structure", registry.names("curvature"))


@dataclass(frozen=True)
class Grid:
    """The exact posterior at points theta (G, 2): log joint (G,), log evidence; each point stands for an area."""

    theta: Tensor
    log_joint: Tensor
    log_area: float

    @property
    def log_evidence(self) -> float:
        return float(self.log_joint.logsumexp(dim=0)) + self.log_area

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean (2,) and covariance (2, 2)."""
        weights = self.log_joint.softmax(dim=0)
        mean = weights @ self.theta
        return mean, ((self.theta - mean).T * weights) @ (self.theta - mean)

    def kl(self, q: Gaussian | Flow) -> float:
        """KL(q || posterior) by quadrature, nats, once q is seen to have its mass on the grid."""
        with torch.no_grad():
            log_q = q.log_density(self.theta)
        share = log_q.exp() * math.exp(self.log_area)
        assert float(share.sum()) == pytest.approx(1, abs=QUADRATURE)
        return float((share * (log_q - self.log_joint + self.log_evidence)).sum())


@cache
def data(num_examples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_examples, generator=seeded(), dtype=torch.float64)
    flip = torch.rand(num_examples, generator=seeded(1), dtype=torch.float64)
    return x, (torch.sigmoid(1.5 * x - 0.5) > flip).long()


def make_target(num_examples: int, prior: Prior = PRIOR) -> LastLayerTarget:
    x, labels = data(num_examples)
    return LastLayerTarget(x.unsqueeze(1), labels, LAYOUT, prior)


@cache
def make_grid(
    num_examples: int, low: float = -9.0, high: float = 15.0, num_points: int = 151, *, intercept_precision: float = 0.3
) -> Grid:
    x, labels = data(num_examples)
    axis = torch.linspace(low, high, num_points, dtype=torch.float64)
    theta = torch.cartesian_prod(axis, axis)
    precisions = torch.tensor([0.3, intercept_precision], dtype=torch.float64)
    log_prior = 0.5 * (precisions / (2 * math.pi)).log().sum() - 0.5 * theta.square() @ precisions
    log_likelihood = torch.zeros(len(theta), dtype=torch.float64)
    for x_n, label in zip(x, labels, strict=True):
        sign = 1.0 if label else -1.0
        log_likelihood -= torch.log1p(torch.exp(-sign * (theta[:, 0] * x_n + theta[:, 1])))
    return Grid(theta, log_prior + log_likelihood, 2 * math.log((high - low) / (num_points - 1)))


def laplace(num_examples: int, structure: str = "full") -> Gaussian:
    return fit_gaussian(make_target(num_examples), start=torch.zeros(2), structure=structure).gaussian


def bent(kind: str, base: Gaussian, seed: int) -> Flow:
    """A flow of two layers whose parameters lie away from their start."""
    layers, generator = build_layers(kind, LAYOUT, seeded(seed), length=2), seeded(seed + 1)
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        parameter.requires_grad_(False)
        step = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter += SPREAD * step / max(1, parameter.shape[-1]) ** 0.5
    return Flow(base, layers, kind, choose_space(kind, "auto"))


def assert_elbo_is_right(q: Gaussian | Flow, target: LastLayerTarget, grid: Grid) -> None:
    """ELBO = log evidence - KL, both from the grid, and so never above the evidence, within four standard errors."""
    estimate = elbo(target, q, generator=seeded(3), num_samples=4000)
    allowed = 4 * estimate.standard_error + QUADRATURE
    assert estimate.value == pytest.approx(grid.log_evidence - grid.kl(q), abs=allowed)
    assert estimate.value <= grid.log_evidence + allowed


def test_the_target_is_the_log_joint_written_out_here() -> None:
    grid = make_grid(12)
    torch.testing.assert_close(make_target(12).log_joint(grid.theta[::97]), grid.log_joint[::97])
    assert grid.log_evidence == pytest.approx(make_grid(12, num_points=201).log_evidence, abs=1e-6)


def test_laplace_has_the_exact_moments_when_there_is_much_data() -> None:
    errors = []
    for num_examples in (100, 1000):
        base = laplace(num_examples)
        width = 8 * float(base.covariance.unwhiten(torch.eye(2, dtype=torch.float64)).abs().max())
        low, high = float(base.mean.min()) - width, float(base.mean.max()) + width
        mean, covariance = make_grid(num_examples, low, high).moments()
        root = base.covariance.unwhiten(torch.eye(2, dtype=torch.float64))
        shift = base.covariance.whiten((mean - base.mean).unsqueeze(0)).norm()
        errors.append((float(shift), float((covariance - root.T @ root).norm() / covariance.norm())))
    # The mean is off by O(N^-1/2) standard deviations, the covariance by O(N^-1) of itself.
    assert errors[1][0] < 0.1
    assert errors[1][0] < 0.5 * errors[0][0]
    assert errors[1][1] < 0.02
    assert errors[1][1] < 0.3 * errors[0][1]


@every_structure
def test_the_elbo_of_every_gaussian_is_the_evidence_less_the_divergence(structure: str) -> None:
    assert_elbo_is_right(laplace(12, structure), make_target(12), make_grid(12))


@some_flows
def test_the_elbo_of_every_flow_is_the_evidence_less_the_divergence(kind: str) -> None:
    flow = bent(kind, laplace(12), seed=5)
    assert abs(make_grid(12).kl(flow) - make_grid(12).kl(flow.base)) > 1e-4  # the layers do something
    assert_elbo_is_right(flow, make_target(12), make_grid(12))


@some_flows
def test_refinement_comes_closer_by_what_its_elbo_gains(kind: str) -> None:
    target, grid = make_target(12), make_grid(12)
    base = fit_gaussian(target, start=torch.tensor([1.0, 0.5]), center="checkpoint").gaussian
    fit = fit_flow(target, base, flow=kind, length=2, epochs=60, batch_size=12, learning_rate=0.02, generator=seeded())
    assert_elbo_is_right(fit.posterior, target, grid)
    found = measure_gain(target, base, fit.posterior, generator=seeded(), num_samples=4000)
    gain, error = found.value, found.standard_error
    fall = grid.kl(base) - grid.kl(fit.posterior)
    assert gain == pytest.approx(fall, abs=4 * error + QUADRATURE)
    assert fall > -0.01


def test_a_radial_flow_takes_away_much_of_a_wrong_centre() -> None:
    target, grid = make_target(12), make_grid(12, num_points=301)  # finer, where the flow peaks
    base = fit_gaussian(target, start=torch.tensor([0.0, 0.5]), center="checkpoint").gaussian
    fit = fit_flow(
        target, base, flow="radial", length=3, epochs=150, batch_size=12, learning_rate=0.05, generator=seeded()
    )
    assert grid.kl(fit.posterior) < 0.5 * grid.kl(base)


def test_the_evidence_of_importance_weights_is_that_of_the_grid() -> None:
    target, grid = make_target(12), make_grid(12)
    for structure in ("full", "diag"):
        found = diagnose_importance(target, laplace(12, structure), generator=seeded(2), num_draws=8000)
        assert found.log_evidence == pytest.approx(grid.log_evidence, abs=4 * found.log_evidence_error)
        assert found.elbo < found.log_evidence


@pytest.mark.parametrize("prior", [PRIOR, TWO], ids=str)
def test_hmc_draws_have_the_exact_means_and_variances(prior: Prior) -> None:
    target = make_target(12, prior)
    base = fit_gaussian(target, start=torch.zeros(2)).gaussian
    num_chains = 160
    drawn = sample_hmc(
        target, mode=base.mean, covariance=base.covariance, generator=seeded(), num_chains=num_chains,
        num_warmup=30, num_draws=40,
    )  # fmt: skip
    intercept_precision = float(prior.diagonal(LAYOUT)[1])
    mean, covariance = make_grid(12, intercept_precision=intercept_precision).moments()
    draws = drawn.draws.double()
    for values, exact in ((draws, mean), ((draws - mean).square(), covariance.diagonal())):
        of_chains = values.mean(dim=1)
        error = of_chains.std(dim=0) / math.sqrt(num_chains)
        assert ((of_chains.mean(dim=0) - exact).abs() < 4 * error).all()

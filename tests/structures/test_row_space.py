"""Fits in the row space of the features against fits over all of theta, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from problems.seeds import normal, seeded
from torch import Tensor

from bnncli import registry
from bnncli.flows import SPACES, build_layers
from bnncli.inference.elbo import log_weights
from bnncli.inference.laplace import fit_gaussian, laplace_evidence
from bnncli.inference.mode import covariance_at, find_mode
from bnncli.inference.prior_search import search
from bnncli.inference.row_space import RowLift, lift_fit, lift_gaussian
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import Flow
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import Covariance
from bnncli.structures.logits import head_spread
from bnncli.structures.row_space import WithinRows
from bnncli.targets.last_layer import LastLayerTarget
from bnncli.targets.row_space import RowSpace

FEATURES = 7
PRIOR = 0.7


@dataclass(frozen=True)
class Case:
    """A problem with fewer examples than features."""

    layout: HeadLayout
    prior: Prior
    num_examples: int = 4
    repeats: int = 1

    def __str__(self) -> str:
        return f"{self.layout}, prior {self.prior}, {self.num_examples} examples x{self.repeats}"

    @property
    def target(self) -> LastLayerTarget:
        features = normal(self.num_examples, self.layout.num_features).repeat(self.repeats, 1)
        labels = torch.randint(self.layout.num_classes, (len(features),), generator=seeded(1))
        return LastLayerTarget(features, labels, self.layout, self.prior)


THREE = HeadLayout(3, FEATURES)
CASES = [
    Case(THREE, Prior(PRIOR)),
    Case(THREE, Prior(PRIOR, 0.05)),
    Case(HeadLayout(3, FEATURES, has_bias=False), Prior(PRIOR)),
    Case(HeadLayout(2, FEATURES), Prior(PRIOR)),
    Case(HeadLayout(1, FEATURES), Prior(PRIOR, 3.0)),
    Case(HeadLayout(1, FEATURES, has_bias=False), Prior(PRIOR)),
    Case(THREE, Prior(PRIOR, 3.0).with_mean(normal(1, THREE.num_params, seed=6)[0], 1.0)),
    Case(THREE, Prior(PRIOR), num_examples=1),
    Case(THREE, Prior(PRIOR), num_examples=2, repeats=3),  # rank 2 of 6 examples
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_exact = pytest.mark.parametrize("structure", ["full", "block", "kron"])


def both(case: Case, structure: str = "full") -> tuple[Gaussian, Gaussian, RowSpace]:
    """The Gaussian at the mode over all of theta, and the one made in the row space."""
    target = case.target
    rows = RowSpace.of(target.features, case.layout)
    fits = []
    for one in (target, rows.target(target)):
        theta = find_mode(one, torch.zeros(one.layout.num_params), tolerance=1e-11).theta
        fits.append(Gaussian(theta, covariance_at(one, theta, structure)[0], one.layout, one.prior))
    return fits[0], lift_gaussian(fits[1], RowLift(rows, target.prior)), rows


def inner_of(gaussian: Gaussian) -> Covariance:
    assert isinstance(gaussian.covariance, WithinRows)
    return gaussian.covariance.inner


def dense(covariance: Any) -> Tensor:
    root = covariance.unwhiten(torch.eye(covariance.num_params, dtype=torch.float64))
    return root.T @ root


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@every_case
def test_the_basis_spans_the_rows_and_nothing_else(case: Case) -> None:
    rows = RowSpace.of(case.target.features, case.layout)
    assert rows.rank == min(case.num_examples, FEATURES)
    close(rows.basis.T @ rows.basis, torch.eye(rows.rank, dtype=torch.float64))
    assert rows.has(case.target.features)
    assert not rows.has(normal(5, FEATURES, seed=3))


def test_rank_is_that_of_the_features() -> None:
    features = normal(6, 3) @ normal(3, 20, seed=1)
    rows = RowSpace.of(features, HeadLayout(3, 20))
    assert rows.rank == 3
    assert rows.has(features)
    assert RowSpace.of(torch.zeros(4, 9), HeadLayout(3, 9)).rank == 1


@every_exact
@every_case
def test_mode_and_covariance_are_those_over_all_of_theta(case: Case, structure: str) -> None:
    whole, lifted, _ = both(case, structure)
    close(lifted.mean, whole.mean)
    close(dense(lifted.covariance), dense(whole.covariance))
    assert lifted.entropy == pytest.approx(whole.entropy, rel=1e-10)


@every_exact
@every_case
def test_logits_off_the_row_space_are_those_over_all_of_theta(case: Case, structure: str) -> None:
    whole, lifted, _ = both(case, structure)
    features = torch.cat([case.target.features, normal(5, FEATURES, seed=7)])
    close(lifted.logit_marginals(features), whole.logit_marginals(features))
    close(lifted.logit_marginals(features, is_projected=True), whole.logit_marginals(features, is_projected=True))
    close(lifted.logit_moments(features), whole.logit_moments(features))
    root = lifted.logit_root(features)[1]
    columns = torch.stack([root.apply(unit[None])[0] for unit in torch.eye(case.layout.num_outputs).double()], dim=1)
    close(torch.einsum("kzn,lzn->nkl", columns, columns), whole.logit_moments(features)[1])


@every_case
def test_evidence_and_log_joint_are_those_over_all_of_theta(case: Case) -> None:
    whole, lifted, rows = both(case)
    target = case.target
    inner = rows.target(target)
    reduced = rows.reduce(lifted.mean)
    fit = fit_gaussian(inner, start=reduced)
    log_joint = float(target.log_joint(whole.mean[None]))
    assert fit.log_marginal_likelihood == pytest.approx(laplace_evidence(log_joint, whole.covariance), abs=1e-5)
    lifted_fit = lift_fit(fit, RowLift(rows, target.prior))
    assert lifted_fit.log_marginal_likelihood == fit.log_marginal_likelihood
    assert lifted_fit.log_joint == pytest.approx(log_joint, abs=1e-5)
    again = laplace_evidence(lifted_fit.log_joint, lifted_fit.gaussian.covariance)
    assert again == pytest.approx(fit.log_marginal_likelihood, abs=1e-9)


@every_exact
@every_case
def test_root_inverse_and_gradient_belong_together(case: Case, structure: str) -> None:
    _, lifted, _ = both(case, structure)
    covariance, z = lifted.covariance, normal(3, case.layout.num_params, seed=4)
    close(covariance.whiten(covariance.unwhiten(z)), z)
    root = covariance.unwhiten(torch.eye(covariance.num_params, dtype=torch.float64)).T
    close(covariance.pull_back(z), z @ root)
    assert covariance.log_det_scale() == pytest.approx(float(torch.linalg.slogdet(root)[1]), rel=1e-10)


def test_draws_have_the_moments_over_all_of_theta() -> None:
    whole, lifted, _ = both(CASES[1])
    num_draws = 20_000
    z = whole.covariance.whiten(lifted.sample(num_draws, seeded(5)).double() - whole.mean)
    assert z.mean(dim=0).abs().max() < 4.5 / num_draws**0.5
    assert (z.T @ z / num_draws - torch.eye(z.shape[1])).abs().max() < 4.5 * (2 / num_draws) ** 0.5
    theta, log_density = lifted.from_noise(lifted.noise(5, seeded()))
    close(log_density, whole.log_density(theta))


def test_float32_and_the_file_keep_the_posterior() -> None:
    _, lifted, _ = both(CASES[1])
    tensors, meta = lifted.to_tensors()
    assert tensors["cov.scale_tril"].shape == (15, 15)
    assert tensors["cov.basis"].shape == (FEATURES, 4)
    again = Gaussian.from_tensors(tensors, meta)
    assert isinstance(again.covariance, WithinRows)
    features = normal(6, FEATURES, seed=7)
    assert torch.equal(again.logit_moments(features)[1], lifted.logit_moments(features)[1])
    single = lifted.covariance.to(dtype=torch.float32)
    variance = head_spread(lifted.covariance, THREE).variance(features)
    torch.testing.assert_close(head_spread(single, THREE).variance(features), variance, rtol=1e-5, atol=1e-6)


def test_a_basis_of_another_size_is_refused() -> None:
    _, lifted, rows = both(CASES[0])
    assert isinstance(lifted.covariance, WithinRows)
    with pytest.raises(ValueError, match="the row space has 12 parameters, but the covariance has 15"):
        replace(lifted.covariance, rows=RowSpace(rows.basis[:, :3], THREE))
    with pytest.raises(ValueError, match="must be positive"):
        replace(lifted.covariance, precision=0.0)


@pytest.mark.parametrize("criterion", ["val", "marglik"])
@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
def test_the_search_finds_what_it_finds_over_all_of_theta(case: Case, criterion: str) -> None:
    target = case.target
    rows = RowSpace.of(target.features, case.layout)
    labels = torch.randint(case.layout.num_classes, (40,), generator=seeded(9))
    held_out, found = target.held_out(normal(40, FEATURES, seed=8), labels), []
    for one, lift in ((target, None), (rows.target(target), RowLift(rows, target.prior))):
        start = torch.zeros(one.layout.num_params)
        # The Cholesky root of all of theta and the lifted one turn the same noise into other draws: the full covariance's
        # val criterion would differ by its noise. The symmetric root of kron is the same in both.
        found.append(
            search(
                one, start=start, generator=seeded(2), structure="kron" if criterion == "val" else "full",
                criterion=criterion, held_out=held_out, lift=lift, tolerance=0, bounds=(1e-1, 1e2),
            )
        )  # fmt: skip
    whole, lifted = found
    assert [value for _, value in lifted.curve] == pytest.approx([value for _, value in whole.curve], rel=1e-7)
    assert lifted.best == pytest.approx(whole.best, rel=1e-4)


@pytest.mark.parametrize("kind", registry.names("flows"))
@pytest.mark.parametrize("space", SPACES)
def test_a_flow_acts_inside_and_leaves_the_prior_outside(kind: str, space: str) -> None:
    if space not in registry.load_class("flows", kind).spaces:
        pytest.skip("the kind does not act there")
    _, base, rows = both(CASES[1])
    layers = build_layers(kind, rows.reduced, seeded(), length=2)
    generator = seeded(3)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.requires_grad_(False).add_(0.2 * torch.randn(parameter.shape, generator=generator).double())
    flow = Flow(base, layers, kind, space)
    noise = flow.noise(6, seeded(4))
    theta, log_density = flow.from_noise(noise)
    outside = [one - rows.lift(rows.reduce(one)) for one in (theta, base.from_noise(noise)[0])]
    close(*outside)
    assert (rows.reduce(theta) - rows.reduce(base.from_noise(noise)[0])).abs().max() > 1e-3
    inner = Flow(Gaussian(rows.reduce(base.mean), inner_of(base), rows.reduced, base.prior), layers, kind, space)
    reduced, inner_density = inner.from_noise(rows.reduce(noise))
    close(reduced, rows.reduce(theta))
    weight = base.layout.split(outside[0])[0]
    constant = 0.5 * rows.num_outside * math.log(base.prior.weight_precision / (2 * math.pi))
    close(log_density, inner_density + constant - 0.5 * base.prior.weight_precision * weight.square().sum(dim=(1, 2)))
    close(flow.log_density(theta), log_density)
    again = Flow.from_tensors(*flow.to_tensors())
    assert torch.equal(again.from_noise(noise)[0], theta)


def test_weights_of_draws_are_those_inside() -> None:
    _, base, rows = both(CASES[1])
    target, noise = CASES[1].target, base.noise(6, seeded(4))
    inner = Gaussian(rows.reduce(base.mean), inner_of(base), rows.reduced, base.prior)
    inside = log_weights(rows.target(target), inner, rows.reduce(noise))
    close(log_weights(target, base, noise), inside)

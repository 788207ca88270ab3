"""Mode, Laplace approximation, prior search and choice of structure on targets that are none of ours, against autograd."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from problems.own_targets import NOISE_SD, Banana, TanhTarget
from problems.seeds import antithetic, seeded
from torch import Tensor
from torch.func import vmap

from bnncli.errors import UsageError
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.memory import NUM_DRAWS
from bnncli.inference.mode import find_mode
from bnncli.inference.prior_search import choose_structure, search
from bnncli.integrators import load_integrator
from bnncli.parameters.prior import Prior

BOUNDS = (0.3, 3.0)
jacobian = partial(torch.autograd.functional.jacobian, vectorize=True)
every_target = pytest.mark.parametrize("name", ["banana", "network"])
every_structure = pytest.mark.parametrize("structure", ["full", "diag"])


def network(count: int, seed: int) -> TanhTarget:
    inputs = torch.randn(count, 2, generator=seeded(seed), dtype=torch.float64)
    noisy = inputs + 0.2 * torch.randn(count, 2, generator=seeded(seed + 1), dtype=torch.float64)
    return TanhTarget(inputs, (noisy[:, 0] > 0.3).long() + (noisy[:, 1] > 0).long())


def banana(count: int, seed: int, mean: float = -1) -> Banana:
    values = NOISE_SD * torch.randn(count, generator=seeded(seed), dtype=torch.float64)
    return Banana(values - values.mean() + mean)


def make(name: str) -> tuple[Any, Any, Tensor]:
    """The target, held-out examples, and a start near a mode."""
    if name == "banana":
        return banana(8, 0), banana(30, 1), torch.tensor([-1.0, 0.3], dtype=torch.float64)
    if name == "two modes":
        return banana(8, 0, mean=3), None, torch.tensor([1.0, -1.5], dtype=torch.float64)
    return network(100, 0), network(60, 10), trained()


@cache
def trained() -> Tensor:
    """Weights of the network from some steps of gradient descent, as training would leave them."""
    target = network(100, 0)
    theta = torch.randn(target.layout.num_params, generator=seeded(3), dtype=torch.float64)
    for _ in range(100):
        theta = theta + 0.02 * target.log_joint_and_grad(theta[None])[1][0]
    return theta


@cache
def brute_mode(name: str, precision: float) -> Tensor:
    """By Newton's method from the same start, with autograd's gradient and exact Hessian."""
    target, _, start = make(name)
    target = target.with_prior(Prior(precision))

    def nll(theta: Tensor) -> Tensor:
        return -target.log_joint(theta[None])[0]

    mode = start
    for _ in range(12):
        gradient, hessian = jacobian(nll, mode), torch.autograd.functional.hessian(nll, mode, vectorize=True)
        values, vectors = torch.linalg.eigh(hessian)
        mode = mode - vectors @ (vectors.T @ gradient / values.abs())
        if float(gradient.norm()) < 1e-8:
            break
    assert float(gradient.norm()) < 1e-6
    assert float(values.min()) > 0
    return mode


def brute_precision(name: str, structure: str, precision: float, theta: Tensor) -> Tensor:
    """H + Lambda by autograd: of the banana the Hessian, of the network J^T (diag(p) - p p^T) J."""
    target = make(name)[0].with_prior(Prior(precision))
    if isinstance(target, Banana):
        found = torch.autograd.functional.hessian(lambda one: -target.log_joint(one[None])[0], theta)
    else:
        found = precision * torch.eye(len(theta), dtype=torch.float64)
        rows = jacobian(lambda one: target.layout.logits_of(one, target.inputs), theta)
        probs = target.layout.logits_of(theta, target.inputs).softmax(dim=1)
        found = found + (rows.mT @ (probs.diag_embed() - probs.unsqueeze(2) * probs.unsqueeze(1)) @ rows).sum(dim=0)
    return found.diagonal().diag() if structure == "diag" else found


def brute_criterion(name: str, structure: str, criterion: str, precision: float) -> float:
    target, held_out, _ = make(name)
    mode = brute_mode(name, precision)
    matrix = brute_precision(name, structure, precision, mode)
    if criterion == "marglik":
        value = target.with_prior(Prior(precision)).log_joint(mode[None]).item()
        return -value - 0.5 * len(mode) * math.log(math.tau) + 0.5 * torch.linalg.slogdet(matrix)[1].item()
    noise = antithetic(NUM_DRAWS, len(mode), 7)
    draws = mode + noise @ torch.linalg.cholesky(torch.linalg.inv(matrix)).T
    if isinstance(target, Banana):
        center = (draws[:, 0] + draws[:, 1] ** 2).unsqueeze(1)
        probs = torch.distributions.Normal(center, NOISE_SD).log_prob(held_out.values).exp()
    else:
        logits = vmap(held_out.layout.logits_of, in_dims=(0, None))(draws, held_out.inputs)
        probs = logits.softmax(dim=2)[:, torch.arange(len(held_out.labels)), held_out.labels]
    return -float(probs.mean(dim=0).log().mean())


@pytest.mark.parametrize("whitening", ["full", "diag"])
@every_target
def test_its_mode_is_found(name: str, whitening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most_full = 2048 if whitening == "full" else 0  # where the full one is large, the target's rough structure
    monkeypatch.setattr("bnncli.inference.mode.MAX_FULL_PRECONDITIONER", most_full)
    target, _, start = make(name)
    mode = find_mode(target, start, tolerance=1e-5)
    assert set(mode.hessian) == {f"hessian.{whitening}"}
    torch.testing.assert_close(mode.theta, brute_mode(name, 1.0), rtol=0, atol=1e-4)
    assert mode.newton_decrement < 1e-5


@every_structure
@every_target
def test_its_laplace_approximation_is_that_of_autograd(name: str, structure: str) -> None:
    target, _, start = make(name)
    fit = fit_gaussian(target, start=start, structure=structure)
    expected = brute_precision(name, structure, 1.0, fit.gaussian.mean)
    scale = fit.gaussian.covariance.unwhiten(torch.eye(len(start), dtype=torch.float64))
    torch.testing.assert_close(scale.T @ scale, torch.linalg.inv(expected))
    evidence = -brute_criterion(name, structure, "marglik", 1.0)
    assert fit.log_marginal_likelihood == pytest.approx(evidence, abs=1e-3)


@pytest.mark.parametrize("criterion", ["val", "marglik"])
@every_structure
@every_target
@pytest.mark.long
def test_the_search_for_its_prior_is_that_of_fits_from_scratch(name: str, structure: str, criterion: str) -> None:
    target, held_out, start = make(name)
    found = search(
        target, start=start, generator=seeded(7), structure=structure, criterion=criterion, held_out=held_out,
        bounds=BOUNDS, tolerance=0.0,
    )  # fmt: skip
    assert len(found.curve) >= 5
    for precision, value in found.curve:
        expected = brute_criterion(name, structure, criterion, precision)
        assert value == pytest.approx(expected, rel=1e-4), precision
    assert found.best == min(found.curve, key=lambda pair: pair[1])[0]
    assert found.fit.gaussian.prior == Prior(found.best)


def test_under_every_prior_the_mode_is_looked_for_from_the_start_where_there_are_many() -> None:
    target, _, start = make("two modes")
    search_all = {"structure": "full", "criterion": "marglik", "bounds": (0.1, 1e3), "tolerance": 0.0}
    found = search(target, start=start, generator=seeded(7), **search_all)
    assert (
        brute_mode("two modes", found.curve[0][0])[1] < -1
    )  # under a strong prior b is zero, a saddle under a weak one
    assert abs(brute_mode("two modes", found.curve[-1][0])[1]) < 0.01
    for precision, value in (found.curve[0], found.curve[-1]):
        assert value == pytest.approx(brute_criterion("two modes", "full", "marglik", precision), rel=1e-4)


@every_target
def test_structures_are_compared_on_its_held_out_examples(name: str) -> None:
    target, held_out, start = make(name)
    found = search(target, start=start, generator=seeded(7), held_out=held_out, bounds=BOUNDS, tolerance=0.0)
    at_best = target.with_prior(found.fit.gaussian.require_prior())
    choice = choose_structure(at_best, found.fit, ("full", "diag"), judge=found.judge)
    for structure, nll in choice.nll.items():
        assert nll == pytest.approx(brute_criterion(name, structure, "val", found.best), rel=1e-4)
    assert set(choice.nll) == {"full", "diag"}


def test_the_evidence_beside_a_mode_needs_the_exact_hessian() -> None:
    for name, is_defined in (("banana", True), ("network", False)):
        near = brute_mode(name, 1.0) + 0.003
        fit = fit_gaussian(make(name)[0], start=near, center="checkpoint")
        assert (fit.log_marginal_likelihood is not None) == is_defined
        if is_defined:
            expected = -brute_criterion(name, "full", "marglik", 1.0)
            assert fit.log_marginal_likelihood == pytest.approx(expected, abs=1e-2)


def test_a_structure_that_it_has_not_is_refused() -> None:
    target, _, start = make("network")
    with pytest.raises(UsageError, match="expected full or diag, got kron"):
        fit_gaussian(target, start=start, structure="kron")


def test_its_logits_are_those_of_the_linearised_network() -> None:
    target, held_out, start = make("network")
    gaussian = fit_gaussian(target, start=start).gaussian
    features = held_out.inputs[:5]
    mean, covariance = gaussian.logit_moments(features)
    rows = jacobian(lambda one: target.layout.logits_of(one, features), gaussian.mean)
    sigma = torch.linalg.inv(target.ggn(gaussian.mean) + torch.eye(len(start), dtype=torch.float64))
    torch.testing.assert_close(mean, target.layout.logits_of(gaussian.mean, features))
    torch.testing.assert_close(covariance, rows @ sigma @ rows.mT)
    assert torch.equal(gaussian.logit_marginals(features)[1], gaussian.logits.spread.variance(features))
    drawn = load_integrator("logit-mc").predict(gaussian, features, num_samples=4000, generator=seeded(7))
    noise = torch.randn(4000, 5, 3, generator=seeded(1), dtype=torch.float64)
    logits = mean + (torch.linalg.cholesky(covariance) @ noise.unsqueeze(3)).squeeze(3)
    torch.testing.assert_close(drawn.probs.double(), logits.softmax(dim=2).mean(dim=0), rtol=0, atol=0.03)

"""The Monte Carlo error of scores, as groups of draws tell it, against fresh draws and theory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from problems.seeds import seeded

from bnncli.errors import DataError
from bnncli.evaluation.bootstrap import DrawGroups, balanced_halves, integration_error, integration_errors
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators import load_integrator
from bnncli.integrators._partitions import DrawPartition, group_ends
from bnncli.integrators.mc import DrawnMc
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.samples import Samples
from bnncli.targets.last_layer import LastLayerTarget

LAYOUT = HeadLayout(3, 6)
NUM_FRESH = 120  # predictions of other seeds: their variance has a standard error of 0.13 of itself
Score = Callable[..., float]


@cache
def problem() -> tuple[Gaussian, torch.Tensor, NDArray, torch.Tensor]:
    """A Gaussian at the mode, features (120, D) and labels (120,) of a test split, and features (80, D) of another."""
    centers = 1.3 * torch.randn(3, 6, generator=seeded(9))
    labels = torch.randint(3, (40,), generator=seeded())
    features = centers[labels] + torch.randn(40, 6, generator=seeded(1))
    target = LastLayerTarget(features.double(), labels, LAYOUT, Prior(0.1))
    gaussian = fit_gaussian(target, start=torch.zeros(LAYOUT.num_params)).gaussian
    test_labels = torch.randint(3, (120,), generator=seeded(2))
    test = centers[test_labels] + 1.2 * torch.randn(120, 6, generator=seeded(3))
    return gaussian, test, test_labels.numpy(), 2 * torch.randn(80, 6, generator=seeded(4))


def nll(probs: NDArray, *_: NDArray) -> float:
    return float(-np.log(probs[np.arange(len(probs)), problem()[2][: len(probs)]]).mean())


def brier(probs: NDArray, *_: NDArray) -> float:
    return float(((probs - np.eye(3)[problem()[2][: len(probs)]]) ** 2).sum(axis=1).mean())


def accuracy(probs: NDArray, *_: NDArray) -> float:
    return float((probs.argmax(axis=1) == problem()[2][: len(probs)]).mean())


def auroc(probs: NDArray, others: NDArray) -> float:
    above = (probs.max(axis=1)[:, None] > others.max(axis=1)).mean()
    return float(above)


SCORES: dict[str, Score] = {"nll": nll, "brier": brier, "accuracy": accuracy, "auroc": auroc}


@cache
def predictions(integrator: str, qmc: bool, num_samples: int) -> list[tuple[DrawGroups, DrawGroups]]:
    """The groups of both splits under many seeds."""
    posterior, test, _, others = problem()
    found = []
    for seed in range(NUM_FRESH):
        settings = {"qmc": True} if qmc else {}
        maker = load_integrator(integrator, **settings)
        ready: Any = maker.prepare(posterior, num_samples=num_samples, generator=seeded(seed))
        parts = [
            ready.predict(posterior, features, group_rows=torch.arange(len(features))).group_probs
            for features in (test, others)
        ]
        weights = ready.groups.weights.numpy()
        found.append((DrawGroups(parts[0].numpy(), weights), DrawGroups(parts[1].numpy(), weights)))
    return found


def ratios_of_variances(scores: Sequence[Score], found: list[Any]) -> list[tuple[float, float]]:
    """For each score, mean variance that the groups tell over the variance of the scores themselves, and its standard error."""

    def every(*probs: NDArray) -> list[float]:
        return [score(*probs) for score in scores]

    told = np.array([[one.variance for one in integration_errors(every, *splits)] for splits in found])
    values = np.array([every(*(split.mean() for split in splits)) for splits in found])
    fresh = values.var(axis=0, ddof=1)
    # Of a sample variance by its own kurtosis; of the mean of those that were told.
    spread = np.sqrt(((values - values.mean(axis=0)) ** 2).var(axis=0) / len(found)) / fresh
    ratio = told.mean(axis=0) / fresh
    error = ratio * np.hypot(spread, told.std(axis=0) / told.mean(axis=0) / np.sqrt(len(found)))
    return list(zip(ratio.tolist(), error.tolist(), strict=True))


@pytest.mark.parametrize(
    ("integrator", "qmc"),
    [
        ("mc", False),
        pytest.param("logit-mc", False, marks=pytest.mark.long),
        pytest.param("logit-mc", True, marks=pytest.mark.long),
    ],
)
def test_groups_tell_the_variance_that_fresh_draws_have(integrator: str, qmc: bool) -> None:
    found = ratios_of_variances(list(SCORES.values()), predictions(integrator, qmc, 128 if qmc else 60))
    for name, (ratio, error) in zip(SCORES, found, strict=True):
        assert ratio == pytest.approx(1, abs=3 * error + 0.1), (
            name
        )  # halves see more of what is not linear in the score
        assert error < 0.25


def test_the_interval_of_students_t_covers() -> None:
    """95 % intervals for the score of infinitely many draws hold it as often as they say."""
    from scipy.stats import t

    posterior, test, _, _ = problem()
    many: Any = load_integrator("logit-mc", qmc=True).prepare(posterior, num_samples=2**15, generator=seeded(5))
    exact = brier(many.predict(posterior, test).probs.double().numpy())
    is_held = []
    for splits in predictions("mc", False, 60):
        found = integration_error(brier, *splits)
        reach = t.ppf(0.975, found.degrees_of_freedom) * found.standard_error
        is_held.append(abs(brier(splits[0].mean()) - exact) < reach)
    assert np.mean(is_held) == pytest.approx(0.95, abs=3 * np.sqrt(0.95 * 0.05 / NUM_FRESH))


def test_chains_that_are_correlated_have_the_variance_of_their_theory() -> None:
    """AR(1) chains: the mean of T draws has variance (1 + rho) / (1 - rho) / T, less an end effect."""
    rho, num_chains, num_draws, num_repeats = 0.8, 4, 400, 300
    noise = torch.randn(num_repeats, num_chains, num_draws, generator=seeded(), dtype=torch.float64)
    chains = noise.clone()
    for step in range(1, num_draws):
        chains[..., step] = rho * chains[..., step - 1] + np.sqrt(1 - rho**2) * noise[..., step]
    lags = np.arange(1, num_draws)
    theory = (1 + 2 * ((1 - lags / num_draws) * rho**lags).sum()) / (num_chains * num_draws)
    ends = group_ends(num_chains * num_draws, starts=range(0, num_chains * num_draws, num_draws))
    groups = DrawPartition.of(ends)
    told = []
    for repeat in chains.flatten(1).numpy():
        means = np.array([part.mean() for part in np.split(repeat, ends[:-1])])
        probs = np.stack([0.5 + means / 100, 0.5 - means / 100], axis=1)[:, None]
        told.append(1e4 * integration_error(lambda p: p[0, 0], DrawGroups(probs, groups.weights.numpy())).variance)
    error = np.std(told) / np.sqrt(num_repeats)
    assert np.mean(told) == pytest.approx(theory, abs=3 * error + 0.05 * theory)  # stretches of 160 draws have ends
    assert np.mean(told) > 7 * 1 / (num_chains * num_draws)  # independent draws would have a ninth of the theory


def test_importance_weights_enter_the_variance() -> None:
    """Self-normalised weights of many fresh sets of draws."""
    _, features, _, _ = problem()
    theta_of = [torch.randn(300, LAYOUT.num_params, generator=seeded(seed)) for seed in range(NUM_FRESH)]
    found = []
    for theta in theta_of:
        weights = (0.7 * theta[:, 0] + 0.5 * theta[:, 1]).double().softmax(dim=0)
        groups = DrawPartition.of(group_ends(300), weights)
        drawn = DrawnMc(LAYOUT, theta, groups, weights)
        part = drawn.predict(None, features, group_rows=torch.arange(120)).group_probs  # type: ignore[arg-type]
        assert part is not None
        found.append((DrawGroups(part.numpy(), groups.weights.numpy()),))
    ((ratio, error),) = ratios_of_variances([brier], found)
    assert ratio == pytest.approx(1, abs=3 * error + 0.1)


def test_groups_of_unequal_sizes_tell_the_variance_of_a_mean() -> None:
    sizes = np.array([1, 1, 2, 3, 5, 8])
    draws = np.random.default_rng(0).normal(0.5, 0.1, size=(500, sizes.sum()))
    told = []
    for row in draws:
        means = np.array([part.mean() for part in np.split(row, np.cumsum(sizes)[:-1])])
        groups = DrawGroups(np.stack([means, 1 - means], axis=1)[:, None], sizes / sizes.sum())
        told.append(integration_error(lambda p: p[0, 0], groups).variance)
    assert np.mean(told) == pytest.approx(0.01 / sizes.sum(), abs=3 * np.std(told) / np.sqrt(len(told)))


@pytest.mark.parametrize("num_groups", range(2, 25))
def test_halves_are_balanced(num_groups: int) -> None:
    halves = balanced_halves(num_groups)
    signs = np.where(halves, 1, -1)
    assert (signs.sum(axis=0) == 0).all()  # every half has its complement
    if num_groups in (4, 8, 12, 20, 24):
        assert (signs.sum(axis=1) == 0).all()
        together = signs.T @ signs / len(signs)
        expected = np.where(np.eye(num_groups), 1, -1 / (num_groups - 1))
        np.testing.assert_allclose(together, expected, atol=1e-12)
    assert len(halves) <= 46


@pytest.mark.parametrize("num_groups", [8, 12])
def test_with_equal_groups_the_variance_of_a_mean_is_the_sample_variance(num_groups: int) -> None:
    probs = np.random.default_rng(0).dirichlet(np.ones(3), size=(num_groups, 50))
    found = integration_error(lambda p: p[:, 0].mean(), DrawGroups(probs, np.full(num_groups, 1 / num_groups)))
    assert found.variance == pytest.approx(probs[:, :, 0].mean(axis=1).var(ddof=1) / num_groups, rel=1e-9)
    assert found.degrees_of_freedom == pytest.approx(num_groups - 1)


def test_some_rows_tell_the_variance_of_their_score_and_at_least_that_of_all() -> None:
    found = [(DrawGroups(splits[0].probs[:, ::4], splits[0].weights),) for splits in predictions("mc", False, 60)]
    labels = problem()[2][::4]

    def some(probs: NDArray) -> float:
        return float(((probs - np.eye(3)[labels]) ** 2).sum(axis=1).mean())

    ((ratio, error),) = ratios_of_variances([some], found)
    assert ratio == pytest.approx(1, abs=3 * error + 0.1)
    of_all = np.mean([integration_error(brier, *splits).variance for splits in predictions("mc", False, 60)])
    assert np.mean([integration_error(some, *splits).variance for splits in found]) > 0.9 * of_all


def test_chains_of_a_sampler_reach_their_groups_whole() -> None:
    """Chains that each sit at a place of their own: all of the error is between them."""
    places = torch.randn(10, 1, LAYOUT.num_params, generator=seeded())
    posterior = Samples(places + 0.01 * torch.randn(10, 30, LAYOUT.num_params, generator=seeded(1)), LAYOUT)
    _, features, _, _ = problem()
    ready: Any = load_integrator("mc").prepare(posterior, num_samples=None, generator=seeded())
    part = ready.predict(posterior, features, group_rows=torch.arange(120)).group_probs
    assert ready.groups.ends == tuple(range(30, 301, 30))
    found = integration_error(brier, DrawGroups(part.numpy(), ready.groups.weights.numpy())).variance
    apart: Any = load_integrator("mc").prepare(Samples(places, LAYOUT), num_samples=None, generator=seeded())
    alone = apart.predict(None, features, group_rows=torch.arange(120)).group_probs
    expected = integration_error(brier, DrawGroups(alone.numpy(), apart.groups.weights.numpy())).variance
    assert found == pytest.approx(expected, rel=0.1)


def test_groups_that_do_not_belong_together_are_refused() -> None:
    probs = np.full((4, 2, 2), 0.5)
    even, uneven = np.full(4, 0.25), np.array([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(DataError, match="predicted with different draws"):
        integration_error(lambda a, b: 0.0, DrawGroups(probs, even), DrawGroups(probs, uneven))
    for weights in (np.full(3, 1 / 3), np.full((4, 1), 0.25)):
        with pytest.raises(DataError, match="expected probs"):
            DrawGroups(probs, weights)
    with pytest.raises(DataError, match="sum to one"):
        DrawGroups(probs, even * 2)

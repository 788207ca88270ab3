"""Errors that come of finite draws: blocks of them, and what an integral is off by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from problems.seeds import normal, seeded
from torch import Tensor

from bnncli.errors import DataError
from bnncli.evaluation.bootstrap import DrawGroups, balanced_halves, integration_error, integration_errors
from bnncli.evaluation.distances import (
    Discrepancy,
    ThinnedDraws,
    compare_draws,
    median_distance,
    mmd2,
    permutation_p_value,
    squared_distances,
    thin,
    thin_draws,
)
from bnncli.inference.laplace import fit_gaussian
from bnncli.integrators import load_integrator
from bnncli.integrators._partitions import DrawPartition, group_ends
from bnncli.integrators.mc import DrawnMc
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.posteriors.samples import Samples
from bnncli.targets.last_layer import LastLayerTarget

Case = tuple[int, int, float, str]  # chains, draws of each, their correlation, what they are compared with
CASES: list[Case] = [
    (chains, length, correlation, other)
    for chains, length in ((16, 75), (4, 260), (16, 260))
    for correlation in (-0.5, 0.5)
    for other in ("draws", "chains")
    if length < 260 or chains < 16 or correlation == 0.5
]
NUM_REPEATS = 150
SIZE = 2


@cache
def lag_filter(length: int, correlation: float) -> Tensor:
    """What takes white noise (T,) to a chain of this correlation at lag one, (T, T)."""
    lag = torch.arange(length).unsqueeze(1) - torch.arange(length)
    filtered = torch.where(lag >= 0, correlation ** lag.clamp(min=0).double(), 0.0) * math.sqrt(1 - correlation**2)
    filtered[:, 0] /= math.sqrt(1 - correlation**2)
    return filtered


def autoregressive(chains: int, length: int, correlation: float, generator: torch.Generator) -> Tensor:
    """Chains (C, T, 2) of N(0, I) with this correlation at lag one."""
    noise = torch.randn(length, chains * SIZE, generator=generator, dtype=torch.float64)
    return (lag_filter(length, correlation) @ noise).reshape(length, chains, SIZE).transpose(0, 1)


def effective(chains: int, length: int, correlation: float) -> int:
    return int(chains * length * min(1.0, (1 - correlation) / (1 + correlation)))


def compare(x: ThinnedDraws, y: ThinnedDraws, *, seed: int = 0, num_permutations: int = 99) -> Discrepancy:
    distances = squared_distances(x.draws, y.draws)
    generator = seeded(seed)
    return compare_draws(
        x, y, distances, median_distance(distances.yy), generator=generator, num_permutations=num_permutations
    )


def simulate(case: Case, *, shift: float = 0.0, count: int = 100, repeats: int = NUM_REPEATS) -> list[Discrepancy]:
    """Comparisons of chains with draws, or with other chains; fewer draws than the code takes, for speed alone."""
    generator, found = seeded(1), []
    for seed in range(repeats):
        x, y = (thin_draws(autoregressive(*case[:3], generator), effective(*case[:3]), count=count) for _ in range(2))
        if case[3] == "draws":
            x = ThinnedDraws(torch.randn(count, SIZE, generator=generator, dtype=torch.float64))
        found.append(compare(replace(x, draws=x.draws + shift), y, seed=seed))
    return found


def by_hand(x: ThinnedDraws, y: ThinnedDraws, bandwidth: float, signs: list[int]) -> float:
    """The estimate from kernel features of single draws, pair of blocks by pair of blocks, some exchanged."""
    sides = [[side.draws[side.blocks == block].tolist() for block in range(len(signs))] for side in (x, y)]
    pairs = [(a, b) if sign > 0 else (b, a) for a, b, sign in zip(*sides, signs, strict=True)]

    def kernel(a: list[list[float]], b: list[list[float]]) -> float:
        return math.fsum(math.exp(-((math.dist(i, j) / bandwidth) ** 2)) for i in a for j in b) / (len(a) * len(b))

    values = []
    for i, (x_i, y_i) in enumerate(pairs):
        for j, (x_j, y_j) in enumerate(pairs):
            if i != j:
                values.append(kernel(x_i, x_j) + kernel(y_i, y_j) - kernel(x_i, y_j) - kernel(y_i, x_j))
    return float(np.mean(values))


def small_sides() -> tuple[ThinnedDraws, ThinnedDraws]:
    x, y = normal(8, 3, 2) + 0.4, normal(8, 2, 2, seed=1)
    return thin_draws(x, 24), thin_draws(y, 20)


def test_estimate_and_p_value_are_those_of_loops_over_blocks_and_signs() -> None:
    x, y = small_sides()
    found = compare(x, y, num_permutations=40)
    assert found.num_blocks == 8
    bandwidth = median_distance(squared_distances(x.draws, y.draws).yy)
    seen = by_hand(x, y, bandwidth, [1] * 8)
    assert found.value == pytest.approx(seen, rel=1e-10)
    flips = 2 * torch.randint(2, (40, 8), generator=seeded()) - 1
    flipped = [by_hand(x, y, bandwidth, signs) for signs in flips.tolist()]
    expected = (1 + sum(value >= seen - 1e-12 for value in flipped)) / 41
    assert found.p_value == pytest.approx(expected, abs=1e-12)
    assert 1 / 41 < expected < 1  # else nothing is compared


def test_the_same_chains_twice_show_no_difference() -> None:
    x = small_sides()[0]
    assert compare(x, replace(x, draws=x.draws.clone())).p_value == 1.0


def test_the_standard_error_is_the_jackknife_of_a_loop_over_pairs_of_blocks() -> None:
    x, y = small_sides()
    bandwidth = median_distance(squared_distances(x.draws, y.draws).yy)
    without = []
    for left_out in range(8):
        rest = []
        for side in (x, y):
            kept = side.blocks != left_out
            blocks = side.blocks[kept] - (side.blocks[kept] > left_out).long()
            rest.append(ThinnedDraws(side.draws[kept], blocks))
        without.append(by_hand(*rest, bandwidth, [1] * 7))
    assert compare(x, y).standard_error == pytest.approx(math.sqrt(7 * np.var(without)), rel=1e-9)


def test_independent_draws_are_relabelled_one_by_one() -> None:
    x, y = normal(30, 3), normal(40, 3, seed=1) + 0.3
    found = compare(ThinnedDraws(x), ThinnedDraws(y), seed=5)
    bandwidth = median_distance(squared_distances(x, y).yy)
    expected = mmd2(x, y, bandwidth)
    assert (found.value, found.standard_error) == (expected.unbiased, expected.standard_error)
    assert found.p_value == permutation_p_value(x, y, bandwidth, generator=seeded(5), num_permutations=99)
    assert found.num_blocks is None


def check_level(p_values: np.ndarray) -> None:
    for level in (0.05, 0.2):
        error = math.sqrt(level * (1 - level) / len(p_values))
        assert np.mean(p_values <= level + 1e-9) <= level + 3 * error
    # The mean, 1/2 with deviation sqrt(1/12), tells more of an inflated level than the few p-values in the tail do.
    assert p_values.mean() >= 0.5 - 3 * math.sqrt(1 / 12 / len(p_values))


SOON = [(16, 75, 0.5, "draws"), (16, 75, -0.5, "chains")]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SOON else pytest.mark.long) for case in CASES], ids=str
)
def test_equal_distributions_are_told_apart_no_more_often_than_the_level(case: Case) -> None:
    check_level(np.array([found.p_value for found in simulate(case)]))


@pytest.mark.parametrize("is_mended", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_second_draw_of_chains_that_swing_needs_blocks(is_mended: bool) -> None:
    generator, p_values = seeded(1), []
    for seed in range(NUM_REPEATS):
        x, y = (thin_draws(autoregressive(16, 25, -0.5, generator), 400, count=200) for _ in range(2))
        if not is_mended:  # single draws relabelled: what blocks are there for
            x, y = ThinnedDraws(x.draws), ThinnedDraws(y.draws)
        p_values.append(compare(x, y, seed=seed).p_value)
    if is_mended:
        check_level(np.array(p_values))
    else:
        with pytest.raises(AssertionError):
            check_level(np.array(p_values))


@pytest.mark.parametrize("case", [(16, 75, -0.5, "draws"), (4, 260, 0.5, "draws"), (16, 260, 0.0, "chains")], ids=str)
def test_a_shift_by_a_third_of_a_standard_deviation_is_mostly_seen(case: Case) -> None:
    found = simulate(case, shift=0.33, repeats=40)
    assert np.mean([each.p_value <= 0.05 for each in found]) > 0.5  # of 100 draws; the level is a tenth of that


@pytest.mark.parametrize("correlation", [pytest.param(-0.5, marks=pytest.mark.long), 0.9])
def test_estimate_is_unbiased_and_its_error_stated_whatever_happens_within_chains(correlation: float) -> None:
    found = simulate((16, 75, correlation, "draws"), shift=0.2)
    generator, exact = seeded(7), []
    for _ in range(30):
        x, y = (torch.randn(400, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
        bandwidth = median_distance(squared_distances(y, y).yy)
        exact.append(mmd2(x + 0.2, y, bandwidth).unbiased)
    values = np.array([each.value for each in found])
    error = math.hypot(values.std() / math.sqrt(len(values)), np.std(exact) / math.sqrt(len(exact)))
    assert abs(values.mean() - np.mean(exact)) < 4 * error
    stated = math.sqrt(np.mean([each.standard_error**2 for each in found]))
    assert 0.8 * values.std() < stated < 1.8 * values.std()


@pytest.mark.parametrize("sizes", [(5, 2), (8, 8)])
def test_p_values_of_few_draws_are_valid(sizes: tuple[int, int]) -> None:
    n, m = sizes
    p_values = []
    for seed in range(400):
        draws = normal(n + m, 2, seed=seed)
        found = compare(ThinnedDraws(draws[:n]), ThinnedDraws(draws[n:]), seed=seed, num_permutations=19)
        p_values.append(found.p_value)
    for level in (0.05, 0.1, 0.3):
        share = np.mean(np.array(p_values) <= level + 1e-9)
        assert share <= level + 3 * math.sqrt(level * (1 - level) / 400)
    assert min(p_values) >= 1 / 20


@pytest.mark.parametrize(
    ("shape", "num_independent", "num_blocks"),
    [
        ((16, 75), 1200, 16),
        ((16, 260), 25, 16),  # whole chains are independent, however slowly they move
        ((4, 260), 346, 16),
        ((4, 260), 120, 12),
        ((8, 16), 100, 8),
        ((64, 40), 900, 64),
        ((2000, 2), 4000, 64),
        ((1, 4000), 4000, 16),
    ],
)
def test_blocks_are_chains_or_long_stretches_of_them(
    shape: tuple[int, int], num_independent: int, num_blocks: int
) -> None:
    chains, length = shape
    index = torch.cartesian_prod(torch.arange(chains), torch.arange(length)).reshape(*shape, 2)
    thinned = thin_draws(index, num_independent)
    assert torch.equal(thinned.draws, thin(index))
    assert thinned.num_blocks == num_blocks == len(thinned.blocks.unique())
    assert bool((thinned.blocks.diff() >= 0).all())
    if num_blocks >= chains:  # no block has draws of two chains
        assert all(len(thinned.draws[thinned.blocks == b, 0].unique()) == 1 for b in range(num_blocks))
    sizes = torch.bincount(thinned.blocks)
    assert sizes.max() - sizes.min() <= 2


@pytest.mark.parametrize(
    ("shape", "num_independent", "reason"),
    [
        ((4, 260), 75, "only about 4 segments of the chains are independent; expected at least 8"),
        ((16, 75), 19, "only about 19 of the draws are independent; expected at least 20"),
        ((16, 75), 0, "the number of independent draws is unknown; expected at least 20"),
    ],
)
def test_what_is_too_little_is_not_tested(shape: tuple[int, int], num_independent: int, reason: str) -> None:
    y = thin_draws(normal(*shape, 2), num_independent)
    found = compare(ThinnedDraws(normal(50, 2, seed=1)), y)
    assert (found.p_value, found.standard_error) == (None, None)
    assert found.untested.startswith(reason)
    few = compare(ThinnedDraws(normal(5, 2)), thin_draws(normal(16, 75, 2), 1200))
    assert few.untested == "only 5 independent draws; expected at least 8"


def test_sides_with_more_blocks_are_merged_to_as_many() -> None:
    x, y = thin_draws(normal(24, 25, 2), 600), thin_draws(normal(16, 30, 2, seed=1), 480)
    found = compare(x, y)
    merged = ThinnedDraws(x.draws, x.blocks * 16 // 24)
    assert (found.num_blocks, found.value) == (16, compare(merged, y).value)
    assert found.value != compare(y, x).value  # the bandwidth is the second's


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

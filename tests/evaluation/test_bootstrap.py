"""Bootstrap weights, standard errors and intervals against closed forms and simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from bnncli.evaluation import bootstrap
from bnncli.evaluation import bootstrap as bootstrap_settings
from bnncli.evaluation.bootstrap import METHODS, Bootstrap, interval
from bnncli.evaluation.detection import detection_rows
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.scores import ScoredPredictions, all_scores, detection_forms, split_scores
from bnncli.evaluation.statistics import ScoreForm, compute_example_statistics, means, score_rows


def all_weights(resampling: Bootstrap, *splits: tuple[str, int]) -> list[NDArray]:
    return [np.concatenate(blocks) for blocks in zip(*resampling.weights(*splits), strict=True)]


def test_every_replicate_draws_as_many_examples_as_there_are() -> None:
    (weights,) = all_weights(Bootstrap(40), ("test", 57))
    assert weights.shape == (40, 57)
    assert weights.dtype == np.float32
    assert (weights.sum(axis=1) == 57).all()
    assert (weights == weights.round()).all()
    assert weights.min() == 0


def test_counts_have_the_moments_of_a_multinomial() -> None:
    size, replicates = 20, 20_000
    (weights,) = all_weights(Bootstrap(replicates), ("test", size))
    # A count is binomial(N, 1/N): mean 1, variance 1 - 1/N; two counts have covariance -1/N.
    assert weights.mean(axis=0) == pytest.approx(np.ones(size), abs=5 / math.sqrt(replicates))
    assert weights.var(axis=0) == pytest.approx(np.full(size, 1 - 1 / size), abs=5 * 1.5 / math.sqrt(replicates))
    between = np.cov(weights[:, 0], weights[:, 1])[0, 1]
    assert between == pytest.approx(-1 / size, abs=5 / math.sqrt(replicates))


def test_weights_depend_on_seed_name_and_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = all_weights(Bootstrap(30), ("test", 50))
    monkeypatch.setattr(bootstrap, "BLOCK_WEIGHTS", 400)
    beside, other = all_weights(Bootstrap(30), ("test", 50), ("far", 50))
    np.testing.assert_array_equal(alone, beside)
    (longer,) = all_weights(Bootstrap(60), ("test", 50))
    np.testing.assert_array_equal(alone, longer[:30])
    (seeded,) = all_weights(Bootstrap(30, seed=1), ("test", 50))
    assert (alone != other).any()
    assert (alone != seeded).any()


@pytest.mark.parametrize("only", [range(0, 4, 2), range(1, 4, 2), range(0)])
def test_blocks_that_are_left_out_change_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch, only: range) -> None:
    monkeypatch.setattr(bootstrap, "BLOCK_WEIGHTS", 800)
    splits = ("test", 50), ("far", 30)
    every = list(Bootstrap(40).weights(*splits))
    assert [len(block) for block in Bootstrap(40).blocks(*splits)] == [len(one) for one, _ in every] == [10] * 4
    some = list(Bootstrap(40).weights(*splits, only=only))
    assert len(some) == len(only)
    for place, block in zip(only, some, strict=True):
        for one, other in zip(block, every[place], strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_standard_error_of_a_mean_is_the_textbook_one() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=400)
    resampling = Bootstrap(4000)
    means = resampling.replicates(lambda w: w @ values / len(values), ("test", 400))
    described = resampling.describe(values.mean(), means)
    expected = values.std() / math.sqrt(len(values))
    # The standard deviation of R replicates is within 5 of its own standard errors, sigma / sqrt(2 R).
    assert described["standard_error"] == pytest.approx(expected, rel=5 / math.sqrt(2 * 4000))
    normal = stats.norm.interval(0.95, values.mean(), expected)
    ends = [described["interval"][name] for name in ("low", "high")]
    assert ends == pytest.approx(normal, abs=0.2 * expected)
    assert described["interval"].items() >= {"level": 0.95, "method": "percentile", "replicates": 4000}.items()


def test_the_percentile_interval_is_that_of_scipy() -> None:
    values = np.random.default_rng(1).exponential(size=60)
    resampling = Bootstrap(20_000, level=0.9)
    means = resampling.replicates(lambda w: w @ values / 60, ("test", 60))
    theirs = stats.bootstrap((values,), np.mean, n_resamples=20_000, confidence_level=0.9, method="percentile", rng=2)
    spread = float(theirs.standard_error)
    ours = interval(values.mean(), means, level=0.9)
    # A 5 % quantile of R normal draws has standard error 2.1 sigma / sqrt R.
    assert ours == pytest.approx(tuple(theirs.confidence_interval), abs=5 * 2.1 * spread * math.sqrt(2 / 20_000))


def test_the_basic_interval_mirrors_the_percentile_one_and_stays_in_the_range() -> None:
    replicates = np.linspace(0.1, 0.5, 1001)
    low, high = interval(0.2, replicates, method="percentile")
    assert (low, high) == pytest.approx((0.11, 0.49))
    assert interval(0.2, replicates, method="basic") == pytest.approx((0.4 - high, 0.4 - low))
    assert interval(0.2, replicates, method="basic", bounds=(0, 0.25)) == (0.0, 0.25)
    with pytest.raises(ValueError, match="percentile, basic"):
        interval(0.2, replicates, method="studentised")


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_of_a_rate_hold_the_truth_as_often_as_they_say(level: float) -> None:
    generator, truth, trials, hits = np.random.default_rng(3), 0.3, 300, 0
    for trial in range(trials):
        values = generator.random(150) < truth
        resampling = Bootstrap(300, level=level, seed=trial)
        means = resampling.replicates(lambda w, v=values: w @ v / 150, ("test", 150))
        low, high = interval(values.mean(), means, level=level)
        hits += low <= truth <= high
    assert hits / trials == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / trials) + 0.01)


def test_undefined_replicates_are_left_out_and_too_many_leave_no_interval() -> None:
    resampling = Bootstrap(100)
    replicates = np.linspace(0, 1, 100)
    replicates[:30] = np.nan
    assert resampling.describe(0.5, replicates)["interval"]["replicates"] == 70
    replicates[:60] = np.nan
    assert resampling.describe(0.5, replicates) == {"standard_error": None, "interval": None}


def test_statistics_of_two_splits_resample_both() -> None:
    ours, theirs = np.arange(30.0), np.arange(40.0) ** 2
    resampling = Bootstrap(3000)
    gaps = resampling.replicates(lambda v, w: w @ theirs / 40 - v @ ours / 30, ("test", 30), ("far", 40))
    expected = math.sqrt(ours.var() / 30 + theirs.var() / 40)
    assert gaps.std() == pytest.approx(expected, rel=5 / math.sqrt(2 * 3000))


@pytest.mark.parametrize("settings", [{"num_replicates": 0}, {"level": 1.0}])
def test_no_replicates_and_sure_intervals_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a replicate"):
        Bootstrap(**settings)


def scored_rows(size: int, bootstrap: Bootstrap, seed: int = 0) -> dict[str, Any]:
    """The rows of the scores of a split, and of its detection among another a third as large, by name."""
    generator = np.random.default_rng(seed)
    logits = 2 * generator.standard_normal((size, 4))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (probs.cumsum(axis=1) > generator.random((size, 1))).argmax(axis=1)
    settings = {name: option.default for score in all_scores().values() for name, option in score.options.items()}
    scored = ScoredPredictions(probs, compute_example_statistics(probs, labels), settings=settings)
    rows = score_rows(
        split_scores(scored), ("test", size), bootstrap, take=lambda some: split_scores(scored.take(some))
    )
    outside = {"max_prob": generator.uniform(0.2, 1, size // 3)}
    inside = {"max_prob": scored.examples.confidence}
    rows += detection_rows(inside, outside, detection_forms(), split="test", ood="far", bootstrap=bootstrap)
    return {spell(row): row for row in rows}


def spell(row: Mapping[str, Any]) -> str:
    return " ".join(f"{row.get(key)}" for key in ("name", "strategy", "class_wise", "k", "positive", "coverage"))


def test_a_part_of_large_splits_gives_the_standard_errors_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = Bootstrap(400)
    expected = scored_rows(9000, bootstrap)
    monkeypatch.setattr(bootstrap_settings, "MOST_RESAMPLED", 3000)
    monkeypatch.setattr(bootstrap_settings, "_FEWEST_RESAMPLED", 500)
    found = scored_rows(9000, bootstrap)
    compared = 0
    for name, row in found.items():
        whole = expected[name]
        assert row["value"] == whole["value"]
        if row.get("standard_error") is None:
            continue
        if row["interval"]["method"] in METHODS:  # not those of calibration errors, which are from all examples
            assert row["interval"].get("num_resampled") == ([3000, 1000] if "ood" in row else 3000), name
            assert "num_resampled" not in whole["interval"]
        if row["name"] != "mce":  # a maximum
            assert row["standard_error"] == pytest.approx(whole["standard_error"], rel=0.25), name
            compared += 1
    assert compared > 12


def test_replicates_of_a_part_are_moved_to_the_scores_of_all_and_shrunk() -> None:
    part = bootstrap_settings.RandomPart((np.arange(5),), 0.25)
    found = part.of_all(np.array([5.0, 2.0]), np.array([1.0, 2.0]), np.array([[1.0, 2.0], [3.0, 1.0]]))
    assert found.tolist() == [[5.0, 2.0], [6.0, 1.5]]


def test_parts_have_one_share_and_leave_small_splits_and_groups_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap = Bootstrap(10)
    monkeypatch.setattr(bootstrap_settings, "MOST_RESAMPLED", 3000)
    part = bootstrap.part(("test", 60_000), ("far", 40_000))
    assert part is not None
    assert [len(rows) for rows in part.rows] == [3000, 2000] == [len(np.unique(rows)) for rows in part.rows]
    assert all(rows[-1] > 0.9 * size for rows, size in zip(part.rows, (60_000, 40_000), strict=True))  # not the first
    few = bootstrap.part(("test", 30_000), ("far", 4_000))
    assert few is not None
    assert [len(rows) for rows in few.rows] == [15_000, 2_000]
    assert bootstrap.part(("test", 3000)) is None
    assert bootstrap.part(("test", 30_000), ("far", 300)) is None
    grouped = Bootstrap(10, groups={"test": RowGroups(np.arange(30_000) // 3)})
    assert grouped.part(("test", 30_000)) is None


def test_intervals_of_a_part_hold_the_truth_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_settings, "MOST_RESAMPLED", 500)
    generator, is_inside, num_trials = np.random.default_rng(3), 0, 400
    for trial in range(num_trials):
        values = generator.exponential(size=2000)
        group = means([ScoreForm("nll")], [values])
        (row,) = score_rows(
            [group],
            ("test", 2000),
            Bootstrap(100, 0.9, seed=trial),
            take=lambda some, values=values: [means([ScoreForm("nll")], [values[some]])],
        )
        is_inside += row["interval"]["low"] <= 1 <= row["interval"]["high"]
    assert abs(is_inside / num_trials - 0.9) < 3 * math.sqrt(0.09 / num_trials) + 0.02  # 100 replicates are few

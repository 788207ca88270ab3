"""Groups of dependent rows: weights, intervals, tests and comparisons hold their level where those by row do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.comparison import Sample, difference
from bnncli.evaluation.detection import auroc, detection_rows
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.recommendation import accuracy_interval, loss_interval, worse_p_value
from bnncli.evaluation.scores import ScoredPredictions, all_scores, detection_forms, split_scores
from bnncli.evaluation.statistics import ScoreGroup, compute_example_statistics, score_rows

LEVEL = 0.9


def groups_of(sizes: NDArray) -> RowGroups:
    found = RowGroups.of(np.repeat(np.arange(len(sizes)) * 7 - 3, sizes))
    assert found is not None
    return found


def scores_of(probs: NDArray, labels: NDArray) -> list[ScoreGroup]:
    settings = {name: option.default for score in all_scores().values() for name, option in score.options.items()}
    examples = compute_example_statistics(probs, labels, is_exclusive=labels.ndim == 1)
    mutual_info, lengths = examples.entropy / 3, 1 + examples.predicted % 2
    ranking = {"rule": "plain", "threshold": 0.9, "cap": 3}
    return split_scores(ScoredPredictions(probs, examples, mutual_info, lengths, ranking, settings))


def is_binned_by_rank(form: Any) -> bool:
    return "equal-mass" in form.choices.values()  # the bins of a score stay those of the sample


@pytest.mark.parametrize("case", ["classes", "two classes", "labels"])
def test_weights_of_any_sum_count_how_often_each_example_occurs(case: str) -> None:
    generator = np.random.default_rng(0)
    if case == "labels":
        probs = generator.random((60, 4))
        labels: NDArray = (generator.random((60, 4)) < probs).astype(np.uint8)
    else:
        probs = generator.dirichlet(np.ones(2 if case == "two classes" else 5), size=60).round(1)
        probs /= probs.sum(axis=1, keepdims=True)
        labels = generator.integers(probs.shape[1], size=60)
    weights = generator.integers(0, 6, size=60)
    assert weights.sum() > 2 * 60
    again = np.repeat(np.arange(60), weights)
    compared = set()
    for own, repeated in zip(scores_of(probs, labels), scores_of(probs[again], labels[again]), strict=True):
        if own.statistic is None or repeated.statistic is None:
            continue
        found, expected = own.statistic(weights[None]), repeated.statistic(np.ones((1, len(again))))
        for place, form in enumerate(own.members):
            if not is_binned_by_rank(form) and form.name != "cumulative_accuracy" and form.name != "ranked_gain":
                assert found[0, place] == pytest.approx(expected[0, place], rel=1e-9, abs=1e-12), form
                compared.add(form.name)
    assert len(compared) > 5


def test_groups_are_drawn_whole_and_have_the_moments_of_a_multinomial() -> None:
    groups = groups_of(np.array([1, 4, 2, 3]))
    bootstrap = Bootstrap(20_000, groups={"test": groups})
    weights = np.concatenate([block for (block,) in bootstrap.weights(("test", 10))])
    drawn = weights[:, [0, 1, 5, 7]]
    np.testing.assert_array_equal(weights, np.repeat(drawn, [1, 4, 2, 3], axis=1))
    assert (drawn.sum(axis=1) == 4).all()
    assert drawn.mean(axis=0) == pytest.approx(np.ones(4), abs=5 / math.sqrt(20_000))
    assert drawn.var(axis=0) == pytest.approx(np.full(4, 0.75), abs=5 * 1.5 / math.sqrt(20_000))


def test_groups_of_one_row_change_no_interval() -> None:
    generator = np.random.default_rng(1)
    probs = generator.dirichlet(np.ones(3), size=50)
    labels = generator.integers(3, size=50)
    plain = Bootstrap(200)
    grouped = Bootstrap(200, groups={"test": RowGroups(np.arange(50))})
    for one, other in zip(
        *(score_rows(scores_of(probs, labels), ("test", 50), way) for way in (plain, grouped)), strict=True
    ):
        ends = one.get("interval")
        if ends is not None:
            assert other["interval"] == {**ends, "resampled": "groups", "num_groups": 50}


def test_one_group_has_no_interval() -> None:
    groups = RowGroups(np.zeros(9, dtype=np.int64))
    probs = np.random.default_rng(2).dirichlet(np.ones(3), size=9)
    labels = np.arange(9) % 3
    bootstrap = Bootstrap(100, groups={"test": groups})
    rows = score_rows(scores_of(probs, labels), ("test", 9), bootstrap, groups=groups)
    assert all(row.get("interval") is None for row in rows)
    vectors = {"max_prob": probs.max(axis=1)}
    (row,) = detection_rows(
        vectors, vectors, {"auroc": detection_forms()["auroc"]}, split="test", ood="far", bootstrap=bootstrap
    )
    assert row["interval"] is None


NUM_GROUPS, LARGEST, TRIALS = 80, 19, 400


def draw_rows(generator: np.random.Generator, mean: float = 0.7) -> tuple[RowGroups, NDArray, NDArray]:
    """Groups of 1 to 19 rows, and for two models whether each row is right: the rows of a group are alike (ICC 0.67)."""
    groups = groups_of(generator.integers(1, LARGEST + 1, size=NUM_GROUPS))
    chances = generator.beta(0.5 * mean, 0.5 * (1 - mean), size=(2, NUM_GROUPS))
    right = generator.random((2, len(groups.index))) < groups.spread(chances)
    return groups, right[0], right[1]


def predictions(is_right: NDArray, confidence: float = 0.7) -> tuple[NDArray, NDArray]:
    """Two-class predictions of class 1 with one confidence, and labels."""
    return np.tile([1 - confidence, confidence], (len(is_right), 1)), is_right.astype(np.int64)


def holds(ends: Any, truth: float) -> bool:
    return bool(ends["low"] <= truth <= ends["high"])


def within_error(share: float, level: float, trials: int = TRIALS) -> bool:
    """Whether a share of trials agrees with its level, to 3 standard errors and 2 points."""
    return abs(share - level) <= 3 * math.sqrt(level * (1 - level) / trials) + 0.02


def test_intervals_by_group_hold_the_truth_as_often_as_they_say_and_those_by_row_do_not() -> None:
    generator, hits = np.random.default_rng(3), {"rows": 0, "groups": 0}
    for trial in range(TRIALS):
        groups, right, _ = draw_rows(generator)
        scores = [g for g in scores_of(*predictions(right)) if g.members[0].name == "accuracy"]
        for way, given in (("rows", {}), ("groups", {"test": groups})):
            bootstrap = Bootstrap(300, level=LEVEL, seed=trial, groups=given)
            (accuracy, *_) = score_rows(scores, ("test", len(right)), bootstrap)
            hits[way] += holds(accuracy["interval"], 0.7)
    assert hits["rows"] / TRIALS < 0.75
    assert within_error(hits["groups"] / TRIALS, LEVEL)


def test_comparisons_by_group_hold_their_level_and_those_by_row_do_not() -> None:
    generator, hits = np.random.default_rng(4), {"rows": 0, "groups": 0}
    for trial in range(TRIALS):
        groups, one, other = draw_rows(generator)
        size, values = len(one), np.stack([one, other], axis=1).astype(np.float64)
        for way, given in (("rows", {}), ("groups", {"test": groups})):
            found = Bootstrap(300, seed=trial, groups=given).replicates(
                lambda w, v=values: (w @ v) / w.sum(axis=1, keepdims=True), ("test", size)
            )
            pair = [Sample(values[:, [k]].mean(axis=0), found[:, k]) for k in range(2)]
            gap = difference(*pair, level=LEVEL)
            hits[way] += holds({"low": gap.low, "high": gap.high}, 0.0)
    assert hits["rows"] / TRIALS < 0.75
    assert within_error(hits["groups"] / TRIALS, LEVEL)


def test_a_calibrated_model_is_not_accused_because_its_errors_come_in_groups() -> None:
    generator, accused, covered = np.random.default_rng(5), {"rows": 0, "groups": 0}, 0
    for trial in range(TRIALS):
        groups, right, _ = draw_rows(generator)
        scores = [g for g in scores_of(*predictions(right)) if g.members[0].name == "ece"][:1]
        for way, given in (("rows", None), ("groups", groups)):
            bootstrap = Bootstrap(1, level=LEVEL, seed=trial)
            (ece, *_) = score_rows(scores, ("test", len(right)), bootstrap, groups=given)
            accused[way] += ece["p_calibrated"] <= 0.1
            covered += given is not None and ece["interval"]["low"] <= 0
    assert accused["rows"] / TRIALS > 0.4
    assert within_error(accused["groups"] / TRIALS, 0.1)
    assert covered / TRIALS >= LEVEL - 0.05


@pytest.mark.long
def test_verdicts_by_group_hold_their_level_and_those_by_row_do_not() -> None:
    generator = np.random.default_rng(6)
    counts = {name: {"rows": 0, "groups": 0} for name in ("losses", "accuracy", "worse")}
    for _ in range(TRIALS):
        groups, one, other = draw_rows(generator)
        losses = [np.where(right, -math.log(0.7), -math.log(0.3)) for right in (one, other)]
        for way, given in (("rows", None), ("groups", groups)):
            ends = loss_interval(*losses, LEVEL, groups=given)
            counts["losses"][way] += ends is not None and ends[0] <= 0 <= ends[1]
            ends = accuracy_interval(one, other, LEVEL, groups=given)
            counts["accuracy"][way] += ends is not None and ends[0] <= 0 <= ends[1]
            p = worse_p_value(*losses, groups=given)
            counts["worse"][way] += p is not None and p > 0.1
    for found in counts.values():
        assert found["rows"] / TRIALS < 0.85
        assert found["groups"] / TRIALS >= LEVEL - 3 * math.sqrt(LEVEL * (1 - LEVEL) / TRIALS) - 0.02


def test_the_linearized_standard_error_is_that_of_a_ratio() -> None:
    generator = np.random.default_rng(7)
    groups = groups_of(generator.integers(1, 9, size=50))
    values = generator.normal(size=len(groups.index)) + groups.spread(generator.normal(size=50))
    ours = groups.linearized(values)
    assert ours.mean() == pytest.approx(values.mean())
    totals, sizes = groups.sums(values), groups.sizes
    residuals = (totals - values.mean() * sizes) / sizes.mean()  # Cochran 1977, equation 9A.10
    assert ours.std(ddof=1) == pytest.approx(residuals.std(ddof=1))


def test_detection_resamples_the_groups_of_each_split() -> None:
    generator = np.random.default_rng(8)
    inside, outside = groups_of(np.full(30, 10)), groups_of(np.full(20, 5))
    vectors = [
        {"max_prob": g.spread(generator.normal(size=len(g))) + shift} for g, shift in ((inside, 1.0), (outside, 0.0))
    ]
    errors = []
    for given in ({}, {"test": inside, "far": outside}):
        form = {"auroc": detection_forms()["auroc"]}
        (row,) = detection_rows(*vectors, form, split="test", ood="far", bootstrap=Bootstrap(500, groups=given))
        errors.append(row["standard_error"])
    assert row["interval"]["resampled"] == "groups"
    assert row["interval"]["num_groups"] == [30, 20]
    assert errors[1] > 2 * errors[0]
    assert auroc is form["auroc"][0].statistic

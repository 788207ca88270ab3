"""Calibration errors against chance: draws of a calibrated model, its floor, the test, and what intervals hold."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import softmax

from bnncli.evaluation import calibration as calibrated
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration import (
    calibration_scores,
    class_bins,
    class_wise_scores,
    draw_gaps,
    largest_gap,
    shrink_gaps,
)
from bnncli.evaluation.statistics import Row, ScoreGroup, compute_example_statistics, score_rows

FORMS = [("equal-width", "l1"), ("equal-mass", "l1"), ("equal-mass", "l2"), ("published", "l1"), ("class-wise", "l1")]


def world(
    generator: np.random.Generator, count: int, *, temperature: float = 1, shift: float = 0, classes: int = 10
) -> tuple[NDArray, NDArray]:
    """Predictions at a temperature, shifted by class, and labels of the softmax itself (temperature 1, shift 0)."""
    logits = 3 * generator.standard_normal((count, classes))
    labels = (softmax(logits, axis=1).cumsum(axis=1) < generator.random((count, 1))).sum(axis=1).clip(0, classes - 1)
    return softmax(logits / temperature + shift * np.linspace(-1, 1, classes), axis=1), labels


def groups_of(probs: NDArray, labels: NDArray) -> list[ScoreGroup]:
    return [*calibration_scores(compute_example_statistics(probs, labels)), class_wise_scores(probs, labels)]


def rows_of(probs: NDArray, labels: NDArray, *, bootstrap: Bootstrap | None = None) -> dict[tuple[str, str], Row]:
    """The rows of the errors, by strategy and norm; `mce` stands for a norm."""
    rows = score_rows(groups_of(probs, labels), ("test", len(labels)), bootstrap)
    return {(row["strategy"], row.get("norm", row["name"])): row for row in rows}


def plain_errors(probs: NDArray, labels: NDArray) -> dict[tuple[str, str], float]:
    """The errors alone."""
    members = [m for group in groups_of(probs, labels) for m in group.members]
    values = np.concatenate([g.statistic(np.ones((1, len(labels))))[0] for g in groups_of(probs, labels)])  # type: ignore[misc]
    return {(m.choices["strategy"], m.choices.get("norm", m.name)): v for m, v in zip(members, values, strict=True)}


def exact_distribution(probabilities: NDArray) -> NDArray:
    """P(n events) of independent events, by convolution."""
    found = np.ones(1)
    for p in probabilities:
        found = np.convolve(found, [1 - p, p])
    return found


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.05), (0.3, 0.9), (0.97, 1.0)])
def test_draws_of_a_bin_are_distributed_as_events_of_its_probabilities(low: float, high: float) -> None:
    stated = np.random.default_rng(0).uniform(low, high, 40)
    sums = [np.array([v]) for v in (40.0, stated.sum(), (stated**2).sum(), 0.0)]
    gaps = draw_gaps(*sums, generator=np.random.default_rng(1))
    found = np.round(stated.sum() - gaps.calibrated[:, 0]).astype(int)
    pmf = exact_distribution(stated)
    expected = np.arange(41) @ pmf
    assert gaps.calibrated.mean() == pytest.approx(0, abs=4 * np.sqrt((stated * (1 - stated)).sum() / len(found)))
    assert found.var() == pytest.approx((np.arange(41) - expected) ** 2 @ pmf, rel=4 * np.sqrt(2 / len(found)))
    shares = np.bincount(found, minlength=41) / len(found)
    assert np.abs(shares - pmf).max() < 4 * 0.5 / np.sqrt(len(found))


@pytest.mark.parametrize("classes", [2, 6])
def test_the_floor_is_the_mean_error_of_labels_drawn_from_the_predictions(classes: int) -> None:
    generator = np.random.default_rng(2)
    probs, labels = world(generator, 400, temperature=0.7, classes=classes)
    rows, cumulative = rows_of(probs, labels), probs.cumsum(axis=1)
    drawn: dict[tuple[str, str], list[float]] = {}
    for _ in range(150):
        new = (cumulative < generator.random((400, 1))).sum(axis=1).clip(0, classes - 1)
        for key, value in plain_errors(probs, new).items():
            drawn.setdefault(key, []).append(value)
    for key, values in drawn.items():
        error = np.std(values) * np.sqrt(1 / 150 + 1 / 400)
        assert rows[key]["floor"] == pytest.approx(np.mean(values), abs=4 * error), key
        assert rows[key]["excess"] == pytest.approx(rows[key]["value"] - rows[key]["floor"])


@pytest.mark.parametrize("classes", [2, pytest.param(5, marks=pytest.mark.long)])
def test_the_test_of_calibration_rejects_as_often_as_it_says(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrated, "NUM_DRAWS", 250)
    generator, trials = np.random.default_rng(3), 80
    p_values: dict[tuple[str, str], list[float]] = {}
    for _ in range(trials):
        for key, row in rows_of(*world(generator, 300, classes=classes)).items():
            p_values.setdefault(key, []).append(row["p_calibrated"])
    assert len(p_values) == 7
    for key, values in p_values.items():
        for level in (0.1, 0.3):
            error = np.sqrt(level * (1 - level) / trials)
            assert np.mean(np.array(values) <= level) < level + 3 * error, (key, level)
            if key[1] != "mce":  # whose values are few and far between
                assert np.mean(np.array(values) <= level) > level - 3 * error - 0.03, (key, level)


QUICK = {"classes": 4}
CASES = [{}, {"temperature": 1.15}]
MORE = [{"temperature": 0.5}, {"temperature": 2.0}, {"shift": 1.0}]


@pytest.mark.parametrize("choices", [*CASES, *(pytest.param(one, marks=pytest.mark.long) for one in MORE)], ids=str)
def test_intervals_hold_the_truth_as_often_as_they_say(
    choices: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 40 intervals of 90 %: three standard errors below. benchmarks/calibration.py has the long simulation.
    monkeypatch.setattr(calibrated, "NUM_DRAWS", 250)
    generator, trials = np.random.default_rng(4), 40
    truth = plain_errors(*world(np.random.default_rng(9), 40_000, **QUICK, **choices))
    hits = dict.fromkeys([*FORMS, ("equal-mass", "mce")], 0)
    for _ in range(trials):
        for group in groups_of(*world(generator, 500, **QUICK, **choices)):
            assert group.against_chance is not None
            for member, row in zip(group.members, group.against_chance(generator, 0.9), strict=True):
                key = member.choices["strategy"], member.choices.get("norm", member.name)
                error = truth[key] if choices or key[0] == "published" else 0.0
                assert 0 <= row["interval"]["low"] <= row["interval"]["high"] <= 1
                if key in hits:
                    hits[key] += row["interval"]["low"] <= error <= row["interval"]["high"]
    assert min(hits.values()) / trials >= 0.9 - 3 * np.sqrt(0.9 * 0.1 / trials), hits


def test_intervals_are_as_narrow_as_the_noise_where_the_error_is_large() -> None:
    probs, labels = world(np.random.default_rng(5), 4000, temperature=0.4)
    rows = rows_of(probs, labels, bootstrap=Bootstrap(200))
    for key in FORMS[:3]:
        row = rows[key]
        width = row["interval"]["high"] - row["interval"]["low"]
        assert width == pytest.approx(2 * 1.96 * row["standard_error"], rel=0.25), key
        assert row["interval"]["low"] < row["value"] < row["interval"]["high"]
        assert row["p_calibrated"] < 0.002


def test_zero_is_in_an_interval_exactly_where_the_test_does_not_reject() -> None:
    generator, seen = np.random.default_rng(6), set()
    for trial in range(12):
        rows = rows_of(*world(generator, 300, temperature=0.85), bootstrap=Bootstrap(2, 0.8, trial))
        for key in FORMS:
            does_reject = rows[key]["p_calibrated"] < 0.1
            assert (rows[key]["interval"]["low"] > 0) == does_reject
            seen.add(does_reject)
    assert seen == {True, False}


def test_a_value_above_its_interval_is_explained() -> None:
    generator, notes = np.random.default_rng(7), 0
    for trial in range(8):
        for row in rows_of(*world(generator, 200), bootstrap=Bootstrap(2, 0.8, trial)).values():
            assert ("note" in row) == (row["value"] > row["interval"]["high"])
            if "note" in row:
                notes += 1
                assert "it contains the noise floor" in row["note"]
    assert notes > 0


def test_the_gaps_of_two_classes_are_those_of_the_second_alone() -> None:
    probs, labels = world(np.random.default_rng(8), 300, classes=2)
    bins = class_bins(probs, labels, num_bins=15)
    assert (bins.size.sum(), bins.observed.sum()) == (300, labels.sum())
    assert bins.stated.sum() == pytest.approx(probs[:, 1].sum())
    assert class_bins(*world(np.random.default_rng(8), 300, classes=3), num_bins=15).size.sum() == 900


def test_the_interval_of_the_largest_gap_is_that_of_the_least_sure_bin() -> None:
    stated = np.array([0.9, 0.6])
    size, observed = np.array([200.0, 10.0]), np.array([180.0, 3.0])
    found = largest_gap(size, size * stated, size * stated**2, observed, level=0.9)
    ends = [
        stats.binomtest(int(k), int(n)).proportion_ci(0.975, method="exact")
        for k, n in zip(observed, size, strict=True)
    ]
    gaps = [(p - e.high, p - e.low, e.low - p, e.high - p) for p, e in zip(stated, ends, strict=True)]
    assert found["low"] == pytest.approx(max(0, *(max(g[0], g[2]) for g in gaps)))
    assert found["high"] == pytest.approx(max(max(g[1], g[3]) for g in gaps))


def test_predictions_that_leave_no_room_for_chance_have_a_floor_of_zero() -> None:
    probs, labels = np.tile([1.0, 0.0], (60, 1)), np.repeat([0, 1], [50, 10])
    rows = rows_of(probs, labels, bootstrap=Bootstrap(20))
    row = rows["equal-width", "l1"]
    assert (row["value"], row["floor"], row["p_calibrated"]) == (pytest.approx(1 / 6), 0.0, pytest.approx(1 / 1001))
    assert 0.05 < row["interval"]["low"] < 1 / 6 < row["interval"]["high"] < 0.3
    right = rows_of(probs, np.zeros(60, dtype=int), bootstrap=Bootstrap(20))["equal-width", "l1"]
    assert (right["value"], right["floor"], right["p_calibrated"]) == (0.0, 0.0, 1.0)
    assert (right["interval"]["low"], right["interval"]["high"]) == (0.0, 0.0)


def test_floors_are_there_without_a_bootstrap_and_repeat_with_the_seed() -> None:
    probs, labels = world(np.random.default_rng(1), 200)
    plain, again, other = (rows_of(probs, labels, bootstrap=b) for b in (None, None, Bootstrap(2, seed=5)))
    assert plain == again
    assert all("interval" not in row and 0 < row["floor"] < 1 for row in plain.values())
    assert plain["equal-width", "l1"]["floor"] != other["equal-width", "l1"]["floor"]


def test_many_bins_get_fewer_draws() -> None:
    for num_bins, num_draws in ((500, 200), (100, 655)):
        bins = [np.full(num_bins, value) for value in (4.0, 2.0, 1.0, 1.0)]
        assert len(draw_gaps(*bins, generator=np.random.default_rng(0)).noise) == num_draws


def test_gaps_are_shrunk_towards_zero_and_not_beyond() -> None:
    assert shrink_gaps(np.array([0.3, -0.3, 0.1]), np.array([0.2, 0.1, 0.2])) == pytest.approx([0.1, -0.2, 0.0])

"""How near predictions are to a reference's, against scipy and naive sums; their intervals against simulation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.spatial.distance import jensenshannon

from bnncli.errors import DataError
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.fidelity import (
    Forecasts,
    PredictionPair,
    ReferencePredictions,
    fidelity_rows,
    mutual_info_correlation,
    undefined_fidelity,
)
from bnncli.evaluation.scores import fidelities

N, C = 300, 4


def drawn(seed: int, size: int = N) -> tuple[NDArray, NDArray]:
    """Probabilities of two models that are somewhat alike, float32."""
    generator = np.random.default_rng(seed)
    shared = generator.normal(size=(size, C))
    logits = [shared + 0.5 * generator.normal(size=(size, C)) for _ in range(2)]
    p, q = (np.exp(one) / np.exp(one).sum(axis=1, keepdims=True) for one in logits)
    return p.astype(np.float32), q.astype(np.float32)


def rows_of(ours: Forecasts, theirs: Forecasts, bootstrap: Bootstrap | None = None, **options: object) -> dict:
    reference = ReferencePredictions("hmc", theirs, **{k: options.pop(k) for k in ("halves",) if k in options})
    split = ("test", len(ours.probs))
    rows = fidelity_rows(ours, reference, fidelities(), split=split, bootstrap=bootstrap, **options)
    return {row["name"]: row for row in rows}


def test_the_scores_are_what_naive_sums_and_scipy_say() -> None:
    p, q = drawn(0)
    info = np.random.default_rng(1).gamma(1.0, size=(2, N)).round(1)  # with ties
    rows = rows_of(Forecasts(p, info[0]), Forecasts(q, info[1]))
    p, q = p.astype(float), q.astype(float)
    assert rows["agreement"]["value"] == np.mean([a.argmax() == b.argmax() for a, b in zip(p, q, strict=True)])
    assert rows["total_variation"]["value"] == pytest.approx(
        np.mean([np.abs(a - b).sum() / 2 for a, b in zip(p, q, strict=True)])
    )
    assert rows["jensen_shannon"]["value"] == pytest.approx(
        np.mean([jensenshannon(a, b) ** 2 for a, b in zip(p, q, strict=True)])
    )
    assert rows["mutual_info_correlation"]["value"] == pytest.approx(stats.spearmanr(*info).statistic)
    assert {row["reference"] for row in rows.values()} == {"hmc"}


def test_of_several_labels_each_is_a_distribution_of_its_own() -> None:
    p, q = np.random.default_rng(2).random((2, 50, 3))
    rows = rows_of(Forecasts(p), Forecasts(q), is_exclusive=False)
    pairs = [(a, b) for a, b in zip(p.ravel(), q.ravel(), strict=True)]
    assert rows["agreement"]["value"] == ((p >= 0.5) == (q >= 0.5)).all(axis=1).mean()
    assert rows["total_variation"]["value"] == pytest.approx(np.mean([abs(a - b) for a, b in pairs]))
    expected = np.mean([jensenshannon([a, 1 - a], [b, 1 - b]) ** 2 for a, b in pairs])
    assert rows["jensen_shannon"]["value"] == pytest.approx(expected)


def test_the_same_predictions_are_at_no_distance_and_disjoint_ones_at_the_largest() -> None:
    p, _ = drawn(3)
    rows = rows_of(Forecasts(p), Forecasts(p))
    assert [rows[name]["value"] for name in ("agreement", "total_variation", "jensen_shannon")] == [1, 0, 0]
    one, other = np.eye(2)[[0, 0, 1]], np.eye(2)[[1, 1, 0]]
    rows = rows_of(Forecasts(one), Forecasts(other))
    found = [rows[name]["value"] for name in ("agreement", "total_variation", "jensen_shannon")]
    assert found == pytest.approx([0, 1, np.log(2)])


def test_the_correlation_under_weights_is_that_of_repeated_examples() -> None:
    generator = np.random.default_rng(4)
    info = generator.gamma(1.0, size=(2, 40)).round(1)
    weights = generator.multinomial(40, np.full(40, 1 / 40), size=5).astype(np.float32)
    probs = np.full((40, 2), 0.5)
    group = mutual_info_correlation(PredictionPair(Forecasts(probs, info[0]), Forecasts(probs, info[1])))
    found = group.statistic(weights)[:, 0]
    expected = [stats.spearmanr(*np.repeat(info, w.astype(int), axis=1)).statistic for w in weights]
    assert found == pytest.approx(expected)


def test_the_floor_is_what_halves_of_the_draws_have_of_each_other() -> None:
    p, q = drawn(5)
    halves = tuple(map(Forecasts, drawn(6, size=100)))
    rows = rows_of(Forecasts(p), Forecasts(q), halves=halves)
    alone = rows_of(*halves)
    for name in ("agreement", "total_variation", "jensen_shannon"):
        assert rows[name]["floor"] == alone[name]["value"]
        assert rows[name]["floor_n"] == 100
        assert rows[name]["excess"] == rows[name]["value"] - rows[name]["floor"]


def test_what_is_not_there_is_undefined_with_a_reason() -> None:
    p, q = drawn(7)
    rows = rows_of(Forecasts(p), Forecasts(q, np.ones(N)))
    assert rows["mutual_info_correlation"]["undefined"] == "the predictions have no mutual information"
    assert (rows["agreement"]["floor"], "excess" in rows["agreement"]) == (None, False)
    assert rows["agreement"]["floor_undefined"] == "stored probabilities have no draws to halve"
    constant = rows_of(Forecasts(p, np.arange(N)), Forecasts(q, np.ones(N)))["mutual_info_correlation"]
    assert (constant["value"], constant["undefined"]) == (None, "one of them is constant")
    rows = undefined_fidelity(fidelities(), reference="hmc", reason="no predictions")
    assert [(row["value"], row["undefined"], row["reference"]) for row in rows] == [(None, "no predictions", "hmc")] * 4
    with pytest.raises(DataError, match=r"the same shape, got \(300, 4\) and \(299, 4\)"):
        PredictionPair(Forecasts(p), Forecasts(q[1:]))


def covered(trials: int, size: int, replicates: int) -> dict[str, float]:
    """How often 90 % intervals hold the values of the population."""
    population = drawn(8, size=60_000)
    generator = np.random.default_rng(9)
    info = generator.normal(size=(2, len(population[0])))
    info[1] += info[0]
    truth = rows_of(Forecasts(population[0], info[0]), Forecasts(population[1], info[1]))
    hits = dict.fromkeys(truth, 0)
    for trial in range(trials):
        rows = generator.integers(len(population[0]), size=size)
        sides = [Forecasts(side[rows], one[rows]) for side, one in zip(population, info, strict=True)]
        for name, row in rows_of(*sides, Bootstrap(replicates, 0.9, trial)).items():
            hits[name] += row["interval"]["low"] <= truth[name]["value"] <= row["interval"]["high"]
    return {name: count / trials for name, count in hits.items()}


@pytest.mark.parametrize(
    ("trials", "size", "replicates"), [(150, 150, 120), pytest.param(1500, 400, 400, marks=pytest.mark.nightly)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(trials: int, size: int, replicates: int) -> None:
    found = covered(trials, size, replicates)
    assert len(found) == 4
    # Percentile intervals of so few replicates and examples hold a little less than they say.
    for name, share in found.items():
        assert share == pytest.approx(0.9, abs=3 * np.sqrt(0.09 / trials) + 0.015), name

"""What other layers gain over the last: levels, coverage, and an interval that agrees with its p-value."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bnncli.evaluation.recommendation import LayerGain, layer_gains, mean_interval, p_value

SETS, SIZE = 500, 300
SLACK = 3 * np.sqrt(0.05 * 0.95 / SETS)  # three standard errors of a share of 5 %


def losses(rng: np.random.Generator, shift: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Losses of two predictives, the first sure and now and then wrong, so that differences are skewed; their true means differ by `shift`."""
    theirs = rng.gamma(0.5, 0.6, size=SIZE)
    is_wrong = rng.random(SIZE) < 0.1
    return theirs + np.where(is_wrong, 0.18, -0.02) * rng.gamma(2.0, 0.5, size=SIZE) + shift, theirs


def gain(own: NDArray[np.float64], theirs: NDArray[np.float64]) -> LayerGain:
    return layer_gains({"all": own}, {"all": ("last", theirs)})[0]


def test_where_nothing_differs_a_difference_is_told_five_times_in_a_hundred_and_the_interval_covers() -> None:
    rng = np.random.default_rng(0)
    found = [gain(*losses(rng, 0.0)) for _ in range(SETS)]
    told = np.mean([one.finding in ("better", "worse") for one in found])
    covered = np.mean([one.low is not None and one.low <= 0 <= (one.high or 0) for one in found])
    assert told <= 0.05 + SLACK
    assert covered >= 0.95 - SLACK


def test_the_last_layer_is_rarely_as_good_where_the_others_gain_the_margin() -> None:
    rng = np.random.default_rng(1)
    found = [gain(*losses(rng, -0.003)) for _ in range(SETS)]  # a hundredth of the mean loss, 0.3
    assert np.mean([one.finding == "as good" for one in found]) <= 0.05 + SLACK


def test_many_posteriors_are_told_together() -> None:
    rng = np.random.default_rng(2)
    told = []
    for _ in range(120):
        pairs = {str(place): losses(rng, 0.0) for place in range(5)}
        found = layer_gains({n: own for n, (own, _) in pairs.items()}, {n: ("last", t) for n, (_, t) in pairs.items()})
        told.append(any(one.finding in ("better", "worse") for one in found))
    assert np.mean(told) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 120)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_ends_where_the_p_value_is_a_fortieth(seed: int) -> None:
    values = np.subtract(*losses(np.random.default_rng(seed), 0.0))
    low, high = mean_interval(values) or (np.nan, np.nan)
    assert p_value(values - low) == pytest.approx(0.025, rel=1e-6)
    assert p_value(high - values) == pytest.approx(0.025, rel=1e-6)


@pytest.mark.parametrize(
    ("differences", "finding", "words"),
    [
        (np.tile([-0.2, -0.1], 50), "better", "all predicts better than the last-layer posterior last"),
        (np.tile([0.2, 0.1], 50), "worse", "the last-layer posterior last predicts better than all"),
        (np.tile([1e-4, -1e-4], 50), "as good", "the last-layer posterior last predicts as well as all"),
        (np.zeros(100), "as good", "val NLL +0.0000 (no interval, p 1, paired)"),
        (np.tile([1.0, -1.0], 10), "untold", "val is too small to distinguish all from"),
    ],
)
def test_what_is_found_is_said_plainly(differences: NDArray[np.float64], finding: str, words: str) -> None:
    theirs = np.full(len(differences), 0.5)
    found = gain(theirs + differences, theirs)
    assert found.finding == finding
    assert words in found.sentence


def test_the_p_of_several_says_that_it_allows_for_them_all() -> None:
    theirs = np.full(100, 0.5)
    both = {"one": theirs + np.tile([-0.2, 0.1], 50), "two": theirs + np.tile([-0.1, 0.1], 50)}
    found = layer_gains(both, dict.fromkeys(both, ("last", theirs)))
    assert [one.to_json()["num_compared"] for one in found] == [2, 2]
    assert all("after Holm correction for 2 posteriors, paired)" in one.sentence for one in found)

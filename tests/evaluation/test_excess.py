"""Whether a predictive is worse than a reference: the formulas by hand, and the level of the test by simulation."""

import math
from functools import cache

import numpy as np
import pytest
import scipy.optimize
from numpy.typing import NDArray
from scipy import stats

from bnncli.evaluation.excess import FALSE_ALARM, WORSE_SHARE, Scored, excesses, p_value, score

SPREAD = 6.0  # of the true logit: most labels are nearly certain, as those of a good network


def sigmoid(logit: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-logit))


def losses(logit: NDArray, labels: NDArray) -> NDArray:
    return np.logaddexp(0, np.where(labels, -logit, logit))


def risk(scale: float, grid: NDArray) -> float:
    """The true NLL of a network whose logits are `scale` times the true ones."""
    truth = sigmoid(grid)
    return float(np.mean(truth * losses(scale * grid, np.ones(1)) + (1 - truth) * losses(scale * grid, np.zeros(1))))


@cache
def as_good_as(scale: float) -> float:
    """The hedging scale, below 1, whose true NLL is that of an overconfident one: the null holds exactly."""
    grid = SPREAD * stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    return scipy.optimize.brentq(lambda other: risk(other, grid) - risk(scale, grid), 1e-3, 1.0)


def draw(size: int, trials: int, *scales: float) -> list[NDArray]:
    """Losses (trials, size) of each scale on the same labels."""
    generator = np.random.default_rng(0)
    truth = SPREAD * generator.normal(size=(trials, size))
    labels = generator.random((trials, size)) < sigmoid(truth)
    return [losses(scale * truth, labels) for scale in scales]


def alarms(chosen: NDArray, *references: NDArray) -> float:
    """The share of trials with any p-value, after Holm's correction, at the level; no least excess asked for."""
    count = 0
    for trial, row in enumerate(chosen):
        others = [Scored(str(place), reference[trial]) for place, reference in enumerate(references)]
        found = excesses(Scored("chosen", row), others)
        count += any(one.p_adjusted is not None and one.p_adjusted <= FALSE_ALARM for one in found)
    return count / len(chosen)


def tolerated(trials: int) -> float:
    """3.3 binomial standard errors: one test in a thousand fails by chance."""
    return 3.3 * math.sqrt(FALSE_ALARM * (1 - FALSE_ALARM) / trials)


@pytest.mark.parametrize("scale", [1.5, 2.5])
@pytest.mark.parametrize("is_hedged", [True, False], ids=["hedged against sure", "sure against hedged"])
def test_predictives_that_are_equally_good_alarm_no_oftener_than_stated(scale: float, is_hedged: bool) -> None:
    sure, hedged = draw(300, 1500, scale, as_good_as(scale))
    share = alarms(*((hedged, sure) if is_hedged else (sure, hedged)))
    assert share <= FALSE_ALARM + tolerated(1500)
    assert share >= 0.5 * FALSE_ALARM  # it is a test, and not silence


def test_students_t_would_not_keep_the_level() -> None:
    sure, hedged = draw(300, 2000, 2.5, as_good_as(2.5))
    gaps = hedged - sure
    statistic = math.sqrt(300) * gaps.mean(axis=1) / gaps.std(axis=1, ddof=1)
    assert np.mean(stats.t.sf(statistic, 299) <= FALSE_ALARM) > FALSE_ALARM + tolerated(2000)


def test_three_references_that_are_as_good_alarm_no_oftener_than_stated() -> None:
    scales = (1.5, as_good_as(1.5))
    sure, hedged = draw(300, 800, *scales)
    noise = np.random.default_rng(1).normal(size=(2, *sure.shape))
    share = alarms(hedged, sure, hedged + 0.1 * noise[0], hedged + 0.1 * noise[1])
    assert share <= FALSE_ALARM + tolerated(800)


def test_a_predictive_that_is_much_worse_is_found() -> None:
    sure, worse = draw(300, 200, 1.0, 0.3)
    assert alarms(worse, sure) > 0.95


def test_the_p_value_is_halls_statistic_by_hand() -> None:
    values = np.array([0.0, 0.0, 0.0, 1.0])
    # mean 1/4, standard deviation 1/2, central moments 3/16 and 3/32: skewness 2 / sqrt(3)
    skewness, ratio = 2 / math.sqrt(3), 0.5
    corrected = ratio + skewness * ratio**2 / 3 + skewness**2 * ratio**3 / 27 + skewness / 24
    assert p_value(values) == pytest.approx(stats.t.sf(2 * corrected, 3), rel=1e-12)
    assert p_value(1e-120 * values) == pytest.approx(p_value(values), rel=1e-12)


def test_without_skewness_it_is_students_t() -> None:
    values = np.array([-1.0, 0.5, 1.0, 1.5, 3.0])
    assert stats.skew(values) == 0
    assert p_value(values) == pytest.approx(stats.ttest_1samp(values, 0, alternative="greater").pvalue, rel=1e-12)


def test_what_does_not_vary_tells_no_p_value_unless_it_is_zero() -> None:
    assert p_value(np.zeros(5)) == 1
    assert p_value(np.full(5, 0.3)) is None
    assert p_value(np.array([0.3])) is None


def test_a_loss_too_small_to_matter_is_no_alarm_however_sure_it_is() -> None:
    base = np.random.default_rng(2).exponential(size=1000)
    reference = Scored("network", base)
    noise = 1e-4 * np.random.default_rng(3).normal(size=1000)
    below, above = (Scored("laplace", base + share * WORSE_SHARE * reference.nll + noise) for share in (0.9, 1.1))
    small, large = (excesses(one, [reference])[0] for one in (below, above))
    assert small.p_adjusted is not None
    assert small.p_adjusted < 1e-6
    assert (small.is_worse, large.is_worse) == (False, True)
    assert large.value == pytest.approx(1.1 * WORSE_SHARE * reference.nll, rel=1e-2)
    assert large.standard_error == pytest.approx(noise.std(ddof=1) / math.sqrt(1000))


def test_a_scored_predictive_has_the_nll_and_the_ece_by_hand() -> None:
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.3, 0.7]])
    found = score("network", probs, np.array([0, 1, 1, 1]))
    assert found.nll == pytest.approx(-np.mean(np.log([0.9, 0.1, 0.6, 0.7])))
    assert found.ece == pytest.approx((2 * 0.4 + 0.4 + 0.3) / 4)  # bins (0.87, 0.93], (0.53, 0.6], (0.67, 0.73]
    assert found.standard_error == pytest.approx(np.std(-np.log([0.9, 0.1, 0.6, 0.7]), ddof=1) / 2)
    held_out = np.ones(4)
    assert score("temperature", probs, np.array([0, 1, 1, 1]), losses=held_out).nll == 1.0

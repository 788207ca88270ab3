"""Whether a predictive is worse than a reference: the formulas by hand, and the level of the test by simulation."""

import math
from functools import cache

import numpy as np
import pytest
import scipy.optimize
from numpy.typing import NDArray
from scipy import stats

from bnncli.evaluation.recommendation import (
    FALSE_ALARM,
    WORSE_SHARE,
    Relabelled,
    Scored,
    excesses,
    loss_interval,
    mean_interval,
    p_value,
    score,
)

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
    assert share >= 0.2 * FALSE_ALARM  # it is a test, and not silence


@pytest.mark.parametrize("size", [30, 100])
@pytest.mark.parametrize("kind", ["mixed", "sure", "very sure"])
def test_samples_that_lack_the_large_losses_prove_nothing(size: int, kind: str) -> None:
    """Two predictives that are equally good at every example, most of them sure: Hall's test alone alarms in up to 59 of 100."""
    generator, trials = np.random.default_rng(5), 600
    uniform = generator.random((trials, size))
    confidence = {"mixed": 0.5 + uniform / 2, "sure": 0.5 + uniform ** (1 / 20) / 2, "very sure": 1 - uniform**6 / 2}[
        kind
    ]
    logit = np.log(confidence) - np.log(np.maximum(1 - confidence, 1e-12))
    sure, hedged = sigmoid(1.7 * logit), sigmoid(0.7 * logit)
    right, wrong = np.log(sure / hedged), np.log(np.maximum(1 - sure, 1e-15) / (1 - hedged))
    truth = np.where(right - wrong > 1e-9, wrong / np.minimum(wrong - right, -1e-9), 0.5)
    labels = generator.random((trials, size)) < truth
    chosen, reference = losses(0.7 * logit, labels), losses(1.7 * logit, labels)
    alone = np.mean([(p_value(gap) or 0) <= FALSE_ALARM for gap in chosen - reference])
    assert alarms(chosen, reference) <= FALSE_ALARM + tolerated(trials)
    if (size, kind) in ((30, "sure"), (100, "sure"), (30, "very sure")):
        assert alone > 0.1


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


def test_relabelled_differences_have_mean_zero_and_their_tail_is_exact_or_bounded() -> None:
    own, other = np.array([0.1, 0.5, 2.0]), np.array([0.05, 0.9, 2.0])
    found = Relabelled.of(own, other)
    assert len(found.seen) == 2  # the third is the same
    q, p = np.exp(-own[:2]), np.exp(-other[:2])
    np.testing.assert_allclose(found.seen, np.log(p / q))
    np.testing.assert_allclose(found.unseen, np.log((1 - p) / (1 - q)))
    np.testing.assert_allclose(found.share * found.seen + (1 - found.share) * found.unseen, 0, atol=1e-12)
    four = {
        found.share[0] ** a * (1 - found.share[0]) ** (1 - a) * found.share[1] ** b * (1 - found.share[1]) ** (1 - b):
        (found.seen[0] if a else found.unseen[0]) + (found.seen[1] if b else found.unseen[1])
        for a in (0, 1) for b in (0, 1)
    }  # fmt: skip
    for total in four.values():
        exact = sum(chance for chance, value in four.items() if value >= total - 1e-12)
        assert found.p_value(total) == pytest.approx(exact, abs=0.04)
    many = Relabelled.of(np.tile(own, 200), np.tile(own - 0.05, 200))
    largest, least = float(many.seen.sum()), math.exp(float(np.log(many.share).sum()))
    assert least <= many.p_value(largest) <= least**0.9  # the observed label everywhere, and no other way
    sd = math.sqrt(-(many.seen * many.unseen).sum())
    assert 1e-9 < many.p_value(4 * sd) < 10 * stats.norm.sf(4)  # large differences are of the other sign: a light tail
    opposite = many.opposite()
    assert opposite.p_value(-4 * sd) > 0.99
    np.testing.assert_allclose(Relabelled.of(np.tile(own - 0.05, 200), np.tile(own, 200)).sums, opposite.sums)


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
    assert small.p_adjusted < 1e-3
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


def test_a_bound_beyond_all_numbers_says_nothing() -> None:
    rare = Relabelled(np.array([100.0]), np.array([-1e-6]), np.array([1e-8]), np.zeros(10))
    assert rare.p_value(50.0) == 1 / 11  # that of the draws


def test_the_interval_of_two_skewed_losses_holds_their_equality() -> None:
    scale = 4.0
    pairs = list(zip(*draw(100, 400, scale, as_good_as(scale)), strict=True))
    ends = [loss_interval(sure, hedging) for sure, hedging in pairs]
    missed = np.mean([low > 0 or high < 0 for low, high in ends])  # type: ignore[misc]
    assert missed <= 0.05 + tolerated(400)
    alone = [mean_interval(sure - hedging) for sure, hedging in pairs]
    assert np.mean([low > 0 or high < 0 for low, high in alone]) > missed  # type: ignore[misc]

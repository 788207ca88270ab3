"""Sequential tests: their levels at any time, their delays, and the guarantees of adaptive conformal inference."""

import math
from functools import cache

import numpy as np
import pytest
from scipy import integrate, stats

from bnncli.evaluation.decisions import distance_p_value, kolmogorov_smirnov_distance
from bnncli.evaluation.monitoring import (
    LARGEST_STEP,
    RATE,
    Capital,
    ConformalRanks,
    adapt_level,
    bet_on_losses,
    bet_on_p_values,
    find_alarm,
    threshold_at_level,
    upper_rate,
)

ALPHA = 0.05
STEPS = 10_000


def play(factors):
    return Capital.start(factors.shape[-1], factors.shape[:-2]).play(factors)[1]


def count_alarms(log_capital):
    return int((log_capital.max(axis=-1) >= -math.log(ALPHA)).sum())


def lowest_rate(count, size):
    """Return the Clopper-Pearson bound below the rate, at confidence 0.999."""
    return stats.binomtest(count, size, alternative="greater").proportion_ci(0.999).low


def stream_p_values(size, num_calibration, steps, seed, shift=0.0, start=None):
    """Return p-values (S, T) of streams of normal scores that drop by `shift` from `start` on."""
    found = []
    for stream in range(size):
        generator = np.random.default_rng([seed, stream])
        calibration, scores = generator.normal(size=num_calibration), generator.normal(size=steps)
        scores[start:] -= shift if start is not None else 0.0
        found.append(ConformalRanks(calibration).extend(scores, generator.random(steps)))
    return np.array(found)


def test_p_values_are_ranks_among_all_earlier_scores():
    generator = np.random.default_rng(0)
    calibration, scores = generator.integers(0, 8, 30), generator.integers(0, 8, 1100)
    uniforms = generator.random(1100)
    found = ConformalRanks(calibration).extend(scores, uniforms)
    for step in (*range(50), *range(500, 540), *range(1020, 1030), 1099):
        bag = np.concatenate([calibration, scores[: step + 1]])
        below, ties = (bag < scores[step]).sum(), (bag == scores[step]).sum()
        assert found[step] == (below + uniforms[step] * ties) / len(bag)


def test_p_values_refuse_scores_that_are_not_finite():
    with pytest.raises(ValueError, match="finite"):
        ConformalRanks(np.zeros(3)).extend(np.array([np.nan]), np.zeros(1))


def test_bets_are_fair():
    for bet in range(bet_on_p_values(np.ones(1)).shape[-1]):
        mean, _ = integrate.quad(lambda p, bet=bet: bet_on_p_values(np.array([p]))[0, bet], 0, 1)
        assert mean == pytest.approx(1, abs=1e-6)
    paid = bet_on_losses(np.array([0.0, 1.0]), 0.1)
    assert 0.9 * paid[0] + 0.1 * paid[1] == pytest.approx(1)
    assert (paid > 0).all()


def test_capital_is_the_average_of_simple_jumpers():
    from bnncli.evaluation.monitoring import JUMP_RATES

    factors = bet_on_p_values(np.random.default_rng(1).random(60))
    size = factors.shape[1]
    capitals = []
    for jump in JUMP_RATES:
        moves = (1 - jump) * np.eye(size) + jump / size
        shares = np.full(size, 1 / size)
        for paid in factors:
            shares = (moves @ shares) * paid
        capitals.append(shares.sum())
    assert play(factors)[-1] == pytest.approx(math.log(np.mean(capitals)), rel=1e-9)


def test_a_stream_continues_where_it_stopped():
    generator = np.random.default_rng(2)
    scores, uniforms, calibration = generator.normal(size=300), generator.random(300), generator.normal(size=40)
    whole = play(bet_on_p_values(ConformalRanks(calibration).extend(scores, uniforms)))
    capital, ranks, found = Capital.start(8), calibration, []
    for rows in np.array_split(np.arange(300), [1, 100, 250]):
        p_values = ConformalRanks(ranks).extend(scores[rows], uniforms[rows])
        ranks = np.concatenate([ranks, scores[rows]])
        capital, path = capital.play(bet_on_p_values(p_values))
        found.append(path)
    np.testing.assert_allclose(np.concatenate(found), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_false_alarms_are_rare_at_any_time_with_a_small_calibration_split():
    size = 400
    p_values = stream_p_values(size, 100, STEPS, seed=3)
    assert lowest_rate(count_alarms(play(bet_on_p_values(p_values))), size) <= ALPHA


@pytest.mark.long
def test_a_fixed_comparison_set_and_a_repeated_batch_test_raise_false_alarms():
    size, night = 100, 100
    fixed, nightly = [], 0
    p_value = cache(distance_p_value)
    for stream in range(size):
        generator = np.random.default_rng([4, stream])
        calibration, scores = np.sort(generator.normal(size=100)), generator.normal(size=STEPS)
        fixed.append((np.searchsorted(calibration, scores) + generator.random(STEPS)) / 101)
        gaps = [kolmogorov_smirnov_distance(calibration, batch) for batch in scores.reshape(-1, night)]
        nightly += any(p_value(gap, 100, night) <= ALPHA for gap in gaps)
    assert lowest_rate(count_alarms(play(bet_on_p_values(np.array(fixed)))), size) > ALPHA
    assert lowest_rate(nightly, size) > ALPHA


@pytest.mark.long
def test_false_alarms_of_the_loss_are_rare_at_any_time():
    size, rate, level = 300, 0.1, ALPHA / 2
    generator = np.random.default_rng(5)
    losses = generator.random((size, STEPS)) < rate
    bounds = [upper_rate(int(wrong), 100, level) for wrong in generator.binomial(100, rate, size)]
    path = play(np.stack([bet_on_losses(*pair) for pair in zip(losses, bounds, strict=True)]))
    assert lowest_rate(int((path.max(axis=-1) >= -math.log(level)).sum()), size) <= ALPHA
    assert lowest_rate(count_alarms(play(bet_on_losses(losses, rate))), size) <= ALPHA


@pytest.mark.parametrize(("shift", "delay"), [(0.5, 300), (1.0, 80), (3.0, 20)])
def test_a_shift_is_found_soon_and_dated(shift, delay):
    path = play(bet_on_p_values(stream_p_values(10, 500, 1500, seed=6, shift=shift, start=500)))
    alarms = [find_alarm(stream, ALPHA) for stream in path]
    assert all(alarm is not None for alarm in alarms)
    assert 500 < np.median([alarm.step for alarm in alarms]) <= 500 + delay
    assert abs(np.median([alarm.change for alarm in alarms]) - 500) <= 100


def test_a_rise_of_the_error_rate_is_found():
    generator = np.random.default_rng(7)
    losses = generator.random(2000) < np.where(np.arange(2000) < 1000, 0.05, 0.15)
    alarm = find_alarm(play(bet_on_losses(losses, 0.06)), ALPHA)
    assert alarm is not None
    assert 1000 < alarm.step < 1500


def test_an_alarm_is_the_first_crossing_and_the_lowest_capital_before_it():
    path = np.array([-1.0, -2.0, 0.0, 4.0, -9.0, 5.0])
    assert (find_alarm(path, ALPHA).step, find_alarm(path, ALPHA).change) == (4, 2)
    assert find_alarm(path, 1e-4) is None
    assert find_alarm(np.array([4.0]), ALPHA).change == 0


@pytest.mark.parametrize(("wrong", "n"), [(0, 50), (3, 50), (50, 50)])
def test_upper_rate_is_that_of_clopper_and_pearson(wrong, n):
    expected = stats.binomtest(wrong, n, alternative="less").proportion_ci(0.95).high
    assert upper_rate(wrong, n, 0.05) == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 7, 500])
def test_adaptive_levels_keep_the_error_rate_under_any_drift(size):
    generator, target, nights = np.random.default_rng(8), 0.1, 800

    def miss(night, level):  # a shift that comes and goes; all wrong; all right; the opposite of what the level expects
        drifted = stats.norm.cdf(generator.normal(size=size) - 3 * (night // 100 % 2)) <= level
        yield drifted
        yield np.full(size, level > 0)  # a level of at most 0 gives sets of all classes
        yield np.full(size, level >= 1)
        yield np.full(size, level >= 1 or (level > 0 and night % 2))

    for stream in range(4):
        level, total, missed = target, 0.0, 0.0
        for night in range(nights):
            is_missed = list(miss(night, level))[stream]
            level, weight = adapt_level(level, target, is_missed)
            total, missed = total + weight, missed + weight * is_missed.mean()
            assert -LARGEST_STEP <= level <= 1 + LARGEST_STEP
        assert abs(missed / total - target) <= (1 + LARGEST_STEP) / (RATE * total)


def test_thresholds_are_conformal_and_let_all_or_none_in_beyond_the_levels_of_a_probability():
    scores = np.random.default_rng(9).permutation(np.arange(1, 20) / 20)  # 19 scores: ranks of 20
    assert threshold_at_level(scores, 0.1) == 18 / 20
    assert threshold_at_level(scores, 0.5) == 10 / 20
    assert [threshold_at_level(scores, level) > 1 for level in (0.049, 0.0, -0.1)] == [True] * 3
    assert [threshold_at_level(scores, level) < 0 for level in (1.0, 1.1)] == [True] * 2

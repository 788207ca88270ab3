"""Test whether a refinement raised the ELBO: every verdict, including "negligible", needs evidence.

The gain is the difference of two ELBOs on the same draws. It is judged in up to LOOKS looks, each with twice as many
draws as the one before. "helped" and "hurt" need a gain different from 0, "negligible" a gain known to be within half a
nat of 0 (two one-sided tests: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15). Every look uses three standard errors,
0.00135 per side, by Hall's t, which corrects for the skewness of the draws (paired.py). Over all looks, each verdict is
wrong at most 0.7% of the time if the mean of the draws is normal, and at most ERROR_RATE of the time for draws as
skewed as an exponential or a unit-scale log-normal distribution, where Student's t errs up to 2.5% of the time
(tests/evaluation/test_gain.py).
"""

from __future__ import annotations

from functools import cache

from bnncli.evaluation.paired import skewed_interval
from bnncli.lazy import special

ERROR_RATE = 0.01
LOOKS = 5
# Moving a Gaussian by one standard deviation along one of its P directions changes the ELBO by half a nat. The handful
# of draws that predictions are made from cannot resolve this.
NEGLIGIBLE_NATS = 0.5
NUM_STANDARD_ERRORS = 3.0
VERDICTS = ("helped", "hurt", "negligible", "undecided")


@cache
def reach(num_draws: int) -> float:
    """Return the margin in standard errors: the quantile of Student's t at the level of three normal standard errors.

    Args:
        num_draws: number of draws behind the standard error, at least 2.
    """
    return float(-special.stdtrit(num_draws - 1, special.ndtr(-NUM_STANDARD_ERRORS)))


def judge_gain(
    gain: float, standard_error: float, num_draws: int, *, is_last: bool, skewness: float = 0.0
) -> str | None:
    """Return one of VERDICTS, or None if more draws are needed and available.

    A significant gain that is not yet known to exceed half a nat waits for more draws; at the last look it counts as
    "helped" or "hurt".

    Args:
        gain: nats.
        standard_error: standard error of the gain, from num_draws draws.
        is_last: no more draws are available.
        skewness: skewness of the draws.
    """
    low, high = skewed_interval(gain, standard_error, skewness, num_draws, reach(num_draws))
    if low > -NEGLIGIBLE_NATS and high < NEGLIGIBLE_NATS:
        return "negligible"
    if (low > 0 or high < 0) and (abs(gain) >= NEGLIGIBLE_NATS or is_last):
        return "helped" if gain > 0 else "hurt"
    return "undecided" if is_last else None

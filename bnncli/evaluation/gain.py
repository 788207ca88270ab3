"""Whether a refinement raised the ELBO: a verdict that needs evidence, for a difference and for none.

The gain is the difference of two ELBOs on the same draws. It is judged at the first look, and again after more draws, up
to LOOKS times, each time with twice as many: "helped" and "hurt" need a gain away from 0, "negligible" one that is known to
lie within half a nat of 0 (two one-sided tests: Schuirmann 1987, J. Pharmacokinet. Biopharm. 15). Every look takes three
standard errors, 0.00135 on a side, by Hall's t, corrected for the skewness of the draws (paired.py): all looks together say each
of these wrongly at most 0.7 % of the time if the mean of the draws is normal, and at most ERROR_RATE where draws are as skewed as an
exponential or a log-normal distribution of unit scale, which Student's t says up to 2.5 % of the time (tests/evaluation/test_gain.py).
"""

from __future__ import annotations

from functools import cache

from bnncli.evaluation.paired import skewed_interval
from bnncli.lazy import special

ERROR_RATE = 0.01
LOOKS = 5
# A Gaussian moved by one standard deviation along one of its P directions is half a nat away from where it was: a handful
# of drawn networks, which is what predictions are made of, cannot tell.
NEGLIGIBLE_NATS = 0.5
NUM_STANDARD_ERRORS = 3.0
VERDICTS = ("helped", "hurt", "negligible", "undecided")


@cache
def reach(num_draws: int) -> float:
    """The standard errors that a gain may stray by: 3 of a normal, as improbable a number of Student's t for few draws.

    Args:
        num_draws: that the standard error comes from, at least 2.
    """
    return float(-special.stdtrit(num_draws - 1, special.ndtr(-NUM_STANDARD_ERRORS)))


def judge_gain(
    gain: float, standard_error: float, num_draws: int, *, is_last: bool, skewness: float = 0.0
) -> str | None:
    """One of VERDICTS, or None: more draws are needed, and are to be had.

    A gain that is positive, and known neither to matter nor not to, is waited for; at the last look it has helped.

    Args:
        gain: nats.
        standard_error: of gain, from num_draws draws.
        is_last: no more draws will come.
        skewness: of the draws.
    """
    low, high = skewed_interval(gain, standard_error, skewness, num_draws, reach(num_draws))
    if low > -NEGLIGIBLE_NATS and high < NEGLIGIBLE_NATS:
        return "negligible"
    if (low > 0 or high < 0) and (abs(gain) >= NEGLIGIBLE_NATS or is_last):
        return "helped" if gain > 0 else "hurt"
    return "undecided" if is_last else None

"""What ranks say: of each quantity how it is off, and of all together one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.options.sbc import SbcOptions

_LEAST = 1e-12  # of a p-value: below it the sum over paths is rounding
_CLEAR = 3.0  # standard errors beyond which a shift or a spread is what is wrong


@dataclass(frozen=True)
class RankedQuantity:
    """The ranks of one quantity.

    Args:
        name: for people.
        ranks: (M,), 0..num_draws.
        num_draws: L.
        p_value: of uniform ranks.
    """

    name: str
    ranks: NDArray[np.int64]
    num_draws: int
    p_value: float

    @property
    def mean_rank(self) -> float:
        """Of 0..1; 0.5 is expected."""
        return float(self.ranks.mean() / self.num_draws)

    @property
    def spread(self) -> float:
        """The variance of the ranks over that of uniform ones."""
        return float(self.ranks.var() / ((self.num_draws + 1) ** 2 - 1) * 12)

    def coverage(self, share: float) -> float:
        """How often the central interval that holds this share of ranks, as nearly as whole ranks can, holds the truth."""
        lowest = round((1 - share) / 2 * (self.num_draws + 1))
        return float(((self.ranks >= lowest) & (self.ranks <= self.num_draws - lowest)).mean())

    @property
    def fault(self) -> str | None:
        """How the draws are off where that is clear: too low, too high, too narrow or too wide."""
        num = len(self.ranks)
        shift = (self.mean_rank - 0.5) * math.sqrt(12 * num)
        spread = (self.spread - 1) * math.sqrt(
            1.25 * num
        )  # of uniform numbers the variance of (x - mean)^2 is 4/5 of its mean squared
        if max(abs(shift), abs(spread)) < _CLEAR:
            return None
        if abs(shift) > abs(spread):
            return "too low" if shift > 0 else "too high"
        return "too narrow" if spread > 0 else "too wide"

    def to_json(self) -> dict[str, Any]:
        """As --json has it."""
        return {
            "name": self.name,
            "p_value": self.p_value,
            "mean_rank": self.mean_rank,
            "spread": self.spread,
            "coverage_50": self.coverage(0.5),
            "coverage_90": self.coverage(0.9),
            "fault": self.fault,
        }


class SbcVerdict(NamedTuple):
    """Whether ranks may be uniform, in a word and in a sentence."""

    is_calibrated: bool
    sentence: str


def verdict_of(ranked: list[RankedQuantity], name: str, options: SbcOptions) -> SbcVerdict:
    """Uniform ranks of all quantities are doubted with probability `level` at most (Bonferroni's bound)."""
    odd = [one for one in ranked if one.p_value <= options.level / len(ranked)]
    if not odd:
        return SbcVerdict(
            True,
            f"the fit of {name} is calibrated, as far as {options.simulations} simulations show: the ranks of "
            f"all {len(ranked)} quantities are uniform",
        )
    told = ", ".join(
        f"{one.name} ({one.fault or 'uneven'}, p {p_text(one.p_value)})"
        for one in sorted(odd, key=lambda one: one.p_value)[:4]
    )
    more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    return SbcVerdict(
        False,
        f"the fit of {name} is not calibrated: the ranks of {len(odd)} of {len(ranked)} quantities are not "
        f"uniform: {told}{more}",
    )


def p_text(value: float) -> str:
    """A p-value for people."""
    return f"below {_LEAST:g}" if value < _LEAST else f"{value:.2g}"

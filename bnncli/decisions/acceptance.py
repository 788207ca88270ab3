"""Selective prediction with a bound on its risk: accept predictions above a confidence threshold.

The guarantee follows Geifman and El-Yaniv (2017), arXiv:1705.08500. Their binary search tests thresholds that depend on
the data. Here the thresholds are fixed in advance: the exact binomial test tests the risk at each, and the fallback
procedure (Wiens and Dmitrienko 2005) combines the tests. It controls the family-wise error rate under any dependence,
as in Learn then Test (Angelopoulos et al. 2021, arXiv:2110.01052).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

# Thresholds on the doubt (1 - confidence), from strict to lenient: twenty per decade, down to float32 resolution.
DOUBTS: NDArray[np.float64] = 10.0 ** (-np.arange(120, -1, -1) / 20)
# every tenth threshold gets a share of the level; those between only inherit level, so a finer grid costs nothing
_STARTS = 10
_NUM_SHARES = len(DOUBTS[::_STARTS])


@dataclass(frozen=True)
class AcceptanceRule:
    """A threshold that decides which predictions to accept.

    Args:
        most_doubt: largest accepted doubt (1 - largest probability); None accepts no prediction, for lack of evidence.
        num_accepted, num_wrong: counts on the calibration examples.
        level: level at which the risk at the threshold was tested.
        p_value: p-value of that test; if no threshold passed, the smallest of all.
    """

    most_doubt: float | None
    num_accepted: int
    num_wrong: int
    level: float
    p_value: float

    def accepts(self, confidence: NDArray) -> NDArray[np.bool_]:
        """Return which predictions are accepted, (n,), given their largest probabilities, (n,)."""
        if self.most_doubt is None:
            return np.zeros(len(confidence), dtype=bool)
        found: NDArray[np.bool_] = 1 - np.asarray(confidence, dtype=np.float64) <= self.most_doubt
        return found


def fit_acceptance(confidence: NDArray, is_right: NDArray, risk: float, certainty: float) -> AcceptanceRule:
    """Return the most lenient threshold whose risk is shown to be at most `risk`.

    The risk is the share of wrong predictions among the accepted ones. The bound holds with probability `certainty`
    over calibration sets. If the true risk of a threshold exceeds `risk`, at most e of its m accepted predictions are
    wrong with probability at most P(Binomial(m, risk) <= e). Each threshold is tested at its share of 1 - certainty
    plus the level it inherits; if the test passes, it hands this level on to the next threshold.

    Args:
        confidence: (n,), largest probabilities.
        is_right: (n,), whether the prediction is correct.
    """
    doubt = np.sort(1 - np.asarray(confidence, dtype=np.float64))
    wrong = np.sort(1 - np.asarray(confidence, dtype=np.float64)[~np.asarray(is_right, dtype=bool)])
    accepted, errors = (np.searchsorted(side, DOUBTS, side="right") for side in (doubt, wrong))
    p_values = np.where(accepted > 0, special.bdtr(errors, np.maximum(accepted, 1), risk), 1.0)
    share = (1 - certainty) / _NUM_SHARES
    level, best = 0.0, None
    for place, p_value in enumerate(p_values):
        level += share if place % _STARTS == 0 else 0.0
        if 0 < level >= p_value:
            best = (place, level)
        else:
            level = 0.0
    place, level = best if best is not None else (int(np.argmin(p_values)), share)
    return AcceptanceRule(
        float(DOUBTS[place]) if best is not None else None,
        int(accepted[place]),
        int(errors[place]),
        level,
        float(p_values[place]),
    )


def least_accepted(risk: float, certainty: float) -> int:
    """Return the smallest number of accepted predictions, all of them right, that can show the risk."""
    return math.ceil(math.log((1 - certainty) / _NUM_SHARES) / math.log1p(-risk))

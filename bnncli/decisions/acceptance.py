"""Selective prediction with a bound on its risk: from which confidence on predictions are accepted.

Selective prediction with guaranteed risk: Geifman and El-Yaniv (2017), arXiv:1705.08500. Their binary search tests thresholds that
depend on what it has seen. Here the thresholds stand before the data: the risk at each is tested by the exact binomial test, and all
together by the fallback procedure (Wiens and Dmitrienko 2005), which holds its level however the tests depend on each other (as in
Learn then Test: Angelopoulos et al. 2021, arXiv:2110.01052).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bnncli.lazy import special

# Largest doubts, one less the confidence, from strict to lenient: twenty a decade, down to what float32 tells from none.
DOUBTS: NDArray[np.float64] = 10.0 ** (-np.arange(120, -1, -1) / 20)
_STARTS = 10  # every so many has a share of the level; the others have what is handed on, and are as fine as that costs nothing
_NUM_SHARES = len(DOUBTS[::_STARTS])


@dataclass(frozen=True)
class AcceptanceRule:
    """Which predictions are accepted.

    Args:
        most_doubt: those of at most this doubt, one less the largest probability; None: none, for want of evidence.
        num_accepted, num_wrong: of the calibration examples.
        level: at which the risk of the threshold was tested.
        p_value: of the test there; where none passed, the least of all.
    """

    most_doubt: float | None
    num_accepted: int
    num_wrong: int
    level: float
    p_value: float

    def accepts(self, confidence: NDArray) -> NDArray[np.bool_]:
        """(n,) of largest probabilities (n,)."""
        if self.most_doubt is None:
            return np.zeros(len(confidence), dtype=bool)
        found: NDArray[np.bool_] = 1 - np.asarray(confidence, dtype=np.float64) <= self.most_doubt
        return found


def fit_acceptance(confidence: NDArray, is_right: NDArray, risk: float, certainty: float) -> AcceptanceRule:
    """The most lenient threshold whose risk, the share of wrong ones among accepted predictions, is shown to be at most `risk`.

    With probability `certainty` over calibration examples that holds of the threshold that is returned: that of m that a threshold
    accepts e or fewer are wrong has probability P(Binomial(m, risk) <= e) at most where its risk is above; a threshold is tested at its
    share of 1 - certainty and what was handed on to it, and hands that on to the next where its risk is shown.

    Args:
        confidence: (n,) largest probabilities. is_right: (n,).
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
    """How many accepted predictions, none of them wrong, it takes at least to show the risk."""
    return math.ceil(math.log((1 - certainty) / _NUM_SHARES) / math.log1p(-risk))

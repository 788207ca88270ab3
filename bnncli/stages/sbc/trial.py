"""What is simulated and how it is fitted: all that ranks are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.inference.simulation import LOG_JOINT, Problem, Refit

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Trial:
    """Of one fit.

    Args:
        problem: what labels are simulated for.
        thetas: (M, P) float64, the truths.
        refit: the fit, made anew.
        of_labels: what of theta and the labels is ranked, LOG_JOINT or LOG_LIKELIHOOD.
    """

    problem: Problem
    thetas: Tensor
    refit: Refit
    of_labels: str = LOG_JOINT

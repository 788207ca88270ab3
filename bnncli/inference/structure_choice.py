"""Which structure of the covariance predicts best on val, among those that are quick: compared at one mode and one prior.

A mode and its prior precision are the same for every structure, so that another one costs a Hessian and a factor. The
precision was tuned for the first: that favours it. Of structures within one standard error of the best, by paired losses, or
within a hundredth of its NLL, the one that says most of the posterior is taken: an exact Hessian needs no proof, a rough one does.
A standard error is no proof: of two that are equally good the second takes the place of the first one time in six, at no loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.errors import NumericError
from bnncli.evaluation.excess import WORSE_SHARE
from bnncli.inference.laplace import LaplaceFit
from bnncli.inference.local_covariance import covariance_at
from bnncli.inference.prior_criterion import Criterion
from bnncli.targets.target import CurvedTarget

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StructureChoice:
    """The structure to take.

    Args:
        structure: its name.
        nll: mean validation nll by structure, nats an example, of all that were compared.
    """

    structure: str
    nll: dict[str, float]


def choose_structure(
    target: CurvedTarget, fit: LaplaceFit, structures: Sequence[str], *, judge: Criterion
) -> StructureChoice:
    """The structure of lowest validation nll at the fit's centre, or the first that is near it: see first_near_the_best.

    Args:
        target: the log posterior of the fit, with its prior.
        fit: of the first structure.
        structures: from the one that says most of the posterior to the least; those that cannot be fitted are left out.
        judge: of the validation nll, as the search for the precision has it: the same draws for all.
    """
    theta, losses = fit.gaussian.mean, {}
    for structure in structures:
        try:
            is_known = structure == fit.gaussian.covariance.structure
            covariance = fit.gaussian.covariance if is_known else covariance_at(target, theta, structure)[0]
        except NumericError:
            continue
        found = judge.losses(target, theta, covariance)
        if math.isfinite(float(found.mean())):
            losses[structure] = found
    return StructureChoice(first_near_the_best(losses), {name: float(part.mean()) for name, part in losses.items()})


def first_near_the_best(losses: dict[str, Tensor]) -> str:
    """The first of losses (M,) by name whose mean is above the lowest by no more than counts.

    That is one standard error of the paired differences, or WORSE_SHARE of the lowest where that is more. A single
    example tells no error.
    """
    best = min(losses, key=lambda name: float(losses[name].mean()))
    lowest = float(losses[best].mean())
    for name, part in losses.items():
        gap = part - losses[best]
        error = float(gap.std()) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
        if float(gap.mean()) <= max(error, WORSE_SHARE * lowest):
            return name
    return best

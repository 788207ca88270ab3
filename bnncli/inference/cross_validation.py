"""The prior precision by cross-validation: that of the lowest NLL of rows that their fold's fit has not seen.

Each of K folds leaves some of the held-out rows out of the likelihood. A precision has a mode and a Gaussian in each fold,
warm-started from its neighbours there, and is judged by the rows left out, all folds together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from bnncli.errors import NumericError
from bnncli.inference.laplace import LaplaceFit
from bnncli.inference.prior_candidates import Candidates
from bnncli.inference.prior_precision import (
    BOUNDS,
    LARGE_SLACK,
    PLUG_IN,
    SAMPLED,
    TOLERANCES,
    approach,
    criterion_of,
    descend,
    grid_of,
    is_at_edge,
    num_judged,
)
from bnncli.inference.structure_choice import first_near_the_best
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress, Task
from bnncli.targets.target import CurvedTarget, HeldOut

if TYPE_CHECKING:
    from torch import Tensor


class Fold(NamedTuple):
    """A target without some rows, those rows, and how many they are."""

    target: CurvedTarget
    held_out: HeldOut
    num_held_out: int


@dataclass(frozen=True)
class FoldSearch:
    """The outcome of a search.

    Args:
        best: the chosen prior precision.
        curve: every (prior precision, mean NLL of the rows left out in nats per example), in increasing order of precision.
        at_edge: as of PriorSearch.
        structure: of the candidates.
        fits: of each fold at the best.
        integrator: as of PriorSearch.
    """

    best: float
    curve: list[tuple[float, float]]
    at_edge: bool
    structure: str
    fits: list[LaplaceFit]
    integrator: str = SAMPLED


def stratified_folds(labels: Tensor, num_folds: int, generator: torch.Generator) -> Tensor:
    """The fold of each row, (N,) uint8: sizes differ by one at most, and so do those of each class within a fold.

    Args:
        labels: (N,); of (N, L) indicators only sizes are even.
        generator: of the permutation, on the CPU.
    """
    order = torch.randperm(len(labels), generator=generator)
    if labels.ndim == 1:
        order = order[labels.cpu()[order].argsort(stable=True)]
    folds = torch.empty(len(labels), dtype=torch.uint8)
    folds[order] = (torch.arange(len(labels)) % num_folds).to(torch.uint8)
    return folds


def search_folds(
    folds: Sequence[Fold],
    *,
    start: Tensor,
    generator: torch.Generator,
    structure: str,
    is_large: bool = False,
    progress: Progress = SILENT,
) -> FoldSearch:
    """Search for the prior precision that predicts the rows left out best, as prior_precision.search does by val.

    Args:
        folds: whose priors differ in their means at most.
    """
    target = folds[0].target
    grid = grid_of(target, BOUNDS, generator)
    criterion = criterion_of(target, structure, folds[0].held_out, None, generator, by_logits=is_large)
    task, slack = progress.task("prior precision", num_judged(grid) * len(folds)), LARGE_SLACK if is_large else 1.0
    parts = []
    for fold in folds:
        own = replace(criterion, held_out=fold.held_out)  # draws have the same noise in all
        parts.append(Candidates(fold.target, structure, "mode", own, start, TOLERANCES["val"], task, mode_slack=slack))
    candidates = _Folds(parts, [fold.num_held_out for fold in folds])
    fits = descend(candidates, grid, is_brief=is_large)
    chosen, integrator = candidates, SAMPLED
    centers = candidates.by_plug_in(progress.task("prior precision of the mode", num_judged(grid) * len(folds)))
    if centers.values[centers.best] < candidates.values[candidates.best]:
        approach(centers, grid, is_brief=is_large)
        losses = {SAMPLED: candidates.losses(fits), PLUG_IN: centers.plug_in_losses()}
        if first_near_the_best(losses) == PLUG_IN:
            candidates.judge(centers.best)
            of_centers = candidates.fit(centers.best)
            if of_centers is not None:
                fits, chosen, integrator = of_centers, centers, PLUG_IN
    curve = [(math.exp(key), value) for key, value in sorted(chosen.values.items())]
    return FoldSearch(math.exp(chosen.best), curve, is_at_edge(chosen.best, grid, target), structure, fits, integrator)


@dataclass(frozen=True)
class _Folds:
    """Candidates of all folds as those of one search: each is judged by the mean over all rows that are left out."""

    parts: list[Candidates]
    sizes: list[int]

    @property
    def target(self) -> CurvedTarget:
        """The first fold's."""
        return self.parts[0].target

    @property
    def values(self) -> dict[float, float]:
        """The mean NLL by log precision, of those that could be fitted in every fold."""
        of_parts = [part.values for part in self.parts]
        known = set.intersection(*(set(values) for values in of_parts))
        total = sum(self.sizes)
        return {
            key: sum(size * values[key] for size, values in zip(self.sizes, of_parts, strict=True)) / total
            for key in known
        }

    @property
    def own_log_precision(self) -> float:
        """The first fold's."""
        return self.parts[0].own_log_precision

    @property
    def best(self) -> float:
        """The log precision of the lowest mean."""
        values = self.values
        if not values:
            raise NumericError("the criterion is not finite for any prior precision", hint="give \0prior_precision\0")
        return min(values, key=lambda key: values[key])

    def by_plug_in(self, task: Task) -> _Folds:
        """The same precisions, judged by the centres alone."""
        return _Folds([part.by_plug_in(task) for part in self.parts], self.sizes)

    def losses(self, fits: Sequence[LaplaceFit]) -> Tensor:
        """The losses of all rows that are left out, (M,), each by the fit of its fold."""
        gaussians = [fit.gaussian for fit in fits]
        return torch.cat(
            [
                part.criterion.losses(part.target.with_prior(one.require_prior()), one.mean, one.covariance)
                for part, one in zip(self.parts, gaussians, strict=True)
            ]
        )

    def plug_in_losses(self) -> Tensor:
        """The losses of all rows that are left out, (M,), each by the best centre of its fold."""
        return torch.cat([part.criterion.plug_in_losses(part.known[self.best].theta) for part in self.parts])

    def judge(self, log_precision: float) -> None:
        """Judges one in every fold."""
        for part in self.parts:
            part.judge(log_precision)

    def judge_all(self, log_precisions: Sequence[float]) -> None:
        """Judges several in every fold."""
        for part in self.parts:
            part.judge_all(log_precisions)

    def fit(self, log_precision: float) -> list[LaplaceFit] | None:
        """The exact fit of every fold; None where one has none."""
        fits = [part.fit(log_precision) for part in self.parts]
        return None if any(fit is None for fit in fits) else [fit for fit in fits if fit is not None]

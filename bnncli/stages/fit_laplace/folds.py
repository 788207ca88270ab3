"""A fit to rows of val among others: the prior precision by cross-validation, and the mode of each fold that leaves rows out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bnncli.errors import DataError
from bnncli.inference.laplace import LaplaceFit, fit_gaussian
from bnncli.inference.memory import NUM_FOLDS
from bnncli.inference.mode import mode_of
from bnncli.inference.prior_search import PriorSearch, SearchRows, is_brief, search, search_rows
from bnncli.inference.prior_variants import Fold, FoldSearch, search_folds, stratified_folds
from bnncli.lazy import torch
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import Split
from bnncli.session.out_of_fold import fitted_rows
from bnncli.session.run import Run
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from torch import Tensor

# A search makes some eighty Gaussians. The precision that it finds hardly depends on their structure, the folds' modes not at all.
_QUICK, _EXACT, _MOST_EXACT = "kron", ("full", "block"), 1000  # parameters


class FoldedFit(NamedTuple):
    """What comes of it.

    Args:
        fit: to all rows.
        search: that chose the precision, where one did.
        theta: (K, P) float64, the folds' modes under that precision.
        counts: metrics that say how many examples the search has read, where these are not all.
    """

    fit: LaplaceFit
    search: FoldSearch | PriorSearch | None
    theta: Tensor
    counts: dict[str, int]


def folds_of(run: Run, val: Split) -> Tensor:
    """The fold of each row of val, (N,) uint8. Raises DataError where there are no two rows."""
    labels = val.labels(torch.device("cpu"))
    if len(labels) < 2:
        raise DataError(
            f"--fit-on: cross-validation needs at least 2 rows of val; got {len(labels)}",
            hint="hold out more, or use --fit-on train",
        )
    return stratified_folds(labels, min(NUM_FOLDS, len(labels)), run.stream("fit-laplace/folds"))


def fit_with_folds(
    run: Run,
    criterion: str,
    structure: str,
    target: LastLayerTarget,
    *,
    folds: Tensor,
    priors: Sequence[Prior],
    start: Tensor,
    in_span: bool,
) -> FoldedFit:
    """Fit all rows of the target, the last of them val's, and the rows of each fold.

    Args:
        folds: (N,), of val's rows.
        priors: of each fold; their precision of the weights is the target's.
    """
    rows = SearchRows(None, None) if in_span else _rows_to_search(run, target, len(folds))
    parts = {name: len(part) for name, part in (("train", rows.train), ("val", rows.val)) if part is not None}
    found: FoldSearch | PriorSearch | None = None
    if criterion == "val":
        is_large = not in_span and (
            bool(parts) or is_brief(target.num_examples, num_params=target.layout.num_params, device=target.device)
        )
        found = search_folds(
            [_fold(target, folds, place, prior, rows) for place, prior in enumerate(priors)],
            start=start,
            generator=run.stream("fit-laplace/val"),
            structure=_QUICK if target.layout.num_params > _MOST_EXACT and structure in _EXACT else structure,
            is_large=is_large,
            progress=run.console,
        )
        start = torch.stack([fit.gaussian.mean for fit in found.fits]).mean(dim=0)
    elif criterion == "marglik":
        found = search(
            target,
            start=start,
            generator=run.stream("fit-laplace/val"),
            structure=structure,
            criterion=criterion,
            progress=run.console,
        )
    if found is not None:
        target = target.with_prior(target.prior.with_weight_precision(found.best))
    fit = fit_gaussian(target, structure=structure, start=start, progress=run.console)
    if isinstance(found, FoldSearch) and not parts:
        modes = [one.gaussian.mean for one in found.fits]
    else:
        precision = target.prior.weight_precision
        modes = []
        for place, prior in enumerate(priors):
            fold = _fold(target, folds, place, prior.with_weight_precision(precision), SearchRows(None, None)).target
            modes.append(mode_of(fold, fit.gaussian.mean, progress=run.console).theta)
    return FoldedFit(
        fit, found, torch.stack(modes), {f"prior_precision_{name}_examples": count for name, count in parts.items()}
    )


def _rows_to_search(run: Run, target: LastLayerTarget, num_val: int) -> SearchRows:
    """Return the rows of the target and of val that a search reads, and say so where they are not all."""
    layout = target.layout
    found = search_rows(
        target.num_examples,
        num_val,
        num_params=layout.num_params,
        num_outputs=layout.num_outputs,
        device=target.device,
        generator=run.stream("fit-laplace/search"),
    )
    if found.train is not None:
        text = f"{len(found.train):,} of {target.num_examples:,} examples"
        run.console.info(f"searching for the prior precision with {text}; the final fits use all")
    return found


def _fold(target: LastLayerTarget, folds: Tensor, place: int, prior: Prior, rows: SearchRows) -> Fold:
    """Return the target without the rows of one fold, as far as the search reads them."""
    first = target.num_examples - len(folds)
    own = (folds == place).nonzero()[:, 0]
    fitted = fitted_rows(folds, place, target.num_examples)
    if rows.train is not None:
        fitted = fitted[torch.isin(fitted, rows.train)]
    judged = own if rows.val is None else own[torch.isin(own, rows.val)]
    index = (first + judged).to(target.device)
    held_out = target.held_out(target.rows(index), target.labels[index])
    return Fold(target.some(fitted).with_prior(prior), held_out, len(judged))

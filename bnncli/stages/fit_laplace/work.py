"""The work of fit-laplace: the mode, the Gaussian there, the search for its prior precision, and what it is worth on val."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bnncli.inference.laplace import LaplaceFit, RowLift, fit_gaussian, lift_fit
from bnncli.inference.prior_criterion import LeftOut
from bnncli.inference.prior_search import (
    BOUNDS,
    PLUG_IN,
    SAMPLED,
    PlugInChoice,
    PriorSearch,
    first_near_the_best,
    search,
)
from bnncli.inference.prior_variants import FoldSearch
from bnncli.inference.temperature import LabelledLogits, fit_temperature
from bnncli.lazy import torch
from bnncli.options.fit_laplace import FitLaplaceOptions
from bnncli.parameters.prior import Prior
from bnncli.posteriors.point import Point
from bnncli.progress import Progress
from bnncli.session.inputs import Split
from bnncli.session.out_of_fold import VAL, GaussianFolds
from bnncli.session.posteriors import Cost, Fitted, row_space, span_metrics
from bnncli.session.run import Run
from bnncli.session.val_report import measure_on_val
from bnncli.stages.fit_laplace.folds import fit_with_folds, folds_of
from bnncli.stages.fit_laplace.search import Searched, examples_to_search
from bnncli.stages.fit_laplace.structure import rough_structure_to_search, structure_by_val, structure_to_search
from bnncli.stages.fit_laplace.warnings import tell_of_memorised, warn_of_edge, warn_of_jitter
from bnncli.targets.last_layer import HeldOutFeatures, LastLayerTarget
from bnncli.targets.target import counted_passes

if TYPE_CHECKING:
    from torch import Tensor

_NEAR = 10**0.5  # by how much the best precisions of two structures may differ before all are tried


def fit(
    run: Run,
    options: FitLaplaceOptions,
    criterion: str,
    structure: str,
    train: Split,
    val: Split | None,
    *,
    in_span: bool,
    only_draws: bool = False,
) -> Fitted:
    """The Gaussian with what is told of it.

    Args:
        in_span: whether it is fitted in the span of the features.
        only_draws: whether a searched precision suits draws, whatever the mode alone predicts.
    """
    start = train.start().to(run.device)
    # A search puts its candidates in the place of the weights' precision.
    weight_precision = float(options.prior_precision) if criterion == "number" else 1.0
    if VAL not in options.fit_on:
        tell_of_memorised(run, train, val)
    folds = folds_of(run, val) if val is not None and VAL in options.fit_on else None
    priors = _priors(run, options, Prior(weight_precision, options.own_bias_precision), train, val, folds)
    target = of_all = train.target(priors[0], run.device)
    held_out = None
    if criterion == "val" and val is not None and folds is None:
        held_out = target.held_out(val.features(run.device), val.labels(run.device))
    rows = row_space(target) if in_span else None
    lift = None if rows is None else RowLift(rows, target.prior)
    if rows is not None:
        target, start = rows.target(target), rows.reduce(start)
    found: PriorSearch | FoldSearch | None
    compared, theta = None, None
    with counted_passes() as tally:
        if folds is None:
            fit, found, compared, counts = _fitted(
                run,
                options,
                criterion,
                structure,
                target,
                start=start,
                lift=lift,
                held_out=held_out,
                val=val,
                only_draws=only_draws,
            )
        else:
            own = priors[1:] if rows is None else [rows.prior(prior) for prior in priors[1:]]
            fit, found, theta, counts = fit_with_folds(
                run, criterion, structure, target, folds=folds, priors=own, start=start, in_span=in_span
            )
    if found is not None:
        warn_of_edge(run, found)
    if lift is not None:
        fit = lift_fit(fit, lift)
    warn_of_jitter(run, fit.gaussian)
    held: GaussianFolds | None = None
    if folds is not None and theta is not None:
        if rows is not None:
            pairs = zip(theta, priors[1:], strict=True)
            theta = torch.stack([rows.lift_about(mode, own_prior.to(run.device)) for mode, own_prior in pairs])
        prior = fit.gaussian.require_prior()
        held = GaussianFolds.of(
            fit.gaussian, theta, folds, num_fitted=of_all.num_examples, target=lambda: of_all.with_prior(prior)
        )
    metrics = fit_metrics(run, fit, found, criterion, train, val, posterior=held)
    told = {} if held is None else {"fit_on": options.fit_on, "num_folds": len(held)}
    metrics |= told
    metrics |= {"center": options.own_center, "structure_nll": compared, **counts}
    if found is not None and found.structure != structure and options.structure != "auto":
        metrics["prior_precision_structure"] = found.structure
    metrics |= Cost.of_fit(tally.passes, is_last_layer=True).to_metrics()
    tensors, meta = fit.gaussian.to_tensors()
    # float32 holds all digits that float32 products gave the Hessian, in half the file.
    tensors |= {name: part.float() for name, part in fit.hessian.items() if name not in tensors}
    meta |= {
        "method": "laplace",
        "center": options.own_center,
        **fit.gaussian.require_prior().to_meta(),
        "criterion": criterion,
        "param_layout": fit.gaussian.layout.to_json(),
        "curve": [list(point) for point in found.curve] if found else None,
        **told,
    }
    if held is not None:
        tensors |= held.to_tensors()
    return Fitted(tensors, meta, metrics, train)


def _priors(
    run: Run, options: FitLaplaceOptions, prior: Prior, train: Split, val: Split | None, folds: Tensor | None
) -> list[Prior]:
    """The prior of all rows and, where val is fitted, of each fold: about the checkpoint's last layer where that was asked for."""
    left_out = [] if folds is None else [folds == place for place in range(int(folds.max()) + 1)]
    if options.prior_mean == "zero":
        return [prior] * (1 + len(left_out))
    return [prior.with_mean(scale * train.start(), scale) for scale in _mean_scales(run, val, left_out)]


def _mean_scales(run: Run, val: Split | None, left_out: Sequence[Tensor]) -> list[float]:
    """One over the temperature of the network's logits that val prefers, then without each of some rows, masks (N,); 1 without val."""
    if val is None or val.content.labels is None:
        return [1.0]
    point = Point(val.start().to(run.device), val.layout)
    logits, labels = val.logits(point, run.device), val.labels(run.device)
    scales = []
    for rows in (torch.zeros(len(labels), dtype=torch.bool), *left_out):
        kept = ~rows.to(run.device)
        fit = fit_temperature(LabelledLogits(logits[kept], labels[kept], val.layout.likelihood))
        scales.append(1.0 if fit.unbounded is not None else 1 / fit.temperature)
        if fit.unbounded is not None and len(scales) == 1:
            why = f"no optimal temperature exists on val ({fit.unbounded})"
            run.console.warn(f"{why}: the prior's mean is the checkpoint's last layer unchanged")
    return scales


def _fitted(
    run: Run,
    options: FitLaplaceOptions,
    criterion: str,
    structure: str,
    target: LastLayerTarget,
    *,
    start: Tensor,
    lift: RowLift | None,
    held_out: HeldOutFeatures | None,
    val: Split | None,
    only_draws: bool,
) -> tuple[LaplaceFit, PriorSearch | None, dict[str, float] | None, dict[str, int]]:
    """The fit, the search for its prior precision where there was one, the val NLL of the structures that it was chosen
    among, and how many examples the search has read, where these are not all.
    """
    if criterion == "number":
        fit = fit_gaussian(
            target,
            structure=structure,
            center=options.own_center,
            start=start,
            progress=run.console,
        )
        return fit, None, None, {}
    center = options.own_center
    if criterion == "loo":
        searched = Searched(target, LeftOut.of(target, run.stream("fit-laplace/loo")), {})
    elif lift is None:
        searched = examples_to_search(run, target, held_out, val, center=center)
    else:
        searched = Searched(target, held_out, {})

    def search_by(
        by: str, structure: str, start: Tensor, generator: torch.Generator, bounds: tuple[float, float] = BOUNDS
    ) -> PriorSearch:
        with counted_passes(searched.share):
            found = search(
                searched.target,
                start=start,
                generator=generator,
                structure=by,
                center=center,
                criterion=criterion,
                held_out=searched.held_out,
                bounds=bounds,
                is_large=searched.is_large,
                lift=None if criterion == "loo" else lift,
                progress=run.console,
            )
        if by == structure and not searched.is_part:
            return found
        return replace(found, fit=_fit_of(found, target, structure, center, start, run.console))

    def search_at(
        *, structure: str, start: Tensor, generator: torch.Generator, around: float | None = None
    ) -> PriorSearch:
        if around is not None:
            bounds = max(BOUNDS[0], around / _NEAR), min(BOUNDS[1], around * _NEAR)
            near = search_by(structure, structure, start, generator.clone_state(), bounds)
            if not near.at_edge:
                return near
        return search_by(structure, structure, start, generator)

    compared: dict[str, float] | None = None
    closest, quick = structure, structure
    if criterion == "val" and lift is None:
        if options.structure == "auto":
            num_examples = searched.target.num_examples
            structure = rough_structure_to_search(run, structure, target.layout, num_examples=num_examples)
        quick = structure_to_search(run, structure, target.layout)
    found = search_by(quick, structure, start, run.stream("fit-laplace/val"))
    plug_in = None if only_draws else found.plug_in
    is_free = options.structure == "auto" and criterion == "val"
    found = _chosen_for(found, plug_in, target, closest if is_free else None, center, run.console)
    if is_free and found.integrator == SAMPLED:
        whole = None if lift is None else lift.layout
        found, compared = structure_by_val(
            run, target, found, search_at, closest=closest, layout=target.layout, whole=whole
        )
        found = _chosen_for(found, plug_in, target, closest, center, run.console)
    return found.fit, found, compared, searched.counts


def _chosen_for(
    found: PriorSearch,
    plug_in: PlugInChoice | None,
    target: LastLayerTarget,
    structure: str | None,
    center: str,
    progress: Progress,
) -> PriorSearch:
    """The search itself; or that of the precision whose mode alone predicts best, where it predicts better than draws do under theirs.

    Args:
        structure: to fit there, where it is free; the search's own by default.
    """
    if plug_in is None:
        return found
    gaussian = found.fit.gaussian
    drawn = found.judge.losses(target.with_prior(gaussian.require_prior()), gaussian.mean, gaussian.covariance)
    if first_near_the_best({SAMPLED: drawn, PLUG_IN: found.judge.plug_in_losses(plug_in.theta)}) == SAMPLED:
        return found
    own = target.with_prior(target.prior.with_weight_precision(plug_in.precision))
    structure = structure or gaussian.covariance.structure
    fit = fit_gaussian(own, structure=structure, center=center, start=plug_in.theta, progress=progress)
    return replace(
        found, best=plug_in.precision, curve=plug_in.curve, at_edge=plug_in.at_edge, fit=fit, integrator=PLUG_IN
    )


def _fit_of(
    found: PriorSearch, target: LastLayerTarget, structure: str, center: str, start: Tensor, progress: Progress
) -> LaplaceFit:
    """The fit of another structure at the precision that was found."""
    gaussian = found.fit.gaussian
    target = target.with_prior(gaussian.require_prior())
    if center == "mode":  # few examples of many have a mode further away than the checkpoint is
        both = torch.stack([gaussian.mean.double(), start.to(gaussian.mean.device).double()])
        start = both[target.log_joint(both).argmax()]
    return fit_gaussian(
        target,
        structure=structure,
        center=center,
        start=start,
        progress=progress,
    )


def fit_metrics(
    run: Run,
    fit: LaplaceFit,
    found: PriorSearch | FoldSearch | None,
    criterion: str,
    train: Split,
    val: Split | None,
    *,
    posterior: Any = None,
) -> dict[str, Any]:
    """What is told of a fit, and of what it is worth on val: of the Gaussian, or of another posterior in its place."""
    gaussian, head = fit.gaussian, train.head()
    metrics: dict[str, Any] = {
        "structure": gaussian.covariance.structure,
        "num_params": gaussian.layout.num_params,
        **span_metrics(gaussian),
        **gaussian.require_prior().to_meta(),
        "prior_precision_by": criterion,
        "prior_precision_for": found.integrator if found is not None and criterion == "val" else None,
        "prior_precision_at_edge": bool(found.at_edge) if found else None,
        "log_marginal_likelihood": fit.log_marginal_likelihood,
        "log_marginal_likelihood_undefined": fit.no_evidence,
        "newton_decrement": fit.mode.newton_decrement if fit.mode else None,
        "mode_distance": None,
        "mode_distance_in_sd": None,
        "val_nll_network": None,
        "val_nll_laplace": None,
        "val": None,
        "val_excess": None,
        "recommended_integrator": None,
    }
    if fit.mode is not None and head is not None:
        shift = head.to(gaussian.mean) - gaussian.mean
        metrics["mode_distance"] = float(shift.norm())
        whitened = gaussian.covariance.whiten(shift.unsqueeze(0))
        metrics["mode_distance_in_sd"] = float(whitened.norm() / math.sqrt(whitened.shape[1]))
    if val is not None and val.content.labels is not None:
        prefer = None if metrics["prior_precision_for"] in (None, SAMPLED) else metrics["prior_precision_for"]
        metrics |= measure_on_val(run, posterior or gaussian, val, method="laplace", prefer=prefer)
        metrics["val_nll_network"] = metrics["val"].get("network", {}).get("nll")
        metrics["val_nll_laplace"] = metrics["val"]["laplace"]["nll"]
    return metrics

"""The work of refine: a flow trained on its base, the ELBO before and after, and what both are worth on val."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncli.covariances._row_space import rows_of
from bnncli.covariances._subspace import Subspace
from bnncli.covariances.diag import Diag
from bnncli.errors import DataError, NumericError
from bnncli.flows import build_layers, settings_of
from bnncli.inference.elbo import measure_gain
from bnncli.inference.refine import RefineFit, fit_flow
from bnncli.integrators.mc import affordable_draws
from bnncli.lazy import torch
from bnncli.options.refine import TRIAL_DRAWS, RefineOptions
from bnncli.options.shared import AUTO
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.flow import is_idle
from bnncli.posteriors.gaussian import Gaussian
from bnncli.session.inputs import Split, open_posterior
from bnncli.session.network_splits import NetworkReader
from bnncli.session.posteriors import Cost, Fitted, search_identity, stored_search
from bnncli.session.produce import Request, resumable_training
from bnncli.session.run import Run
from bnncli.session.val_report import measure_on_val
from bnncli.stages.refine.prior import choose_prior
from bnncli.targets.target import Target

IDLE_DRAWS = 64


def num_layer_params(options: RefineOptions, layout: ParamLayout) -> int:
    """Numbers in all layers, as the fit will build them."""
    layer = build_layers(options.chosen_flow, layout, torch.Generator(), length=1, **options.settings)[0]
    return (options.length or 0) * sum(part.numel() for part in layer.parameters())


@contextmanager
def seen(
    options: RefineOptions, reader: NetworkReader | None, train: Split, val: Split | None
) -> Iterator[tuple[Split, Split | None]]:
    """Both splits as the posterior sees them: their features, or the inputs of the network, which is at hand inside the block.

    Args:
        reader: of the network; None for the last layer.
    """
    if reader is None:
        yield train, val
        return
    with reader.recorded.visible():
        yield reader.split(train, options.layers), None if val is None else reader.split(val, options.layers)


def base_of(run: Run, train: Split, base_path: Path | None, prior: Prior) -> Gaussian:
    """The Gaussian that the flow starts from: the artifact's, or the prior itself."""
    if base_path is None:
        nothing = torch.zeros(train.layout.num_params, dtype=torch.float64)
        covariance = Diag.from_hessian({"hessian.diag": nothing}, prior, train.layout)
        return Gaussian(prior.center(train.layout), covariance, train.layout, prior).to(run.device)
    base, _ = open_posterior(base_path)
    if base.layout != train.layout:
        raise DataError(
            f"--base: {base_path} takes {base.layout}, but the features have {train.layout}",
            code="wrong_layout",
            path=base_path,
        )
    base = replace(base, layout=train.layout)  # bound to the network, where there is one
    return _within_rows(run, base, train, prior=prior, path=base_path).to(run.device)


def _within_rows(run: Run, base: Gaussian, train: Split, *, prior: Prior, path: Path) -> Gaussian:
    """The base itself; where it was fitted in the row space, with the target's prior outside, which is exact there.

    Raises:
        DataError: the features lie outside the space that it was fitted in.
    """
    within = rows_of(base.covariance)
    if within is None:
        return base
    if not within.rows.has(torch.from_numpy(train.content.features)):
        raise DataError(
            f"--base: {path} was fitted in the row space of other training features",
            code="wrong_row_space",
            hint=run.suggest("fit-laplace"),
            path=path,
        )
    mean = within.rows.lift_about(within.rows.reduce(base.mean), prior)
    return replace(base, mean=mean, covariance=replace(within, precision=prior.weight_precision))


def fit(
    run: Run,
    options: RefineOptions,
    splits: tuple[Split, Split | None],
    base_at: Callable[[Prior], Gaussian],
    *,
    prior: Prior,
    request: Request,
    rows: Mapping[str, str],
    base_integrator: str | None,
) -> Fitted:
    """The flow, with what is told of it.

    Args:
        base_at: the Gaussian to start from, for a target with this prior.
        prior: of the base, or as given; another may be chosen.
        rows: what the file records of those that it is fitted to.
        base_integrator: by which predict predicts with the base; None for the prior as a base.
    """
    train, val = splits
    told: dict[str, Any] = {}

    def fit_at(prior: Prior, **choices: Any) -> RefineFit:
        tried = base_at(prior)
        given = {
            "flow": options.chosen_flow,
            "length": options.length,
            "epochs": options.epochs,
            "batch_size": options.batch_size,
            "learning_rate": options.learning_rate,
            "num_draws": options.num_draws,
            "patience": options.patience,
            "space": options.space,
            "settings": options.settings,
            "subspace": _subspace(run, options, tried),
            "generator": run.stream("refine/train"),
            "progress": run.console,
        }
        return _fit_flow(train.target(prior, run.device), tried, **{**given, **choices})

    if options.prior_precision == AUTO and val is not None:
        num_draws = affordable_draws(TRIAL_DRAWS, train.layout.num_params)
        told = (stored_search(request) if options.resume else None) or choose_prior(
            run, options, prior, (train, val), fit_at, num_draws=num_draws
        )
        prior = Prior.from_meta(told, mean=prior.mean) or prior
    also = search_identity(told)
    resumable = resumable_training(run, request, resume=options.resume, save_every=options.save_every, also=also)
    with resumable.hint():
        found = fit_at(prior, state=resumable.restore(), save=resumable.save)
        base, target = base_at(prior), train.target(prior, run.device)
        metrics = _measure(run, options, found, base, target) | told
        passes = len(found.history) * (options.num_draws or 1) + told.get("prior_precision_search_passes", 0)
        metrics |= Cost.of_fit(passes, is_last_layer=options.is_last_layer).to_metrics()
        if val is not None:
            others = {} if base_integrator is None else {"base": (base, base_integrator)}
            metrics |= measure_on_val(run, found.posterior, val, method="refine", others=others)
    if metrics["verdict"] == "hurt":
        run.console.warn("the refined posterior is farther from its target than the base is")
    tensors, meta = found.posterior.to_tensors()
    tensors |= prior.to_tensors()
    tensors["history.elbo"] = found.history.double().cpu()
    meta |= {
        "method": "refine",
        **options.layers_params,
        **prior.to_meta(),
        **rows,
        "param_layout": train.layout.to_json(),
        "maps": found.posterior.layers[0].maps,
    }
    return Fitted(tensors, meta, metrics, train, publishing=resumable.publishing)


def _subspace(run: Run, options: RefineOptions, base: Gaussian) -> Subspace | None:
    """The directions that the flow is to act in; None for all. In the row space, where the base was fitted there."""
    if options.subspace is None:
        return None
    within = rows_of(base.covariance)
    covariance = base.covariance if within is None else within.inner
    return Subspace.widest(covariance, options.subspace, run.stream("refine/subspace"))


def _fit_flow(target: Any, base: Gaussian, **choices: Any) -> RefineFit:
    """The flow on the base; where that was fitted in the row space the layers are trained and act there."""
    within = rows_of(base.covariance)
    if within is None:
        return fit_flow(target, base, **choices)
    rows = within.rows
    inner = Gaussian(rows.reduce(base.mean), within.inner, rows.reduced, rows.prior(base.require_prior()))
    fit = fit_flow(rows.target(target), inner, **choices)
    return replace(fit, posterior=replace(fit.posterior, base=base))


def _measure(run: Run, options: RefineOptions, fit: RefineFit, base: Gaussian, target: Target) -> dict[str, Any]:
    """ELBO before and after from fresh draws on the full data, both with the same noise, and what is to be said of it."""
    found = measure_gain(
        target,
        base,
        fit.posterior,
        generator=run.stream("refine/elbo"),
        num_samples=options.num_elbo_draws,
        progress=run.console,
    )
    before, after = found.before, found.after
    if not all(math.isfinite(value) for value in (before.value, after.value, found.value, found.standard_error)):
        raise NumericError(
            f"the ELBO is not finite (before {before.value:.4g}, after {after.value:.4g})",
            hint=f"use a --learning-rate below {options.learning_rate}",
        )
    estimates = {"before": before, "after": after}
    metrics: dict[str, Any] = {}
    for name, estimate in estimates.items():
        metrics[f"elbo_{name}"] = {"value": estimate.value, "standard_error": estimate.standard_error}
        metrics[f"log_weight_sd_{name}"] = estimate.log_weight_sd
    if fit.posterior.subspace is not None:
        metrics["subspace"] = _subspace_metrics(base, fit.posterior.subspace)
    if not options.is_last_layer:
        metrics["over_layers"] = options.layers
    return metrics | {
        "elbo_gain": {"value": found.value, "standard_error": found.standard_error},
        "elbo_draws": len(before.log_weights),
        "verdict": found.verdict,
        "is_idle": is_idle(fit.posterior, fit.posterior.noise(IDLE_DRAWS, run.stream("refine/idle"))),
        "flow": options.chosen_flow,
        "length": options.length,
        "space": options.space,
        "settings": settings_of(fit.posterior.layers[0]),
        "layers": [dict(layer.summary()) for layer in fit.posterior.layers],
        "epochs": options.epochs,
        "epochs_run": len(fit.history),
        "ended_early": fit.is_early,
        "val": None,
        "val_excess": None,
        "recommended_integrator": None,
    }


def _subspace_metrics(base: Gaussian, subspace: Subspace) -> dict[str, Any]:
    """How many directions there are, and the base's variance along each as a part of its prior's, from the least to the most."""
    within = rows_of(base.covariance)
    covariance, layout = (base.covariance, base.layout) if within is None else (within.inner, within.rows.reduced)
    moved = covariance.unwhiten(subspace.basis.T)
    variances = moved.square().sum(dim=1)
    precisions = base.require_prior().diagonal(layout, device=moved.device)
    of_prior = (moved.square() / precisions).sum(dim=1) / variances
    shares = (variances / of_prior).tolist()
    return {"dimensions": len(shares), "share_of_prior": [min(shares), max(shares)]}

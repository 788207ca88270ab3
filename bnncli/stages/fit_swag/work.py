"""The work of fit-swag: a learning rate, the iterates and their Gaussian, and what it is worth on val."""

from __future__ import annotations

from typing import Any

from bnncli.inference.sghmc import curvature_passes, largest_curvature
from bnncli.inference.swag import SwagFit, SwagPlan, fit_swag, noise_trace, tamed
from bnncli.lazy import torch
from bnncli.options.fit_swag import FitSwagOptions
from bnncli.session.posteriors import Cost, Fitted, Fitting, beside_base, chosen_instead
from bnncli.session.produce import resumable_training
from bnncli.session.val_report import measure_on_val
from bnncli.stages.fit_swag.report import warnings


def fit(fitting: Fitting, options: FitSwagOptions) -> Fitted:
    """The Gaussian with what is told of it."""
    run, target, start = fitting.run, fitting.target, fitting.start
    plan, told, passes = _planned(fitting, options, start)
    resumable = resumable_training(run, fitting.request, resume=options.resume, save_every=options.save_every)
    with resumable.hint(), chosen_instead(options.learning_rate):
        found = fit_swag(
            target,
            plan,
            start=start,
            generator=run.stream("fit-swag/train"),
            state=resumable.restore(),
            save=resumable.save,
            progress=run.console,
        )
    metrics = _metrics(fitting, plan, found, start) | told
    passes += plan.warmup + plan.epochs
    metrics |= Cost.of_fit(passes, is_last_layer=fitting.is_last_layer).to_metrics()
    for text in warnings(metrics):
        run.console.warn(text)
    if fitting.val is not None:
        metrics |= measure_on_val(run, found.gaussian, fitting.val, method="swag")
    tensors, meta = found.gaussian.to_tensors()
    tensors["history.log_joint"] = found.history
    return Fitted(tensors, {**meta, **fitting.meta}, metrics, fitting.train, publishing=resumable.publishing)


def _planned(fitting: Fitting, options: FitSwagOptions, start: torch.Tensor) -> tuple[SwagPlan, dict[str, Any], float]:
    """How iterates are made, what is told of it, and the gradient passes that finding it took."""
    target, run = fitting.target, fitting.run
    batch_size = options.examples_a_step(target.num_examples)
    rate, by, passes = options.learning_rate, "given", 0.0
    if rate is None:
        trace, passes = noise_trace(target, start, batch_size, run.stream("fit-swag/noise"))
        stiffness = largest_curvature(target, start, run.stream("fit-swag/stiffness"))
        passes += curvature_passes(target)
        matched = (1 - options.momentum) * 2 * batch_size * target.layout.num_params / (target.num_examples * trace)
        stable = (1 + options.momentum) * target.num_examples / stiffness
        rate, by = min((matched, "noise"), (stable, "stability"))
    plan = SwagPlan(
        options.num_warmup,
        options.num_epochs,
        options.num_columns,
        batch_size,
        rate,
        options.momentum,
        options.scale,
    )
    if by != "given":
        plan, epochs = tamed(target, plan, start=start, generator=run.stream("fit-swag/pilot"), progress=run.console)
        passes += epochs
        by = by if plan.learning_rate == rate else "pilot"
    return plan, {"learning_rate": plan.learning_rate, "learning_rate_by": by}, passes


def _metrics(fitting: Fitting, plan: SwagPlan, found: SwagFit, start: torch.Tensor) -> dict[str, Any]:
    """How the Gaussian was made, and how wide it is."""
    target, gaussian = fitting.target, found.gaussian
    shares = gaussian.covariance.marginal_variances() * fitting.prior.diagonal(target.layout, device=target.device)  # type: ignore[attr-defined]
    beside = beside_base(fitting.base, gaussian)
    ends = target.log_joint(torch.stack([start, gaussian.mean])).tolist()
    return {
        "structure": gaussian.covariance.structure,
        "num_params": target.layout.num_params,
        **fitting.prior.to_meta(),
        "warmup": plan.warmup,
        "iterates": plan.epochs,
        "rank": plan.rank,
        "batch_size": plan.batch_size,
        "momentum": plan.momentum,
        "scale": plan.scale,
        "num_still": found.num_still,
        "median_share_of_prior": float(shares.median()),
        "largest_share_of_prior": float(shares.max()),
        "base": None if beside is None else beside.name,
        "median_share_of_base": None if beside is None else beside.median_share,
        "share_wider_than_prior": float((shares > 1).double().mean()),
        "log_joint_start": ends[0],
        "log_joint_mean": ends[1],
        "val": None,
        "val_excess": None,
        "recommended_integrator": None,
    }

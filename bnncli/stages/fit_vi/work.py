"""The work of fit-vi: the Gaussian, its ELBO, and what it is worth on val."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from bnncli.errors import NumericError
from bnncli.inference.elbo import elbo
from bnncli.inference.sghmc import curvature_passes, largest_curvature
from bnncli.inference.vi import ViFit, ViPlan, fit_vi, shortfall
from bnncli.names import counted
from bnncli.numerics.random import stream_seed
from bnncli.options.fit_vi import FitViOptions
from bnncli.parameters.prior import initial_theta
from bnncli.session.posteriors import Cost, Fitted, Fitting, beside_base
from bnncli.session.produce import resumable_training
from bnncli.session.val_report import measure_on_val


def fit(fitting: Fitting, options: FitViOptions) -> Fitted:
    """The Gaussian with what is told of it."""
    run, target, start = fitting.run, fitting.target, fitting.start
    if options.start == "init":
        start = initial_theta(fitting.train.layout, 1, stream_seed(run.compute.seed, "fit-vi/start"))[0]
    stiffness, passes = 0.0, 0.0
    if options.optimizer == "ivon":
        stiffness, passes = largest_curvature(target, start, run.stream("fit-vi/stiffness")), curvature_passes(target)
    plan = ViPlan(
        options.num_epochs(target.num_examples),
        min(options.examples_a_step, target.num_examples),
        options.first_rate,
        options.draws_a_step,
        options.chosen_estimator,
        options.optimizer,
        options.kl_weight,
        options.rounds_of_patience,
        stiffness=stiffness,
    )
    resumable = resumable_training(run, fitting.request, resume=options.resume, save_every=options.save_every)
    with resumable.hint():
        found = fit_vi(
            target,
            plan,
            start=start,
            generator=run.stream("fit-vi/train"),
            state=resumable.restore(),
            save=resumable.save,
            progress=run.console,
        )
    metrics = _metrics(fitting, options, plan, found)
    metrics["shortfall"], doubt = _shortfall(fitting, plan, found)
    beside = beside_base(fitting.base, found.gaussian)
    metrics["beside_base"] = None if beside is None else asdict(beside)
    if doubt is not None:
        what = "ELBO" if plan.kl_weight == 1 else "objective"
        more = "more \0epochs\0 or a larger \0patience\0" if found.is_early else "more \0epochs\0"
        run.console.warn(f"the {what} {doubt} after {counted(len(found.history), 'epoch')}: use {more}")
    passes += len(found.history) * options.draws_a_step
    metrics |= Cost.of_fit(passes, is_last_layer=fitting.is_last_layer).to_metrics()
    if fitting.val is not None:
        metrics |= measure_on_val(run, found.gaussian, fitting.val, method="vi")
    tensors, meta = found.gaussian.to_tensors()
    tensors["history.elbo"] = found.history
    return Fitted(tensors, {**meta, **fitting.meta}, metrics, fitting.train, publishing=resumable.publishing)


def _shortfall(fitting: Fitting, plan: ViPlan, found: ViFit) -> tuple[dict[str, Any] | None, str | None]:
    """By how much the objective is below its maximum, where that can be told, and why more epochs may help."""
    target, gaussian = fitting.target, found.gaussian
    if not target.is_concave:
        return None, found.doubt
    left = shortfall(target, gaussian, kl_weight=plan.kl_weight, generator=fitting.run.stream("fit-vi/shortfall"))
    is_large = left.is_large(len(gaussian.mean))
    doubt = f"is about {left.value:.3g} nats below its maximum" if is_large else None
    return {"value": left.value, "standard_error": left.standard_error, "is_large": is_large}, doubt


def _metrics(fitting: Fitting, options: FitViOptions, plan: ViPlan, found: ViFit) -> dict[str, Any]:
    """The ELBO by fresh draws on the full data, and how it was reached."""
    run, target, gaussian = fitting.run, fitting.target, found.gaussian
    estimate = elbo(
        target,
        gaussian,
        generator=run.stream("fit-vi/elbo"),
        num_samples=options.num_elbo_draws,
        progress=run.console,
    )
    if not math.isfinite(estimate.value):
        raise NumericError(
            f"the ELBO is not finite ({estimate.value:.4g})",
            hint=f"use a \0learning_rate\0 below {plan.learning_rate:g}",
        )
    shares = gaussian.covariance.variances * fitting.prior.diagonal(target.layout, device=target.device)  # type: ignore[attr-defined]
    return {
        "structure": gaussian.covariance.structure,
        "num_params": target.layout.num_params,
        **fitting.prior.to_meta(),
        "elbo": {"value": estimate.value, "standard_error": estimate.standard_error},
        "elbo_draws": len(estimate.log_weights),
        "log_weight_sd": estimate.log_weight_sd,
        "estimator": plan.estimator,
        "optimizer": plan.optimizer,
        "learning_rate": plan.learning_rate,
        "batch_size": plan.batch_size,
        "num_draws": plan.num_draws,
        "kl_weight": plan.kl_weight,
        "epochs": plan.epochs,
        "epochs_run": len(found.history),
        "ended_early": found.is_early,
        "start": options.start,
        "median_share_of_prior": float(shares.median()),
        "val": None,
        "val_excess": None,
        "recommended_integrator": None,
    }

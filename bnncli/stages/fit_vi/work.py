"""The work of fit-vi: the Gaussian, its ELBO, and what it is worth on val."""

from __future__ import annotations

import math
from typing import Any

from bnncli.errors import NumericError
from bnncli.inference.elbo import elbo
from bnncli.inference.stiffness import curvature_passes, largest_curvature
from bnncli.inference.vi import ViFit, ViPlan, fit_vi
from bnncli.names import counted
from bnncli.numerics.seeds import stream_seed
from bnncli.options import FitViOptions
from bnncli.run.cost import Cost
from bnncli.run.produce_posterior import Fitted
from bnncli.run.resumable import resumable_training
from bnncli.run.target_fit import Fitting
from bnncli.run.val_report import measure_on_val
from bnncli.theta.initial import initial_theta


def fit(fitting: Fitting, options: FitViOptions) -> Fitted:
    """The Gaussian with what is told of it."""
    run, target, start = fitting.run, fitting.target, fitting.start
    if options.start == "init":
        start = initial_theta(fitting.train.layout, 1, stream_seed(run.compute.seed, "fit-vi/start"))[0]
    stiffness, passes = 0.0, 0.0
    if options.optimizer == "ivon":
        stiffness, passes = largest_curvature(target, start, run.stream("fit-vi/stiffness")), curvature_passes(target)
    plan = ViPlan(
        options.num_epochs,
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
    if found.doubt is not None:
        what = "ELBO" if plan.kl_weight == 1 else "objective"
        run.console.warn(f"the {what} {found.doubt} after {counted(len(found.history), 'epoch')}: use more \0epochs\0")
    passes += len(found.history) * options.draws_a_step
    metrics |= Cost.of_fit(passes, is_last_layer=fitting.is_last_layer).to_metrics()
    if fitting.val is not None:
        metrics |= measure_on_val(run, found.gaussian, fitting.val, method="vi")
    tensors, meta = found.gaussian.to_tensors()
    tensors["history.elbo"] = found.history
    return Fitted(tensors, {**meta, **fitting.meta}, metrics, fitting.train, publishing=resumable.publishing)


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

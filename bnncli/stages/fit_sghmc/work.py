"""The work of fit-sghmc: a learning rate, the chains, how they agree, and the file of their draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bnncli import __version__
from bnncli.artifacts.resume import DrawFile
from bnncli.artifacts.samples import SampleFile, write_samples
from bnncli.errors import UsageError
from bnncli.evaluation.convergence import Convergence
from bnncli.inference.dynamics import WhiteCoordinates
from bnncli.inference.sghmc import Planned, SghmcPlan, SghmcRun, planned, sample_sghmc
from bnncli.lazy import torch
from bnncli.names import counted
from bnncli.numerics.random import stream_seed
from bnncli.options.fit_sghmc import BASE, NONE, RMSPROP, FitSghmcOptions
from bnncli.parameters.prior import initial_theta
from bnncli.posteriors.samples import Samples
from bnncli.session.chains import head_judges, network_judge, parameter_judge, parameter_metrics, prediction_metrics
from bnncli.session.inputs import open_posterior
from bnncli.session.posteriors import Cost, Fitted, Fitting, chosen_instead
from bnncli.session.produce import ResumableDraws, resumable_training
from bnncli.session.val_report import measure_on_val
from bnncli.stages.fit_sghmc.report import warnings

MIN_SIZED_DRAWS = 20  # a chain: of fewer no effective sample size is told


def fit(fitting: Fitting, options: FitSghmcOptions) -> Fitted:
    """The draws with what is told of them."""
    run, target = fitting.run, fitting.target
    start = fitting.start.expand(options.chains, -1)
    if options.start == "init":
        start = initial_theta(fitting.train.layout, options.chains, stream_seed(run.compute.seed, "fit-sghmc/start"))
    whitening = _whitening(fitting, options)
    chosen, told = _planned(fitting, options, start[0].to(run.device), whitening)
    store = DrawFile(fitting.request.target, num_chains=options.chains, num_params=target.layout.num_params)
    resumable = resumable_training(run, fitting.request, resume=options.resume, save_every=options.save_every)
    resume = ResumableDraws(resumable, store)
    try:
        with resumable.hint(), chosen_instead(options.learning_rate):
            drawn = sample_sghmc(
                target,
                chosen.plan,
                start=start,
                generator=run.stream("fit-sghmc/chains"),
                square=chosen.square,
                whitening=whitening,
                store=store,
                state=resume.restore(),
                save=lambda state, is_last: resume.offer(lambda: dict(state), is_last=is_last),
                progress=run.console,
            )
    finally:
        resume.close()
    metrics = _metrics(fitting, options, drawn, chosen.plan) | told
    passes = chosen.plan.epochs * options.chains + chosen.passes
    metrics |= Cost.of_fit(passes, is_last_layer=fitting.is_last_layer).to_metrics()
    for text in warnings(metrics):
        run.console.warn(text)
    if fitting.val is not None:
        posterior = Samples(drawn.draws, target.layout).to(run.device)
        metrics |= measure_on_val(run, posterior, fitting.val, method="sghmc")
    meta = {**fitting.meta, "type": "samples"}
    return Fitted({}, meta, metrics, fitting.train, write=partial(_write, fitting, drawn), publishing=resume.publishing)


def _whitening(fitting: Fitting, options: FitSghmcOptions) -> WhiteCoordinates | None:
    """The base's, where its covariance preconditions.

    Raises:
        UsageError: asked for, and there is no base, or it is no Gaussian.
    """
    base = fitting.base
    if not options.may_whiten:
        return None
    if base is None or not base.is_gaussian:
        if options.preconditioner is None:
            return None
        what = "\0prior_precision\0 has none" if base is None else f"{base.path.stem} is not one"
        raise UsageError(
            f"\0preconditioner\0 {BASE}: expected a Gaussian \0base\0, such as one from fit-laplace; {what}"
        )
    return WhiteCoordinates.of(open_posterior(base.path)[0], fitting.target.device, fitting.target.dtype)


def _planned(
    fitting: Fitting, options: FitSghmcOptions, theta: torch.Tensor, whitening: WhiteCoordinates | None
) -> tuple[Planned, dict[str, Any]]:
    """How chains move, and what is told of it."""
    run, target = fitting.run, fitting.target

    def plan_at(learning_rate: float) -> SghmcPlan:
        return SghmcPlan(
            options.num_epochs,
            options.num_cycles,
            options.num_draws,
            options.num_exploring,
            min(options.examples_a_step, target.num_examples),
            learning_rate,
            options.decay(is_whitened=whitening is not None),
            options.temperature,
            is_cyclical=options.is_cyclical,
            is_preconditioned=options.preconditioner == RMSPROP,
        )

    chosen = planned(
        target,
        plan_at,
        places=[theta, *_center_of_base(fitting)],
        learning_rate=options.learning_rate,
        whitening=whitening,
        squares=run.stream("fit-sghmc/squares"),
        generator=run.stream("fit-sghmc/stiffness"),
    )
    by_steps, by_batches = (_finite(one) for one in chosen.excess)
    told = {
        "learning_rate": chosen.plan.learning_rate,
        "learning_rate_by": "given" if options.learning_rate is not None else "stiffness",
        "stiffness": chosen.stiffness,
        "excess_by_steps": by_steps,
        "excess_by_batches": by_batches,
        "preconditioner": BASE if whitening is not None else options.preconditioner or NONE,
    }
    return chosen, told


def _center_of_base(fitting: Fitting) -> list[torch.Tensor]:
    """The mean (P,) of the base where it is a Gaussian: about where the posterior is."""
    if fitting.base is None or not fitting.base.is_gaussian:
        return []
    return [open_posterior(fitting.base.path)[0].mean.to(fitting.run.device)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _metrics(fitting: Fitting, options: FitSghmcOptions, drawn: SghmcRun, plan: SghmcPlan) -> dict[str, Any]:
    """How the chains agree, and how they moved."""
    run, train, target = fitting.run, fitting.train, fitting.target
    num_draws = drawn.draws.shape[1]
    judged_by: str | None = None
    if fitting.is_last_layer:
        judges = head_judges(run, train, fitting.val)
    else:
        judged_by = "train" if fitting.val is None else "heldout"
        judges = {judged_by: network_judge(run, target, fitting.val or train)}  # type: ignore[arg-type]
    return {
        "sampler": options.chosen_sampler,
        "chains": options.chains,
        "draws": num_draws,
        **fitting.prior.to_meta(),
        **parameter_metrics(_sized(parameter_judge(run)(drawn.draws), num_draws)),
        **prediction_metrics(
            {name: _sized(judge(drawn.draws), num_draws) for name, judge in judges.items()}, judged_by
        ),
        "is_exact": False,
        "epochs": plan.epochs,
        "cycles": plan.num_cycles,
        "exploring_epochs": plan.num_exploring,
        "batch_size": plan.batch_size,
        "momentum_decay": plan.momentum_decay,
        "temperature": plan.temperature,
        "start": options.start,
        "log_joint_first": float(drawn.history[0].mean()),
        "log_joint_last": float(drawn.history[-1].mean()),
        "val": None,
        "val_excess": None,
        "recommended_integrator": None,
    }


def _sized(judged: Convergence, num_draws: int) -> Convergence:
    """The same without effective sample sizes where chains have too few draws to tell any.

    Of so few the estimator finds no autocorrelation to sum, and ends at its cap, S log10 S of all S draws, however chains disagree.
    """
    if num_draws >= MIN_SIZED_DRAWS:
        return judged
    few = (
        f"{counted(num_draws, 'draw')} per chain {'is' if num_draws == 1 else 'are'} too few for an effective sample "
        f"size, which needs {MIN_SIZED_DRAWS}"
    )
    why = few if judged.undefined is None else f"{judged.undefined}; {few}"
    return replace(judged, ess_bulk=None, ess_tail=None, undefined=why)


def _write(
    fitting: Fitting, drawn: SghmcRun, meta: Mapping[str, Any], provenance: dict[str, Any], may_replace: bool
) -> str:
    """Publishes draws as hmc does."""
    train, draws = fitting.train, drawn.draws.cpu()
    weight, bias = train.layout.split(draws) if train.is_last_layer else (None, None)
    stats = {}
    if train.is_last_layer:  # of a network it would take a pass each
        stats["lp"] = fitting.target.log_joint(drawn.draws.flatten(0, 1)).view(draws.shape[:2]).cpu().numpy()
    samples = SampleFile(
        head_weight=None if weight is None else weight.numpy(),
        head_bias=None if bias is None else bias.numpy(),
        stats=stats,
        constants=fitting.prior.to_constants(),
        theta=None if train.is_last_layer else draws.numpy(),
    )
    return write_samples(
        fitting.request.target,
        samples,
        outputs=train.layout.likelihood.output_names(train.content.classes),
        created_at=provenance["created_at"],
        name=fitting.run.checkpoint_path.stem,
        sampler_library=("bnncli", __version__),
        meta=meta,
        provenance=provenance,
        may_replace=may_replace,
    )

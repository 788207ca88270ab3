"""The work of fit-sghmc: a learning rate, the chains, how they agree, and the file of their draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bnncli import __version__
from bnncli.errors import UsageError
from bnncli.evaluation.convergence import Convergence
from bnncli.inference.sghmc import SghmcPlan, SghmcRun, inflation, preconditioner, sample_sghmc
from bnncli.inference.stiffness import curvature_passes, largest_curvature, mean_square
from bnncli.inference.white_coordinates import WhiteCoordinates
from bnncli.names import counted
from bnncli.numerics.seeds import stream_seed
from bnncli.options import FitSghmcOptions
from bnncli.options.fit_sghmc import BASE, NONE, RMSPROP
from bnncli.posteriors.samples import Samples
from bnncli.run.chain_judges import head_judges, network_judge, parameter_judge
from bnncli.run.chain_report import parameter_metrics, prediction_metrics
from bnncli.run.cost import Cost
from bnncli.run.given_rate import chosen_instead
from bnncli.run.inputs import open_posterior
from bnncli.run.produce_posterior import Fitted
from bnncli.run.resumable import ResumableDraws, resumable_training
from bnncli.run.target_fit import Fitting
from bnncli.run.val_report import measure_on_val
from bnncli.stages.fit_sghmc.report import warnings
from bnncli.storage.draw_file import DrawFile
from bnncli.storage.samples import SampleFile, write_samples
from bnncli.theta.initial import initial_theta

MIN_SIZED_DRAWS = 20  # a chain: of fewer no effective sample size is told
ALLOWED = 0.05  # by which the length of steps may make the variance too large, where no learning rate is given


def fit(fitting: Fitting, options: FitSghmcOptions) -> Fitted:
    """The draws with what is told of them."""
    run, target = fitting.run, fitting.target
    start = fitting.start.expand(options.chains, -1)
    if options.start == "init":
        start = initial_theta(fitting.train.layout, options.chains, stream_seed(run.compute.seed, "fit-sghmc/start"))
    whitening = _whitening(fitting, options)
    plan, square, told, passes = _planned(fitting, options, start[0].to(run.device), whitening)
    store = DrawFile(fitting.request.target, num_chains=options.chains, num_params=target.layout.num_params)
    resumable = resumable_training(run, fitting.request, resume=options.resume, save_every=options.save_every)
    resume = ResumableDraws(resumable, store)
    try:
        with resumable.hint(), chosen_instead(options.learning_rate):
            drawn = sample_sghmc(
                target,
                plan,
                start=start,
                generator=run.stream("fit-sghmc/chains"),
                square=square,
                whitening=whitening,
                store=store,
                state=resume.restore(),
                save=lambda state, is_last: resume.offer(lambda: dict(state), is_last=is_last),
                progress=run.console,
            )
    finally:
        resume.close()
    metrics = _metrics(fitting, options, drawn, plan) | told
    metrics |= Cost.of_fit(plan.epochs * options.chains + passes, is_last_layer=fitting.is_last_layer).to_metrics()
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
        what = "there is none with \0prior_precision\0" if base is None else f"{base.path.stem} is none"
        raise UsageError(f"\0preconditioner\0 {BASE}: expected a Gaussian \0base\0, one of fit-laplace; {what}")
    return WhiteCoordinates.of(open_posterior(base.path)[0], fitting.target.device, fitting.target.dtype)


def _planned(
    fitting: Fitting, options: FitSghmcOptions, theta: torch.Tensor, whitening: WhiteCoordinates | None
) -> tuple[SghmcPlan, torch.Tensor | None, dict[str, Any], float]:
    """How chains move, RMSprop's start, what is told of both, and the gradient passes that finding them took."""
    run, target = fitting.run, fitting.target
    places = [theta, *_center_of_base(fitting)]
    num_examples, passes, square = target.num_examples, len(places) * curvature_passes(target), None
    batch_size = min(options.examples_a_step, num_examples)
    if options.preconditioner == RMSPROP:
        square, more = mean_square(
            target, theta, _squared_batch(batch_size, num_examples), run.stream("fit-sghmc/squares")
        )
        passes += more
    scale = None if square is None else preconditioner(square)
    # A network that is sure of its labels has little curvature where chains start, and more where they go.
    generator = run.stream("fit-sghmc/stiffness")
    stiffness = max(largest_curvature(target, place, generator, scale, whitening=whitening) for place in places)
    decay, last = options.decay(is_whitened=whitening is not None), _rate_share(options)
    rate = options.learning_rate
    if rate is None:
        rate = _bearable_reach(options, num_examples / batch_size, is_whitened=whitening is not None)
        rate *= num_examples / stiffness
    plan = SghmcPlan(
        options.num_epochs,
        options.num_cycles,
        options.num_draws,
        options.num_exploring,
        batch_size,
        rate,
        decay,
        options.temperature,
        is_cyclical=options.is_cyclical,
        is_preconditioned=square is not None,
    )
    by_steps, by_batches = (_finite(one) for one in inflation(plan, stiffness, num_examples, last * rate))
    told = {
        "learning_rate": rate,
        "learning_rate_by": "given" if options.learning_rate is not None else "stiffness",
        "stiffness": stiffness,
        "excess_by_steps": by_steps,
        "excess_by_batches": by_batches,
        "preconditioner": BASE if whitening is not None else options.preconditioner or NONE,
    }
    return plan, square, told, passes


def _bearable_reach(options: FitSghmcOptions, num_batches: float, *, is_whitened: bool) -> float:
    """The learning rate of each cycle's start where none is given, in stiffest directions: eta times their curvature."""
    decay, last = options.decay(is_whitened=is_whitened), _rate_share(options)
    reach = ALLOWED / (1 + ALLOWED) * 2 * (2 - decay) / last
    if not is_whitened:
        return min(reach, 2 - decay)  # no more than half of what is stable, while exploring
    if num_batches > 1 and options.temperature > 0:  # all directions are the stiffest, with its noise of minibatches
        reach = min(reach, ALLOWED * 2 * decay * options.temperature / (num_batches - 1) / last)
    return min(reach, 0.25 * (2 - decay))  # they stiffen far from the base


def _center_of_base(fitting: Fitting) -> list[torch.Tensor]:
    """The mean (P,) of the base where it is a Gaussian: about where the posterior is."""
    if fitting.base is None or not fitting.base.is_gaussian:
        return []
    return [open_posterior(fitting.base.path)[0].mean.to(fitting.run.device)]


def _squared_batch(batch_size: int, num_examples: int) -> int:
    """Examples of the batches that RMSprop starts from: a whole split has no gradient at its mode."""
    return min(batch_size, max(1, num_examples // 32))


def _rate_share(options: FitSghmcOptions) -> float:
    """The learning rate where draws begin to be kept, of that at the start."""
    return 0.5 * (1 + math.cos(math.pi * options.num_exploring / options.cycle_length)) if options.is_cyclical else 1.0


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
    few = f"{counted(num_draws, 'draw')} a chain {'tells' if num_draws == 1 else 'tell'} no effective sample size, {MIN_SIZED_DRAWS} are needed"
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
        constants={name: np.array([value]) for name, value in fitting.prior.to_meta().items()},
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

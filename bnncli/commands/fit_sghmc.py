"""fit-sghmc: sample with stochastic-gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

from bnncli import __version__
from bnncli.artifacts.resume import DrawFile
from bnncli.artifacts.samples import SampleFile, write_samples
from bnncli.errors import UsageError
from bnncli.evaluation.convergence import GOOD_RHAT, Convergence, deciding_numbers
from bnncli.inference import memory
from bnncli.inference.dynamics import WhiteCoordinates
from bnncli.inference.memory import StochasticFitPlan
from bnncli.inference.sghmc import ChainPlan, SghmcPlan, SghmcRun, plan_chains, sample_sghmc
from bnncli.lazy import torch
from bnncli.names import count_noun, percent
from bnncli.numerics.random import stream_seed
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import option
from bnncli.options.shared import GivenPriorOptions
from bnncli.parameters.prior import initial_theta
from bnncli.posteriors.samples import Samples
from bnncli.session import revisions as _revisions
from bnncli.session.chains import (
    format_deciding_diagnostic,
    format_other_diagnostics,
    head_judges,
    network_judge,
    parameter_judge,
    parameter_metrics,
    prediction_metrics,
)
from bnncli.session.costs import Cost
from bnncli.session.fits import (
    LEAVE_OUT,
    FitOutput,
    Fitting,
    Method,
    open_inputs,
    require_steps,
    run_fit,
    suggest_default_learning_rate,
)
from bnncli.session.inputs import open_posterior
from bnncli.session.metrics import SghmcMetrics
from bnncli.session.produce import ResumableDraws, prepare_resumable_training
from bnncli.session.run import Result, Run
from bnncli.session.val_report import UNMEASURED, measure_on_val, val_lines

CYCLICAL, SGHMC, SGLD = "cyclical", "sghmc", "sgld"
BASE, RMSPROP, NONE = "base", "rmsprop", "none"


@dataclass(frozen=True)
class FitSghmcOptions(GivenPriorOptions):
    """Options of fit-sghmc."""

    sampler: str | None = option(
        None,
        "Sampler: cyclical (cosine learning rate per cycle), sghmc, or sgld (no momentum). Default: sghmc for "
        "the last layer, else cyclical.",
        choices=(CYCLICAL, SGHMC, SGLD),
        group="Sampling",
    )
    chains: int = option(4, "Number of chains, run as one batch.", minimum=1, group="Sampling")
    epochs: int | None = option(
        None,
        "Total passes over the training split, across all cycles. Default: 1000, or 250 times the number of "
        "cycles if you set it; with other layers, 40, or 10 times the number of cycles.",
        minimum=1,
        group="Sampling",
    )
    cycles: int | None = option(
        None, "Number of cycles (cyclical). Default: 4.", minimum=1, group="Sampling", is_rare=True
    )
    draws: int | None = option(
        None,
        "Draws to keep per chain and cycle. Default: 200 (50 in cycles); other layers 50 (3 in cycles).",
        minimum=1,
        group="Sampling",
    )
    exploration: float | None = option(
        None,
        "Share of each cycle (or of all epochs) before draws are kept. Default: 0.8 in cycles, else 0.3.",
        minimum=0.0,
        maximum=0.99,
        group="Sampling",
        is_rare=True,
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: 65536; other layers 128.", minimum=1, group="Sampling"
    )
    learning_rate: float | None = option(
        None,
        "Initial step size of each cycle, for the mean loss. Default: the largest one whose bias along the "
        "stiffest direction is small.",
        minimum=1e-15,
        group="Sampling",
    )
    momentum_decay: float | None = option(
        None,
        "Share of the momentum lost per step. Default: 0.2 with \0preconditioner\0 base, else 0.05.",
        minimum=1e-6,
        maximum=1.0,
        group="Sampling",
        is_rare=True,
    )
    temperature: float = option(
        1.0,
        "Posterior temperature. 1 samples the posterior; 0 adds no noise.",
        minimum=0.0,
        group="Sampling",
        is_rare=True,
    )
    preconditioner: str | None = option(
        None,
        "Preconditioner: the covariance of \0base\0, rmsprop, or none. Default: base for the last layer, if "
        "\0base\0 is Gaussian.",
        choices=(BASE, RMSPROP, NONE),
        group="Sampling",
        is_rare=True,
    )
    start: str = option(
        "checkpoint",
        "Start from the checkpoint's weights, or from PyTorch's initialisation (init).",
        choices=("checkpoint", "init"),
        group="Sampling",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Sampling"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every epoch.",
        minimum=0,
        numeric=False,
        group="Sampling",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_cyclical and self.cycles is not None:
            raise UsageError(f"\0cycles\0 is for \0sampler\0 cyclical; {self.chosen_sampler} has none")
        if self.chosen_sampler == SGLD and self.momentum_decay not in (None, 1.0):
            raise UsageError("\0momentum_decay\0 is for \0sampler\0 cyclical or sghmc; sgld has no momentum")
        if self.num_epochs % self.num_cycles:
            raise UsageError(
                f"\0epochs\0: expected a multiple of the {self.num_cycles} \0cycles\0; got {self.num_epochs}"
            )
        if self.num_draws > self.num_sampling:
            raise UsageError(
                f"\0draws\0: expected at most {self.num_sampling}, the sampling epochs per cycle; got {self.num_draws}",
                hint="use more \0epochs\0, or a smaller \0exploration\0",
            )

    @property
    def chosen_sampler(self) -> str:
        """Return the value given, or the default."""
        return self.sampler or (SGHMC if self.is_last_layer and self.cycles is None else CYCLICAL)

    @property
    def may_whiten(self) -> bool:
        """True where the covariance of a Gaussian base may precondition: if requested, and by default for the last layer.

        Not by default for other layers: they take minibatches, and whitening spreads the noise of the stiffest direction to all.
        """
        return self.preconditioner == BASE or (self.preconditioner is None and self.is_last_layer)

    @property
    def is_cyclical(self) -> bool:
        """True for a cyclical step size."""
        return self.chosen_sampler == CYCLICAL

    @property
    def num_epochs(self) -> int:
        """Return the epochs of all cycles together, with the default filled in."""
        in_cycle = (250 if self.is_last_layer else 10) * (1 if self.is_cyclical else 4)
        return self.epochs or in_cycle * self.num_cycles

    @property
    def num_cycles(self) -> int:
        """Return the value given, or the default."""
        return (self.cycles or 4) if self.is_cyclical else 1

    @property
    def cycle_length(self) -> int:
        """Return the epochs of a cycle; all epochs without cycles."""
        return max(1, self.num_epochs // self.num_cycles)

    @property
    def num_exploring(self) -> int:
        """Return the epochs of a cycle before draws are kept, which leave at least one."""
        share = self.exploration
        if share is None:
            share = 0.8 if self.is_cyclical else 0.3
        return min(round(share * self.cycle_length), self.cycle_length - 1)

    @property
    def num_sampling(self) -> int:
        """Return the epochs of a cycle in which draws are kept."""
        return self.cycle_length - self.num_exploring

    @property
    def num_draws(self) -> int:
        """Return the draws of a cycle, with the default filled in."""
        if self.draws is not None:
            return self.draws
        many = (50, 200) if self.is_last_layer else (3, 50)
        return min(many[not self.is_cyclical], self.num_sampling)

    @property
    def examples_a_step(self) -> int:
        """Return the value given, or the default."""
        return self.batch_size or (65536 if self.is_last_layer else 128)

    def decay(self, *, is_whitened: bool) -> float:
        """Return the fraction of the momentum that a step loses, with the default filled in."""
        return 1.0 if self.chosen_sampler == SGLD else self.momentum_decay or (0.2 if is_whitened else 0.05)


COMMAND = Command(
    "Sample by stochastic-gradient HMC, cyclical or not.",
    "This is a baseline for hmc without accept/reject steps, so its draws are biased by the step size and "
    "minibatch noise. The summary reports the bias along the stiffest direction. With --layers, batch norm "
    "statistics stay fixed. Writes posteriors/sghmc.nc, or sghmc-all.nc.",
    (FitSghmcOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-sghmc ckpt.pt",
        "bnncli fit-sghmc ckpt.pt --sampler sgld --name sgld",
        "bnncli fit-sghmc ckpt.pt --sampler cyclical --epochs 200 --batch-size 128 --learning-rate 0.1 --momentum-decay 0.9 --exploration 0.9 "
        "--draws 3 --preconditioner none --name published",
        "bnncli fit-sghmc ckpt.pt --layers all --chains 1 --resume",
    ),
    section="Fit",
    place=90,
)


# Of each chain: theta, momentum, gradient, noise, RMSprop's mean squares or whitened ones, products; twice for states to resume from.
_CHAIN_VECTORS = 12


def execute(run: Run, options: FitSghmcOptions) -> Result:
    """Sample and publish. The result's metrics have R-hat, effective sample sizes and the bias of steps and minibatches."""
    inputs = open_inputs(run, options)
    run.require_device()
    return run_fit(SghmcSampling(inputs, options))


@dataclass(frozen=True)
class SghmcSampling(Method):
    """One request for draws."""

    name: ClassVar[str] = "sghmc"
    kind: ClassVar[str] = "samples"
    algo_rev: ClassVar[int] = _revisions.FIT_SGHMC
    options: FitSghmcOptions

    @property
    def num_draws(self) -> int:
        """Return the draws of all chains together."""
        return self.options.chains * self.options.num_cycles * self.options.num_draws

    def estimate_memory(self) -> int:
        """Return the peak memory in bytes. Raises DeviceError if it is short."""
        options = self.options
        plan = StochasticFitPlan(
            _CHAIN_VECTORS * options.chains,
            options.chains,
            options.examples_a_step,
            num_kept=self.num_draws,
            num_predicting=self.num_draws,
        )
        num_bases = 2 if options.may_whiten else 0  # as it is read, and in the precision of steps
        hint = "use fewer \0chains\0 or a smaller \0batch_size\0"
        return require_steps(self.inputs, plan, method=self.name, hint=hint, num_bases=num_bases)

    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""
        return memory.draw_storage_bytes(self.inputs.layout.num_params, self.num_draws)

    def fit(self, fitting: Fitting) -> FitOutput:
        """Run the chains and judge them."""
        return sample_chains(fitting, self.options)

    def summarize(self, metrics: SghmcMetrics) -> list[str]:
        """Return the summary for people."""
        return format_summary(metrics)


def sample_chains(fitting: Fitting, options: FitSghmcOptions) -> FitOutput:
    """Run the chains, judge them and measure the draws on val."""
    run, target = fitting.run, fitting.target
    start = fitting.start.expand(options.chains, -1)
    if options.start == "init":
        start = initial_theta(fitting.train.layout, options.chains, stream_seed(run.compute.seed, "fit-sghmc/start"))
    whitening = _open_whitening(fitting, options)
    chosen, told = _make_plan(fitting, options, start[0].to(run.device), whitening)
    store = DrawFile(fitting.request.target, num_chains=options.chains, num_params=target.layout.num_params)
    resumable = prepare_resumable_training(run, fitting.request, resume=options.resume, save_every=options.save_every)
    resume = ResumableDraws(resumable, store)
    try:
        with resumable.hint(), suggest_default_learning_rate(options.learning_rate):
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
    for text in list_warnings(cast(SghmcMetrics, metrics)):
        run.console.warn(text)
    if fitting.val is not None:
        posterior = Samples(drawn.draws, target.layout).to(run.device)
        metrics |= measure_on_val(run, posterior, fitting.val, method="sghmc")
    meta = {**fitting.describe_target("sghmc"), "type": "samples"}
    return FitOutput(
        {}, meta, metrics, fitting.train, write=partial(_write, fitting, drawn), publishing=resume.publishing
    )


def _open_whitening(fitting: Fitting, options: FitSghmcOptions) -> WhiteCoordinates | None:
    """Return the base's Gaussian where its covariance preconditions the chains.

    Raises:
        UsageError: whitening was requested, but there is no base or it is not a Gaussian.
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


def _make_plan(
    fitting: Fitting, options: FitSghmcOptions, theta: torch.Tensor, whitening: WhiteCoordinates | None
) -> tuple[ChainPlan, dict[str, Any]]:
    """Plan the chains. Return the plan and its metrics."""
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

    chosen = plan_chains(
        target,
        plan_at,
        places=[theta, *_center_of_base(fitting)],
        learning_rate=options.learning_rate,
        whitening=whitening,
        squares=run.stream("fit-sghmc/squares"),
        generator=run.stream("fit-sghmc/stiffness"),
    )
    by_steps, by_batches = (_replace_infinite(one) for one in chosen.excess)
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
    """Return the mean (P,) of a Gaussian base, which is near the posterior; None for other bases."""
    if fitting.base is None or not fitting.base.is_gaussian:
        return []
    return [open_posterior(fitting.base.path)[0].mean.to(fitting.run.device)]


def _replace_infinite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _metrics(fitting: Fitting, options: FitSghmcOptions, drawn: SghmcRun, plan: SghmcPlan) -> dict[str, Any]:
    """Return metrics of how the chains agree and how they moved."""
    run, train, target = fitting.run, fitting.train, fitting.target
    num_draws = drawn.draws.shape[1]
    judged_by: str | None = None
    if fitting.is_last_layer:
        judges = head_judges(run, train, fitting.val)
    else:
        judged_by = "train" if fitting.val is None else "heldout"
        judges = {judged_by: network_judge(run, target, fitting.val or train)}
    return {
        "sampler": options.chosen_sampler,
        "chains": options.chains,
        "draws": num_draws,
        **fitting.prior.to_meta(),
        **parameter_metrics(_drop_unknown_sizes(parameter_judge(run)(drawn.draws), num_draws)),
        **prediction_metrics(
            {name: _drop_unknown_sizes(judge(drawn.draws), num_draws) for name, judge in judges.items()}, judged_by
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
        **UNMEASURED,
    }


MIN_SIZED_DRAWS = 20  # per chain, to report effective sample sizes


def _drop_unknown_sizes(judged: Convergence, num_draws: int) -> Convergence:
    """Remove effective sample sizes where chains have too few draws to estimate them.

    With so few draws the estimator finds no autocorrelation to sum and returns its cap, S log10 S for S draws in all, however chains disagree.
    """
    if num_draws >= MIN_SIZED_DRAWS:
        return judged
    few = (
        f"{count_noun(num_draws, 'draw')} per chain {'is' if num_draws == 1 else 'are'} too few for an effective sample "
        f"size, which needs {MIN_SIZED_DRAWS}"
    )
    why = few if judged.undefined is None else f"{judged.undefined}; {few}"
    return replace(judged, ess_bulk=None, ess_tail=None, undefined=why)


LARGE = 0.5  # relative excess of the variance that is worth a warning


def list_warnings(metrics: SghmcMetrics) -> list[str]:
    """Return the reasons to distrust the draws."""
    found = []
    r_hat = deciding_numbers(metrics).r_hat
    if r_hat is not None and r_hat > GOOD_RHAT:
        of = " of predictions" if "judged_by" in metrics else ""
        found.append(f"the chains do not agree: largest R-hat{of} {r_hat:.3f} (above {GOOD_RHAT}); use more --epochs")
    steps, batches = metrics["excess_by_steps"], metrics["excess_by_batches"]
    if steps is None or steps > LARGE:
        found.append(f"steps are too long for the stiffest direction; {_advise_shorter_steps(metrics)}")
    if batches is not None and batches > LARGE:
        found.append(
            f"minibatch noise makes the variance along the stiffest direction up to {_format_share(batches)} too large: "
            "use a larger --batch-size or a smaller --learning-rate"
        )
    return found


def _advise_shorter_steps(metrics: SghmcMetrics) -> str:
    """Return advice for shorter steps."""
    if metrics["learning_rate_by"] == "given":
        return LEAVE_OUT
    return f"use a --learning-rate below {metrics['learning_rate']:.3g}"


def _write(
    fitting: Fitting, drawn: SghmcRun, meta: Mapping[str, Any], provenance: dict[str, Any], may_replace: bool
) -> str:
    """Publish the draws in hmc's format."""
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


def format_summary(metrics: SghmcMetrics) -> list[str]:
    """Return the summary for people."""
    lines = [format_deciding_diagnostic(metrics), *format_other_diagnostics(metrics)]
    starts = "the same weights" if metrics["start"] == "checkpoint" else "separate initialisations"
    lines.append(
        f"all chains started at {starts} and saw the same minibatches, so R-hat cannot detect an error that they share"
    )
    how = "as given" if metrics["learning_rate_by"] == "given" else "from the stiffness"
    cold = (
        "" if metrics["temperature"] == 1 else f"; temperature {metrics['temperature']:g} instead of the posterior's 1"
    )
    lines.append(
        f"learning rate {metrics['learning_rate']:.3g} ({how}), momentum decay {metrics['momentum_decay']:g}, batches of "
        f"{metrics['batch_size']:,}{cold}"
    )
    lines.append(
        f"steps are never rejected: along the stiffest direction (curvature {metrics['stiffness']:.3g}), the "
        f"step length makes the variance {_format_share(metrics['excess_by_steps'])} too large, and minibatch noise "
        f"makes it up to {_format_share(metrics['excess_by_batches'])} too large"
    )
    lines += val_lines(metrics)
    return lines


def _format_share(value: float | None) -> str:
    return "an unbounded factor" if value is None else f"{value:.2g} times" if value >= 1 else percent(value, ".2g")

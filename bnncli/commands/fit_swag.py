"""fit-swag: fit a Gaussian to the iterates of SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

from bnncli.errors import DataError, UsageError
from bnncli.inference.memory import StochasticFitPlan
from bnncli.inference.sghmc import curvature_passes, largest_curvature
from bnncli.inference.swag import SwagFit, SwagPlan, fit_swag, halve_learning_rate, noise_trace
from bnncli.integrators.mc import Mc
from bnncli.lazy import torch
from bnncli.names import count_noun, percent
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import option
from bnncli.options.shared import GivenPriorOptions
from bnncli.session import revisions as _revisions
from bnncli.session.costs import Cost
from bnncli.session.fits import (
    LEAVE_OUT,
    FitOutput,
    Fitting,
    Method,
    compare_with_base,
    open_inputs,
    require_steps,
    run_fit,
    suggest_default_learning_rate,
)
from bnncli.session.metrics import SwagMetrics
from bnncli.session.produce import prepare_resumable_training
from bnncli.session.run import Result, Run
from bnncli.session.val_report import UNMEASURED, measure_on_val, val_lines


@dataclass(frozen=True)
class FitSwagOptions(GivenPriorOptions):
    """Options of fit-swag."""

    warmup: int | None = option(
        None, "Epochs of SGD before collecting iterates. Default: 50; other layers 5.", minimum=0, group="Training"
    )
    epochs: int | None = option(
        None,
        "Number of epochs that contribute one iterate each. Default: 100; other layers 20.",
        minimum=2,
        group="Training",
    )
    rank: int | None = option(
        None,
        "Rank of the low-rank half of the covariance. Default: 20, or as many as there are iterates.",
        minimum=2,
        group="Training",
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: 128, or a quarter of a smaller split.", minimum=1, group="Training"
    )
    learning_rate: float | None = option(
        None,
        "Constant learning rate of SGD, which sets the spread. Default: the rate nearest to the posterior "
        "(Mandt et al., 2017).",
        minimum=1e-15,
        group="Training",
    )
    momentum: float = option(0.9, "Momentum of SGD.", minimum=0.0, maximum=0.999, group="Training", is_rare=True)
    scale: float = option(1.0, "Factor on the covariance.", minimum=1e-12, group="Training", is_rare=True)
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Training"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every epoch.",
        minimum=0,
        numeric=False,
        group="Training",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_columns > self.num_epochs:
            raise UsageError(f"\0rank\0: expected at most the {self.num_epochs} \0epochs\0; got {self.rank}")

    @property
    def num_warmup(self) -> int:
        """Return the number given, or the default."""
        return self.warmup if self.warmup is not None else 50 if self.is_last_layer else 5

    @property
    def num_epochs(self) -> int:
        """Return the number given, or the default."""
        return self.epochs or (100 if self.is_last_layer else 20)

    @property
    def num_columns(self) -> int:
        """Return the number given, or the default."""
        return self.rank or min(20, self.num_epochs)

    def examples_a_step(self, num_examples: int) -> int:
        """Return the batch size given, or the default.

        Raises:
            UsageError: a step would take all examples, so it would have no noise.
            DataError: there is only one example.
        """
        if num_examples < 2:
            raise DataError("fit-swag needs at least two training examples: minibatch noise sets the spread")
        if self.batch_size is not None and self.batch_size >= num_examples:
            raise UsageError(
                f"\0batch_size\0: expected fewer than the {num_examples} examples, because minibatch noise sets "
                f"SWAG's spread; got {self.batch_size}"
            )
        return self.batch_size or max(1, min(128, num_examples // 4))


COMMAND = Command(
    "Fit a Gaussian to the iterates of SGD (SWAG).",
    "This is a baseline for fit-laplace. SGD starts at the network's weights; minibatch noise and the learning "
    "rate set the spread. With --layers, batch norm statistics stay fixed. Writes posteriors/swag.safetensors, "
    "or swag-all.",
    (FitSwagOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-swag ckpt.pt",
        "bnncli fit-swag ckpt.pt --learning-rate 0.05 --rank 30 --scale 0.5 --name wide",
        "bnncli fit-swag ckpt.pt --layers all --resume",
    ),
    section="Fit",
    place=80,
)


_VECTORS = 12  # of P numbers: theta, momentum, gradients, mean and squares, and these in a state to resume from


def execute(run: Run, options: FitSwagOptions) -> Result:
    """Fit and publish. The result's metrics have the learning rate and the spread."""
    inputs = open_inputs(run, options)
    run.require_device()
    return run_fit(SwagRun(inputs, options))


@dataclass(frozen=True)
class SwagRun(Method):
    """One fit of a Gaussian to the iterates of SGD."""

    name: ClassVar[str] = "swag"
    algo_rev: ClassVar[int] = _revisions.FIT_SWAG
    options: FitSwagOptions

    def estimate_memory(self) -> int:
        """Return the peak memory in bytes. Raises DeviceError if it is short."""
        options = self.options
        plan = StochasticFitPlan(
            # The deviations in two precisions, their orthonormal basis, and copies in a state.
            _VECTORS + 4 * options.num_columns,
            1,
            options.examples_a_step(self.inputs.num_examples),
            num_predicting=Mc().default_for(self.inputs.layout.num_params, is_last_layer=options.is_last_layer),
        )
        return require_steps(self.inputs, plan, method=self.name, hint="use a smaller \0rank\0 or \0batch_size\0")

    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""
        return (4 * self.options.num_columns + 24) * self.inputs.layout.num_params

    def fit(self, fitting: Fitting) -> FitOutput:
        """Fit the Gaussian and measure it."""
        return fit_gaussian(fitting, self.options)

    def summarize(self, metrics: SwagMetrics) -> list[str]:
        """Return the summary for people."""
        return format_summary(metrics)


def fit_gaussian(fitting: Fitting, options: FitSwagOptions) -> FitOutput:
    """Run SGD, fit the Gaussian to its iterates and measure it on val."""
    run, target, start = fitting.run, fitting.target, fitting.start
    plan, told, passes = _make_plan(fitting, options, start)
    resumable = prepare_resumable_training(run, fitting.request, resume=options.resume, save_every=options.save_every)
    with resumable.hint(), suggest_default_learning_rate(options.learning_rate):
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
    for text in list_warnings(cast(SwagMetrics, metrics)):
        run.console.warn(text)
    if fitting.val is not None:
        metrics |= measure_on_val(run, found.gaussian, fitting.val, method="swag")
    tensors, meta = found.gaussian.to_tensors()
    tensors["history.log_joint"] = found.history
    return FitOutput(
        tensors, {**meta, **fitting.describe_target("swag")}, metrics, fitting.train, publishing=resumable.publishing
    )


def _make_plan(
    fitting: Fitting, options: FitSwagOptions, start: torch.Tensor
) -> tuple[SwagPlan, dict[str, Any], float]:
    """Plan the iterates. Return the plan, its metrics and the gradient passes that planning took."""
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
        plan, epochs = halve_learning_rate(
            target, plan, start=start, generator=run.stream("fit-swag/pilot"), progress=run.console
        )
        passes += epochs
        by = by if plan.learning_rate == rate else "pilot"
    return plan, {"learning_rate": plan.learning_rate, "learning_rate_by": by}, passes


def _metrics(fitting: Fitting, plan: SwagPlan, found: SwagFit, start: torch.Tensor) -> dict[str, Any]:
    """Return metrics of the fit and the spread of the Gaussian."""
    target, gaussian = fitting.target, found.gaussian
    shares = gaussian.covariance.marginal_variances() * fitting.prior.diagonal(target.layout, device=target.device)  # type: ignore[attr-defined]
    beside = compare_with_base(fitting.base, gaussian)
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
        "base": None if beside is None else beside["name"],
        "median_share_of_base": None if beside is None else beside["median_share"],
        "share_wider_than_prior": float((shares > 1).double().mean()),
        "log_joint_start": ends[0],
        "log_joint_mean": ends[1],
        **UNMEASURED,
    }


TOO_NARROW = 1e-6


def list_warnings(metrics: SwagMetrics) -> list[str]:
    """Return the reasons to distrust the spread."""
    found, rate = [], f"{metrics['learning_rate']:.3g}"
    slower = LEAVE_OUT if metrics["learning_rate_by"] == "given" else f"use a --learning-rate below {rate}"
    if metrics["share_wider_than_prior"] > 0:
        found.append(
            f"{percent(metrics['share_wider_than_prior'], '.3g')} of the parameters have a larger variance than "
            f"under the prior, although data lower the variance on average: {slower}, or use a smaller --scale"
        )
    if metrics["median_share_of_prior"] < TOO_NARROW:
        found.append(
            f"the spread is negligible compared with the prior (median {metrics['median_share_of_prior']:.2g} of "
            f"its variance): use a --learning-rate above {rate}"
        )
    if metrics["num_still"]:
        had = "has" if metrics["num_still"] == 1 else "have"
        found.append(f"{count_noun(metrics['num_still'], 'parameter')} did not move and {had} almost no variance")
    return found


def format_summary(metrics: SwagMetrics) -> list[str]:
    """Return the summary for people."""
    how = {
        "given": "as given",
        "noise": "from the gradient noise",
        "stability": "half of the stable limit",
        "pilot": "halved until the steps were stable",
    }
    lines = [
        f"{count_noun(metrics['iterates'], 'iterate')} after {count_noun(metrics['warmup'], 'epoch')} of warm-up; learning rate {metrics['learning_rate']:.3g} "
        f"({how[metrics['learning_rate_by']]}), momentum {metrics['momentum']:g}, batches of {metrics['batch_size']:,}"
    ]
    scale = "" if metrics["scale"] == 1 else f", scale {metrics['scale']:g}"
    lines.append(
        f"the covariance is half diagonal, half of rank {metrics['rank']}{scale}; the median parameter has "
        f"{percent(metrics['median_share_of_prior'], '.3g')} of the prior's variance, the largest has "
        f"{percent(metrics['largest_share_of_prior'], '.3g')} (set by the learning rate)"
    )
    if metrics["median_share_of_base"] is not None:
        share = percent(metrics["median_share_of_base"], ".3g")
        lines.append(f"the median parameter has {share} of its variance in {metrics['base']}")
    lines.append(
        f"log joint {metrics['log_joint_start']:.2f} nats at the start, {metrics['log_joint_mean']:.2f} at the mean of the iterates"
    )
    lines += val_lines(metrics)
    return lines

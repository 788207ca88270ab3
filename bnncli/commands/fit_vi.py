"""fit-vi: fit independent Gaussians by variational inference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from bnncli.errors import NumericError, UsageError
from bnncli.inference.elbo import elbo
from bnncli.inference.memory import StochasticFitPlan
from bnncli.inference.sghmc import curvature_passes, largest_curvature
from bnncli.inference.vi import ViFit, ViPlan, estimate_shortfall, fit_vi
from bnncli.integrators.mc import Mc
from bnncli.names import count_noun, percent
from bnncli.numerics.random import stream_seed
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import option
from bnncli.options.shared import GivenPriorOptions
from bnncli.parameters.prior import initial_theta
from bnncli.session import revisions as _revisions
from bnncli.session.costs import Cost
from bnncli.session.fits import FitOutput, Fitting, Method, compare_with_base, open_inputs, require_steps, run_fit
from bnncli.session.metrics import ViMetrics
from bnncli.session.produce import prepare_resumable_training
from bnncli.session.run import Result, Run
from bnncli.session.val_report import UNMEASURED, measure_on_val, val_lines

# By default: a fit to 1,000 examples of 10 features ends 100 nats short of its ELBO after 200 steps, within 0.1 after 4,000.
LEAST_STEPS, LEAST_NETWORK_STEPS = 4000, 2000


@dataclass(frozen=True)
class FitViOptions(GivenPriorOptions):
    """Options of fit-vi."""

    estimator: str | None = option(
        None,
        "Gradient estimator: draws of parameters (reparam), of layer outputs (local), or sign flips (flipout). "
        "Default: local, or reparam for other layers and ivon.",
        choices=("reparam", "local", "flipout"),
        group="Training",
        is_rare=True,
    )
    optimizer: str = option(
        "adam", "Optimizer: adam, or ivon (variational online Newton).", choices=("adam", "ivon"), group="Training"
    )
    epochs: int | None = option(
        None,
        f"Maximum passes over the training split. Default: 200 and at least {LEAST_STEPS:,} steps; other layers "
        f"20 and {LEAST_NETWORK_STEPS:,}.",
        minimum=1,
        group="Training",
    )
    batch_size: int | None = option(
        None, "Examples per step. Default: 1024; other layers 128.", minimum=1, group="Training"
    )
    learning_rate: float | None = option(
        None,
        "Initial learning rate, with cosine decay. Default: 0.01 (adam), 0.1 (ivon); other layers a tenth of that.",
        minimum=1e-12,
        group="Training",
    )
    num_draws: int | None = option(
        None, "Draws per step (reparam). Default: 4; other layers 1.", minimum=1, group="Training", is_rare=True
    )
    kl_weight: float = option(
        1.0,
        "Weight of the KL term. 1 is the ELBO; smaller values give a colder posterior.",
        minimum=1e-9,
        group="Training",
        is_rare=True,
    )
    patience: int | None = option(
        None,
        "Stop after this many rounds without improvement; with 0, never stop early. Default: 20 (adam), 0 (ivon).",
        minimum=0,
        group="Training",
        is_rare=True,
    )
    elbo_draws: int | None = option(
        None, "Draws for the final ELBO. Default: 256; other layers 32.", minimum=2, group="Training", is_rare=True
    )
    start: str = option(
        "checkpoint",
        "Start from the checkpoint's weights, or from PyTorch's initialisation (init).",
        choices=("checkpoint", "init"),
        group="Training",
        is_rare=True,
    )
    resume: bool = option(
        False, "Continue an interrupted run that had the same inputs and options.", numeric=False, group="Training"
    )
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every round.",
        minimum=0,
        numeric=False,
        group="Training",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer == "ivon" and self.estimator not in (None, "reparam"):
            raise UsageError(f"\0optimizer\0 ivon needs \0estimator\0 reparam; got {self.estimator}")
        if self.num_draws is not None and self.chosen_estimator != "reparam":
            raise UsageError(
                f"\0num_draws\0 is for \0estimator\0 reparam; {self.chosen_estimator} draws once per example"
            )

    @property
    def chosen_estimator(self) -> str:
        """Return the value given, or the default."""
        return self.estimator or ("local" if self.is_last_layer and self.optimizer == "adam" else "reparam")

    def num_epochs(self, num_examples: int) -> int:
        """Return the number given, or the default, which is larger for few examples so that there are enough steps."""
        num_batches = -(-num_examples // self.examples_a_step)
        by_default, steps = (200, LEAST_STEPS) if self.is_last_layer else (20, LEAST_NETWORK_STEPS)
        return self.epochs or max(by_default, -(-steps // num_batches))

    @property
    def examples_a_step(self) -> int:
        """Return the value given, or the default."""
        return self.batch_size or (1024 if self.is_last_layer else 128)

    @property
    def first_rate(self) -> float:
        """Return the value given, or the default."""
        by_default = 0.01 if self.optimizer == "adam" else 0.1
        return self.learning_rate or by_default * (1 if self.is_last_layer else 0.1)

    @property
    def draws_a_step(self) -> int:
        """Return the value given, or the default."""
        by_default = 4 if self.is_last_layer and self.chosen_estimator == "reparam" else 1
        return self.num_draws or by_default

    @property
    def rounds_of_patience(self) -> int:
        """Return the value given, or the default."""
        return self.patience if self.patience is not None else 0 if self.optimizer == "ivon" else 20

    @property
    def num_elbo_draws(self) -> int:
        """Return the value given, or the default."""
        return self.elbo_draws or (256 if self.is_last_layer else 32)


COMMAND = Command(
    "Fit independent Gaussians by variational inference.",
    "This is a baseline for fit-laplace and refine. Maximises the ELBO over a mean and a variance per "
    "parameter. With --layers, batch norm statistics stay fixed. Writes posteriors/vi.safetensors, or vi-all.",
    (FitViOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-vi ckpt.pt",
        "bnncli fit-vi ckpt.pt --optimizer ivon --name ivon",
        "bnncli fit-vi ckpt.pt --layers all --estimator flipout --resume",
    ),
    section="Fit",
    place=70,
)


_VECTORS = (
    24  # of P numbers: means, standard deviations, gradients, the optimizer's, and these in a state to resume from
)


def execute(run: Run, options: FitViOptions) -> Result:
    """Fit and publish. The result's metrics have the ELBO."""
    inputs = open_inputs(run, options)
    run.require_device()
    return run_fit(VariationalFit(inputs, options))


@dataclass(frozen=True)
class VariationalFit(Method):
    """One fit of independent Gaussians."""

    name: ClassVar[str] = "vi"
    algo_rev: ClassVar[int] = _revisions.FIT_VI
    options: FitViOptions

    def estimate_memory(self) -> int:
        """Return the peak memory in bytes. Raises DeviceError if it is short."""
        options = self.options
        plan = StochasticFitPlan(
            _VECTORS + 3 * options.draws_a_step,
            options.draws_a_step,
            options.examples_a_step,
            num_predicting=Mc().default_for(self.inputs.layout.num_params, is_last_layer=options.is_last_layer),
            num_judging=options.num_elbo_draws,
        )
        draws = "use a smaller \0num_draws\0, or " if options.chosen_estimator == "reparam" else "use "
        return require_steps(self.inputs, plan, method=self.name, hint=f"{draws}a smaller \0batch_size\0")

    def estimate_disk(self) -> int:
        """Return the size of the file in bytes."""
        return 24 * self.inputs.layout.num_params

    def fit(self, fitting: Fitting) -> FitOutput:
        """Fit the Gaussian and measure it."""
        return fit_gaussian(fitting, self.options)

    def summarize(self, metrics: ViMetrics) -> list[str]:
        """Return the summary for people."""
        return format_summary(metrics)


def fit_gaussian(fitting: Fitting, options: FitViOptions) -> FitOutput:
    """Fit the Gaussian and measure its ELBO and its scores on val."""
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
    resumable = prepare_resumable_training(run, fitting.request, resume=options.resume, save_every=options.save_every)
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
    metrics["shortfall"], doubt = _measure_shortfall(fitting, plan, found)
    metrics["beside_base"] = compare_with_base(fitting.base, found.gaussian)
    if doubt is not None:
        what = "ELBO" if plan.kl_weight == 1 else "objective"
        more = "more \0epochs\0 or a larger \0patience\0" if found.is_early else "more \0epochs\0"
        run.console.warn(f"the {what} {doubt} after {count_noun(len(found.history), 'epoch')}: use {more}")
    passes += len(found.history) * options.draws_a_step
    metrics |= Cost.of_fit(passes, is_last_layer=fitting.is_last_layer).to_metrics()
    if fitting.val is not None:
        metrics |= measure_on_val(run, found.gaussian, fitting.val, method="vi")
    tensors, meta = found.gaussian.to_tensors()
    tensors["history.elbo"] = found.history
    return FitOutput(
        tensors, {**meta, **fitting.describe_target("vi")}, metrics, fitting.train, publishing=resumable.publishing
    )


def _metrics(fitting: Fitting, options: FitViOptions, plan: ViPlan, found: ViFit) -> dict[str, Any]:
    """Return the ELBO from fresh draws on the full data, and metrics of the fit."""
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
        **UNMEASURED,
    }


def _measure_shortfall(fitting: Fitting, plan: ViPlan, found: ViFit) -> tuple[dict[str, Any] | None, str | None]:
    """Return how far the objective is below its maximum, where known, and why more epochs may help."""
    target, gaussian = fitting.target, found.gaussian
    if not target.is_concave:
        return None, found.doubt
    left = estimate_shortfall(
        target, gaussian, kl_weight=plan.kl_weight, generator=fitting.run.stream("fit-vi/shortfall")
    )
    is_large = left.is_large(len(gaussian.mean))
    doubt = f"is about {left.value:.3g} nats below its maximum" if is_large else None
    return {"value": left.value, "standard_error": left.standard_error, "is_large": is_large}, doubt


def format_summary(metrics: ViMetrics) -> list[str]:
    """Return the summary for people."""
    elbo = metrics["elbo"]
    lines = [
        f"ELBO {elbo['value']:.2f} +- {elbo['standard_error']:.2f} nats ({metrics['elbo_draws']} draws, full "
        "data) with independent parameters; log importance weights have standard deviation "
        f"{metrics['log_weight_sd']:.2f}"
    ]
    ended = count_noun(metrics["epochs"], "epoch")
    if metrics["ended_early"]:
        ended = f"stopped after {metrics['epochs_run']} of {ended} because it no longer improves"
    lines.append(
        f"{metrics['optimizer']}, {metrics['estimator']} gradients, learning rate {metrics['learning_rate']:.3g}, batches of {metrics['batch_size']:,}, {ended}"
    )
    if metrics["kl_weight"] != 1:
        lines.append(
            f"the divergence from the prior had weight {metrics['kl_weight']:g}, not 1, so this fit neither "
            "approximates the target nor maximises its ELBO"
        )
    lines.append(f"the median parameter has {percent(metrics['median_share_of_prior'], '.3g')} of the prior's variance")
    if metrics["beside_base"] is not None:
        beside = metrics["beside_base"]
        lines.append(
            f"compared with {beside['name']}: the median parameter has {percent(beside['median_share'], '.3g')} "
            f"of its variance, and the means differ by {beside['rms_distance']:.2g} of its standard deviations "
            f"(rms over parameters; at most {beside['largest_distance']:.2g})"
        )
    lines += val_lines(metrics)
    return lines

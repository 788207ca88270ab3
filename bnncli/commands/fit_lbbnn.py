"""fit-lbbnn: fit a latent binary network, whose weights are each in or out with a probability (Skaaret-Lund et al. 2022)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import NumericError, UsageError
from bnncli.evaluation.latent_networks import MAX_INPUTS, THRESHOLD, input_inclusions, prediction_density_rows
from bnncli.inference import memory
from bnncli.integrators.mc import Mc, affordable_draws
from bnncli.latent.factors import initial_factors, initial_model, num_params
from bnncli.latent.fit import (
    CANDIDATES,
    EstimatorSettings,
    History,
    Inputs,
    Plan,
    Scaling,
    average_divergence,
    draw_logits,
    fit_apart,
    fit_latent,
    fit_tensors,
    join_histories,
    join_models,
    largest_group,
    nll_of_repeats,
    search_epochs,
    split_repeats,
    weight_moments,
)
from bnncli.latent.model import LatentModel, SpikeAndSlab, bias_divergence
from bnncli.lazy import no_grad, torch
from bnncli.likelihoods import name_to_record, outputs_for
from bnncli.names import percent
from bnncli.numerics.random import on_device
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, option, parse_positive
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import DEFAULT_NETWORKS, LatentBinary
from bnncli.session import revisions as _revisions
from bnncli.session.costs import Cost
from bnncli.session.fits import FitOutput, Report, posterior_request, produce_posterior
from bnncli.session.inputs import Split, load_split
from bnncli.session.produce import (
    Request,
    Resumable,
    prepare_resumable_training,
    report_idle_workers,
    select_own_states,
    take_begun_states,
)
from bnncli.session.run import Result, Run
from bnncli.system.workers import Team, team
from bnncli.targets.blocks import FeatureBlocks
from bnncli.training.loop import State
from bnncli.training.shared_out import Seat

if TYPE_CHECKING:
    from torch import Tensor


# Learning rates of the thesis, by estimator, and of the inclusion logits in the first epochs.
LEARNING_RATES = {"lrt": 1e-3, "mnf": 1e-4, "concrete": 1e-4}
HEAD_RATE = 1e-2  # of a last layer alone, which the thesis does not have; falls along a cosine
HEAD_EPOCHS = 60
HEAD_STEPS = 6000  # and more epochs where they are fewer: after these the bound of 2,000 examples stood still
MEAN_RANGES = {"lrt": 0.2, "mnf": 0.01, "concrete": 0.2}
MAX_FLOW_RATE = 1e-3  # default limit for flows; at ten times as much their bound may diverge
_ONLY = {
    "variance": ("lrt", "mnf"),
    "flow_length": ("mnf",),
    "flow_hidden": ("mnf",),
    "multiplier_draws": ("mnf",),
    "flow_rate": ("mnf",),
    "temperature": ("concrete",),
    "prior_weight": ("concrete",),
}
_DEFAULTS: dict[str, Any] = {
    "variance": "exact",
    "flow_length": 2,
    "flow_hidden": "75,75,75,75",
    "multiplier_draws": 10,
    "temperature": 0.5,
    "prior_weight": 10.0,
}


@dataclass(frozen=True)
class FitLbbnnOptions(CheckedOptions):
    """Options of fit-lbbnn."""

    hidden: str | None = option(
        None,
        "Sizes of the hidden layers, such as 400,600. Default: none, which fits the last layer.",
        metavar="N,...",
        group="Model",
    )
    estimator: str = option(
        "lrt",
        "Gradient estimator: local reparameterisation (lrt, fastest), lrt with multiplicative flows (mnf), or "
        "relaxed inclusions with a learned prior (concrete).",
        choices=("lrt", "mnf", "concrete"),
        group="Model",
    )
    epochs: int | None = option(
        None, "Passes over the training split. Default: 60 or more; with \0hidden\0 250.", minimum=1, group="Training"
    )
    batch_size: int = option(100, "Examples per step.", minimum=1, group="Training")
    learning_rate: float | None = option(
        None,
        "Learning rate of Adam. Default: 0.01; with \0hidden\0 0.001 (lrt) or 0.0001 (mnf, concrete).",
        minimum=1e-12,
        group="Training",
    )
    flow_rate: float | None = option(
        None,
        "Learning rate of the multiplier flows (mnf). Default: \0learning_rate\0, at most 0.001.",
        minimum=1e-12,
        group="Training",
        is_rare=True,
    )
    schedule: str | None = option(
        None,
        "Learning rate schedule. Default: cosine; with \0hidden\0 constant.",
        choices=("constant", "cosine"),
        group="Training",
        is_rare=True,
    )
    inclusion_rate: float | None = option(
        None,
        "Learning rate of the inclusion logits during \0early_epochs\0. Default: \0learning_rate\0.",
        minimum=1e-12,
        group="Training",
        is_rare=True,
    )
    early_epochs: int | None = option(
        None,
        "Number of epochs that use \0inclusion_rate\0 and, with concrete, learn the prior. Default: 20.",
        minimum=0,
        group="Training",
        is_rare=True,
    )
    variance: str | None = option(
        None,
        "Variance of a weight in lrt and mnf: exact, or as published (alpha^2 sigma^2), which ignores the "
        "inclusion noise.",
        choices=("exact", "published"),
        group="Training",
        is_rare=True,
    )
    prior_inclusion: float = option(
        0.05, "Prior probability that a weight is included.", minimum=1e-9, maximum=1 - 1e-9, group="Prior"
    )
    slab_mean: float = option(0.0, "Prior mean of an included weight.", group="Prior", is_rare=True)
    slab_sd: str = option(
        "auto",
        "Prior standard deviation of an included weight. auto is 1 with \0hidden\0, else chosen on val.",
        metavar="NUMBER|auto",
        group="Prior",
    )
    bias_sd: float = option(1.0, "Prior standard deviation of the biases.", minimum=1e-9, group="Prior", is_rare=True)
    start_inclusion: str = option(
        "0,1",
        "Range from which the initial inclusion logits are drawn uniformly.",
        metavar="LOW,HIGH",
        group="Training",
        is_rare=True,
    )
    flow_length: int | None = option(
        None, "Coupling layers per flow (mnf). Default: 2.", minimum=1, group="Training", is_rare=True
    )
    flow_hidden: str | None = option(
        None,
        "Hidden units of a coupling network (mnf). Default: 75,75,75,75.",
        metavar="N,...",
        group="Training",
        is_rare=True,
    )
    multiplier_draws: int | None = option(
        None, "Draws of the multipliers per step (mnf). Default: 10.", minimum=1, group="Training", is_rare=True
    )
    temperature: float | None = option(
        None,
        "Temperature of the relaxed inclusions (concrete). Default: 0.5.",
        minimum=1e-6,
        group="Training",
        is_rare=True,
    )
    prior_weight: float | None = option(
        None,
        "Weight of the priors \0prior_inclusion\0 and \0slab_sd\0 in concrete, relative to the layer's weights. "
        "Default: 10.",
        minimum=0.0,
        group="Training",
        is_rare=True,
    )
    repeats: int = option(
        1,
        "Number of networks to fit in parallel from different starts. mc averages over them; prune takes the "
        "one with the best bound.",
        minimum=1,
        group="Model",
    )
    standardize: bool = option(
        False,
        "Standardise the inputs with the training split's means and standard deviations. The stored posterior still takes unstandardised inputs.",
        group="Training",
    )
    no_shuffle: bool = option(False, "Take batches in the order of the data.", group="Training", is_rare=True)
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
        _ = self.hidden_sizes, self.start_logits  # raises for bad values before any work
        _parse_sizes("\0flow_hidden\0", self.flow_hidden)
        if self.slab_sd != "auto":
            parse_positive(self.slab_sd, "\0slab_sd\0", "auto or a positive number")
        for name, estimators in _ONLY.items():
            if getattr(self, name) is not None and self.estimator not in estimators:
                whose = " and ".join(estimators)
                raise UsageError(f"\0{name}\0 is for \0estimator\0 {whose}; the estimator is {self.estimator}")
        if self.early_epochs is not None and self.inclusion_rate is None and self.estimator != "concrete":
            raise UsageError("\0early_epochs\0 has no effect without \0inclusion_rate\0 or \0estimator\0 concrete")

    def resolved(self, num_examples: int) -> FitLbbnnOptions:
        """Return the options with the estimator's defaults filled in."""
        chosen = {
            name: value
            for name, value in _DEFAULTS.items()
            if getattr(self, name) is None and self.estimator in _ONLY.get(name, (self.estimator,))
        }
        own_rate = LEARNING_RATES[self.estimator] if self.hidden_sizes else HEAD_RATE
        rate = chosen["learning_rate"] = self.learning_rate or own_rate
        enough = 250 if self.hidden_sizes else max(HEAD_EPOCHS, -(-HEAD_STEPS // -(-num_examples // self.batch_size)))
        chosen["epochs"] = self.epochs or enough
        chosen["schedule"] = self.schedule or ("constant" if self.hidden_sizes else "cosine")
        if self.estimator == "mnf":
            chosen["flow_rate"] = self.flow_rate or min(rate, MAX_FLOW_RATE)
        if self.inclusion_rate is not None or self.estimator == "concrete":
            chosen["early_epochs"] = 20 if self.early_epochs is None else self.early_epochs
        return replace(self, **chosen)

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """Return the outputs of each hidden layer."""
        return _parse_sizes("\0hidden\0", self.hidden)

    @property
    def flow_sizes(self) -> tuple[int, ...]:
        """Return the hidden units of the coupling layers' networks."""
        return _parse_sizes("\0flow_hidden\0", self.flow_hidden)

    @property
    def start_logits(self) -> tuple[float, float]:
        """Return the bounds between which inclusion logits start."""
        try:
            low, high = (float(part) for part in self.start_inclusion.split(","))
        except ValueError:
            low, high = 1.0, 0.0
        if not -80 <= low <= high <= 80:
            raise UsageError(f"\0start_inclusion\0: expected LOW,HIGH, such as 0,1; got {self.start_inclusion!r}")
        return low, high


def _parse_sizes(flag: str, text: str | None) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{flag}: expected sizes joined by commas, such as 400,600; got {text!r}")
    return tuple(int(part) for part in parts)


COMMAND = Command(
    "Fit a latent binary network, which includes each weight with some probability.",
    "Fits a spike-and-slab network by maximising a lower bound on the evidence. By default it fits the last "
    "layer, on the extracted features; with --hidden, it fits a whole network on raw inputs (extract-features "
    "--model flatten). Reports the bound and the density. Writes posteriors/lbbnn.safetensors.",
    (FitLbbnnOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli fit-lbbnn ckpt.pt",
        "bnncli fit-lbbnn mnist --hidden 400,600 --estimator lrt --epochs 250",
        "bnncli fit-lbbnn ckpt.pt --estimator mnf --name sparse --resume",
    ),
    section="Fit",
    place=100,
)


def execute(run: Run, options: FitLbbnnOptions) -> Result:
    """Fit and publish. The result's metrics have the bound's parts and the density."""
    train = load_split(run, "train").check_labeled()
    layout = _layout(options, train)
    options = options.resolved(len(train.content.features))
    val = _val(run, options, layout)
    if val is None and options.slab_sd == "auto":
        options = replace(options, slab_sd="1")
    params = {**options.params(), "sizes": list(layout.sizes), "seed": run.compute.seed}
    params |= name_to_record(layout.likelihood_name)
    request = posterior_request(
        run,
        "lbbnn",
        params=params,
        algo_rev=_revisions.FIT_LBBNN,
        sources=[train.source] + ([val.source] if val is not None else []),
        checkpoint=train.checkpoint,
        estimated_bytes=lambda: 4 * options.repeats * (3 * layout.num_weights + 2 * layout.num_biases),
    )

    def fit() -> FitOutput:
        return fit_networks(run, options, train, val, layout=layout, request=request)

    return produce_posterior(run, request, fit, _report)


def _layout(options: FitLbbnnOptions, train: Split) -> NetworkLayout:
    """Return the layout of the outputs: that of the network's head or, without one, what the classes need."""
    head, num_classes = train.layout, len(train.content.classes)
    has_own = train.content.head_weight is not None or not head.likelihood.is_exclusive
    outputs = head.num_outputs if has_own else outputs_for(num_classes)
    return NetworkLayout((head.num_features, *options.hidden_sizes, outputs), head.likelihood_name)


def _val(run: Run, options: FitLbbnnOptions, layout: NetworkLayout) -> Split | None:
    """Return the split that chooses the slab's standard deviation; None where that is given, learnt, or 1."""
    if options.slab_sd != "auto" or options.estimator == "concrete" or layout.num_layers > 1:
        return None
    val = load_split(run, "val") if run.folder.features("val").is_file() else None
    if val is not None and val.content.labels is not None and len(val.content.labels):
        return val
    run.console.info("no labelled val split to choose the slab's standard deviation on; using 1 (--slab-sd)")
    return None


class TrainedRepeats(NamedTuple):
    """The trained networks. `seconds` is the time of one epoch of all repeats."""

    model: LatentModel
    history: History
    seconds: float


class TrainingData(NamedTuple):
    """The data of a fit: features (N, D) on any device, labels (N,) on the run's device, and the scaling of the inputs."""

    features: Tensor
    labels: Tensor
    scaling: Scaling | None

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of inputs (n, D) and their labels (n,)."""
        for rows, inputs in Inputs(FeatureBlocks(self.features, self.labels.device), self.scaling).blocks():
            yield inputs, self.labels[rows]


@dataclass(frozen=True)
class LatentTraining:
    """The networks to fit and their data."""

    run: Run
    options: FitLbbnnOptions
    layout: NetworkLayout
    data: TrainingData
    plan: Plan

    def search(self, val: Split) -> list[dict[str, float]]:
        """Return the NLL on val of each candidate for the slab's standard deviation, after a short fit."""
        plan = replace(self.plan, epochs=search_epochs(self.plan.epochs), schedule="cosine")
        start, others = self._start(CANDIDATES, num_repeats=len(CANDIDATES)), team()

        def nll(model: LatentModel, apart: str, **report: Any) -> Tensor:
            model, _ = self._fit(model, plan, f"fit-lbbnn/search{apart}", what="slab search", **report)
            features, labels = val.resident(self.run.device), val.labels(self.run.device)
            generator = self.run.stream(f"fit-lbbnn/val{apart}")
            return nll_of_repeats(model, features, labels, generator, scaling=self.data.scaling)

        def nll_apart(model: LatentModel, first: int, seat: Seat) -> Mapping[str, Tensor]:
            return {"nll": nll(model, f"/{first}", progress=seat)}

        if others is None:
            found = nll(start, "", progress=self.run.console)
        else:
            parts = fit_apart(others, start, nll_apart, what="slab search", **self._steps(plan))
            found = torch.cat([part["nll"] for part in parts])
        return [{"slab_sd": sd, "val_nll": value} for sd, value in zip(CANDIDATES, found.tolist(), strict=True)]

    def fit(self, slab_sd: float, state: dict[str, Tensor] | None, resumable: Resumable) -> TrainedRepeats:
        """Fit the networks from their start, or from the state of an earlier run, which workers that share it consume."""
        start, others, begin = self._start([slab_sd], num_repeats=self.options.repeats), team(), time.monotonic()
        if others is not None:
            return self._fit_apart(others, start, state, resumable)
        model, history = self._fit(
            start, self.plan, "fit-lbbnn/train", state=state, save=resumable.save, progress=self.run.console
        )
        done = 0 if state is None else _num_epochs(state)
        return TrainedRepeats(model, history, (time.monotonic() - begin) / max(1, self.plan.epochs - done))

    def _fit_apart(
        self, others: Team, start: LatentModel, state: dict[str, Tensor] | None, resumable: Resumable
    ) -> TrainedRepeats:
        begin, groups = time.monotonic(), split_repeats(self.layout, start.num_repeats, start.device)
        report_idle_workers(self.run, others, len(groups))
        begun = take_begun_states(state)
        left = len(groups) * self.plan.epochs - sum(map(_num_epochs, begun.values()))
        stored = select_own_states(resumable, begun, others, len(groups))

        def fit(model: LatentModel, first: int, seat: Seat) -> Mapping[str, Tensor]:
            stream = f"fit-lbbnn/train/{first}"
            return fit_tensors(*self._fit(model, self.plan, stream, state=seat.state, save=seat.save, progress=seat))

        parts = fit_apart(others, start, fit, what="fit", stored=stored, **self._steps(self.plan))
        model = join_models(start, parts, has_learnt_prior=self.plan.hyper_prior and self.plan.early_epochs > 0)
        return TrainedRepeats(model, join_histories(parts), (time.monotonic() - begin) / max(1.0, left / len(groups)))

    def _start(self, slab_sds: Sequence[float], *, num_repeats: int) -> LatentModel:
        """Return the start of the fit, or of the search before it, both from the same random stream."""
        generator = self.run.stream("fit-lbbnn/start")
        return build_start(
            self.options, self.layout, slab_sds, num_repeats=num_repeats, generator=generator, device=self.run.device
        )

    def _fit(self, model: LatentModel, plan: Plan, stream: str, **report: Any) -> tuple[LatentModel, History]:
        data, generator = self.data, self.run.stream(stream)
        return fit_latent(
            model, data.features, data.labels, plan, generator=generator, scaling=data.scaling, **report
        )  # fmt: skip

    def _steps(self, plan: Plan) -> dict[str, Any]:
        num_batches = -(-len(self.data.labels) // plan.batch_size)
        return {"num_steps": plan.epochs * num_batches, "progress": self.run.console}


def fit_networks(
    run: Run, options: FitLbbnnOptions, train: Split, val: Split | None, *, layout: NetworkLayout, request: Request
) -> FitOutput:
    """Fit the networks, and measure the bound, the density and the scores on val."""
    check_memory(options, layout, run.device, num_examples=len(train.content.features), is_searched=val is not None)
    features = train.resident(run.device)
    data = TrainingData(
        features, train.labels(run.device), Scaling.of(features, run.device) if options.standardize else None
    )
    plan = make_plan(options, len(features))
    _warn(run, warn_of_short_plan(options, plan, len(features)))
    training = LatentTraining(run, options, layout, data, plan)
    resumable = _open_resumable(run, options, request, layout)
    with resumable.hint():
        state = resumable.restore()
        search = None if val is None else training.search(val)
        model, history, seconds = training.fit(_choose_slab_sd(options, search), state, resumable)
    posterior = _posterior(run, model, history)
    if data.scaling is not None:
        posterior = replace(posterior, shift=data.scaling.shift, scale=data.scaling.scale)
    # What is drawn of the other repeats is not used; in one process it is drawn all the same, and numbers stay what they were.
    measured = posterior if team() is None else posterior.of_best()
    metrics = measure(run, measured, data, variance=options.variance or "exact", estimator=options.estimator)
    passes = choose_epochs(options) * options.repeats * (options.multiplier_draws or 1)
    if val is not None:
        passes += search_epochs(choose_epochs(options)) * len(CANDIDATES)
    metrics |= Cost.of_fit(passes, is_last_layer=True).to_metrics()
    metrics |= {
        "slab_sd_search": search,
        "log_likelihood_of_shares": compute_guessing_likelihood(data.labels, layout.num_classes),
        "rise": compute_rise(history, posterior.best),
    }
    _warn(run, warn_of_rise(metrics["rise"], plan.schedule))
    _warn(run, warn_of_poor_fit(metrics, features, is_standardized=options.standardize))
    tensors, meta = posterior.to_tensors()
    tensors |= history.tensors()
    meta |= {
        "method": "lbbnn",
        "estimator": options.estimator,
        "variance": options.variance,
        "param_layout": layout.to_json(),
        "default_samples": default_samples(layout, options.repeats),
    }
    told = {"seconds_per_epoch": seconds}
    return FitOutput(tensors, meta, metrics, train, told=told, publishing=resumable.publishing)


def check_memory(
    options: FitLbbnnOptions,
    layout: NetworkLayout,
    device: torch.device | str,
    *,
    num_examples: int,
    is_searched: bool = False,
) -> None:
    """Raise DeviceError where the fit, or the search before it, does not fit in memory."""
    sizes = {"batch_size": min(options.batch_size, num_examples), "num_flow_params": 0}
    if options.estimator == "mnf":
        length, hidden = options.flow_length or 2, options.flow_sizes
        sizes["num_flow_params"] = sum(num_params(n, length=length, hidden=hidden) for _, n in layout.shapes)
    smaller = ["--hidden layers"] * bool(options.hidden) + ["--flow-hidden"] * (options.estimator == "mnf")
    hint = f"use smaller {', '.join([*smaller, '--batch-size'])}"
    fits = [(options.repeats, "use fewer --repeats" if options.repeats > 1 else hint)]
    if is_searched:
        fits.append((len(CANDIDATES), "give --slab-sd as a number; its search fits ten networks"))
    for repeats, advice in fits:
        at_once = None if team() is None else largest_group(layout, repeats, torch.device(device))
        memory.require_latent(layout, device, num_repeats=repeats, most_at_once=at_once, hint=advice, **sizes)


def make_plan(options: FitLbbnnOptions, num_examples: int) -> Plan:
    """Return the plan of a fit to `num_examples` with resolved options."""
    return Plan(
        epochs=choose_epochs(options),
        batch_size=min(options.batch_size, num_examples),
        learning_rate=options.learning_rate or HEAD_RATE,
        schedule=options.schedule or "constant",
        inclusion_rate=options.inclusion_rate,
        flow_rate=options.flow_rate,
        early_epochs=options.early_epochs or 0,
        hyper_prior=options.estimator == "concrete",
        prior_weight=Plan.prior_weight if options.prior_weight is None else options.prior_weight,
        settings=EstimatorSettings(
            options.estimator,
            options.variance or "exact",
            options.temperature or EstimatorSettings().temperature,
            options.multiplier_draws or EstimatorSettings().multiplier_draws,
        ),
        shuffles=not options.no_shuffle,
    )


def _warn(run: Run, warning: str | None) -> None:
    if warning is not None:
        run.console.warn(warning)


def warn_of_short_plan(options: FitLbbnnOptions, plan: Plan, num_examples: int) -> str | None:
    """Return a warning where a plan's steps cannot move an inclusion logit from its start to the prior; else None."""
    high = options.start_logits[1]
    prior = math.log(options.prior_inclusion / (1 - options.prior_inclusion))
    need, farthest = high - prior, compute_reach(plan, num_examples)
    if farthest >= need * (1 - 1e-9):  # sums round
        return None
    steps = plan.epochs * math.ceil(num_examples / plan.batch_size)
    return (
        f"{steps} steps move an inclusion logit by at most {farthest:.2g}, but getting from {high:g} to the "
        f"prior's {prior:.2g} takes {need:.2g}, so density and inclusions will reflect the start, not the data; "
        f"use at least --epochs {math.ceil(plan.epochs * need / farthest - 1e-9)}, or a larger --learning-rate "
        "or --inclusion-rate"
    )


def compute_reach(plan: Plan, num_examples: int) -> float:
    """Return how far an inclusion logit can move at most. Adam's steps are about as long as its learning rate."""
    num_batches = math.ceil(num_examples / plan.batch_size)
    early = min(plan.early_epochs, plan.epochs)
    total = 0.0
    for epoch in range(plan.epochs):
        is_early = epoch < early and plan.inclusion_rate is not None
        rate = plan.inclusion_rate if is_early and plan.inclusion_rate is not None else plan.learning_rate
        course = 0.5 * (1 + math.cos(math.pi * (epoch + 0.5) / plan.epochs)) if plan.schedule == "cosine" else 1.0
        total += rate * course * num_batches
    return total


def _num_epochs(state: State) -> int:
    """Return the epochs done in a state of fit_latent."""
    return len(state.get("history.density", ()))


def build_start(
    options: FitLbbnnOptions,
    layout: NetworkLayout,
    slab_sds: Sequence[float],
    *,
    num_repeats: int,
    generator: torch.Generator,
    device: torch.device,
) -> LatentModel:
    """Return the start of a fit, on the device, with one standard deviation for all repeats or one for each."""
    factors = initial_factors(
        layout,
        num_repeats,
        generator,
        mean_range=MEAN_RANGES[options.estimator],
        logit_range=options.start_logits,
        device=device,
    )
    prior = SpikeAndSlab.constant(
        layout.num_layers,
        inclusion=options.prior_inclusion,
        slab_mean=options.slab_mean,
        bias_sd=options.bias_sd,
    ).to(device)
    sds = torch.tensor(slab_sds, dtype=torch.float64, device=device).unsqueeze(1)
    prior = replace(prior, slab_sd=sds.expand(-1, layout.num_layers).clone())
    multipliers = []
    if options.estimator == "mnf":
        multipliers = [
            initial_model(
                inputs,
                num_repeats,
                generator,
                length=options.flow_length or 2,
                hidden=options.flow_sizes,
                device=device,
            )
            for _, inputs in layout.shapes
        ]
    return LatentModel(layout, factors, prior, tuple(multipliers))


def _open_resumable(run: Run, options: FitLbbnnOptions, request: Request, layout: NetworkLayout) -> Resumable:
    """Return the resumable state of the fit. Workers that share the repeats each have the state of theirs."""
    also = {}
    if team() is not None:
        groups = split_repeats(layout, options.repeats, run.device)
        also = {"groups": ",".join(str(part.stop - part.start) for part in groups)}
    return prepare_resumable_training(run, request, resume=options.resume, save_every=options.save_every, also=also)


def _choose_slab_sd(options: FitLbbnnOptions, search: list[dict[str, float]] | None) -> float:
    """Return the slab's standard deviation: the best on val, or as given."""
    return float(options.slab_sd) if search is None else min(search, key=lambda one: one["val_nll"])["slab_sd"]


def _posterior(run: Run, model: LatentModel, history: History) -> LatentBinary:
    """Return the posterior. Its best network is the repeat with the highest bound over the last epochs."""
    best = int(history.bound()[-5:].mean(dim=0).argmax())
    with torch.no_grad():
        means = model.multiplier_means(run.stream("fit-lbbnn/multipliers"))
    return LatentBinary(model, tuple(means), best)


@no_grad
def measure(run: Run, posterior: LatentBinary, data: TrainingData, *, variance: str, estimator: str) -> dict[str, Any]:
    """Measure the parts of the best repeat's bound on all data, in nats, and the density of its layers.

    The expected log likelihood is that under exact draws of the weights; beside it, where activations were drawn in
    training, that under such draws: their difference is what the Gaussian approximation of activations is off. The flow's
    part is of exact draws too.
    """
    model, best = posterior.model, posterior.best
    generator = on_device(run.stream("fit-lbbnn/bound"), run.device)
    exact = _evaluate_by_weights(run, posterior, data, generator)
    metrics: dict[str, Any] = {"estimator": estimator, "expected_log_likelihood": _estimate(exact)}
    if estimator != "concrete":
        drawn = _evaluate_by_activations(run, posterior, data, variance, generator)
        metrics["expected_log_likelihood_of_activations"] = _estimate(drawn)
    weight = average_divergence(model, generator)[best]
    factors = model.factors
    bias = bias_divergence(factors.bias_mean, factors.bias_rho, model.prior, model.layout)[best].double()
    flows = _flow_divergences(run, posterior, generator)
    flow = flows.sum(dim=0) / max(1, len(flows))
    parts = zip(weight.tolist(), bias.tolist(), flow.tolist(), strict=True)
    metrics["divergence"] = [{"weights": w, "biases": b, "flow": f} for w, b, f in parts]
    total = float(weight.sum() + bias.sum() + flow.sum())
    value = metrics["expected_log_likelihood"]["value"] - total
    if not math.isfinite(value):
        raise NumericError("the bound is not finite", hint="use a smaller --learning-rate")
    error = metrics["expected_log_likelihood"]["standard_error"]
    if len(flows):
        error = math.hypot(error, _estimate(flows.sum(dim=1))["standard_error"])
    metrics["bound"] = {"value": value, "standard_error": error}
    metrics |= compute_densities(posterior)
    if model.layout.sizes[1:] == (1,) and model.layout.num_features <= MAX_INPUTS:
        metrics["inputs"] = input_inclusions(factors.inclusion.detach())
    metrics["prior_inclusion"] = model.prior.inclusion[min(best, len(model.prior.inclusion) - 1)].tolist()
    metrics["slab_sd"] = model.prior.slab_sd[min(best, len(model.prior.slab_sd) - 1)].tolist()
    return metrics


NUM_PASSES = 8  # passes over the data for the expected log likelihood


def _evaluate_by_weights(run: Run, posterior: LatentBinary, data: TrainingData, generator: torch.Generator) -> Tensor:
    """Return the log likelihood of all data, (S,), under exact draws of the weights."""
    model = posterior.model
    repeats = torch.full((NUM_PASSES,), posterior.best, device=model.device)
    theta = model.layout.join(*model.draw_weights(repeats, generator))
    total = torch.zeros(NUM_PASSES, dtype=torch.float64, device=model.device)
    for features, labels in data.blocks():
        logits = model.layout.logits(features, theta)
        total += model.layout.likelihood.log_likelihoods(logits, labels).sum(dim=1)
        run.console.poll()
    return total


def _estimate(values: Tensor) -> dict[str, float]:
    return {"value": float(values.mean()), "standard_error": float(values.std()) / math.sqrt(len(values))}


def _evaluate_by_activations(
    run: Run, posterior: LatentBinary, data: TrainingData, variance: str, generator: torch.Generator
) -> Tensor:
    """Return the log likelihood of all data, (S,), under drawn activations."""
    model = posterior.model.of_repeats(
        slice(posterior.best, posterior.best + 1)
    )  # of all repeats at once there may be no room
    weight = weight_moments(model, variance)
    total = []
    for _ in range(NUM_PASSES):
        one = torch.zeros((), dtype=torch.float64, device=model.device)
        for features, labels in data.blocks():
            logits = draw_logits(model, features, weight, generator)
            one += model.layout.likelihood.log_likelihoods(logits, labels).sum(dim=1)[0]
            run.console.poll()
        total.append(one)
    return torch.stack(total)


FLOW_DRAWS = 64  # of multipliers and weights, NUM_PASSES at once


def _flow_divergences(run: Run, posterior: LatentBinary, generator: torch.Generator) -> Tensor:
    """Return log q(z) - log r(z | w) of each layer, (FLOW_DRAWS, L) float64, under exact draws of z and w; no rows without multipliers."""
    model, best = posterior.model, posterior.best
    parts = [part.at(best) for part in model.multipliers]
    repeats = torch.full((NUM_PASSES,), best, device=model.device)
    found = []
    for _ in range(FLOW_DRAWS // NUM_PASSES if parts else 0):
        sizes = [(1, NUM_PASSES, inputs) for _, inputs in model.layout.shapes]
        noises = [torch.randn(size, generator=generator, device=generator.device).to(model.device) for size in sizes]
        draws = [part.draw(noise) for part, noise in zip(parts, noises, strict=True)]
        weights, _ = model.draw_weights(repeats, generator, [z[0] for z, _ in draws])
        views = model.layout.weights(weights)
        found.append(
            torch.stack(
                [
                    log_q - part.log_auxiliary_at(z, (view @ part.readout[0]).unsqueeze(0))
                    for part, (z, log_q), view in zip(parts, draws, views, strict=True)
                ],
                dim=2,
            )[0].double()
        )
        run.console.poll()
    return torch.cat(found) if found else torch.zeros(0, model.layout.num_layers, dtype=torch.float64)


def compute_densities(posterior: LatentBinary) -> dict[str, Any]:
    """Return the fraction of weights that are in, by layer and overall: expected, and in the median probability model."""
    layout, logit = posterior.model.layout, posterior.model.factors.logit[posterior.best].detach()
    views = layout.weights(logit)
    expected, *by_layer = [row["value"] for row in prediction_density_rows([torch.sigmoid(view) for view in views])]
    median, *median_by_layer = [row["value"] for row in prediction_density_rows([view > 0 for view in views])]
    return {
        "density": expected,
        "density_by_layer": by_layer,
        "median_density": median,
        "median_density_by_layer": median_by_layer,
        "num_weights": [view.numel() for view in views],
    }


def choose_epochs(options: FitLbbnnOptions) -> int:
    """Return the number of epochs of resolved options."""
    assert options.epochs is not None  # resolved
    return options.epochs


def compute_guessing_likelihood(labels: Tensor, num_classes: int) -> float:
    """Return the log likelihood, in nats, of labels (N,) or (N, C) under the frequencies of the classes."""
    if labels.ndim == 2:
        there = labels.cpu().double().sum(dim=0)
        rest = len(labels) - there
        return float(
            (torch.special.xlogy(there, there / len(labels)) + torch.special.xlogy(rest, rest / len(labels))).sum()
        )
    counts = torch.bincount(labels.cpu(), minlength=num_classes).double()
    return float(torch.special.xlogy(counts, counts / counts.sum()).sum())


MIN_EPOCHS = 10  # with fewer, a tenth of them is none


def compute_rise(history: History, best: int) -> float | None:
    """Return the relative rise of the bound over the last tenth of the epochs; None for fewer than ten epochs."""
    bound = history.bound()[:, best]
    tenth = len(bound) // 10
    if len(bound) < MIN_EPOCHS or float(bound[-1]) == 0:
        return None
    return float((bound[-tenth:].mean() - bound[-2 * tenth : -tenth].mean()) / bound[-1].abs())


STEEP = 0.1  # relative rise over the last tenth of the epochs that shows a bound far from its end


def warn_of_rise(share: float | None, schedule: str) -> str | None:
    """Return a warning where the bound still rises steeply at the end of a fit at a constant learning rate; else None."""
    if share is None or share < STEEP or schedule != "constant":
        return None
    return f"the bound still rose by {percent(share, '.0f')} over the last tenth of the epochs: use more --epochs"


LARGE = (
    30.0  # mean or standard deviation of an input, from which learning rates and priors that are made for 1 fit badly
)


def warn_of_poor_fit(metrics: dict[str, Any], features: Tensor, *, is_standardized: bool) -> str | None:
    """Return a warning where drawn networks explain the training labels worse than the classes' frequencies; else None."""
    value, guess, count = (
        metrics["expected_log_likelihood"]["value"],
        metrics["log_likelihood_of_shares"],
        len(features),
    )
    if value >= guess:
        return None
    found = (
        f"the sampled networks explain the training labels worse ({value / count:.3g} nats per example) than the "
        f"class frequencies ({guess / count:.3g})"
    )
    scaling = Scaling.of(features, features.device)
    largest = float(torch.maximum(scaling.shift.abs(), scaling.scale).max())
    if not is_standardized and largest > LARGE:
        return f"{found}: inputs have means or standard deviations of up to {largest:.2g}; use --standardize"
    return f"{found}: use more --epochs or another --learning-rate"


def default_samples(layout: NetworkLayout, num_repeats: int) -> int:
    """Return the default number of draws of a prediction: equally many from each repeat, and as for other posteriors for a head."""
    wanted = DEFAULT_NETWORKS if layout.num_layers > 1 else Mc().default_samples
    return num_repeats * math.ceil(affordable_draws(wanted, layout.num_params) / num_repeats)


def _report(meta: Mapping[str, Any]) -> Report:
    return Report(meta["metrics"], format_summary(meta["metrics"]))


def format_summary(metrics: dict[str, Any]) -> list[str]:
    """Return the summary for people."""
    if not metrics:
        return []
    bound, fit = metrics["bound"], metrics["expected_log_likelihood"]
    lines = [
        f"bound {bound['value']:.1f} +- {bound['standard_error']:.1f} nats: expected log likelihood {fit['value']:.1f}, "
        f"divergence {fit['value'] - bound['value']:.1f}"
    ]
    if metrics.get("log_likelihood_of_shares") is not None:
        lines[0] += f"; log likelihood of the class frequencies {metrics['log_likelihood_of_shares']:.1f}"
    if metrics.get("rise") is not None:
        lines.append(f"change of the bound over the last tenth of the epochs: {percent(metrics['rise'], '+.1f')}")
    layers = ", ".join(percent(share) for share in metrics["density_by_layer"])
    lines.append(
        f"density {percent(metrics['density'])} (by layer {layers}); {percent(metrics['median_density'])} in the "
        "median probability model"
    )
    if "inputs" in metrics:
        lines.append(_inputs_line(metrics["inputs"]))
    if metrics.get("slab_sd_search"):
        best = min(metrics["slab_sd_search"], key=lambda one: one["val_nll"])
        lines.append(
            f"slab standard deviation {best['slab_sd']:.3g}, chosen by val NLL ({best['val_nll']:.4f} in the search)"
        )
    if "seconds_per_epoch" in metrics:
        lines.append(f"{metrics['seconds_per_epoch']:.2f} s per epoch")
    return lines


_NAMED = 20  # inputs listed in the summary


def _inputs_line(inputs: list[dict[str, Any]]) -> str:
    """List the inputs by their mean inclusion probability, numbered from 1, the most probable first."""
    found = sorted((part for part in inputs if part["mean"] > THRESHOLD), key=lambda part: -part["mean"])
    named = [f"{part['input']} ({part['mean']:.2f})" for part in found[:_NAMED]]
    if len(found) > _NAMED:
        named.append(f"{len(found) - _NAMED} more")
    return f"included inputs, of {len(inputs)} (mean inclusion probability): {', '.join(named) or 'none'}"

"""The work of fit-lbbnn: a slab for the weights, networks that learn which of them are in, and what that achieved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bnncli.inference import memory
from bnncli.integrators.mc import Mc, affordable_draws
from bnncli.latent.factors import initial_factors
from bnncli.latent.fit import Plan, fit_latent
from bnncli.latent.history import History
from bnncli.latent.model import LatentModel
from bnncli.latent.multiplier import initial_model, num_params
from bnncli.latent.prior import SpikeAndSlab
from bnncli.latent.scaling import Scaling
from bnncli.latent.search import CANDIDATES, nll_of_repeats, search_epochs
from bnncli.latent.steps import EstimatorSettings
from bnncli.options import FitLbbnnOptions
from bnncli.options.fit_lbbnn import HEAD_RATE, MEAN_RANGES
from bnncli.posteriors.latent_binary import DEFAULT_NETWORKS, LatentBinary
from bnncli.run.cost import Cost
from bnncli.run.inputs import Split
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted
from bnncli.run.resumable import resumable_training
from bnncli.run.session import Run
from bnncli.stages.fit_lbbnn.report import TrainingData, measure
from bnncli.stages.fit_lbbnn.underfitting import guessing, poor_fit, rise, short_plan, still_rising
from bnncli.theta.network import NetworkLayout


def _start(
    run: Run, options: FitLbbnnOptions, layout: NetworkLayout, slab_sds: Sequence[float], *, num_repeats: int
) -> LatentModel:
    """What a fit starts from, on the device; one standard deviation for all repeats, or one for each."""
    generator = run.stream("fit-lbbnn/start")
    factors = initial_factors(
        layout,
        num_repeats,
        generator,
        mean_range=MEAN_RANGES[options.estimator],
        logit_range=options.start_logits,
        device=run.device,
    )
    prior = SpikeAndSlab.constant(
        layout.num_layers,
        inclusion=options.prior_inclusion,
        slab_mean=options.slab_mean,
        bias_sd=options.bias_sd,
    ).to(run.device)
    sds = torch.tensor(slab_sds, dtype=torch.float64, device=run.device).unsqueeze(1)
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
                device=run.device,
            )
            for _, inputs in layout.shapes
        ]
    return LatentModel(layout, factors, prior, tuple(multipliers))


def _check_memory(
    run: Run, options: FitLbbnnOptions, layout: NetworkLayout, *, num_examples: int, is_searched: bool
) -> None:
    """Pass when the fit, and the search before it, have room. Raises DeviceError otherwise."""
    sizes = {"batch_size": min(options.batch_size, num_examples), "num_flow_params": 0}
    if options.estimator == "mnf":
        length, hidden = options.flow_length or 2, options.flow_sizes
        sizes["num_flow_params"] = sum(num_params(n, length=length, hidden=hidden) for _, n in layout.shapes)
    smaller = ["--hidden layers"] * bool(options.hidden) + ["--flow-hidden"] * (options.estimator == "mnf")
    hint = f"use smaller {', '.join([*smaller, '--batch-size'])}"
    fits = [(options.repeats, "use fewer --repeats" if options.repeats > 1 else hint)]
    if is_searched:
        fits.append((len(CANDIDATES), "give the --slab-sd as a number; its search fits ten networks"))
    for repeats, advice in fits:
        memory.require_latent(layout, run.device, num_repeats=repeats, hint=advice, **sizes)


def _epochs(options: FitLbbnnOptions) -> int:
    assert options.epochs is not None  # resolved
    return options.epochs


def _plan(options: FitLbbnnOptions, num_examples: int) -> Plan:
    return Plan(
        epochs=_epochs(options),
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


def fit(
    run: Run, options: FitLbbnnOptions, train: Split, val: Split | None, *, layout: NetworkLayout, request: Request
) -> Fitted:
    """The networks, with what is told of them."""
    _check_memory(run, options, layout, num_examples=len(train.content.features), is_searched=val is not None)
    features = train.resident(run.device)
    data = TrainingData(
        features, train.labels(run.device), Scaling.of(features, run.device) if options.standardize else None
    )
    plan = _plan(options, len(features))
    _warn(run, short_plan(options, plan, len(features)))
    resumable = resumable_training(run, request, resume=options.resume, save_every=options.save_every)
    with resumable.hint():
        state = resumable.restore()
        slab_sd, search = _slab_sd(run, options, data, val, layout)
        start, done = time.monotonic(), 0 if state is None else len(state.get("history.density", ()))
        model, history = fit_latent(
            _start(run, options, layout, [slab_sd], num_repeats=options.repeats),
            data.features,
            data.labels,
            plan,
            generator=run.stream("fit-lbbnn/train"),
            state=state,
            save=resumable.save,
            scaling=data.scaling,
            progress=run.console,
        )
        seconds = (time.monotonic() - start) / max(1, _epochs(options) - done)
    posterior = _posterior(run, model, history)
    if data.scaling is not None:
        posterior = replace(posterior, shift=data.scaling.shift, scale=data.scaling.scale)
    metrics = measure(run, posterior, data, variance=options.variance or "exact", estimator=options.estimator)
    passes = _epochs(options) * options.repeats * (options.multiplier_draws or 1)
    if val is not None:
        passes += search_epochs(_epochs(options)) * len(CANDIDATES)
    metrics |= Cost.of_fit(passes, is_last_layer=True).to_metrics()
    metrics |= {
        "slab_sd_search": search,
        "log_likelihood_of_shares": guessing(data.labels, layout.num_classes),
        "rise": rise(history, posterior.best),
    }
    _warn(run, still_rising(metrics["rise"], plan.schedule))
    _warn(run, poor_fit(metrics, features, is_standardized=options.standardize))
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
    return Fitted(tensors, meta, metrics, train, told=told, publishing=resumable.publishing)


def _warn(run: Run, warning: str | None) -> None:
    if warning is not None:
        run.console.warn(warning)


def _slab_sd(
    run: Run, options: FitLbbnnOptions, data: TrainingData, val: Split | None, layout: NetworkLayout
) -> tuple[float, list[dict[str, float]] | None]:
    """The slab's standard deviation, and where it was searched for the val NLL of each candidate."""
    if val is None:
        return float(options.slab_sd), None
    model = _start(run, options, layout, CANDIDATES, num_repeats=len(CANDIDATES))
    plan = replace(_plan(options, len(data.labels)), epochs=search_epochs(_epochs(options)), schedule="cosine")
    model, _ = fit_latent(
        model,
        data.features,
        data.labels,
        plan,
        generator=run.stream("fit-lbbnn/search"),
        scaling=data.scaling,
        progress=run.console,
        what="slab search",
    )
    nll = nll_of_repeats(
        model,
        val.resident(run.device),
        val.labels(run.device),
        run.stream("fit-lbbnn/val"),
        scaling=data.scaling,
    )
    found = [{"slab_sd": sd, "val_nll": value} for sd, value in zip(CANDIDATES, nll.tolist(), strict=True)]
    return min(found, key=lambda one: one["val_nll"])["slab_sd"], found


def _posterior(run: Run, model: LatentModel, history: History) -> LatentBinary:
    """The posterior; one network stands for all where the bound was highest over the last epochs."""
    best = int(history.bound()[-5:].mean(dim=0).argmax())
    with torch.no_grad():
        means = model.multiplier_means(run.stream("fit-lbbnn/multipliers"))
    return LatentBinary(model, tuple(means), best)


def default_samples(layout: NetworkLayout, num_repeats: int) -> int:
    """Draws of a prediction when nobody says: as many of each repeat, of a head as of any other posterior's."""
    wanted = DEFAULT_NETWORKS if layout.num_layers > 1 else Mc().default_samples
    return num_repeats * math.ceil(affordable_draws(wanted, layout.num_params) / num_repeats)

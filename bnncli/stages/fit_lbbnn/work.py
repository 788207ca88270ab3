"""The work of fit-lbbnn: a slab for the weights, networks that learn which of them are in, and what that achieved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bnncli.integrators.mc import Mc, affordable_draws
from bnncli.latent.fit import fit_latent
from bnncli.latent.history import History
from bnncli.latent.model import LatentModel
from bnncli.latent.scaling import Scaling
from bnncli.latent.search import CANDIDATES, nll_of_repeats, search_epochs
from bnncli.options import FitLbbnnOptions
from bnncli.posteriors.latent_binary import DEFAULT_NETWORKS, LatentBinary
from bnncli.run.cost import Cost
from bnncli.run.inputs import Split
from bnncli.run.produce import Request
from bnncli.run.produce_posterior import Fitted
from bnncli.run.resumable import resumable_training
from bnncli.run.session import Run
from bnncli.stages.fit_lbbnn.plan import check_memory, epochs_of, plan_of, start_of
from bnncli.stages.fit_lbbnn.report import TrainingData, measure
from bnncli.stages.fit_lbbnn.underfitting import guessing, poor_fit, rise, short_plan, still_rising
from bnncli.theta.network import NetworkLayout


def _start(
    run: Run, options: FitLbbnnOptions, layout: NetworkLayout, slab_sds: Sequence[float], *, num_repeats: int
) -> LatentModel:
    """What the fit, or the search before it, starts from: both from the same stream."""
    generator = run.stream("fit-lbbnn/start")
    return start_of(options, layout, slab_sds, num_repeats=num_repeats, generator=generator, device=run.device)


def fit(
    run: Run, options: FitLbbnnOptions, train: Split, val: Split | None, *, layout: NetworkLayout, request: Request
) -> Fitted:
    """The networks, with what is told of them."""
    check_memory(options, layout, run.device, num_examples=len(train.content.features), is_searched=val is not None)
    features = train.resident(run.device)
    data = TrainingData(
        features, train.labels(run.device), Scaling.of(features, run.device) if options.standardize else None
    )
    plan = plan_of(options, len(features))
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
        seconds = (time.monotonic() - start) / max(1, epochs_of(options) - done)
    posterior = _posterior(run, model, history)
    if data.scaling is not None:
        posterior = replace(posterior, shift=data.scaling.shift, scale=data.scaling.scale)
    metrics = measure(run, posterior, data, variance=options.variance or "exact", estimator=options.estimator)
    passes = epochs_of(options) * options.repeats * (options.multiplier_draws or 1)
    if val is not None:
        passes += search_epochs(epochs_of(options)) * len(CANDIDATES)
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
    plan = replace(plan_of(options, len(data.labels)), epochs=search_epochs(epochs_of(options)), schedule="cosine")
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

"""The work of fit-lbbnn: a slab for the weights, networks that learn which of them are in, and what that achieved."""

from __future__ import annotations

import math
from dataclasses import replace

from bnncli.integrators.mc import Mc, affordable_draws
from bnncli.latent.fit import CANDIDATES, History, Scaling, groups_of, search_epochs
from bnncli.latent.model import LatentModel
from bnncli.lazy import torch
from bnncli.options.fit_lbbnn import FitLbbnnOptions
from bnncli.parameters.layouts import NetworkLayout
from bnncli.posteriors.latent_binary import DEFAULT_NETWORKS, LatentBinary
from bnncli.session.inputs import Split
from bnncli.session.posteriors import Cost, Fitted
from bnncli.session.produce import Request, Resumable, resumable_training
from bnncli.session.run import Run
from bnncli.stages.fit_lbbnn.plan import check_memory, epochs_of, plan_of
from bnncli.stages.fit_lbbnn.report import TrainingData, measure
from bnncli.stages.fit_lbbnn.training import LatentTraining
from bnncli.stages.fit_lbbnn.underfitting import guessing, poor_fit, rise, short_plan, still_rising
from bnncli.system.workers import team


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
    training = LatentTraining(run, options, layout, data, plan)
    resumable = _resumable(run, options, request, layout)
    with resumable.hint():
        state = resumable.restore()
        search = None if val is None else training.search(val)
        model, history, seconds = training.fit(_slab_sd(options, search), state, resumable)
    posterior = _posterior(run, model, history)
    if data.scaling is not None:
        posterior = replace(posterior, shift=data.scaling.shift, scale=data.scaling.scale)
    # What is drawn of the other repeats is not used; in one process it is drawn all the same, and numbers stay what they were.
    measured = posterior if team() is None else posterior.of_best()
    metrics = measure(run, measured, data, variance=options.variance or "exact", estimator=options.estimator)
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


def _resumable(run: Run, options: FitLbbnnOptions, request: Request, layout: NetworkLayout) -> Resumable:
    """The state of the fit; that of groups of networks belongs to these groups."""
    also = {}
    if team() is not None:
        groups = groups_of(layout, options.repeats, run.device)
        also = {"groups": ",".join(str(part.stop - part.start) for part in groups)}
    return resumable_training(run, request, resume=options.resume, save_every=options.save_every, also=also)


def _slab_sd(options: FitLbbnnOptions, search: list[dict[str, float]] | None) -> float:
    """The slab's standard deviation: the one that val prefers, or the one given."""
    return float(options.slab_sd) if search is None else min(search, key=lambda one: one["val_nll"])["slab_sd"]


def _warn(run: Run, warning: str | None) -> None:
    if warning is not None:
        run.console.warn(warning)


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

"""fit-lbbnn: features in, a network out whose weights are each in or out with a probability."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bnncli.inference.latent_fit import History, Plan, fit_latent
from bnncli.inference.latent_steps import Settings
from bnncli.latent.factors import initial_factors
from bnncli.latent.layout import NetworkLayout
from bnncli.latent.model import LatentModel
from bnncli.latent.multiplier import initial_model
from bnncli.latent.prior import SpikeAndSlab
from bnncli.options import FitLbbnnOptions
from bnncli.options.fit_lbbnn import LEARNING_RATES, MEAN_RANGES
from bnncli.posteriors.latent_binary import DEFAULT_SAMPLES, LatentBinary
from bnncli.stages._inputs import Split, head_tensors, load_split
from bnncli.stages._lbbnn_report import measure, summary
from bnncli.stages._produce import Computed, Request, produce
from bnncli.stages._resumable import Resumable
from bnncli.stages._run import Result, Run
from bnncli.storage.headers import Header
from bnncli.storage.posteriors import write_posterior

ALGO_REV = 1


def run(run: Run, options: FitLbbnnOptions) -> Result:
    """Fit and publish; the result's metrics have the bound's parts and the density."""
    train = load_split(run, "train").check_labeled()
    layout = _layout(options, train)
    options = options.resolved()
    params = {**options.params(), "sizes": list(layout.sizes), "seed": run.compute.seed}
    target = Path(run.naming.out) if run.naming.out else run.folder.posterior(run.naming.name or "lbbnn")
    run.folder.check_name_is_free(target)
    size = 4 * options.repeats * (3 * layout.num_weights + 2 * layout.num_biases)
    request = Request(target, "posterior", target.stem, params, ALGO_REV, [train.source], train.checkpoint, size)
    return produce(run, request, lambda: _compute(run, options, train, layout, request=request), when_fresh=_when_fresh)


def _layout(options: FitLbbnnOptions, train: Split) -> NetworkLayout:
    """Outputs as the network's head has them; without a head a class each, and a single logit for two."""
    head, num_classes = train.layout, len(train.content.classes)
    outputs = head.num_outputs if train.content.head_weight is not None else 1 if num_classes == 2 else num_classes
    return NetworkLayout((head.num_features, *options.hidden_sizes, outputs))


def _start(run: Run, options: FitLbbnnOptions, layout: NetworkLayout) -> LatentModel:
    """What the fit starts from, on the device."""
    generator = run.stream("fit-lbbnn/start")
    factors = initial_factors(
        layout,
        options.repeats,
        generator,
        mean_range=MEAN_RANGES[options.estimator],
        logit_range=options.start_logits,
        device=run.device,
    )
    prior = SpikeAndSlab.constant(
        layout.num_layers,
        inclusion=options.prior_inclusion,
        slab_mean=options.slab_mean,
        slab_sd=options.slab_sd,
        bias_sd=options.bias_sd,
    ).to(run.device)
    multipliers = []
    if options.estimator == "mnf":
        multipliers = [
            initial_model(
                inputs,
                options.repeats,
                generator,
                length=options.flow_length or 2,
                hidden=options.flow_sizes,
                device=run.device,
            )
            for _, inputs in layout.shapes
        ]
    return LatentModel(layout, factors, prior, tuple(multipliers))


def _plan(options: FitLbbnnOptions, num_examples: int) -> Plan:
    return Plan(
        epochs=options.epochs,
        batch_size=min(options.batch_size, num_examples),
        learning_rate=options.learning_rate or LEARNING_RATES[options.estimator],
        schedule=options.schedule,
        inclusion_rate=options.inclusion_rate,
        early_epochs=options.early_epochs or 0,
        hyper_prior=options.estimator == "concrete",
        settings=Settings(
            options.estimator,
            options.variance or "exact",
            options.temperature or Settings().temperature,
            options.multiplier_draws or Settings().multiplier_draws,
        ),
        shuffles=not options.no_shuffle,
    )


def _compute(run: Run, options: FitLbbnnOptions, train: Split, layout: NetworkLayout, *, request: Request) -> Computed:
    features, labels = train.features(run.device), train.labels(run.device)
    moments = _input_moments(features) if options.standardize else (None, None)
    if moments[0] is not None and moments[1] is not None:
        features = (features - moments[0]) / moments[1]
    resumable = Resumable(run, request, resume=options.resume, save_every=options.save_every)
    with resumable.hint():
        state = resumable.restore()
        start, done = time.monotonic(), 0 if state is None else len(state.get("history.density", ()))
        model, history = fit_latent(
            _start(run, options, layout),
            features,
            labels,
            _plan(options, len(features)),
            generator=run.stream("fit-lbbnn/train"),
            state=state,
            save=resumable.save,
            progress=run.console,
        )
        seconds = (time.monotonic() - start) / max(1, options.epochs - done)
    posterior = replace(_posterior(run, model, history), shift=moments[0], scale=moments[1])
    metrics = measure(
        run, posterior, features, labels, variance=options.variance or "exact", estimator=options.estimator
    )
    metrics["seconds_per_epoch"] = seconds
    tensors, meta = posterior.to_tensors()
    tensors |= head_tensors(train) | history.tensors()
    meta |= {
        "method": "lbbnn",
        "estimator": options.estimator,
        "variance": options.variance,
        "param_layout": _param_layout(layout),
        "num_examples": len(features),
        "metrics": metrics,
        "classes": train.content.classes,
        "default_samples": DEFAULT_SAMPLES,
    }

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        digest = write_posterior(request.target, tensors, meta=meta, provenance=provenance, may_replace=may_replace)
        resumable.remove()
        return digest

    return Computed(publish, metrics, summary(metrics))


def _input_moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each input, (D,) float32; 1 for one that never varies."""
    doubled = features.double()
    sd = doubled.std(dim=0, correction=0)
    return doubled.mean(dim=0).float(), torch.where(sd > 0, sd, 1.0).float()


def _posterior(run: Run, model: LatentModel, history: History) -> LatentBinary:
    """The posterior; one network stands for all where the bound was highest over the last epochs."""
    best = int(history.bound()[-5:].mean(dim=0).argmax())
    with torch.no_grad():
        means = model.multiplier_means(run.stream("fit-lbbnn/multipliers"))
    return LatentBinary(model, tuple(means), best)


def _param_layout(layout: NetworkLayout) -> list[dict[str, Any]]:
    """Where each layer lies in theta."""
    parts: list[dict[str, Any]] = []
    offset = 0
    for index, (outputs, inputs) in enumerate(layout.shapes):
        parts.append({"name": f"layers.{index}.weight", "shape": [outputs, inputs], "offset": offset})
        offset += outputs * inputs
        parts.append({"name": f"layers.{index}.bias", "shape": [outputs], "offset": offset})
        offset += outputs
    return parts


def _when_fresh(header: Header) -> Computed:
    metrics = header.meta.get("metrics", {})
    return Computed(lambda provenance, may_replace: header.content_digest, metrics, summary(metrics))

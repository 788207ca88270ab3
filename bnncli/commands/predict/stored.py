"""Predict a split of the run and store the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.predictions import PredictionFile, write_predictions
from bnncli.lazy import torch
from bnncli.likelihoods import name_to_record
from bnncli.numerics.dirichlet import ranked_lengths
from bnncli.options.declaration import spell_options
from bnncli.session.inputs import Split
from bnncli.session.out_of_fold import is_fitted_to
from bnncli.session.prediction_memory import PosteriorMemory, require_prediction
from bnncli.session.predictor import IntegratorChoice, IntegratorPredictions, Predictor
from bnncli.session.produce import ComputationOutput
from bnncli.session.run import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def estimate_bytes(predictor: Predictor, choice: IntegratorChoice, split: Split, *, keep_samples: bool) -> int | None:
    """Return the memory that predicting a split takes, in bytes; None for a last layer, whose features are streamed.

    Raises:
        DeviceError: the predictions do not fit in memory.
        Untrusted, MissingInput, DataError: the network cannot be opened.
    """
    layers = predictor.header.meta.get("layers")
    if layers is None:
        return None

    reader, count = predictor.train.reader, len(split.content.features)
    with reader.recorded.visible():
        memory = PosteriorMemory.of(predictor.header, reader.layout(split, str(layers)))
        what = f"predicting {count:,} examples with {predictor.path.stem} ({choice.variant})"
        needs, device = choice.integrator.needs, predictor.run.device
        return require_prediction(memory, device, needs, count, choice.samples, keeps_samples=keep_samples, what=what)


def predict_split(
    predictor: Predictor, choice: IntegratorChoice, split: Split, target: Path, *, keep_samples: bool
) -> ComputationOutput:
    """Predict one split, to be published at `target` by the first of the workers that share it."""
    combined = predictor.train.combined_scores(split)
    predicted = predictor.predict_split(choice, split, keep_samples=keep_samples)
    if predicted is None:
        return ComputationOutput(None)
    content = build_prediction_file(
        predicted,
        labels=split.content.labels,
        sample_id=split.content.sample_id,
        groups=split.content.groups,
        classes=split.content.classes,
        choice=choice,
        combined=combined,
    )
    notes = spell_options(predicted.integrator.notes())  # with options as the command line spells them
    meta = {**_meta(predictor, choice, split), "num_examples": len(content.probs), **notes}
    meta["draws"] = predicted.integrator.num_draws
    meta["interval_level"] = None if content.interval is None else predicted.integrator.interval_level

    def publish(provenance: dict[str, Any], may_replace: bool) -> str:
        return write_predictions(target, content, meta=meta, provenance=provenance, may_replace=may_replace)

    return ComputationOutput(publish, facts=read_facts(meta))


def build_params(run: Run, choice: IntegratorChoice, posterior: str, *, keep_samples: bool) -> dict[str, Any]:
    """Return the parameters of a prediction that provenance records."""
    is_sampling = choice.integrator.is_sampling
    return {
        "integrator": choice.name,
        "settings": choice.settings,
        "samples": choice.samples,
        "posterior": posterior,
        "seed": run.compute.seed if is_sampling else None,
        "keep_samples": keep_samples and is_sampling,
        "top_k": choice.top_k,
    }


def read_facts(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the number of draws and the level of the intervals; None where a prediction has none."""
    return {name: meta.get(name) for name in ("draws", "interval_level")}


def build_prediction_file(
    predicted: IntegratorPredictions,
    *,
    labels: Any,
    sample_id: Any,
    classes: list[str],
    choice: IntegratorChoice,
    combined: NDArray | None,
    groups: Any = None,
) -> PredictionFile:
    """Return the predictions of N examples as a prediction file holds them.

    Args:
        labels: (N,) or (N, L), or None.
        sample_id: (N,).
        combined: (N,), the combined out-of-distribution score; None without one.
        groups: (N,), the group of each example; None without groups.
    """
    prediction, of_draws = predicted.prediction, predicted.integrator.groups
    return PredictionFile(
        probs=prediction.probs.numpy(),
        entropy=prediction.entropy.numpy(),
        mutual_info=_numpy(prediction.mutual_info),
        labels=labels,
        sample_id=sample_id,
        classes=classes,
        probs_samples=_numpy(predicted.probs_samples),
        interval=_numpy(prediction.interval),
        log_concentration=_numpy(prediction.log_concentration),
        energy=predicted.energy.numpy(),
        max_logit=predicted.max_logit.numpy(),
        combined=combined,
        top_k=_count_ranked_classes(prediction.log_concentration, choice.top_k),
        group_probs=_numpy(prediction.group_probs),
        group_rows=_numpy(predicted.group_rows),
        group_weights=None if predicted.group_rows is None or of_draws is None else of_draws.weights.numpy(),
        groups=groups,
    )


def _meta(predictor: Predictor, choice: IntegratorChoice, split: Split) -> dict[str, Any]:
    return {
        "posterior": predictor.path.stem,
        "integrator": choice.name,
        "variant": choice.variant,
        "settings": choice.settings,
        "samples": choice.samples,
        "top_k": choice.top_k,
        "split": split.content.name,
        "is_ood": split.content.is_ood,
        "is_labeled": split.content.labels is not None,
        "order_digest": split.content.header.meta.get("order_digest") if split.content.header else None,
        **({"num_folds": predictor.header.meta["num_folds"]} if is_fitted_to(predictor.header, split) else {}),
        **name_to_record(predictor.posterior.layout.likelihood_name),
    }


_MOST_CONCENTRATIONS = 1 << 22  # ranked at once, in float64


def _count_ranked_classes(log_concentration: Tensor | None, top_k: dict[str, Any] | None) -> Any:
    """Return how many classes each example keeps, (N,), in blocks of rows; None where classes are not ranked."""
    if log_concentration is None or top_k is None:
        return None
    blocks = log_concentration.split(max(1, _MOST_CONCENTRATIONS // log_concentration.shape[1]))
    return torch.cat([ranked_lengths(block, **top_k) for block in blocks]).numpy()


def _numpy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.numpy()

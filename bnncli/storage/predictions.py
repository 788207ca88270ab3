"""Prediction files: class probabilities of one split under one posterior and integrator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.errors import DataError
from bnncli.storage.hdf5 import Array, check_digest, header_of, open_hdf5, read_contents, write_hdf5
from bnncli.storage.headers import Header


@dataclass(frozen=True)
class PredictionFile:
    """Predictions of a split.

    Attributes:
        probs: (N, C) float32, rows sum to 1.
        entropy: (N,) float32, nats, of the mean probabilities.
        mutual_info: (N,) float32, nats; None for integrators that do not sample.
        labels: (N,) int64 or None. sample_id: (N,) int64.
        classes: the C class names.
        probs_samples: (S, N, C) float16, of every draw; only where they were asked for.
    """

    probs: Array
    entropy: Array
    mutual_info: Array | None
    labels: Array | None
    sample_id: Array
    classes: list[str]
    header: Header | None = None
    probs_samples: Array | None = None


def write_predictions(
    target: Path,
    predictions: PredictionFile,
    *,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a prediction file and return its content digest; meta has posterior, integrator, samples, split, is_ood."""
    arrays = {"probs": predictions.probs, "entropy": predictions.entropy, "sample_id": predictions.sample_id}
    optional = {
        "mutual_info": predictions.mutual_info,
        "labels": predictions.labels,
        "probs_samples": predictions.probs_samples,
    }
    arrays |= {name: value for name, value in optional.items() if value is not None}
    texts: dict[str, str | list[str]] = {"classes": predictions.classes}
    return write_hdf5(
        target, arrays, texts, kind="predictions", meta=meta, provenance=provenance, may_replace=may_replace
    )


def read_predictions(path: Path) -> PredictionFile:
    """The predictions of a split, after a full check.

    Raises:
        MissingInput: no such file.
        DataError: truncated, wrong digest, arrays that do not fit together.
    """
    with open_hdf5(path) as file:
        header = header_of(path, file)
        if header.kind != "predictions":
            raise DataError(f"{path}: expected predictions, got {header.kind}", code="wrong_kind", path=path)
        arrays, texts = read_contents(path, file)
    check_digest(path, header, arrays, texts)
    classes = texts.get("classes")
    missing = [name for name in ("probs", "entropy", "sample_id") if name not in arrays]
    if missing or not isinstance(classes, list):
        raise DataError(f"{path}: has no {', '.join(missing) or 'classes'}", code="damaged", path=path)
    probs, labels = arrays["probs"], arrays.get("labels")
    rows = len(arrays["sample_id"])
    if probs.shape != (rows, len(classes)) or (labels is not None and labels.shape != (rows,)):
        raise DataError(
            f"{path}: expected probs ({rows}, {len(classes)}), got {probs.shape}", code="bad_shape", path=path
        )
    return PredictionFile(
        probs=probs,
        entropy=arrays["entropy"],
        mutual_info=arrays.get("mutual_info"),
        labels=labels,
        sample_id=arrays["sample_id"],
        classes=classes,
        header=header,
        probs_samples=_check_samples(path, arrays.get("probs_samples"), probs),
    )


def _check_samples(path: Path, samples: Array | None, probs: Array) -> Array | None:
    """The draws' probabilities. Raises DataError when their mean is not the prediction."""
    if samples is None:
        return None
    if samples.shape[1:] != probs.shape or np.abs(samples.mean(axis=0, dtype=np.float64) - probs).max(initial=0) > 1e-3:
        raise DataError(f"{path}: the mean of probs_samples is not probs", code="damaged", path=path)
    return samples

"""Prediction files: class probabilities of one split under one posterior and integrator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.artifacts.hdf5 import Array, check_digest, header_of, open_hdf5, read_contents, write_hdf5
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError
from bnncli.likelihoods import has_exclusive_classes, read_recorded_name


@dataclass(frozen=True)
class PredictionFile:
    """Predictions of a split.

    Attributes:
        probs: (N, C) float32, rows sum to 1; if meta's `likelihood` is multilabel, each class is a label of its own.
        entropy: (N,) float32, nats, of the mean probabilities.
        mutual_info: (N,) float32, nats; None for integrators without draws.
        labels: (N,) int64, (N, C) uint8 for multi-label, or None.
        sample_id: (N,) int64.
        groups: (N,) int64, as in the features.
        classes: the C class names.
        probs_samples: (S, N, C) float16, of every draw; only on request.
        interval: (N, 2) float32, central interval of the posterior of the predicted class's probability, with level
            `interval_level` in meta (95% if missing); (N, C, 2) per label for multi-label.
        log_concentration: (N, C) float32, logarithms of a Dirichlet's parameters; (N, C, 2), of each label's Beta
            (absence, presence) for multi-label.
        energy: (N,) float32, -log sum exp of the posterior's mean logits.
        max_logit: (N,) float32, the largest of these.
        combined: (N,) float32, combined score of the features, higher for in-distribution examples.
        top_k: (N,) int64, number of classes that the uncertainty-aware ranking keeps.
        group_probs: (G, R, C) float32, mean probabilities of G disjoint groups of the draws, at R of the rows; group g
            has the same draws in every split predicted with the same seed.
        group_rows: (R,) int64 ascending, those rows.
        group_weights: (G,) float64, each group's share of the draws or of their importance weights; they sum to one,
            and the weighted group means equal probs at those rows.

    All but probs, entropy and sample_id may be None. (N, C) arrays are memory-mapped when read.
    """

    probs: Array
    entropy: Array
    mutual_info: Array | None
    labels: Array | None
    sample_id: Array
    classes: list[str]
    header: Header | None = None
    probs_samples: Array | None = None
    interval: Array | None = None
    log_concentration: Array | None = None
    energy: Array | None = None
    max_logit: Array | None = None
    combined: Array | None = None
    top_k: Array | None = None
    group_probs: Array | None = None
    group_rows: Array | None = None
    group_weights: Array | None = None
    groups: Array | None = None

    @property
    def is_exclusive(self) -> bool:
        """Return whether classes are mutually exclusive; for a file, from its header."""
        return self.header is None or has_exclusive_classes(read_recorded_name(self.header.meta))


# Optional arrays, with their shapes.
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "mutual_info": ("N",),
    "labels": ("N",),
    "probs_samples": ("S", "N", "C"),
    "interval": ("N", "2"),
    "log_concentration": ("N", "C"),
    "energy": ("N",),
    "max_logit": ("N",),
    "combined": ("N",),
    "top_k": ("N",),
    "group_probs": ("G", "R", "C"),
    "group_rows": ("R",),
    "group_weights": ("G",),
    "groups": ("N",),
}
_OF_LABELS: dict[str, tuple[str, ...]] = {
    "labels": ("N", "C"), "interval": ("N", "C", "2"), "log_concentration": ("N", "C", "2")
}  # fmt: skip
_GROUPS = ("group_probs", "group_rows", "group_weights")
_CHECK_ROWS = 4096  # held in memory at once
_MAPPED = ("probs", "log_concentration", "probs_samples", "group_probs")


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
    arrays |= {name: value for name in _OPTIONAL if (value := getattr(predictions, name)) is not None}
    texts: dict[str, str | list[str]] = {"classes": predictions.classes}
    return write_hdf5(
        target, arrays, texts, kind="predictions", meta=meta, provenance=provenance, may_replace=may_replace
    )


def list_arrays(path: Path) -> set[str]:
    """Return the names of the arrays in a prediction file, without reading them."""
    with open_hdf5(path) as file:
        return set(file)


def read_predictions(path: Path) -> PredictionFile:
    """Read the predictions of a split, after a full check.

    Raises:
        MissingInput: there is no such file.
        DataError: the file is truncated, has a wrong digest, or its arrays are inconsistent.
    """
    with open_hdf5(path) as file:
        header = header_of(path, file)
        if header.kind != "predictions":
            raise DataError(f"{path}: expected predictions, got {header.kind}", code="wrong_kind", path=path)
        arrays, texts = read_contents(path, file, mapped=_MAPPED)
    check_digest(path, header, arrays, texts)
    classes = texts.get("classes")
    missing = [name for name in ("probs", "entropy", "sample_id") if name not in arrays]
    if missing or not isinstance(classes, list):
        raise DataError(f"{path}: has no {', '.join(missing) or 'classes'}", code="damaged", path=path)
    lacking = [name for name in _GROUPS if name not in arrays]
    if 0 < len(lacking) < len(_GROUPS):
        raise DataError(f"{path}: it has groups of draws but no {', '.join(lacking)}", code="damaged", path=path)
    sizes = {"N": len(arrays["sample_id"]), "C": len(classes), "2": 2, "S": len(arrays.get("probs_samples", ()))}
    sizes |= {"G": len(arrays.get("group_weights", ())), "R": len(arrays.get("group_rows", ()))}
    of_labels = {} if has_exclusive_classes(read_recorded_name(header.meta)) else _OF_LABELS
    for name, axes in {"probs": ("N", "C"), "entropy": ("N",), **_OPTIONAL, **of_labels}.items():
        expected = tuple(sizes[axis] for axis in axes)
        if name in arrays and arrays[name].shape != expected:
            message = f"{path}: expected {name} {expected}, got {arrays[name].shape}"
            raise DataError(message, code="bad_shape", path=path)
    _check_samples(path, arrays.get("probs_samples"), arrays["probs"])
    _check_groups(path, arrays)
    return PredictionFile(
        probs=arrays["probs"],
        entropy=arrays["entropy"],
        sample_id=arrays["sample_id"],
        classes=classes,
        header=header,
        **{name: arrays.get(name) for name in _OPTIONAL},
    )


def _check_samples(path: Path, samples: Array | None, probs: Array) -> None:
    """Raise DataError if the mean of the draws' probabilities differs from the prediction."""
    if samples is None:
        return
    for start in range(0, len(probs), _CHECK_ROWS):
        rows = slice(start, start + _CHECK_ROWS)
        error = np.abs(samples[:, rows].mean(axis=0, dtype=np.float64) - probs[rows]).max(initial=0)
        if not error <= 1e-3:
            raise DataError(f"{path}: the mean of probs_samples does not match probs", code="damaged", path=path)


def _check_groups(path: Path, arrays: Mapping[str, Array]) -> None:
    """Raise DataError if the groups of draws do not average to the prediction."""
    if "group_probs" not in arrays:
        return
    means, kept, weights = (arrays[name] for name in _GROUPS)
    is_ordered = bool(np.all(np.diff(kept) > 0)) and (len(kept) == 0 or 0 <= kept[0] <= kept[-1] < len(arrays["probs"]))
    if not is_ordered or not np.issubdtype(kept.dtype, np.integer):
        raise DataError(f"{path}: group_rows must be ascending rows of the split", code="damaged", path=path)
    if len(weights) < 2 or not np.all(weights >= 0) or not abs(weights.sum() - 1) <= 1e-9:
        raise DataError(f"{path}: expected at least two group_weights that sum to one", code="damaged", path=path)
    for start in range(0, len(kept), _CHECK_ROWS):
        rows = slice(start, start + _CHECK_ROWS)
        mixed = np.tensordot(weights, means[:, rows].astype(np.float64), axes=1)
        error = np.abs(mixed - arrays["probs"][kept[rows]]).max(initial=0)
        if not error <= 1e-6:
            raise DataError(f"{path}: the mean of group_probs does not match probs", code="damaged", path=path)

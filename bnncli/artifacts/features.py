"""Feature files: penultimate features of one split, with labels, class names and the head they belong to.

A file checks itself: features times head must equal the network's logits for the first rows. This single test detects a
wrong layer, a wrong checkpoint, permuted rows and damaged bytes. Features are memory-mapped, so they may exceed memory.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.hdf5 import Array, check_digest, header_of, open_hdf5, read_contents, read_texts, write_hdf5
from bnncli.artifacts.headers import Header
from bnncli.errors import BnnError, DataError
from bnncli.likelihoods import BINARY, MULTILABEL, has_exclusive_classes, name_to_record, read_recorded_name
from bnncli.numerics.digests import canonical_json, tensor_digest

CHECK_ROWS = 256
CHECK_BYTES = 1 << 23
CHECK_TOLERANCE = {"float32": 1e-3, "float16": 2e-2}


@dataclass(frozen=True)
class FeatureFile:
    """The contents of a feature file.

    Attributes:
        features: (N, D) float32 or float16; memory-mapped when read.
        labels: (N,) int64, or (N, C) uint8, zeros and ones, for multi-label; None without labels.
        sample_id: (N,) int64, row of each example in its source.
        classes: names of the C classes; index = label.
        head_weight, head_bias: (K, D) and (K,) float32; None without a head or bias.
        check_logits: (min(N, 256), K) of the first rows; None without a head.
        is_ood: whether the split was given with --ood.
        names: (N,) fixed-length bytes, UTF-8 name of each example; None if the data has none. Memory-mapped when read.
        num_truncated: number of texts or clips that the model truncated; None for other examples.
        head_notes: notes on how the head was extracted.
        likelihood: of the labels by name; None for one class per example.
        groups: (N,) int64, the group of each example, such as its text or patient; None if all are independent.
    """

    name: str
    features: Array
    labels: Array | None
    sample_id: Array
    classes: list[str]
    head_weight: Array | None
    head_bias: Array | None
    check_logits: Array | None
    is_ood: bool
    header: Header | None = None
    names: Array | None = None
    num_truncated: int | None = None
    head_notes: tuple[str, ...] = ()
    likelihood: str | None = None
    groups: Array | None = None


def write_features(
    target: Path,
    split: FeatureFile,
    *,
    preprocess: Mapping[str, Any],
    layer: str | None,
    order_digest: str,
    source: str,
    provenance: Mapping[str, Any],
    may_replace: bool,
    network_fit: Mapping[str, Any] | None = None,
    input_statistics: Mapping[str, Any] | None = None,
) -> str:
    """Publish a feature file and return its content digest."""
    arrays = {"features": split.features, "sample_id": split.sample_id}
    optional = {
        "labels": split.labels,
        "head/weight": split.head_weight,
        "head/bias": split.head_bias,
        "check_logits": split.check_logits,
        "sample_name": split.names,
        "groups": split.groups,
    }
    arrays |= {name: value for name, value in optional.items() if value is not None}
    counts = None
    if split.labels is not None:
        counts = label_counts(split.labels, len(split.classes)).tolist()
    meta = {
        "split": split.name,
        "num_examples": len(split.features),
        "num_features": split.features.shape[1],
        "is_labeled": split.labels is not None,
        "is_ood": split.is_ood,
        "layer": layer,
        "class_counts": counts,
        "order_digest": order_digest,
        "head_digest": head_digest(split),
        **({} if split.num_truncated is None else {"num_truncated": split.num_truncated}),
        **({"head_notes": [*split.head_notes]} if split.head_notes else {}),
        **name_to_record(split.likelihood),
    }
    texts: dict[str, str | list[str]] = {"classes": split.classes, "preprocess": canonical_json(preprocess)}
    made_from = {**provenance, "source": source}  # the location of the data is not part of the content
    found = {"network_fit": network_fit, "input_statistics": input_statistics}  # nor is what follows from it
    made_from |= {name: value for name, value in found.items() if value is not None}
    return write_hdf5(target, arrays, texts, kind="features", meta=meta, provenance=made_from, may_replace=may_replace)


def read_features(path: Path, *, is_full_check: bool = False) -> FeatureFile:
    """Read the features of a split after the self-check (and the digest, with is_full_check).

    Raises:
        MissingInput: there is no such file.
        DataError: the file is truncated, values are not finite, labels are out of range, or features do not give the
            logits.
    """
    with open_hdf5(path) as file:
        header = header_of(path, file)
        if header.kind != "features":
            raise DataError(f"{path}: expected features, got {header.kind}", code="wrong_kind", path=path)
        arrays, texts = read_contents(path, file, mapped=("features", "sample_name"))
    if is_full_check:
        check_digest(path, header, arrays, texts)
    for name in ("features", "sample_id"):
        if name not in arrays:
            raise DataError(f"{path}: has no {name}", code="damaged", path=path)
    classes = texts.get("classes", [])
    split = FeatureFile(
        name=str(header.meta.get("split", path.stem)),
        features=arrays["features"],
        labels=arrays.get("labels"),
        sample_id=arrays["sample_id"],
        classes=classes if isinstance(classes, list) else [classes],
        head_weight=arrays.get("head/weight"),
        head_bias=arrays.get("head/bias"),
        check_logits=arrays.get("check_logits"),
        is_ood=bool(header.meta.get("is_ood")),
        header=header,
        names=arrays.get("sample_name"),
        num_truncated=header.meta.get("num_truncated"),
        head_notes=tuple(header.meta.get("head_notes", ())),
        likelihood=read_recorded_name(header.meta),
        groups=arrays.get("groups"),
    )
    check_split(path, split)
    return split


def check_split(path: Path, split: FeatureFile) -> None:
    """Raise DataError unless shapes agree, values are finite, labels are classes, and features give the logits."""
    rows, labels = len(split.features) if split.features.ndim == 2 else 0, split.labels
    if rows == 0 or split.sample_id.shape != (rows,):
        raise DataError(
            f"{path}: expected features (N, D) with N > 0, got {split.features.shape}",
            code="bad_shape",
            path=path,
        )
    if str(split.features.dtype) not in CHECK_TOLERANCE:
        raise DataError(f"{path}: expected features in float32 or float16, got {split.features.dtype}", path=path)
    if split.names is not None and (split.names.shape != (rows,) or split.names.dtype.kind != "S"):
        raise DataError(f"{path}: expected one name for each of {rows} rows", code="bad_shape", path=path)
    if split.groups is not None and (split.groups.shape != (rows,) or split.groups.dtype != np.int64):
        raise DataError(f"{path}: expected one group for each of {rows} rows", code="bad_shape", path=path)
    if split.likelihood not in (None, MULTILABEL, *([BINARY] if split.head_weight is None else [])):
        raise DataError(f"{path}: unknown likelihood {split.likelihood!r}", code="damaged", path=path)
    bad = _rows_not_finite(split.features)
    if len(bad):
        raise DataError(
            f"{path}: {len(bad)} rows are not finite; the first is row {bad[0]}", code="not_finite", path=path
        )
    if labels is not None and not has_exclusive_classes(split.likelihood):
        if labels.shape != (rows, len(split.classes)) or labels.dtype != np.uint8 or labels.max() > 1:
            message = f"{path}: expected labels of zeros and ones, shape ({rows}, {len(split.classes)}), type uint8"
            raise DataError(f"{message}; got {labels.dtype} {labels.shape}", code="bad_labels", path=path)
    elif labels is not None and labels.ndim != 1:
        raise DataError(f"{path}: expected one label per row, got shape {labels.shape}", code="bad_labels", path=path)
    elif labels is not None:
        wrong = np.flatnonzero((labels < 0) | (labels >= len(split.classes)))
        if labels.shape != (rows,) or len(wrong):
            first = f"; row {wrong[0]} has {labels[wrong[0]]}" if len(wrong) else ""
            message = f"{path}: expected one label per row from 0 to {len(split.classes) - 1}{first}"
            raise DataError(message, code="bad_labels", path=path)
    if split.head_weight is None:
        return
    if (
        split.head_weight.ndim != 2
        or split.head_weight.shape[1] != split.features.shape[1]
        or split.check_logits is None
        or split.check_logits.shape != (min(rows, CHECK_ROWS), len(split.head_weight))
        or (split.head_bias is not None and split.head_bias.shape != (len(split.head_weight),))
    ):
        raise DataError(
            f"{path}: head {split.head_weight.shape} does not match features {split.features.shape}",
            code="bad_shape",
            path=path,
        )
    first_rows = split.features[: len(split.check_logits)].astype(np.float64)
    logits = first_rows @ split.head_weight.T.astype(np.float64)
    logits = logits if split.head_bias is None else logits + split.head_bias
    error = np.abs(logits - split.check_logits).max()
    tolerance = CHECK_TOLERANCE[str(split.features.dtype)] * (1 + np.abs(split.check_logits).max())
    if not error <= tolerance:
        raise DataError(
            f"{path}: features times head weights differ from the network's logits by {error:.3g} (tolerance "
            f"{tolerance:.3g})",
            code="self_check",
            hint="the file is damaged or inconsistent: run extract-features \0force\0",
            path=path,
        )


def _rows_not_finite(features: Array) -> Array:
    """Return the rows (n,) with NaN or infinity, found block by block."""
    size = max(1, CHECK_BYTES // max(1, features[:1].nbytes))
    found = [np.empty(0, np.int64)]
    for start in range(0, len(features), size):
        is_finite = np.isfinite(features[start : start + size])
        if not is_finite.all():
            found.append(start + np.flatnonzero(~is_finite.all(axis=1)))
    return np.concatenate(found)


def label_counts(labels: Array, num_classes: int) -> Array:
    """Count the examples (C,) of each class or with each label, for labels (N,) or (N, C)."""
    return np.bincount(labels, minlength=num_classes) if labels.ndim == 1 else labels.sum(axis=0, dtype=np.int64)


def encode_names(names: Sequence[str] | None) -> Array | None:
    """Encode names (N,) as UTF-8, with invalid bytes of file names as escapes."""
    return None if names is None else np.array([name.encode("utf-8", "backslashreplace") for name in names], dtype="S")


def head_digest(split: FeatureFile) -> str:
    """Return a digest of the head that a split's features belong to."""
    parts = {"weight": split.head_weight, "bias": split.head_bias}
    return tensor_digest({name: part for name, part in parts.items() if part is not None})


class SplitClasses(NamedTuple):
    """Class names in a feature file, and whether it has labels."""

    names: list[str]
    is_labeled: bool

    @property
    def is_numbered(self) -> bool:
        """Return whether the names are 0, 1, 2, ...: the data named no classes."""
        return self.names == [str(index) for index in range(len(self.names))]


def read_classes(path: Path) -> tuple[Header, SplitClasses]:
    """Read the classes of a feature file, but not the features. Raises as read_features does."""
    with open_hdf5(path) as file:
        header = header_of(path, file)
        names = read_texts(file, "classes")
    return header, SplitClasses(names, bool(header.meta.get("is_labeled")) and not header.meta.get("is_ood"))


def read_sample_ids(path: Path) -> Array:
    """Read the row of each example in its source, (N,), but not the features."""
    with open_hdf5(path) as file:
        ids: Array = file["sample_id"][()]
    return ids


def read_groups(path: Path) -> Array | None:
    """Read the group of each example, (N,) int64, but not the features; None without groups."""
    with open_hdf5(path) as file:
        groups: Array | None = file["groups"][()] if "groups" in file else None
    return groups


_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError)


def detector_file(features: Path) -> Path:
    """Return the file for the combined score fitted to a run's features, given any split's file."""
    return features.with_name(".combined.npz")


def read_known(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an npz file; empty if it is missing or damaged."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return dict(archive)
    except _DAMAGE:
        return {}


def write_known(path: Path, arrays: Mapping[str, np.ndarray], *, is_compressed: bool) -> None:
    """Write arrays as an npz file; a failure only means that they are recomputed next time."""
    stream = io.BytesIO()
    (np.savez_compressed if is_compressed else np.savez)(stream, allow_pickle=False, **arrays)
    with suppress(BnnError):
        publish_bytes(path, stream.getvalue(), may_replace=True, poll=False)


class DataFacts:
    """Known facts about the data behind the features of one split, in a file beside them."""

    def __init__(self, features: Path) -> None:
        self._path = features.with_name(f".{features.stem}.data.npz")
        self._offered: Mapping[str, np.ndarray] | None = None

    def read(self) -> Mapping[str, np.ndarray]:
        """Return the stored arrays; empty if the file is missing or damaged."""
        return read_known(self._path)

    def offer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Store arrays with the next `keep`."""
        self._offered = arrays

    def keep(self) -> None:
        """Write the offered arrays; a failure only means that the data are opened again next time."""
        if self._offered is not None:
            write_known(self._path, self._offered, is_compressed=True)
        self._offered = None

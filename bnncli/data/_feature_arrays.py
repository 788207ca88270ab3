"""`--from-npz FILE`: features, labels and head from the user's own extractor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bnncli.data._arrays import npz_names, places, read_npz
from bnncli.data._labels import FROM_1, check_labels, common_task
from bnncli.errors import DataError
from bnncli.likelihoods import likelihood_of
from bnncli.progress import Progress

_FEATURES, _LABELS, _NAMES = "features_", "labels_", "names_"
_EXPECTED = (
    "features_<split> (N, D), labels_<split> (N,) or (N, L), names_<split> (N,), head_weight (K, D), head_bias (K,)"
)


@dataclass(frozen=True, eq=False)
class FeatureDataset:
    """Features (rows, D) float32, labels (rows,) int64, (rows, L) uint8 or None, and a text for each row in `texts`, or None."""

    features: np.ndarray
    labels: np.ndarray | None
    texts: np.ndarray | None
    classes: None = None
    is_sized: bool = True
    items: str = "arrays"

    @property
    def is_labeled(self) -> bool:
        """Whether there are labels."""
        return self.labels is not None

    @property
    def names(self) -> tuple[str, ...] | None:
        """Of the examples."""
        return None if self.texts is None else tuple(self.texts.tolist())

    def __len__(self) -> int:
        return len(self.features)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Features and labels of the rows; a run of neighbours is not copied."""
        index = places(rows)
        return self.features[index], None if self.labels is None else self.labels[index]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """The rows, and all that they hold."""
        features, labels = self.read(rows)
        texts = None if self.texts is None else self.texts[rows]
        parts = {"features": features, "sample_id": rows, "labels": labels, "names": texts}
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True)
class FeatureArrays:
    """What an npz file of features holds.

    Attributes:
        splits: by name.
        head_weight, head_bias: (K, D) and (K,) float32; None where there is no head, or it has no bias.
        likelihood: of the labels, by name; None where classes exclude each other.
    """

    splits: Mapping[str, FeatureDataset]
    head_weight: np.ndarray | None
    head_bias: np.ndarray | None
    likelihood: str | None = None

    @property
    def num_features(self) -> int:
        """D, the same of all splits."""
        return next(iter(self.splits.values())).features.shape[1]


def feature_splits(path: Path | str) -> list[str]:
    """The splits whose features an npz file holds, by its names alone. Raises MissingInput or DataError."""
    return [name.removeprefix(_FEATURES) for name in npz_names(Path(path)) if name.startswith(_FEATURES)]


def read_feature_arrays(path: Path | str, *, unlabeled: Collection[str] = (), task: str | None = None) -> FeatureArrays:
    """Features, labels and head out of an npz file, shapes, types and values checked.

    Args:
        unlabeled: splits whose labels are left out: out-of-distribution data has other classes.
        task: what labels were said to be, one of bnncli.likelihoods.TASKS; None for what they show.

    Raises:
        MissingInput: no such file.
        DataError: no features, labels without features, unknown arrays, shapes that do not fit, NaN or infinite
            values, labels that break a rule or are not classes of the head.
        Untrusted: an array of Python objects.
    """
    path = Path(path)
    names = npz_names(path)
    splits = feature_splits(path)
    known = {f"{kind}{split}" for split in splits for kind in (_FEATURES, _LABELS, _NAMES)} | {
        "head_weight",
        "head_bias",
    }
    unknown = [name for name in names if name not in known]
    if not splits or unknown:
        came = (
            f"unexpected {', '.join(map(repr, unknown))[:200]}" if unknown else f"only {', '.join(names) or 'nothing'}"
        )
        raise DataError(f"{path}: expected arrays {_EXPECTED}; got {came}", path=path)
    arrays = read_npz(path, names)
    head_weight, head_bias = (_floats(arrays.get(name), name, path) for name in ("head_weight", "head_bias"))
    features = {split: _finite(arrays[f"{_FEATURES}{split}"], f"{_FEATURES}{split}", path) for split in splits}
    _check_shapes(features, head_weight, head_bias, path)
    labels = {
        split: check_labels(arrays[key], num_rows=len(features[split]), where=f"{path}: {key}")
        for split in splits if (key := f"{_LABELS}{split}") in arrays
    }  # fmt: skip
    labels = {split: array for split, array in labels.items() if split not in unlabeled}
    likelihood = common_task({f"{path}: {_LABELS}{split}": array for split, array in labels.items()}, task)
    if head_weight is not None:
        _check_range(labels, len(head_weight), path)
    texts = {
        split: _texts(arrays[key], key, len(features[split]), path)
        for split in splits if (key := f"{_NAMES}{split}") in arrays
    }  # fmt: skip
    found = {split: FeatureDataset(array, labels.get(split), texts.get(split)) for split, array in features.items()}
    return FeatureArrays(found, head_weight, head_bias, likelihood)


def _texts(array: np.ndarray, name: str, num_rows: int, path: Path) -> np.ndarray:
    """The array itself. Raises DataError unless it is a text for each row."""
    if array.dtype.kind != "U" or array.shape != (num_rows,):
        raise DataError(
            f"{path}: {name} has type {array.dtype} and shape {array.shape}, expected strings of shape ({num_rows},)",
            path=path,
        )
    return array


def _floats(array: np.ndarray | None, name: str, path: Path) -> np.ndarray | None:
    return None if array is None else _finite(array, name, path)


def _finite(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    """The array as float32. Raises DataError for other types and for values that are not finite."""
    if array.dtype.kind != "f":
        raise DataError(f"{path}: {name} has type {array.dtype}, expected floating point", path=path)
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(array, np.float32)
    bad = np.argwhere(~np.isfinite(narrow))
    if len(bad):
        raise DataError(
            f"{path}: {name} has {len(bad)} values that are not finite in float32; the first is in row {bad[0][0]}",
            code="not_finite", path=path,
        )  # fmt: skip
    return narrow


def _check_shapes(
    features: Mapping[str, np.ndarray], weight: np.ndarray | None, bias: np.ndarray | None, path: Path
) -> None:
    """Raises DataError unless all features have the same D, the head's, and the bias fits the weight."""
    for split, array in features.items():
        if array.ndim != 2 or 0 in array.shape:
            expected = "expected (N, D) with N > 0 and D > 0"
            raise DataError(f"{path}: features_{split} has shape {array.shape}, {expected}", path=path)
    shapes = {split: array.shape[1] for split, array in features.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{path}: splits have different numbers of features: {shapes}", path=path)
    num_features = next(iter(shapes.values()))
    if weight is None and bias is not None:
        raise DataError(f"{path}: has head_bias but no head_weight", path=path)
    if weight is not None and weight.ndim == 2 and weight.shape[1] != num_features == weight.shape[0]:
        raise DataError(
            f"{path}: head_weight has shape {weight.shape}, expected (K, {num_features}); it looks transposed",
            hint="save head_weight.T", path=path,
        )  # fmt: skip
    if weight is not None and (weight.ndim != 2 or weight.shape[1] != num_features or not len(weight)):
        raise DataError(f"{path}: head_weight has shape {weight.shape}, expected (K, {num_features})", path=path)
    if weight is not None and bias is not None and bias.shape != (len(weight),):
        raise DataError(f"{path}: head_bias has shape {bias.shape}, expected ({len(weight)},)", path=path)


def _check_range(labels: Mapping[str, np.ndarray], num_outputs: int, path: Path) -> None:
    num_classes = likelihood_of(num_outputs).num_classes
    for split, array in labels.items():
        if array.ndim == 2:
            if array.shape[1] != num_outputs:
                message = (
                    f"{path}: labels_{split} has {array.shape[1]} labels per example, but the head has "
                    f"{num_outputs} outputs"
                )
                raise DataError(message, code="bad_labels", path=path)
            continue
        bad = np.flatnonzero(array >= num_classes)
        if len(bad):
            raise DataError(
                f"{path}: labels_{split} row {bad[0]} is {int(array[bad[0]])}, expected 0 to {num_classes - 1}",
                code="bad_labels", path=path, hint=FROM_1 if array.min() == 1 and array.max() == num_classes else None,
            )  # fmt: skip

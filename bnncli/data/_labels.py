"""The rules for labels, one class an example; and what arrays that break them are instead."""

from __future__ import annotations

import numpy as np

from bnncli.errors import DataError

MAX_CLASSES = 1_000_000
_ONE_CLASS = "bnncli takes one class an example"


def check_labels(labels: np.ndarray, *, num_rows: int, where: str) -> np.ndarray:
    """Labels (N,) as int64: whole numbers from 0 on, one for each row.

    Raises:
        DataError: another shape or type, or a negative label, naming the rule, the first bad row, and what was found.
    """
    rule = "labels must be whole numbers of shape (N,), counted from 0"
    if labels.ndim == 2 and labels.shape[1] == 1:
        raise DataError(f"{where}: {rule}; got shape {labels.shape}", hint="save labels[:, 0]", code="bad_labels")
    if labels.ndim == 2 and labels.size:
        found, hint = explain_matrix(labels)
        raise DataError(f"{where}: {rule}; got shape {labels.shape}{found}", hint=hint, code="bad_labels")
    if labels.shape != (num_rows,):
        raise DataError(f"{where}: {rule}; got shape {labels.shape} for {num_rows} rows", code="bad_labels")
    if labels.dtype.kind not in "iu":
        found, hint = _explain_type(labels)
        raise DataError(f"{where}: {rule}; got {labels.dtype}{found}", hint=hint, code="bad_labels")
    negative = np.flatnonzero(labels < 0)
    if len(negative):
        first = negative[0]
        raise DataError(f"{where}: {rule}; row {first} has {labels[first]}", code="bad_labels")
    check_largest(int(labels.max(initial=0)), f"{where}: {rule}; row {int(labels.argmax()) if len(labels) else 0}")
    return labels.astype(np.int64)


def check_largest(label: int, where: str) -> None:
    """Raise DataError when a label would be of more classes than any classifier has: each of them gets a name."""
    if label >= MAX_CLASSES:
        raise DataError(
            f"{where} has {label}, expected at most {MAX_CLASSES - 1}", code="bad_labels",
            hint="number the classes from 0: np.unique(labels, return_inverse=True)[1]",
        )  # fmt: skip


def explain_matrix(labels: np.ndarray) -> tuple[str, str]:
    """What labels (N, C) are instead of labels (N,), and what to do with them."""
    if labels.dtype.kind not in "biuf":
        return f" of type {labels.dtype}", f"{_ONE_CLASS}: save the number of its class"
    if np.isin(labels, (0, 1)).all():
        counts = (labels != 0).sum(axis=1)
        odd = np.flatnonzero(counts != 1)
        if len(odd) == 0:
            return " (one-hot?)", "save labels.argmax(1)"
        found = f", and row {odd[0]} has {counts[odd[0]]} ones: several labels an example (multilabel)"
        return found, f"{_ONE_CLASS}: save one of the labels, such as labels[:, 0], with a network for it alone"
    if labels.dtype.kind == "f" and (labels >= 0).all() and np.abs(labels.sum(axis=1) - 1).max() < 1e-3:
        return ": probabilities of the classes (soft labels)", f"{_ONE_CLASS}: save labels.argmax(1)"
    return ": real numbers (targets of a regression?)", f"{_ONE_CLASS}, of a classifier: save the number of its class"


def _explain_type(labels: np.ndarray) -> tuple[str, str]:
    """What labels (N,) that are no whole numbers are, and what to do with them."""
    if labels.dtype.kind in "US":
        return ": names", "number them: np.unique(labels, return_inverse=True)[1]"
    if labels.dtype.kind != "f":
        return "", "save labels.astype('int64')"
    missing = np.flatnonzero(np.isnan(labels))
    if len(missing):
        return (
            f", and row {missing[0]} is NaN",
            "leave out the rows without a label, or save them as a split without labels",
        )
    broken = np.flatnonzero(labels != np.round(labels))
    if len(broken):
        found = f", and row {broken[0]} is {labels[broken[0]]:.6g}: real numbers (targets of a regression?)"
        return found, f"{_ONE_CLASS}, of a classifier: save the number of its class"
    return "", "save labels.astype('int64')"

"""The rules for labels, one class an example or several labels; and what arrays that break them are instead.

Several labels are a matrix (N, L) of zeros and ones. One whose rows all have a single one may be classes in another form: what
it is has to be said, by `task`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bnncli.errors import DataError
from bnncli.likelihoods import MULTILABEL

MAX_CLASSES = 1_000_000
_ONE_CLASS = "bnncli expects one class per example"
_RULE = "labels must be integers of shape (N,), counted from 0"
IF_UNKNOWN = "remove the rows with unknown labels; a split may also have no labels at all"
FROM_1 = "if the labels count from 1, subtract 1: classes count from 0"
_IF_LABELS = "add \0task\0 multilabel if each column is a separate label"


def check_labels(labels: np.ndarray, *, num_rows: int, where: str) -> np.ndarray:
    """Labels (N,) as int64: whole numbers from 0 on, one for each row; or zeros and ones (N, L), L at least 2, as uint8.

    What a matrix of zeros and ones means is for `common_task` to say.

    Raises:
        DataError: another shape or type, or a negative label, naming the rule, the first bad row, and what was found.
    """
    rule = _RULE
    if is_matrix(labels) and len(labels) != num_rows:
        raise DataError(f"{where}: labels have shape {labels.shape} for {num_rows} rows", code="bad_labels")
    if is_matrix(labels):
        return labels.astype(np.uint8)
    if labels.ndim == 2 and labels.shape[1] == 1:
        raise DataError(f"{where}: {rule}; got shape {labels.shape}", hint="save labels[:, 0]", code="bad_labels")
    if labels.ndim == 2 and labels.size:
        _check_known(labels, where)
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


def _check_known(labels: np.ndarray, where: str) -> None:
    """Raise DataError where zeros and ones (N, L) have NaN or -1 among them."""
    if labels.dtype.kind not in "iuf":
        return
    is_unknown = np.isnan(labels) | (labels == -1)
    if is_unknown.any() and np.isin(labels[~is_unknown], (0, 1)).all():
        row, column = np.argwhere(is_unknown)[0]
        message = f"{where}: row {row} has no value for label {column} ({labels[row, column]:g})"
        raise DataError(message, code="bad_labels", hint=IF_UNKNOWN)


def is_matrix(labels: np.ndarray) -> bool:
    """Whether labels are (N, L) zeros and ones, of at least two columns and one row."""
    is_shaped = labels.ndim == 2 and labels.shape[1] > 1 and labels.size > 0 and labels.dtype.kind in "biuf"
    return is_shaped and bool(np.isin(labels, (0, 1)).all())


def shows_several(labels: np.ndarray | None) -> bool:
    """Whether checked labels are several an example: zeros and ones with several ones in a row."""
    return labels is not None and labels.ndim == 2 and bool((labels.sum(axis=1) > 1).any())


def common_task(labels: Mapping[str, np.ndarray | None], task: str | None) -> str | None:
    """The likelihood that checked labels ask for by name, the same for all of them; None where their classes exclude each other.

    Args:
        labels: by what they are called in messages.
        task: what they were said to be, None for what they show: several labels where a row of any has several ones.

    Raises:
        DataError: some are not of the task, or may be of several.
    """
    shown = MULTILABEL if task is None and any(shows_several(array) for array in labels.values()) else task
    for where, array in labels.items():
        _check_task(array, shown, where)
    widths = {where: array.shape[1] for where, array in labels.items() if array is not None and array.ndim == 2}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{where} has {width}" for where, width in widths.items())
        raise DataError(f"splits have different numbers of labels per example: {found}", code="bad_labels")
    return MULTILABEL if shown == MULTILABEL else None


def _check_task(labels: np.ndarray | None, task: str | None, where: str) -> None:
    """Raise DataError unless labels are of the task; None allows no matrix, which may be classes in another form."""
    if labels is None or (labels.ndim == 2) == (task == MULTILABEL):
        return
    if labels.ndim == 1:
        raise DataError(
            f"{where}: expected multi-label data, zeros and ones of shape (N, L) with L at least 2; got shape "
                f"{labels.shape}",
            hint="omit \0task\0 multilabel if each example has one class", code="bad_labels",
        )  # fmt: skip
    found, hint = explain_matrix(labels)
    other = _IF_LABELS if task is None else f"omit \0task\0 {task}"
    hint = other if hint == _IF_LABELS else f"{hint}; {other}"
    raise DataError(f"{where}: {_RULE}; got shape {labels.shape}{found}", hint=hint, code="bad_labels")


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
        return f" of type {labels.dtype}", f"{_ONE_CLASS}: save the class number of each example"
    if np.isin(labels, (0, 1)).all():
        counts = (labels != 0).sum(axis=1)
        odd = np.flatnonzero(counts != 1)
        if len(odd) == 0:
            return " (one-hot?)", "save labels.argmax(1)"
        found = f", and row {odd[0]} has {counts[odd[0]]} ones (multi-label data?)"
        return found, _IF_LABELS
    if labels.dtype.kind == "f" and (labels >= 0).all() and np.abs(labels.sum(axis=1) - 1).max() < 1e-3:
        return "; these look like class probabilities (soft labels)", f"{_ONE_CLASS}: save labels.argmax(1)"
    return (
        "; these look like real numbers (regression targets?)",
        f"{_ONE_CLASS}: save the class number of each example",
    )


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
            "remove the rows without a label, or save them as a split without labels",
        )
    broken = np.flatnonzero(labels != np.round(labels))
    if len(broken):
        found = f", and row {broken[0]} is {labels[broken[0]]:.6g} (regression targets?)"
        return found, f"{_ONE_CLASS}: save the class number of each example"
    return "", "save labels.astype('int64')"

"""Labels out of the values of a column: numbers as they are, names numbered in their order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bnncli.data._labels import IF_UNKNOWN, check_labels
from bnncli.errors import DataError
from bnncli.names import listed, quoted

_WHOLE = re.compile(r"[+-]?\d+")
_LARGEST = 1 << 62
_UNKNOWN = -1
_MOST_DIGITS = 100  # zeros may stand in front
_TRUTHS = ("true", "false")
_NO_NUMBER = {"", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "none", "?"}  # how tables write it
_ONE_LABEL = dict.fromkeys(("1", "1.0", "true", "yes"), 1) | dict.fromkeys(("0", "0.0", "false", "no"), 0)
_ONE_LABEL |= dict.fromkeys([*map(str.casefold, _NO_NUMBER), "-1", "-1.0"], _UNKNOWN)


class Labels(NamedTuple):
    """Labels (N,) int64, None where no row has one, and the names of the classes, None where they are numbers."""

    numbers: np.ndarray | None
    classes: tuple[str, ...] | None


def labels_of(values: Sequence[Any], names: tuple[str, ...] | None, *, where: str) -> Labels:
    """Labels out of a column.

    Args:
        values: whole numbers, truth values, or texts; texts that are all whole numbers are numbers. Where classes have names,
            lists of their numbers too: several labels an example.
        names: of the classes, where the table has numbers and tells what they mean.
        where: the column, for messages.

    Raises:
        DataError: some rows have no label, or values are not of one of these kinds.
    """
    if {*map(type, values)} in ({str}, {int}):  # of which few differ: what each of them is, is found once
        number_of = {value: number for number, value in enumerate(dict.fromkeys(values))}
        try:
            numbers, classes = _labels_of(list(number_of), names, where)
        except DataError:  # told below with the row that it has among all
            pass
        else:
            places = np.fromiter(map(number_of.__getitem__, values), np.int64, len(values))
            return Labels(None if numbers is None else numbers[places], classes)
    return _labels_of(values, names, where)


def _labels_of(values: Sequence[Any], names: tuple[str, ...] | None, where: str) -> Labels:
    values = [value.strip() if isinstance(value, str) else value for value in values]
    is_missing = [value is None or value == "" for value in values]
    texts = {value for value in values if isinstance(value, str)}
    if texts - _NO_NUMBER and all(map(_WHOLE.fullmatch, texts - _NO_NUMBER)):
        is_missing = [value is None or (isinstance(value, str) and value in _NO_NUMBER) for value in values]
    if all(is_missing):
        return Labels(None, names)
    if any(is_missing):
        raise DataError(
            f"{where}: row {is_missing.index(True)} has no label", code="bad_labels",
            hint="remove the rows without a label, or use no labels: label=",
        )  # fmt: skip
    if names is not None and all(isinstance(value, list) for value in values):
        return Labels(check_labels(zeros_and_ones(values, len(names), where), num_rows=len(values), where=where), names)
    if all(isinstance(value, str) for value in values):
        if names is None and not all(_WHOLE.fullmatch(value) for value in values):
            folded = [value.casefold() for value in values]
            if {*folded} <= {*_TRUTHS, "0", "1"} and not {*folded} <= {*_TRUTHS}:
                row = next(row for row, value in enumerate(folded) if (value in _TRUTHS) != (folded[0] in _TRUTHS))
                raise _mixed_truths(values, row, where)
            return _by_name(values, where)
        if names is not None:
            return Labels(_known(values, names, where), names)
        for row, value in enumerate(values):
            if len(value) > _MOST_DIGITS:
                raise DataError(
                    f"{where}: row {row} has a number with {len(value)} digits; expected class numbers from 0",
                    code="bad_labels",
                )
        values = [int(value) for value in values]
    are_truths = {type(value) is bool for value in values}
    if are_truths == {True}:
        return Labels(np.array(values, np.int64), None)
    if True in are_truths:
        row = next(row for row, value in enumerate(values) if (type(value) is bool) != (type(values[0]) is bool))
        raise _mixed_truths(values, row, where)
    numbers = _array(values, where)
    if numbers.dtype.kind in "iu" and numbers.ndim == 1 and (numbers == -1).all():  # so test splits are published
        return Labels(None, names)
    found = check_labels(numbers, num_rows=len(values), where=where)
    if names is not None and len(found) and found.max() >= len(names):
        raise DataError(
            f"{where}: row {int(found.argmax())} has label {found.max()}, but there are only {len(names)} classes",
            code="bad_labels",
        )
    return Labels(found, names)


def unlabelled_note(columns: Sequence[str]) -> str:
    """What to say of columns of labels in which no row has one."""
    return (
        f"{listed(columns)} has no label in any row (every value is -1 or empty), so the split is treated as unlabelled"
    )


def several_labels(columns: Mapping[str, Sequence[Any]], *, where: str) -> Labels:
    """Several labels an example (N, L) uint8, out of a column for each of them; None where no row has any.

    Args:
        columns: zeros and ones, truth values or yes and no by the names of the labels; -1, NaN or nothing where it is not known.
        where: the table, for messages.

    Raises:
        DataError: another value, or some labels that are not known.
    """
    parts = [_there_or_not(values, f"{where}: column {quoted(name)}") for name, values in columns.items()]
    matrix = np.stack(parts, axis=1)
    is_unknown = matrix == _UNKNOWN
    if is_unknown.all():
        return Labels(None, None)
    if is_unknown.any():
        row, column = np.argwhere(is_unknown)[0]
        name = quoted(list(columns)[column])
        message = f"{where}: row {row} has no value for label {name} (-1, NaN or empty)"
        raise DataError(message, code="bad_labels", hint=IF_UNKNOWN)
    return Labels(matrix.astype(np.uint8), tuple(columns))


def _there_or_not(values: Sequence[Any], where: str) -> np.ndarray:
    """Whether each row has a label: 0, 1, or -1 where it is not known. Raises DataError for another value."""
    found = np.empty(len(values), np.int8)
    for row, value in enumerate(values):
        number = _ONE_LABEL.get(str(value).strip().casefold())
        if number is None:
            message = (
                f"{where}: row {row} has {quoted(value)}; expected 0 or 1, false or true, no or yes for each label"
            )
            raise DataError(message, code="bad_labels")
        found[row] = number
    return found


def zeros_and_ones(values: Sequence[Sequence[int]], num_classes: int, where: str) -> np.ndarray:
    """A matrix (N, C) with a one for each class that a list names. Raises DataError for a number that is no class."""
    found = np.zeros((len(values), num_classes), np.int64)
    for row, numbers in enumerate(values):
        for number in numbers:
            if not isinstance(number, int) or not 0 <= number < num_classes:
                message = f"{where}: row {row} has class {number!r}, but there are only {num_classes} classes"
                raise DataError(message, code="bad_labels")
            found[row, number] = 1
    return found


def _mixed_truths(values: Sequence[Any], row: int, where: str) -> DataError:
    """Return the error for labels that mix truth values and numbers."""
    return DataError(
        f"{where}: expected either integers or booleans, not both; row 0 has {quoted(values[0])}, row {row} has "
            f"{quoted(values[row])}",
        code="bad_labels", hint="write all of them as 0 and 1",
    )  # fmt: skip


def _by_name(values: Sequence[str], where: str) -> Labels:
    """Texts as names of classes, numbered in sorted order. Raises DataError where they are real numbers."""
    classes = sorted(set(values))
    if all(_is_real(name) for name in classes):
        if all(float(name).is_integer() for name in classes):
            message = f"{where}: labels must be integers, counted from 0; row 0 has {quoted(values[0])}"
            raise DataError(message, code="bad_labels", hint=f"write {float(values[0]):.0f}, without a decimal point")
        check_labels(np.array([float(value) for value in values]), num_rows=len(values), where=where)
    place = {name: number for number, name in enumerate(classes)}
    return Labels(np.array([place[value] for value in values], np.int64), tuple(classes))


def _known(values: Sequence[str], names: tuple[str, ...], where: str) -> np.ndarray:
    place = {name: number for number, name in enumerate(names)}
    for row, value in enumerate(values):
        if value not in place:
            raise DataError(
                f"{where}: row {row} has {quoted(value)}, which is not a class of the table", code="bad_labels"
            )
    return np.array([place[value] for value in values], np.int64)


def _array(values: Sequence[Any], where: str) -> np.ndarray:
    """Numbers, or lists of as many numbers each, as an array."""
    try:
        numbers = np.array(values)
    except (ValueError, OverflowError):
        numbers = np.array([None])
    if numbers.dtype.kind not in "iufb" or (numbers.dtype.kind in "iu" and np.abs(numbers).max() > _LARGEST):
        odd = next((row for row, value in enumerate(values) if type(value) is not type(values[0])), 0)
        rows = ", ".join(f"row {row} has {values[row]!r:.80}" for row in sorted({0, odd}))
        raise DataError(
            f"{where}: labels must be all integers from 0 or all names; {rows}",
            code="bad_labels",
        )
    return numbers


def _is_real(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

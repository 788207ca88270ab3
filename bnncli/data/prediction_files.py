"""Read predictions of any origin: probabilities or logits, labels and names, from npz, npy, csv and Parquet files."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bnncli.data.arrays import npz_shapes, read_npy, read_npz
from bnncli.data.columns import (
    BESIDE,
    LABEL,
    LOGITS,
    PROBS,
    Columns,
    find_group,
    find_labels,
    find_predictions,
    prediction_like_columns,
    split_place,
)
from bnncli.data.labels import number_groups
from bnncli.data.table_files import LIST, OTHER, REAL, TEXT, UTF16_MARKS, WHOLE, Table, open_delimited, open_parquet
from bnncli.data.tables import Labels, convert_labels, convert_multi_labels, format_unlabelled_note, is_number
from bnncli.errors import DataError
from bnncli.names import format_names, quote_name
from bnncli.system.input_files import open_regular

_FORM = "FILE[:probs=COLUMN,label=COLUMN,group=COLUMN] (or logits=COLUMN; join several columns with +, or match them with one *)"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ZIP_MAGIC, _NPY_MAGIC, _PARQUET_MAGIC, _GZIP_MAGIC = b"PK", b"\x93NUMPY", b"PAR1", b"\x1f\x8b"
_MUTUAL_INFO = "mutual_info"
_CLASSES = "classes"  # an array of their names
_PREDICTED = "predicted"  # a column in the tables of predict


def split_prediction_place(place: str) -> tuple[Path, dict[str, str]]:
    """Split off the file from what is named after it: `probs`, `logits`, `label`, or "" for `FILE:ARRAY[,LABELS]`.

    A colon belongs to the file's name if that file exists. Raises UsageError for another form.
    """
    path, named = split_place(place, (PROBS, LOGITS), f"expected {_FORM}")
    if "" in named:
        values, comma, label = named[""].partition(",")
        named = {"": values} | ({LABEL: label} if comma else {})
    return path, named


@dataclass(frozen=True)
class FilePredictions:
    """Predictions read from a file.

    Attributes:
        path: the file.
        column: name of the predictions in it, for messages.
        values: (N, C) real numbers as stored; (N, 1) for a single column.
        holds: probs or logits, as stated by the file; else None.
        classes: class names, if the file has them.
        labels: (N,) int64, (N, L) uint8 for multi-label, or None.
        mutual_info: (N,) nats, or None.
        unordered: class columns, if nothing says that their order is that of numeric labels.
        note: set if all labels are -1 or missing.
        beside: the same predictions as logits (N, C), and their name, if the file has both.
        groups: (N,) int64, if the user named their column; else None.
    """

    path: Path
    column: str
    values: np.ndarray
    holds: str | None
    classes: tuple[str, ...] | None
    labels: np.ndarray | None
    mutual_info: np.ndarray | None = None
    unordered: tuple[str, ...] = ()
    note: str = ""
    beside: tuple[np.ndarray, str] | None = None
    groups: np.ndarray | None = None


def read_given_predictions(place: str, *, wanted: str | None = None, has_labels: bool = True) -> FilePredictions:
    """Read the predictions in `FILE[:probs=COLUMN,label=COLUMN]` or `FILE:ARRAY[,LABELS]`.

    Args:
        wanted: probs or logits if the user says which.
        has_labels: look for labels if none are named.

    Raises:
        MissingInput: there is no such file.
        UsageError: the columns have another form.
        DataError: the file is damaged, the columns are missing or ambiguous, or numbers or labels break a rule.
        Untrusted: an array has Python objects.
    """
    path, named = split_prediction_place(place)
    source = _open(path)
    columns = _columns(source)
    where = columns.where
    if isinstance(source, Table):
        if len(source) == 0:  # nothing says what its columns hold
            raise DataError(f"{where} has no rows", code="empty_split", path=path)
        if not named.keys() - {*BESIDE}:
            _check_cells(source, where)
        _check_one_origin(source, where)
    chosen = find_predictions(columns, named, wanted)
    name, classes = chosen.names[0], chosen.classes
    if len(chosen.names) == 1 and source.columns[name] != LIST:
        _check_not_of_predicted(name, source.columns, where, path)
    label_names = find_labels(columns, named.get(LABEL)) if has_labels or LABEL in named else ()
    values = _read_matrix(source, chosen.names, where)
    if isinstance(source, _Arrays) and source.columns.get(_CLASSES) == TEXT:
        (known,) = source.values([_CLASSES])
        classes = tuple(known) if len(known) == values.shape[1] else classes
    if has_labels and not label_names and classes is not None:
        of_each = tuple(f"label_{one}" for one in classes)
        label_names = of_each if set(of_each) <= source.columns.keys() else ()
    unordered = () if chosen.is_ordered else chosen.names
    labels = _read_labels(source, label_names, classes, unordered) if label_names else None
    note = format_unlabelled_note(label_names) if label_names and labels is None else ""
    has_info = _MUTUAL_INFO not in chosen.names and source.columns.get(_MUTUAL_INFO) in (REAL, WHOLE)
    info = np.array(source.values([_MUTUAL_INFO])[0], np.float64) if has_info else None
    info = info if info is not None and info.shape == (len(values),) and np.isfinite(info).all() else None
    beside = (_read_matrix(source, chosen.others, where), chosen.others[0]) if chosen.others else None
    groups = _read_groups(source, find_group(columns, named), len(values))
    return FilePredictions(path, name, values, chosen.holds, classes, labels, info, unordered, note, beside, groups)


def _read_groups(source: Table | _Arrays, name: str | None, num_rows: int) -> np.ndarray | None:
    """Return the group of each row, or None if no column is named. Raises DataError."""
    if name is None:
        return None
    where = f"{quote_name(source.path, limit=300)}: {source.noun} {quote_name(name)}"
    (values,) = source.values([name])
    if len(values) != num_rows or any(isinstance(value, list) for value in values[:1]):
        raise DataError(f"{where}: expected one text or number for each of {num_rows} rows", code="bad_groups")
    return number_groups(values, where=where)


def read_labels(place: str, classes: tuple[str, ...] | None, unordered: tuple[str, ...] = ()) -> np.ndarray:
    """Read labels (N,), or (N, L) for multi-label, in `FILE[:COLUMN]`.

    Args:
        classes: class names, if known: labels may be such names.
        unordered: as in FilePredictions.

    Raises:
        MissingInput, UsageError, DataError, Untrusted: as in read_given_predictions, or if there are no labels.
    """
    path, named = split_prediction_place(place)
    source = _open(path)
    names = find_labels(_columns(source), named.get(LABEL) or named.get(""), is_alone=True, has_header=False)
    labels = _read_labels(source, names, classes, unordered)
    if labels is None:
        raise DataError(f"{quote_name(path, limit=300)}: no row has a label", code="bad_labels", path=path)
    return labels


def read_texts(path: Path, column: str) -> list[str]:
    """Return the values (N,) of a column or array as texts. Raises as read_given_predictions, or if it is missing."""
    source = _open(path)
    try:
        names = _columns(source).resolve(column)
    except DataError as error:
        hint = "name one of these, or a column of another file: FILE:COLUMN"
        raise DataError(error.message, code=error.code, hint=hint, path=path) from None
    rows = zip(*source.values(names), strict=True)
    return [", ".join("" if value is None else str(value) for value in row) for row in rows]


def read_columns(path: Path, names: Collection[str]) -> dict[str, list[Any]]:
    """Return the values (N,) of those of the columns or arrays that a file has. Raises as read_given_predictions."""
    source = _open(path)
    there = [name for name in names if name in source.columns]
    return dict(zip(there, source.values(there), strict=True))


def read_magic(path: Path) -> bytes:
    """Return the first bytes of a file. Raises MissingInput, or DataError if it is empty."""
    with open_regular(path) as stream:
        found = stream.read(8)
    if not found:
        raise DataError(f"{quote_name(path, limit=300)} is empty", code="truncated", path=path)
    return found


class _Arrays:
    """The arrays of an npz or npy file as columns; a matrix of real numbers is one of lists."""

    noun = "array"

    def __init__(self, path: Path, *, is_archive: bool) -> None:
        self.path, self.class_names = path, MappingProxyType[str, tuple[str, ...]]({})
        self._array = None
        if is_archive:
            shapes = npz_shapes(path)
        else:
            with open_regular(path) as stream:
                self._array = read_npy(stream, quote_name(path, limit=300), path)
            shapes = {"arr_0": (self._array.shape, self._array.dtype)}
        if not shapes:
            raise DataError(f"{quote_name(path, limit=300)} has no arrays; expected predictions", path=path)
        self.columns = {name: _classify_array(shape, dtype) for name, (shape, dtype) in shapes.items()}

    def read(self, name: str) -> np.ndarray:
        """Return an array."""
        return self._array if self._array is not None else read_npz(self.path, [name])[name]

    def values(self, names: Sequence[str]) -> list[list[Any]]:
        """Return some arrays as lists."""
        arrays = [np.atleast_1d(self.read(name)) for name in names]
        return [(array.astype(str) if array.dtype.kind == "S" else array).tolist() for array in arrays]


def _classify_array(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Return what an array holds, as a column of a table does; its type and shape for any other."""
    if len(shape) == 1 and dtype.kind in "fiubUS":
        return REAL if dtype.kind == "f" else TEXT if dtype.kind in "US" else WHOLE
    if dtype.kind not in "fiub":
        return OTHER
    return LIST if len(shape) == 2 and dtype.kind == "f" else f"{dtype} {shape}"


def _open(path: Path) -> Table | _Arrays:
    """Open a file of any kind."""
    magic = read_magic(path)
    if magic.startswith((_ZIP_MAGIC, _NPY_MAGIC)):
        return _Arrays(path, is_archive=magic.startswith(_ZIP_MAGIC))
    if magic.startswith(_PARQUET_MAGIC):
        return Table(path, [path], open_parquet, "parquet")
    if b"\0" in magic and not magic.startswith((_GZIP_MAGIC, *UTF16_MARKS)):
        raise DataError(
            f"{quote_name(path, limit=300)} has an unknown format; expected npz, npy, csv, Parquet or a prediction "
                "file written by bnncli", path=path,
            hint="save the predictions with np.savez(FILE, probs=..., label=...)", code="wrong_kind",
        )  # fmt: skip
    return Table(path, [path], open_delimited, "csv")


def _columns(source: Table | _Arrays) -> Columns:
    return Columns(source.columns, quote_name(source.path, limit=300), noun=source.noun)


def _read_matrix(source: Table | _Arrays, names: Sequence[str], where: str) -> np.ndarray:
    """Return predictions (N, C); a vector becomes a single column. Raises DataError if there are none."""
    if isinstance(source, Table):
        return _two_axes(read_numbers(source, names, where), f"{where}: column {quote_name(names[0])}")
    return np.concatenate(
        [_two_axes(source.read(name), f"{where}: array {quote_name(name)}") for name in names], axis=1
    )


def read_numbers(table: Table, names: Sequence[str], where: str) -> np.ndarray:
    """Return columns of numbers, or a list column, as (N, C) float64; lists of lists have more axes.

    Raises:
        DataError: a cell is not a number, or lists differ in length.
    """
    if (numbers := table.numbers(names)) is not None:
        return numbers
    found = []
    for name, column in zip(names, table.values(names), strict=True):
        size = next((len(value) for value in column if isinstance(value, list)), None)
        for row, value in enumerate(column):
            if isinstance(value, list) and len(value) != size:
                raise DataError(
                    f"{where}: row {row}: column {quote_name(name)} has {len(value)} numbers, but the first row has {size}"
                )
            if not (isinstance(value, list) or is_number(value) or (value is None and size is None)):
                raise _not_number_error(where, row, name, value)
        try:
            array = np.array(column, np.float64)
            found.append(array[:, None] if array.ndim == 1 else array)
        except (ValueError, TypeError):
            raise DataError(f"{where}: column {quote_name(name)} has values that are not numbers") from None
    return np.concatenate(found, axis=1)


def _check_cells(table: Table, where: str) -> None:
    """Raise DataError for the first cell that is not a number in a column that must hold numbers.

    These are text columns that begin with a decimal comma, or that are named like predictions and at least half numeric.
    """
    texts = [name for name, holds in table.columns.items() if holds == TEXT]
    first = table.read(np.arange(min(1, len(table))), texts)
    odd = [(0, name, cell) for name, cells in zip(texts, first, strict=True) for cell in cells if _has_comma(cell)]
    like = prediction_like_columns(table.columns, TEXT)
    for name, column in zip(like, table.values(like), strict=True):
        rows = [row for row, value in enumerate(column) if not is_number(value)]
        if 0 < 2 * len(rows) <= len(column):
            odd.append((rows[0], name, column[rows[0]]))
    if odd:
        raise _not_number_error(where, *min(odd, key=lambda one: one[0]))


def _has_comma(value: object) -> bool:
    """Return whether a cell is a number with a decimal comma."""
    return re.fullmatch(r"\s*[-+]?[0-9]+,[0-9]+([eE][-+]?[0-9]+)?\s*", str(value)) is not None


def _not_number_error(where: str, row: int, name: str, value: Any) -> DataError:
    came = quote_name(value) if value not in ("", None) else "nothing"
    hint = f"use a decimal point: {value.replace(',', '.')}" if _has_comma(value) else None
    return DataError(f"{where}: row {row}, column {quote_name(name)}: expected a number, got {came}", hint=hint)


def _check_not_of_predicted(name: str, names: Collection[str], where: str, path: Path) -> None:
    """Raise DataError for the single column with the predicted class's probability, as in tables of `predict`."""
    if name == "probability" and _PREDICTED in names:
        is_ours = {"split", "posterior", "variant"} <= {*names}
        raise DataError(
            f"{where}: expected the probability of every class, but {quote_name(name)} next to {quote_name(_PREDICTED)} "
                "holds only that of the predicted class",
            code="which", path=path,
            hint="write the table with predict \0probabilities\0, or score a prediction file from the run folder" if is_ours
            else "give one column per class (p_NAME); if the column holds the probability of class 1, rename it to "
                f"something other than {name}",
        )  # fmt: skip


def _check_one_origin(table: Table, where: str) -> None:
    """Raise DataError for a table of `predict` with several predictions per example."""
    names = [name for name in ("split", "posterior", "variant") if name in table.columns]
    if len(names) < 3:
        return
    origins = sorted(set(zip(*table.values(names), strict=True)))
    if len(origins) > 1:
        shown = ", ".join(" ".join(map(str, one)) for one in origins[:4])
        raise DataError(
            f"{where} mixes predictions of {len(origins)} splits, posteriors or integrators: {shown}", code="several_splits",
            hint="score one at a time", path=table.path,
        )  # fmt: skip


def _read_labels(
    source: Table | _Arrays, names: Sequence[str], classes: tuple[str, ...] | None, unordered: tuple[str, ...]
) -> np.ndarray | None:
    """Return the labels in one column, or multi-label labels in one column each; None if there are none.

    Args:
        unordered: as in FilePredictions.
    """
    values, where = source.values(names), quote_name(source.path, limit=300)
    if len(names) > 1:
        return convert_multi_labels(dict(zip(names, values, strict=True)), where=where).numbers
    column = f"{where}: {source.noun} {quote_name(names[0])}"
    own = source.class_names.get(names[0])
    if own is not None and classes is not None and {*own} == {*classes}:  # its numbers refer to its own names
        numbers = convert_labels(values[0], own, where=column).numbers
        return None if numbers is None else np.array([classes.index(name) for name in own])[numbers]
    return _convert_labels(values[0], own or classes, column, unordered)


def _convert_labels(
    values: Sequence[Any], classes: tuple[str, ...] | None, where: str, unordered: tuple[str, ...] = ()
) -> np.ndarray | None:
    """Convert texts or numbers to labels: names if all are, else numbers.

    Raises:
        DataError: labels are numbers, but nothing says which class column has which number.
    """
    if classes is not None:  # tables of predict put ' before names that a spreadsheet would take for formulas
        values = [
            one[1:] if isinstance(one, str) and one[:1] == "'" and one not in classes and one[1:] in classes else one
            for one in values
        ]
    kinds = {*map(type, values)}
    texts = {str(value).strip() for value in {*values}} if kinds and kinds <= {str, int} else set()
    if classes is not None and texts and texts <= {*classes, ""}:
        return convert_labels(values if kinds == {str} else [*map(str, values)], classes, where=where).numbers
    found: Labels = convert_labels(values, None, where=where)
    if found.classes is None:
        if found.numbers is not None and found.numbers.ndim == 1:
            _check_ordered(unordered, where)
        return found.numbers
    if classes is None:
        raise DataError(
            f"{where}: labels are names, such as {quote_name(found.classes[0])}, but the prediction columns do not "
                "say which class they belong to",
            code="bad_labels", hint="save labels as class numbers from 0, or name the columns p_NAME",
        )  # fmt: skip
    return convert_labels(values, classes, where=where).numbers  # names the row without a known name


def _check_ordered(unordered: tuple[str, ...], where: str) -> None:
    """Raise DataError if labels are numbers and nothing says which prediction column has which number."""
    if unordered:
        raise DataError(
            f"{where}: labels are numbers, but nothing says which of the columns {format_names(unordered, limit=8)} is "
                "class 0",
            code="bad_labels", hint="list the columns in class order: "
                f"FILE:probs={'+'.join(unordered[:8])}{'+...' * (len(unordered) > 8)}",
        )  # fmt: skip


def _two_axes(array: np.ndarray, where: str) -> np.ndarray:
    """Return (N, C) numbers; a vector becomes a single column. Raises DataError otherwise."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"{where} has type {array.dtype}, expected numbers")
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] == 0:
        draws = "; for draws, save their mean" if array.ndim == 3 else ""
        raise DataError(f"{where}: expected shape (N, C), got {array.shape}{draws}", code="bad_shape")
    if len(array) == 0:
        raise DataError(f"{where} has no rows", code="empty_split")
    if array.dtype.kind != "f":
        array = array.astype(np.float64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)

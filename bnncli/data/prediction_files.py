"""Read predictions of any origin: probabilities or logits, labels and names, from npz, npy, csv and Parquet files."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bnncli.data.arrays import npz_shapes, read_npz
from bnncli.data.labels import check_labels
from bnncli.data.table_files import LIST, REAL, TEXT, UTF16_MARKS, WHOLE, DelimitedBlocks, ParquetBlocks, Table
from bnncli.data.tables import (
    LABEL_NAMES,
    Labels,
    check_cells,
    check_points,
    convert_labels,
    convert_multi_labels,
    format_unlabelled_note,
    read_numbers,
)
from bnncli.errors import DataError, Untrusted, UsageError
from bnncli.names import by_number, format_names, quote_name
from bnncli.system.input_files import is_failure, open_regular

PROBS, LOGITS, LABEL = "probs", "logits", "label"
_KEYS = (PROBS, LOGITS, LABEL)
_NAMES = {
    PROBS: ("probs", "prob", "probabilities", "probability", "proba", "probas", "p", "softmax", "predict_proba", "y_prob", "y_proba", "y_pred_proba"),
    LOGITS: ("logits", "logit"),
}  # fmt: skip
_PREFIXES = {
    PROBS: ("p_", "prob_", "probs_", "proba_", "probability_", "probabilities_"),
    LOGITS: ("logit_", "logits_"),
}
_OF_LABELS = (*LABEL_NAMES, "y_true", "true_label", "ground_truth")
FORM = "FILE[:probs=COLUMN,label=COLUMN] (or logits=COLUMN; join several columns with +, or match them with one *)"


class PredictionColumns(NamedTuple):
    """Columns or arrays with the predictions.

    Attributes:
        names: one that holds a vector per row, or one per class.
        holds: PROBS or LOGITS, judged by their names; None if undecided.
        classes: class names, if the columns have them.
        others: columns or arrays with the same predictions as logits, by name.
        is_ordered: whether the classes are in numerical order: the user gave it, or the names sort that way.
    """

    names: tuple[str, ...]
    holds: str | None
    classes: tuple[str, ...] | None = None
    others: tuple[str, ...] = ()
    is_ordered: bool = True


def split_prediction_place(place: str) -> tuple[Path, dict[str, str]]:
    """Split off the file from what is named after it: `probs`, `logits`, `label`, or "" for `FILE:ARRAY[,LABELS]`.

    A colon belongs to the file's name if that file exists. Raises UsageError for another form.
    """
    if Path(place).expanduser().exists():
        return Path(place).expanduser(), {}
    starts = [match.start() for match in re.finditer(rf":(?=(?:{'|'.join(_KEYS)})=)", place)]
    if starts:
        start = next((one for one in starts if Path(place[:one]).expanduser().exists()), starts[0])
        return Path(place[:start]).expanduser(), _parse(place[start + 1 :], place)
    before, colon, after = place.rpartition(":")
    if colon and after and Path(before).expanduser().exists():
        if "=" in after:
            raise UsageError(f"expected {FORM}; got {place!r}")
        values, comma, label = after.partition(",")
        return Path(before).expanduser(), {"": values} | ({LABEL: label} if comma else {})
    return Path(place).expanduser(), {}


def _parse(text: str, place: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in re.split(rf",(?=(?:{'|'.join(_KEYS)})=)", text):
        key, _, value = part.partition("=")
        if key not in _KEYS or key in found or not value:
            raise UsageError(f"expected {FORM}; got {place!r}")
        found[key] = value
    if {PROBS, LOGITS} <= found.keys():
        raise UsageError(f"probs= and logits= are mutually exclusive; got {place!r}")
    return found


def find_arrays(
    shapes: Mapping[str, tuple[int, ...]], named: Mapping[str, str], wanted: str | None, where: str
) -> PredictionColumns:
    """Find the array of predictions in an archive.

    Args:
        shapes: of the real arrays.
        named: as from `divide`.
        wanted: PROBS or LOGITS if the user says which.

    Raises:
        DataError: there is none, or it is ambiguous.
    """
    holds, name = _parse_named_predictions(named)
    if name is not None:
        return PredictionColumns((_check_column_name(name, shapes, where),), wanted or holds or _infer_content(name))
    found = {kind: [one for one in shapes if one.casefold() in names] for kind, names in _NAMES.items()}
    for kind, own in found.items():  # beside a matrix, a vector is a property of the rows
        found[kind] = [one for one in own if len(shapes[one]) == 2] or own
    for kind in (wanted,) if wanted else (PROBS, LOGITS):
        if len(found[kind]) == 1:
            name = found[kind][0]
            logits = [one for one in found[LOGITS] if wanted is None and one != name and shapes[one] == shapes[name]]
            return PredictionColumns((name,), kind, others=tuple(logits[:1]))
    others = [one for one in found[PROBS] + found[LOGITS] if wanted is None or one in found[wanted]]
    others = others or [one for one, shape in shapes.items() if len(shape) == 2]
    if len(others) == 1:
        return PredictionColumns((others[0],), wanted or _infer_content(others[0]))
    if others:
        shown = ", ".join(f"{quote_name(one)} {shapes[one]}" for one in others[:20])
        raise DataError(
            f"{where}: several arrays could be the predictions: {shown}", code="several_arrays",
            hint=f"choose one: FILE:{others[0]}",
        )  # fmt: skip
    shown = ", ".join(f"{quote_name(one)} {shape}" for one, shape in list(shapes.items())[:20]) or "none"
    raise DataError(
        f"{where}: found no array (N, C) of probabilities or logits; its floating-point arrays: {shown}", code="no_column",
        hint="name the array: FILE:ARRAY",
    )  # fmt: skip


def find_columns(
    columns: Mapping[str, str], named: Mapping[str, str], wanted: str | None, where: str
) -> PredictionColumns:
    """Find the columns of predictions in a table; arguments as in `find_arrays`, `columns` with what each holds.

    Raises:
        DataError: there are none, or they are ambiguous.
    """
    holds, name = _parse_named_predictions(named)
    if name is not None:
        names = _expand_names(name, columns, where)
        kind, classes = wanted or holds or _infer_content(names[0]), _classes(names)
        return PredictionColumns(names, kind, classes, is_ordered="+" in name or _is_sorted_by_number(classes))
    numbers = [one for one, kind in columns.items() if kind in (REAL, WHOLE)]
    for kind in (wanted,) if wanted else (PROBS, LOGITS):
        found = _find_columns_by_name(columns, numbers, kind)
        if len(found) > 1:
            raise _several_columns([own[0] for own in found], where)
        if found:
            chosen = _choose_class_columns(found[0], kind)
            beside = [
                _choose_class_columns(own, LOGITS)
                for own in _find_columns_by_name(columns, numbers, LOGITS)
                if wanted is None
            ]
            if kind == PROBS and [one.classes for one in beside] == [chosen.classes]:
                chosen = chosen._replace(others=beside[0].names)
            return chosen
    by_number = [one for one in numbers if one.isdecimal()]
    if len(by_number) > 1:
        return _choose_class_columns(by_number, wanted)
    shown = ", ".join(f"{quote_name(one)} ({kind})" for one, kind in list(columns.items())[:20]) or "none"
    raise DataError(
        f"{where}: found no columns of probabilities or logits (p_NAME, prob_NAME, logit_NAME); its columns: {shown}",
        code="no_column", hint="name the columns: FILE:probs=COL+COL+COL, or FILE:probs='prefix*'",
    )  # fmt: skip


def _find_columns_by_name(columns: Mapping[str, str], numbers: Sequence[str], kind: str) -> list[list[str]]:
    """Return sets of columns, one per class or one for all, that are named like probabilities or logits."""
    found = [own for prefix in _PREFIXES[kind] if len(own := [one for one in numbers if _has_prefix(one, prefix)]) > 1]
    lists = [one for one in columns if columns[one] == LIST and one.casefold() in _NAMES[kind]]
    return found or [[one] for one in lists or [one for one in numbers if one.casefold() in _NAMES[kind]]]


def prediction_like_columns(columns: Mapping[str, str], kind: str) -> list[str]:
    """Return the columns that hold values of a kind and are named like probabilities or logits."""
    prefixes = [prefix for every in _PREFIXES.values() for prefix in every]
    whole = {name for every in _NAMES.values() for name in every}
    return [
        name
        for name, holds in columns.items()
        if holds == kind and (name.casefold() in whole or any(_has_prefix(name, prefix) for prefix in prefixes))
    ]


def find_labels(
    names: Sequence[str], named: Mapping[str, str], where: str, *, is_alone: bool = False
) -> tuple[str, ...]:
    """Find the columns or arrays of labels; none if there are none.

    Args:
        is_alone: the file is only for labels, so a single column is theirs, whatever its name.

    Raises:
        DataError: a named one is missing, or the choice is ambiguous.
    """
    given = named.get(LABEL, named.get("") if is_alone else None)
    if given is not None:
        return _expand_names(given, names, where)
    found = [one for one in names if one.casefold() in _OF_LABELS]
    if not found and is_alone and len(names) == 1:
        found = [names[0]]
    if len(found) > 1:
        raise DataError(
            f"{where}: several columns could be the labels: {format_names(found)}", code="several_columns",
            hint=f"choose one: FILE:label={found[0]}",
        )  # fmt: skip
    if is_alone and not found:
        raise DataError(
            f"{where}: found no label column; its columns: {format_names(names, limit=20)}", code="no_column",
            hint="name the column: FILE:COLUMN",
        )  # fmt: skip
    if is_alone and re.fullmatch(r"[+-]?\d+(\.\d+)?", found[0]):
        raise DataError(
            f"{where}: the name of the label column is a number, {quote_name(found[0])} (is the header line missing?)", code="no_column",
            hint="add a header line: label",
        )  # fmt: skip
    return tuple(found)


def _parse_named_predictions(named: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return what the named predictions hold, and their name."""
    for key in (PROBS, LOGITS):
        if key in named:
            return key, named[key]
    return None, named.get("")


def _infer_content(name: str) -> str | None:
    """Infer what a column or array holds from its name."""
    folded = name.casefold()
    if "logit" in folded:
        return LOGITS
    return PROBS if "prob" in folded or "softmax" in folded else None


def _expand_names(text: str, names: Sequence[str] | Mapping[str, object], where: str) -> tuple[str, ...]:
    """Return a single name, names joined by +, or names that match a pattern with one *."""
    if text in names:
        return (text,)
    if text.count("*") == 1:
        first, last = text.split("*")
        found = tuple(
            name for name in names if name.startswith(first) and name.endswith(last) and len(name) >= len(text)
        )
        if found:
            return found
    return tuple(_check_column_name(one, names, where) for one in text.split("+"))


def _check_column_name(name: str, names: Sequence[str] | Mapping[str, object], where: str) -> str:
    if name not in names:
        raise DataError(
            f"{where} has no column {quote_name(name)}; it has {format_names(names, limit=20)}", code="no_column"
        )
    return name


def _has_prefix(name: str, prefix: str) -> bool:
    return name.casefold().startswith(prefix) and len(name) > len(prefix)


def _choose_class_columns(names: Sequence[str], holds: str | None) -> PredictionColumns:
    """Choose columns of one class each, sorted numerically if named by numbers."""
    classes = _classes(names) or ()
    if classes and all(one.isdecimal() for one in classes):
        order = sorted(range(len(names)), key=lambda place: int(classes[place]))
        names, classes = [names[place] for place in order], tuple(classes[place] for place in order)
    return PredictionColumns(tuple(names), holds, classes or None, is_ordered=_is_sorted_by_number(classes))


def _is_sorted_by_number(classes: Sequence[str] | None) -> bool:
    """Return whether names are sorted, ignoring case, with numbers compared as numbers."""
    keys = [by_number(name.casefold()) for name in classes or ()]
    return keys == sorted(keys)


def _classes(names: Sequence[str]) -> tuple[str, ...] | None:
    """Remove the names' common prefix up to its last underscore; None for a single name."""
    if len(names) < 2:
        return None
    first = next(
        (
            prefix
            for prefixes in _PREFIXES.values()
            for prefix in prefixes
            if all(_has_prefix(one, prefix) for one in names)
        ),
        "",
    )
    return tuple(one[len(first) :] for one in names)


def _several_columns(found: Sequence[str], where: str) -> DataError:
    return DataError(
        f"{where}: several columns could be the predictions: {format_names(found)}", code="several_columns",
        hint=f"choose one: FILE:probs={found[0]}",
    )  # fmt: skip


HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ZIP_MAGIC, _NPY_MAGIC, _PARQUET_MAGIC, _GZIP_MAGIC = b"PK", b"\x93NUMPY", b"PAR1", b"\x1f\x8b"
_MUTUAL_INFO = "mutual_info"
_CLASSES = "classes"  # an array of their names
_PREDICTED = "predicted"  # a column in the tables of predict
_ROWS = 4096  # rows compared at once
_ROUNDING = 0.01  # of probabilities beside logits: two decimals, or 16 bits of either


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
    magic = read_magic(path)
    if magic.startswith(_NPY_MAGIC):
        return FilePredictions(
            path, path.name, _two_axes(_read_npy(path), quote_name(path, limit=300)), wanted, None, None
        )
    if magic.startswith(_ZIP_MAGIC):
        return _read_archive(path, named, wanted, has_labels=has_labels)
    return _read_table(_table(path, magic), named, wanted, has_labels=has_labels)


def read_labels(place: str, classes: tuple[str, ...] | None, unordered: tuple[str, ...] = ()) -> np.ndarray:
    """Read labels (N,), or (N, L) for multi-label, in `FILE[:COLUMN]`.

    Args:
        classes: class names, if known: labels may be such names.
        unordered: as in GivenFile.

    Raises:
        MissingInput, UsageError, DataError, Untrusted: as in read_given, or if there are no labels.
    """
    path, named = split_prediction_place(place)
    magic, where = read_magic(path), quote_name(path, limit=300)
    if magic.startswith(_NPY_MAGIC):
        labels = _check_label_array(_read_npy(path), classes, where, unordered)
    elif magic.startswith(_ZIP_MAGIC):
        (name,) = _single(find_labels(list(npz_shapes(path)), named, where, is_alone=True), where)
        labels = _check_label_array(
            read_npz(path, [name])[name], classes, f"{where}: array {quote_name(name)}", unordered
        )
    else:
        table = _table(path, magic)
        names = find_labels(list(table.columns), named, where, is_alone=True)
        labels = _read_label_columns(table, names, table.values(names), classes, where, unordered)
    if labels is None:
        raise DataError(f"{where}: no row has a label", code="bad_labels", path=path)
    return labels


def read_texts(path: Path, column: str) -> list[str]:
    """Return the values (N,) of a column or array as texts. Raises as read_given does; DataError if it is missing."""
    magic, where = read_magic(path), quote_name(path, limit=300)
    if magic.startswith(_ZIP_MAGIC):
        if column not in (names := list(npz_shapes(path))):
            raise DataError(
                f"{where} has no array {quote_name(column)}; it has {format_names(names, limit=20)}", code="no_column",
                hint="name one of these, or a column of another file: FILE:COLUMN", path=path,
            )  # fmt: skip
        array = read_npz(path, [column])[column]
        if array.ndim != 1:
            raise DataError(f"{where}: array {quote_name(column)} has shape {array.shape}, expected (N,)", path=path)
        return [str(value) for value in array.tolist()]
    table = _table(path, magic)
    (name,) = find_labels(list(table.columns), {LABEL: column}, where)
    return ["" if value is None else str(value) for value in table.values([name])[0]]


def read_magic(path: Path) -> bytes:
    """Return the first bytes of a file. Raises MissingInput, or DataError if it is empty."""
    with open_regular(path) as stream:
        found = stream.read(8)
    if not found:
        raise DataError(f"{quote_name(path, limit=300)} is empty", code="truncated", path=path)
    return found


def _table(path: Path, magic: bytes) -> Table:
    if magic.startswith(_PARQUET_MAGIC):
        return Table(path, [path], ParquetBlocks, "parquet")
    if b"\0" in magic and not magic.startswith((_GZIP_MAGIC, *UTF16_MARKS)):
        raise DataError(
            f"{quote_name(path, limit=300)} has an unknown format; expected npz, npy, csv, Parquet or a prediction "
                "file written by bnncli", path=path,
            hint="save the predictions with np.savez(FILE, probs=..., label=...)", code="wrong_kind",
        )  # fmt: skip
    return Table(path, [path], DelimitedBlocks, "csv")


def _read_archive(path: Path, named: Mapping[str, str], wanted: str | None, *, has_labels: bool) -> FilePredictions:
    shapes, where = npz_shapes(path), quote_name(path, limit=300)
    if named.keys() & {""} and named[""] in shapes and shapes[named[""]][1].kind not in "fiub":
        raise DataError(
            f"{where}: array {quote_name(named[''])} has type {shapes[named['']][1]}, expected numbers", path=path
        )
    if not shapes:
        raise DataError(f"{where} has no arrays; expected an npz file with predictions", path=path)
    is_named = {name for key, name in named.items() if key != LABEL}
    real = {name: shape for name, (shape, dtype) in shapes.items() if dtype.kind == "f" or name in is_named}
    absent = next((name for name in is_named if name not in shapes), None)
    if absent is not None:
        raise DataError(
            f"{where} has no array {quote_name(absent)}; it has {format_names(list(shapes), limit=20)}",
            code="no_column",
            path=path,
        )
    chosen = find_arrays(real, named, wanted, where)
    (name,) = chosen.names
    if len(shapes[name][0]) == 1:
        _check_not_of_predicted(name, shapes, where, path)
    labels = find_labels(list(shapes), named, where) if has_labels or LABEL in named else ()
    others = [one for one in (_CLASSES, _MUTUAL_INFO) if one in shapes and shapes[one][1].kind in "Uf" and one != name]
    arrays = read_npz(path, [name, *_single(labels, where), *others, *chosen.others])
    values = _two_axes(arrays[name], f"{where}: array {quote_name(name)}")
    for other in chosen.others:
        _check_agreement(values, _two_axes(arrays[other], f"{where}: array {quote_name(other)}"), (name, other), path)
    classes = _class_names(arrays.get(_CLASSES), values.shape[1])
    own = _check_label_array(arrays[labels[0]], classes, f"{where}: array {quote_name(labels[0])}") if labels else None
    note = format_unlabelled_note(labels) if labels and own is None else ""
    mutual_info = _select_per_example(arrays.get(_MUTUAL_INFO), len(values))
    return FilePredictions(path, name, values, chosen.holds, classes, own, mutual_info, note=note)


def _read_table(table: Table, named: Mapping[str, str], wanted: str | None, *, has_labels: bool) -> FilePredictions:
    where = quote_name(table.path, limit=300)
    if not named.keys() - {LABEL}:
        check_points(table, where)
        check_cells(table, prediction_like_columns(table.columns, TEXT), where)
    chosen = find_columns(table.columns, named, wanted, where)
    if len(chosen.names) == 1:
        _check_not_of_predicted(chosen.names[0], table.columns, where, table.path)
    _check_one_origin(table, where)
    label_names = find_labels(list(table.columns), named, where) if has_labels or LABEL in named else ()
    if has_labels and not label_names and chosen.classes is not None:
        of_each = [f"label_{name}" for name in chosen.classes]
        label_names = tuple(of_each) if set(of_each) <= table.columns.keys() else ()
    further = [name for name in table.columns if name == _MUTUAL_INFO and name not in chosen.names]
    raw = table.values([*label_names, *further])
    if len(table) == 0:
        raise DataError(f"{where} has no rows", code="empty_split", path=table.path)
    values = read_numbers(table, chosen.names, where)
    if chosen.others:
        _check_agreement(
            values, read_numbers(table, chosen.others, where), (chosen.names[0], chosen.others[0]), table.path
        )
    unordered = () if chosen.is_ordered else chosen.names
    own = raw[: len(label_names)]
    labels = _read_label_columns(table, label_names, own, chosen.classes, where, unordered) if label_names else None
    mutual_info = _real(raw[-1]) if further else None
    note = format_unlabelled_note(label_names) if label_names and labels is None else ""
    return FilePredictions(
        table.path, chosen.names[0], values, chosen.holds, chosen.classes, labels, mutual_info, unordered, note
    )


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


def _check_agreement(probs: np.ndarray, logits: np.ndarray, names: tuple[str, str], path: Path) -> None:
    """Raise DataError if logits (N, C) contradict the probabilities (softmax if rows sum to 1, else sigmoid)."""
    if probs.shape != logits.shape:
        return
    apart = 0.0
    for start in range(0, len(probs), _ROWS):
        block, own = probs[start : start + _ROWS], np.asarray(logits[start : start + _ROWS], np.float64)
        if block.shape[1] > 1 and np.allclose(block.sum(axis=1), 1, atol=_ROUNDING):
            with np.errstate(invalid="ignore"):  # infinite ones are refused when scored
                raised = np.exp(own - own.max(axis=1, keepdims=True))
            made = raised / raised.sum(axis=1, keepdims=True)
        else:
            made = 0.5 + np.tanh(own / 2) / 2
        apart = max(apart, float(np.abs(made - block).max()))
    if apart > _ROUNDING:
        raise DataError(
            f"{quote_name(path, limit=300)}: {quote_name(names[0])} and {quote_name(names[1])} disagree: probabilities "
                f"computed from the logits differ by up to {apart:.3g}",
            code="which", hint=f"choose one: FILE:probs={names[0]} or FILE:logits={names[1]}", path=path,
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


def _read_label_columns(
    table: Table,
    names: Sequence[str],
    values: Sequence[Sequence[Any]],
    classes: tuple[str, ...] | None,
    where: str,
    unordered: tuple[str, ...],
) -> np.ndarray | None:
    """Return the labels in one column, or multi-label labels in one column each."""
    if len(names) > 1:
        return convert_multi_labels(dict(zip(names, values, strict=True)), where=where).numbers
    column = f"{where}: column {quote_name(names[0])}"
    own = table.class_names.get(names[0])
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


def _check_label_array(
    array: np.ndarray, classes: tuple[str, ...] | None, where: str, unordered: tuple[str, ...] = ()
) -> np.ndarray | None:
    """Check the labels of an array; None if all are -1, as for unlabelled examples."""
    if array.dtype.kind in "US" and array.ndim == 1:
        return _convert_labels([str(value) for value in array.astype(str).tolist()], classes, where, unordered)
    if array.dtype.kind in "if" and array.ndim == 1 and len(array) and (array == -1).all():
        return None
    if array.ndim == 1:
        _check_ordered(unordered, where)
    return check_labels(np.asarray(array), num_rows=len(array) if array.ndim else 0, where=where)


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


def _class_names(array: np.ndarray | None, num_classes: int) -> tuple[str, ...] | None:
    is_there = array is not None and array.dtype.kind == "U" and array.shape == (num_classes,)
    return tuple(map(str, array.tolist())) if is_there and array is not None else None


def _select_per_example(array: np.ndarray | None, num_rows: int) -> np.ndarray | None:
    """Return finite numbers (N,) of the examples, or None."""
    return array if array is not None and array.shape == (num_rows,) and np.isfinite(array).all() else None


def _real(values: Sequence[Any]) -> np.ndarray | None:
    try:
        return _select_per_example(np.array(values, np.float64), len(values))
    except (ValueError, TypeError):
        return None


def _single(names: tuple[str, ...], where: str) -> tuple[str, ...]:
    if len(names) > 1:
        raise DataError(f"{where}: expected the labels in a single array; got {', '.join(map(quote_name, names))}")
    return names


def _read_npy(path: Path) -> np.ndarray:
    """Read the array of an npy file. Raises DataError, or Untrusted for Python objects."""
    where = quote_name(path, limit=300)
    with open_regular(path) as stream:
        try:
            array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
        except (ValueError, EOFError, OSError, SyntaxError) as error:
            if is_failure(error):
                raise
            if "allow_pickle" in str(error):
                raise Untrusted(
                    f"{where} holds Python objects, which need unpickling; bnncli does not unpickle data",
                    hint="save it as a plain array of numbers",
                    path=path,
                ) from None
            raise DataError(
                f"{where} is truncated or damaged ({' '.join(str(error).split())[:120]})", path=path
            ) from error
    return array

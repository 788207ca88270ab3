"""Labels of data: their rules, matching of classes by name, and one folder per class."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bnncli.errors import DataError, MissingInput
from bnncli.likelihoods import MULTILABEL
from bnncli.names import count_noun, format_names, is_split, quote_name
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.progress import Progress
from bnncli.system.input_files import convert_read_errors, open_regular

if TYPE_CHECKING:
    from bnncli.data.splits import InputSplit


MAX_CLASSES = 1_000_000
_ONE_CLASS = "bnncli expects one class per example"
_RULE = "labels must be integers of shape (N,), counted from 0"
IF_UNKNOWN = "remove the rows with unknown labels; a split may also have no labels at all"
FROM_1 = "if the labels count from 1, subtract 1: classes count from 0"
_IF_LABELS = "add \0task\0 multilabel if each column is a separate label"


def check_labels(labels: np.ndarray, *, num_rows: int, where: str) -> np.ndarray:
    """Check labels and return (N,) as int64, integers from 0, or a matrix (N, L) of zeros and ones, L >= 2, as uint8.

    `common_task` decides what a matrix of zeros and ones means.

    Raises:
        DataError: shape or type is wrong, or a label is negative; names the rule, the first bad row, and what was
            found.
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
    """Raise DataError if zeros and ones (N, L) include NaN or -1."""
    if labels.dtype.kind not in "iuf":
        return
    is_unknown = np.isnan(labels) | (labels == -1)
    if is_unknown.any() and np.isin(labels[~is_unknown], (0, 1)).all():
        row, column = np.argwhere(is_unknown)[0]
        message = f"{where}: row {row} has no value for label {column} ({labels[row, column]:g})"
        raise DataError(message, code="bad_labels", hint=IF_UNKNOWN)


def is_matrix(labels: np.ndarray) -> bool:
    """Return whether labels are (N, L) zeros and ones with at least two columns and one row."""
    is_shaped = labels.ndim == 2 and labels.shape[1] > 1 and labels.size > 0 and labels.dtype.kind in "biuf"
    return is_shaped and bool(np.isin(labels, (0, 1)).all())


def is_multi_label(labels: np.ndarray | None) -> bool:
    """Return whether checked labels are multi-label: zeros and ones with several ones in a row."""
    return labels is not None and labels.ndim == 2 and bool((labels.sum(axis=1) > 1).any())


def common_task(labels: Mapping[str, np.ndarray | None], task: str | None) -> str | None:
    """Return the likelihood, common to all checked labels, by name; None for mutually exclusive classes.

    Args:
        labels: by their name in messages.
        task: kind of the labels; None to infer it: multi-label if any row has several ones.

    Raises:
        DataError: some labels are not of the task, or the task is ambiguous.
    """
    shown = MULTILABEL if task is None and any(is_multi_label(array) for array in labels.values()) else task
    for where, array in labels.items():
        _check_task(array, shown, where)
    widths = {where: array.shape[1] for where, array in labels.items() if array is not None and array.ndim == 2}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{where} has {width}" for where, width in widths.items())
        raise DataError(f"splits have different numbers of labels per example: {found}", code="bad_labels")
    return MULTILABEL if shown == MULTILABEL else None


def _check_task(labels: np.ndarray | None, task: str | None, where: str) -> None:
    """Raise DataError unless labels are of the task; None allows no matrix, which may be one-hot classes."""
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
    """Raise DataError if a label implies more classes than any classifier has, each of which gets a name."""
    if label >= MAX_CLASSES:
        raise DataError(
            f"{where} has {label}, expected at most {MAX_CLASSES - 1}", code="bad_labels",
            hint="number the classes from 0: np.unique(labels, return_inverse=True)[1]",
        )  # fmt: skip


def number_groups(values: Sequence[Any], *, where: str) -> np.ndarray:
    """Return the group of each row, (N,) int64: whole numbers from 0 as they are, and digests of other values, below 0.

    A number identifies a group only within its source, a digest in every source.

    Args:
        values: texts or numbers.
        where: the column or array, for messages.

    Raises:
        DataError: a row has no group.
    """
    texts = [_missing_as_empty(value) for value in values]
    if "" in texts:
        hint = "give every row a group; a row on its own is a group of one"
        raise DataError(f"{where}: row {texts.index('')} has no group", code="bad_groups", hint=hint)
    if all(_NUMBER_FROM_0.fullmatch(text) for text in texts):
        return np.array(texts, dtype=np.int64)
    digests = {text: -1 - int(json_sha256(text)[:15], 16) for text in dict.fromkeys(texts)}
    return np.array([digests[text] for text in texts], dtype=np.int64)


_NUMBER_FROM_0 = re.compile("0|[1-9][0-9]{0,17}")  # below 2^63


def _missing_as_empty(value: Any) -> str:
    """Return a cell as text, whole numbers without decimals; empty for None, NaN and spaces."""
    if isinstance(value, float):
        return "" if value != value else str(int(value)) if value.is_integer() else repr(value)
    return "" if value is None else str(value).strip()


def explain_matrix(labels: np.ndarray) -> tuple[str, str]:
    """Describe what labels (N, C) are instead of labels (N,), and what to do with them."""
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
    """Describe what labels (N,) that are not integers are, and what to do with them."""
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


@dataclass(frozen=True, eq=False)
class Numbering:
    """The mapping of data labels to a model's outputs.

    Attributes:
        classes: class name of each output; None if the model names none.
        numbers: (C,), output of each label of the data; None to keep labels.
    """

    classes: tuple[str, ...] | None
    numbers: np.ndarray | None = None

    def of(self, labels: np.ndarray) -> np.ndarray:
        """Map labels (n,) or (n, L) to outputs. Raises DataError for a label without a name, or an output without a label."""
        if self.numbers is None:
            return labels
        if labels.ndim == 2:
            return self._columns(labels, self.numbers)
        if len(labels) and labels.max() >= len(self.numbers):
            raise DataError(
                f"found label {labels.max()}, but the data name only {len(self.numbers)} classes", code="bad_labels"
            )
        return self.numbers[labels]

    def _columns(self, labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Reorder columns (n, L) to the model's outputs; each output needs one, since a missing label is not an absent one."""
        classes = self.classes or ()
        if labels.shape[1] == len(numbers) < len(classes):
            named = [classes[number] for number in numbers]
            raise DataError(
                f"the data have only the labels {format_names(named, limit=8)}; the model has {format_names(classes, limit=8)}",
                code="bad_labels",
                hint="add a column for each label of the model; a missing column does not mean that the label is "
                "absent",
            )
        if labels.shape[1] != len(numbers) or len(numbers) != len(classes):
            raise DataError(
                f"each example has {labels.shape[1]} labels, but the data name {len(numbers)} and the model has "
                f"{len(classes)}",
                code="bad_labels",
            )
        found = np.empty_like(labels)
        found[:, numbers] = labels
        return found


def match_classes(split: InputSplit, classes: tuple[str, ...] | None) -> InputSplit:
    """Match the split's labels to a model's: classes by name, integers unchanged.

    Names match regardless of case and surrounding spaces. Data may have a subset of the classes. Names that are all
    integers are the model's class numbers, even if it names no classes.

    Args:
        classes: class name of each output; None if the model names none, and the data's are kept.

    Raises:
        DataError: the data has a class that the model lacks; the message lists both.
    """
    if split.is_ood:
        return split
    if classes is None:
        return _convert_integer_names(split)
    if split.classes is None or not split.is_labeled:
        return replace(split, numbering=Numbering(classes))
    numbers = _numbers_by_name(split.classes, classes)
    if numbers is None:
        known = {_fold_name(name) for name in classes}
        unknown = [name for name in split.classes if _fold_name(name) not in known]
        raise DataError(
            f"split {split.name!r} has the classes {format_names(split.classes, limit=8)}; the model has "
            f"{format_names(classes, limit=8)}"
            + (f"; not in the model: {format_names(unknown)}" if len(classes) > 8 or len(split.classes) > 8 else ""),
            code="class_mismatch",
            hint="rename the classes of the data, or give labels as integers (indices of the model's outputs, from 0)",
        )
    return replace(split, numbering=Numbering(classes, numbers))


def _convert_integer_names(split: InputSplit) -> InputSplit:
    """If all class names are integers, use them as labels; else return the split unchanged.

    Raises:
        DataError: two names are the same number, or a number is not a class.
    """
    names = split.classes
    if not names or not split.is_labeled or split.num_labels is not None or not are_numbers(names):
        return split
    numbers = [int(name) for name in names]
    if len({*numbers}) < len(numbers):
        twice = [name for name in names if numbers.count(int(name)) > 1]
        raise DataError(
            f"split {split.name!r}: the classes {format_names(twice)} have the same number", code="bad_labels"
        )
    check_largest(max(numbers), f"split {split.name!r}: a class")
    return replace(split, numbering=Numbering(None, np.array(numbers, np.int64)))


def check_same_classes(splits: Iterable[InputSplit], *, hint: str) -> None:
    """Check that all splits with class names have the same ones in the same order.

    Args:
        hint: what to do if two differ.

    Raises:
        DataError: two differ; the message has what only one of them has.
    """
    named = {split.name: split.classes for split in splits if split.classes and not split.is_ood}
    first_name, first = next(iter(named.items()), ("", ()))
    for name, names in named.items():
        if names == first:
            continue
        apart = {
            first_name: [one for one in first if one not in names],
            name: [one for one in names if one not in first],
        }
        said = "; ".join(f"only {split!r} has {format_names(own)}" for split, own in apart.items() if own)
        raise DataError(
            f"splits {first_name!r} and {name!r} have different classes: {said or 'same names, different order'}",
            code="class_mismatch",
            hint=hint,
        )


def are_numbers(names: Iterable[str]) -> bool:
    """Return whether class names are all integers, which are then sorted and used as numbers."""
    return all(name.isascii() and name.isdecimal() for name in names)


def alphabetical_numbering(split: InputSplit) -> str | None:
    """Return the numbering of named labels if only their alphabetical order defines it; else None."""
    names = split.classes
    if not (split.is_labeled and split.numbering is None and names) or [*names] != sorted(names) or are_numbers(names):
        return None
    shown = [f"{name}={number}" for number, name in enumerate(names[:10])]
    shown += [] if len(names) <= 10 else ["...", f"{names[-1]}={len(names) - 1}"]
    return f"{split.name}: labels numbered in alphabetical order: {', '.join(shown)}"


def columns_of_classes(split: InputSplit) -> list[str]:
    """Return the table columns named after the model's classes, one each, if no label columns were given; else none."""
    columns: Iterable[str] = getattr(getattr(split.dataset, "table", None), "columns", ())
    if split.is_labeled or split.is_ood or split.numbering is None or "label=" in split.spec:
        return []
    named = {_fold_name(name): name for name in columns}
    found = [named[_fold_name(name)] for name in split.numbering.classes or () if _fold_name(name) in named]
    return found if len(found) == len(split.numbering.classes or ()) else []


def _numbers_by_name(names: tuple[str, ...], classes: tuple[str, ...]) -> np.ndarray | None:
    """Return the index in `classes` of each name; None if one is missing or two have the same."""
    exact = {name: index for index, name in enumerate(classes)}
    folded = {_fold_name(name): index for index, name in enumerate(classes)}
    if len(exact) == len(classes) and all(name in exact for name in names):
        return np.array([exact[name] for name in names], np.int64)
    if len(folded) == len(classes) and len({_fold_name(name) for name in names}) == len(names):
        if all(_fold_name(name) in folded for name in names):
            return np.array([folded[_fold_name(name)] for name in names], np.int64)
        if are_numbers(names) and all(int(name) < len(classes) for name in names):
            return np.array([int(name) for name in names], np.int64)
    return None


def _fold_name(name: str) -> str:
    return name.strip().casefold()


class ClassFolderFiles(NamedTuple):
    """Files (N,), as paths in their folder; labels (N,) and classes, or None without class folders; a note on skipped files."""

    files: tuple[str, ...]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    note: str = ""


def hash_files(files: Sequence[Path], progress: Progress, what: str) -> list[str]:
    """Return the hexadecimal SHA-256 of each file; "" for a file that is missing or cannot be opened."""
    found = []
    task = progress.task(f"hash {what}", len(files))
    for file in files:
        try:
            with open_regular(file) as stream:
                found.append(file_sha256(stream))
        except MissingInput:
            found.append("")
        task.advance()
    return found


def check_hashed(files: Sequence[Path], hashes: Sequence[str], rows: np.ndarray) -> None:
    """Raise MissingInput for the first file among these rows (n,) that hash_files could not open."""
    for row in rows.tolist():
        if not hashes[row]:
            with open_regular(files[row]):
                pass


def files_in(folder: Path, suffixes: Collection[str], what: str) -> ClassFolderFiles:
    """Find the files with these suffixes in a folder, naturally sorted within sorted classes.

    Args:
        what: description of the files, for messages.

    Raises:
        MissingInput: there is no such folder.
        DataError: it has no such files, or has some both directly and in class folders.
    """
    if not folder.is_dir():
        raise MissingInput(f"no folder {quote_name(folder, limit=300)}", path=folder)
    with convert_read_errors(folder):
        entries = list(folder.iterdir())
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not _is_hidden(entry.name))
        loose = sorted(entry.name for entry in entries if _is_of(entry.name, suffixes) and entry.is_file())
    if are_numbers(classes):
        classes.sort(key=lambda name: (int(name), name))
    if classes and all(is_split(name) for name in classes):
        raise DataError(
            f"{quote_name(folder, limit=300)} contains split folders, expected class folders: {format_names(classes)}",
            path=folder, hint=f"give one of them, such as {folder / classes[0]}",
        )  # fmt: skip
    if loose and classes:
        raise DataError(f"{folder} has both {what} and folders; expected one folder for each class", path=folder)
    groups = [_files_under(folder, name, suffixes, what) for name in classes] if classes else [loose]
    files = tuple(name for group in groups for name in group)
    if not files:
        raise DataError(f"no {what} in {folder}", code="empty_split", path=folder)
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups]) if classes else None
    num_others = _count_hidden(folder)
    note = (
        f"skipped {count_noun(num_others, 'hidden file')} (names starting with a dot, {_MAC_FOLDER})"
        if num_others
        else ""
    )
    return ClassFolderFiles(files, labels, tuple(classes) or None, note)


_MAC_FOLDER = "__MACOSX"  # in archives created on a Mac


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == _MAC_FOLDER


def _count_hidden(folder: Path) -> int:
    """Count the files that are hidden or in hidden folders."""
    found = 0
    for parent, _, names in os.walk(folder):
        inside = any(map(_is_hidden, Path(os.path.relpath(parent, folder)).parts[parent == str(folder) :]))
        found += len(names) if inside else sum(map(_is_hidden, names))
    return found


def _files_under(folder: Path, class_name: str, suffixes: Collection[str], what: str) -> list[str]:
    """Return one class's files at any depth, as sorted relative paths. Raises DataError if all are of another kind."""
    found: list[str] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder / class_name, followlinks=True):
        folders[:] = [one for one in folders if not _is_hidden(one) and not _is_cyclic_link(os.path.join(parent, one))]
        others += [name for name in names if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names if _is_of(name, suffixes)]
    if others and not found:
        raise DataError(
            f"{quote_name(folder / class_name, limit=300)} has files, but no {what}: {format_names(others)}",
            path=folder / class_name, hint=f"supported suffixes of {what}: {', '.join(sorted(suffixes))}",
        )  # fmt: skip
    return sorted(found)


def _is_cyclic_link(folder: str) -> bool:
    """Return whether a link points to a folder that contains it."""
    return os.path.islink(folder) and Path(folder).parent.resolve().is_relative_to(Path(folder).resolve())


def _is_of(name: str, suffixes: Collection[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes and not name.startswith(".")

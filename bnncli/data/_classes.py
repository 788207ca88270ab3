"""Labels of data as classes of a model: matched by their names, never by their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bnncli.data._labels import check_largest
from bnncli.errors import DataError
from bnncli.names import listed

if TYPE_CHECKING:
    from bnncli.data._split import InputSplit


@dataclass(frozen=True, eq=False)
class Numbering:
    """Classes of a model, index = output, None where it names none; `numbers` (C,): the output of each label of the data, None leaves them."""

    classes: tuple[str, ...] | None
    numbers: np.ndarray | None = None

    def of(self, labels: np.ndarray) -> np.ndarray:
        """Labels (n,), or (n, L), as outputs of the model. Raises DataError for one that has no name, or an output without."""
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
        """Zeros and ones (n, L) with the columns in the order of the model's outputs: each needs one, absent is not unknown."""
        classes = self.classes or ()
        if labels.shape[1] == len(numbers) < len(classes):
            named = [classes[number] for number in numbers]
            raise DataError(
                f"the data have only the labels {listed(named, limit=8)}; the model has {listed(classes, limit=8)}",
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


def matched_to(split: InputSplit, classes: tuple[str, ...] | None) -> InputSplit:
    """The split with its labels as those of a model: each class by its name, whole numbers as they are.

    Names are the same where they differ in nothing but capitals and spaces around them. Data may have some of the classes
    alone. Names that are all whole numbers are the model's own, also where it names no classes.

    Args:
        classes: of the model, index = output; None where it names none, and the data's stay.

    Raises:
        DataError: the data name a class that the model does not have; both lists are in the message.
    """
    if split.is_ood:
        return split
    if classes is None:
        return _as_numbers(split)
    if split.classes is None or not split.is_labeled:
        return replace(split, numbering=Numbering(classes))
    numbers = _numbers_by_name(split.classes, classes)
    if numbers is None:
        known = {_folded(name) for name in classes}
        unknown = [name for name in split.classes if _folded(name) not in known]
        raise DataError(
            f"split {split.name!r} has the classes {listed(split.classes, limit=8)}; the model has "
            f"{listed(classes, limit=8)}"
            + (f"; not in the model: {listed(unknown)}" if len(classes) > 8 or len(split.classes) > 8 else ""),
            code="class_mismatch",
            hint="rename the classes of the data, or give labels as integers (indices of the model's outputs, from 0)",
        )
    return replace(split, numbering=Numbering(classes, numbers))


def _as_numbers(split: InputSplit) -> InputSplit:
    """The split with classes whose names are all whole numbers as these numbers, whichever of them it has; others as they are.

    Raises:
        DataError: two names are the same number, or one is no number of a class.
    """
    names = split.classes
    if not names or not split.is_labeled or split.num_labels is not None or not are_numbers(names):
        return split
    numbers = [int(name) for name in names]
    if len({*numbers}) < len(numbers):
        twice = [name for name in names if numbers.count(int(name)) > 1]
        raise DataError(f"split {split.name!r}: the classes {listed(twice)} have the same number", code="bad_labels")
    check_largest(max(numbers), f"split {split.name!r}: a class")
    return replace(split, numbering=Numbering(None, np.array(numbers, np.int64)))


def check_same_classes(splits: Iterable[InputSplit], *, hint: str) -> None:
    """Pass where all splits that name classes name the same ones in the same order, so that a label means the same in each.

    Args:
        hint: what to do where two differ.

    Raises:
        DataError: two differ; what only one of them has is in the message.
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
        said = "; ".join(f"only {split!r} has {listed(own)}" for split, own in apart.items() if own)
        raise DataError(
            f"splits {first_name!r} and {name!r} have different classes: {said or 'same names, different order'}",
            code="class_mismatch",
            hint=hint,
        )


def are_numbers(names: Iterable[str]) -> bool:
    """Whether names of classes are all whole numbers: then they are sorted and used as such."""
    return all(name.isascii() and name.isdecimal() for name in names)


def numbered_by_name(split: InputSplit) -> str | None:
    """What numbers labels that are names have, where nothing but their alphabetical order says which; else None."""
    names = split.classes
    if not (split.is_labeled and split.numbering is None and names) or [*names] != sorted(names) or are_numbers(names):
        return None
    shown = [f"{name}={number}" for number, name in enumerate(names[:10])]
    shown += [] if len(names) <= 10 else ["...", f"{names[-1]}={len(names) - 1}"]
    return f"{split.name}: labels numbered in alphabetical order: {', '.join(shown)}"


def columns_of_classes(split: InputSplit) -> list[str]:
    """Columns of a table that are called as the classes of the model, one for each, where nobody said which are labels; else none."""
    columns: Iterable[str] = getattr(getattr(split.dataset, "table", None), "columns", ())
    if split.is_labeled or split.is_ood or split.numbering is None or "label=" in split.spec:
        return []
    named = {_folded(name): name for name in columns}
    found = [named[_folded(name)] for name in split.numbering.classes or () if _folded(name) in named]
    return found if len(found) == len(split.numbering.classes or ()) else []


def _numbers_by_name(names: tuple[str, ...], classes: tuple[str, ...]) -> np.ndarray | None:
    """The index in `classes` of each name; None where one has no index, or two have the same."""
    exact = {name: index for index, name in enumerate(classes)}
    folded = {_folded(name): index for index, name in enumerate(classes)}
    if len(exact) == len(classes) and all(name in exact for name in names):
        return np.array([exact[name] for name in names], np.int64)
    if len(folded) == len(classes) and len({_folded(name) for name in names}) == len(names):
        if all(_folded(name) in folded for name in names):
            return np.array([folded[_folded(name)] for name in names], np.int64)
        if are_numbers(names) and all(int(name) < len(classes) for name in names):
            return np.array([int(name) for name in names], np.int64)
    return None


def _folded(name: str) -> str:
    return name.strip().casefold()

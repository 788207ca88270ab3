"""Which columns of a table, or arrays of an archive, are predictions and labels: as the user names them, or as their names tell."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bnncli.data._columns import LABEL_NAMES, LIST, REAL, WHOLE
from bnncli.errors import DataError, UsageError
from bnncli.names import by_number, listed, quoted

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


class Chosen(NamedTuple):
    """Columns or arrays of the predictions.

    Attributes:
        names: one that holds a vector for each row, or one a class.
        holds: PROBS or LOGITS, as their names say; None where they do not.
        classes: the names of the classes, where the columns have them.
        others: columns or arrays that hold the same predictions as logits, by their names.
        is_ordered: whether the classes are in the order of their numbers: the user wrote it, or the names sort so.
    """

    names: tuple[str, ...]
    holds: str | None
    classes: tuple[str, ...] | None = None
    others: tuple[str, ...] = ()
    is_ordered: bool = True


def divide(place: str) -> tuple[Path, dict[str, str]]:
    """The file, and what is named after it by `probs`, `logits`, `label`, or "" for `FILE:ARRAY[,LABELS]`.

    A colon belongs to the file's name where that file exists. Raises UsageError for another form.
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
) -> Chosen:
    """The array of an archive that predictions are.

    Args:
        shapes: of the arrays of real numbers.
        named: as `divide` gives them.
        wanted: PROBS or LOGITS where the user says what they are.

    Raises:
        DataError: there is none, or several could be.
    """
    holds, name = _named(named)
    if name is not None:
        return Chosen((_known(name, shapes, where),), wanted or holds or _said(name))
    found = {kind: [one for one in shapes if one.casefold() in names] for kind, names in _NAMES.items()}
    for kind, own in found.items():  # beside a matrix a vector is something of its rows
        found[kind] = [one for one in own if len(shapes[one]) == 2] or own
    for kind in (wanted,) if wanted else (PROBS, LOGITS):
        if len(found[kind]) == 1:
            name = found[kind][0]
            logits = [one for one in found[LOGITS] if wanted is None and one != name and shapes[one] == shapes[name]]
            return Chosen((name,), kind, others=tuple(logits[:1]))
    others = [one for one in found[PROBS] + found[LOGITS] if wanted is None or one in found[wanted]]
    others = others or [one for one, shape in shapes.items() if len(shape) == 2]
    if len(others) == 1:
        return Chosen((others[0],), wanted or _said(others[0]))
    if others:
        shown = ", ".join(f"{quoted(one)} {shapes[one]}" for one in others[:20])
        raise DataError(
            f"{where}: several arrays could be the predictions: {shown}", code="several_arrays",
            hint=f"choose one: FILE:{others[0]}",
        )  # fmt: skip
    shown = ", ".join(f"{quoted(one)} {shape}" for one, shape in list(shapes.items())[:20]) or "none"
    raise DataError(
        f"{where}: found no array (N, C) of probabilities or logits; its floating-point arrays: {shown}", code="no_column",
        hint="name the array: FILE:ARRAY",
    )  # fmt: skip


def find_columns(columns: Mapping[str, str], named: Mapping[str, str], wanted: str | None, where: str) -> Chosen:
    """The columns of a table that predictions are; arguments as of `find_arrays`, `columns` with what each holds.

    Raises:
        DataError: there are none, or several could be.
    """
    holds, name = _named(named)
    if name is not None:
        names = _several(name, columns, where)
        kind, classes = wanted or holds or _said(names[0]), _classes(names)
        return Chosen(names, kind, classes, is_ordered="+" in name or _sorts_so(classes))
    numbers = [one for one, kind in columns.items() if kind in (REAL, WHOLE)]
    for kind in (wanted,) if wanted else (PROBS, LOGITS):
        found = _called(columns, numbers, kind)
        if len(found) > 1:
            raise _several_columns([own[0] for own in found], where)
        if found:
            chosen = _of_classes(found[0], kind)
            beside = [_of_classes(own, LOGITS) for own in _called(columns, numbers, LOGITS) if wanted is None]
            if kind == PROBS and [one.classes for one in beside] == [chosen.classes]:
                chosen = chosen._replace(others=beside[0].names)
            return chosen
    by_number = [one for one in numbers if one.isdecimal()]
    if len(by_number) > 1:
        return _of_classes(by_number, wanted)
    shown = ", ".join(f"{quoted(one)} ({kind})" for one, kind in list(columns.items())[:20]) or "none"
    raise DataError(
        f"{where}: found no columns of probabilities or logits (p_NAME, prob_NAME, logit_NAME); its columns: {shown}",
        code="no_column", hint="name the columns: FILE:probs=COL+COL+COL, or FILE:probs='prefix*'",
    )  # fmt: skip


def _called(columns: Mapping[str, str], numbers: Sequence[str], kind: str) -> list[list[str]]:
    """The sets of columns, of a class each or one that holds all, that are called as probabilities or logits are."""
    found = [own for prefix in _PREFIXES[kind] if len(own := [one for one in numbers if _begins(one, prefix)]) > 1]
    lists = [one for one in columns if columns[one] == LIST and one.casefold() in _NAMES[kind]]
    return found or [[one] for one in lists or [one for one in numbers if one.casefold() in _NAMES[kind]]]


def called_as_predictions(columns: Mapping[str, str], kind: str) -> list[str]:
    """The columns that hold values of a kind and are called as probabilities or logits are."""
    prefixes = [prefix for every in _PREFIXES.values() for prefix in every]
    whole = {name for every in _NAMES.values() for name in every}
    return [
        name
        for name, holds in columns.items()
        if holds == kind and (name.casefold() in whole or any(_begins(name, prefix) for prefix in prefixes))
    ]


def find_labels(
    names: Sequence[str], named: Mapping[str, str], where: str, *, is_alone: bool = False
) -> tuple[str, ...]:
    """The columns or arrays of the labels; none where there are none.

    Args:
        is_alone: whether the file is there for the labels: a single column is theirs, whatever it is called.

    Raises:
        DataError: one that is named is not there, or several could be it.
    """
    given = named.get(LABEL, named.get("") if is_alone else None)
    if given is not None:
        return _several(given, names, where)
    found = [one for one in names if one.casefold() in _OF_LABELS]
    if not found and is_alone and len(names) == 1:
        found = [names[0]]
    if len(found) > 1:
        raise DataError(
            f"{where}: several columns could be the labels: {listed(found)}", code="several_columns",
            hint=f"choose one: FILE:label={found[0]}",
        )  # fmt: skip
    if is_alone and not found:
        raise DataError(
            f"{where}: found no label column; its columns: {listed(names, limit=20)}", code="no_column",
            hint="name the column: FILE:COLUMN",
        )  # fmt: skip
    if is_alone and re.fullmatch(r"[+-]?\d+(\.\d+)?", found[0]):
        raise DataError(
            f"{where}: the name of the label column is a number, {quoted(found[0])} (is the header line missing?)", code="no_column",
            hint="add a header line: label",
        )  # fmt: skip
    return tuple(found)


def _named(named: Mapping[str, str]) -> tuple[str | None, str | None]:
    """What the predictions that are named hold, and their name."""
    for key in (PROBS, LOGITS):
        if key in named:
            return key, named[key]
    return None, named.get("")


def _said(name: str) -> str | None:
    """What the name of a column or array says that it holds."""
    folded = name.casefold()
    if "logit" in folded:
        return LOGITS
    return PROBS if "prob" in folded or "softmax" in folded else None


def _several(text: str, names: Sequence[str] | Mapping[str, object], where: str) -> tuple[str, ...]:
    """One name, several joined by +, or those that a pattern with one * fits."""
    if text in names:
        return (text,)
    if text.count("*") == 1:
        first, last = text.split("*")
        found = tuple(
            name for name in names if name.startswith(first) and name.endswith(last) and len(name) >= len(text)
        )
        if found:
            return found
    return tuple(_known(one, names, where) for one in text.split("+"))


def _known(name: str, names: Sequence[str] | Mapping[str, object], where: str) -> str:
    if name not in names:
        raise DataError(f"{where} has no column {quoted(name)}; it has {listed(names, limit=20)}", code="no_column")
    return name


def _begins(name: str, prefix: str) -> bool:
    return name.casefold().startswith(prefix) and len(name) > len(prefix)


def _of_classes(names: Sequence[str], holds: str | None) -> Chosen:
    """Columns of which each is a class; those that are called by numbers in the order of these."""
    classes = _classes(names) or ()
    if classes and all(one.isdecimal() for one in classes):
        order = sorted(range(len(names)), key=lambda place: int(classes[place]))
        names, classes = [names[place] for place in order], tuple(classes[place] for place in order)
    return Chosen(tuple(names), holds, classes or None, is_ordered=_sorts_so(classes))


def _sorts_so(classes: Sequence[str] | None) -> bool:
    """Whether names are in order, capitals apart, with the numbers in them as numbers."""
    keys = [by_number(name.casefold()) for name in classes or ()]
    return keys == sorted(keys)


def _classes(names: Sequence[str]) -> tuple[str, ...] | None:
    """What is left of the names without what they begin with alike, up to its last underscore; None of one."""
    if len(names) < 2:
        return None
    first = next(
        (
            prefix
            for prefixes in _PREFIXES.values()
            for prefix in prefixes
            if all(_begins(one, prefix) for one in names)
        ),
        "",
    )
    return tuple(one[len(first) :] for one in names)


def _several_columns(found: Sequence[str], where: str) -> DataError:
    return DataError(
        f"{where}: several columns could be the predictions: {listed(found)}", code="several_columns",
        hint=f"choose one: FILE:probs={found[0]}",
    )  # fmt: skip

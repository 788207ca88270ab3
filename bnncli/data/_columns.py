"""Which columns of a table are the input and the label: as the user names them, or as their names and contents tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from bnncli.errors import DataError, UsageError
from bnncli.names import listed, quoted

# What a column holds, as far as the table tells without reading it.
TEXT, WHOLE, REAL, FILE, LIST, OTHER = (
    "text",
    "whole numbers",
    "real numbers",
    "images or sound",
    "lists",
    "something else",
)

_KEYS = ("text", "image", "audio", "x", "label")
_TEXT_NAMES = ("text", "sentence", "review", "content", "comment", "tweet", "document", "body", "utterance")
_TEXT_PAIRS = (("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"))
_FILE_NAMES = ("path", "file", "filename", "file_name")
_AUDIO_NAMES = ("audio", "sound", "wav", "clip", "audio_path", "audio_file", *_FILE_NAMES)
_IMAGE_NAMES = ("image", "img", "picture", "photo", "image_path", "image_file", *_FILE_NAMES)
_NUMBER = re.compile(r"[+-]?[0-9]+([.][0-9]+)?")
LABEL_NAMES = ("label", "labels", "target", "targets", "class", "category", "sentiment", "y")


@dataclass(frozen=True)
class Roles:
    """The columns of an input, of one kind, and of the label.

    Attributes:
        kind: text, image, audio or x.
        inputs: one column; two are a pair of texts, several the numbers of a row.
        labels: one column; several are a matrix of zeros and ones, one a class; none where there are no labels.
    """

    kind: str
    inputs: tuple[str, ...]
    labels: tuple[str, ...]

    def to_texts(self) -> list[str]:
        """What tells these columns from others."""
        return [self.kind, *self.inputs, "label", *self.labels]


def divide(place: str, spelled: str) -> tuple[str, dict[str, str]]:
    """The place itself, and the columns that are named after it: `FILE:text=COL,label=COL`.

    A colon belongs to the place where such a file exists.

    Args:
        spelled: the kind, for messages.

    Raises:
        UsageError: the columns are not of that form.
    """
    if Path(place).expanduser().exists():
        return place, {}
    starts = [match.start() for match in re.finditer(rf":(?=(?:{'|'.join(_KEYS)})=)", place)]
    if not starts:
        before, colon, after = place.rpartition(":")
        if colon and after and "=" in after and Path(before).expanduser().exists():
            raise _form(after, spelled)
        return place, {}
    start = next((one for one in starts if Path(place[:one]).expanduser().exists()), starts[0])
    return place[:start], _parse(place[start + 1 :], spelled)


def _parse(text: str, spelled: str) -> dict[str, str]:
    """Columns by what they are; a comma belongs to a name where no `KEY=` comes after it."""
    found: dict[str, str] = {}
    for part in re.split(rf",(?=(?:{'|'.join(_KEYS)})=)", text):
        key, _, value = part.partition("=")
        if key not in _KEYS or key in found or (not value and key != "label"):
            raise _form(text, spelled)
        found[key] = value
    if len(found.keys() - {"label"}) > 1:
        raise UsageError(f"\0data\0 {spelled}: expected only one of text=, image=, audio= and x=; got {text!r}")
    return found


def _form(text: str, spelled: str) -> UsageError:
    return UsageError(
        f"\0data\0 {spelled}: expected columns such as text=COL,label=COL (keys: "
        f"{', '.join(f'{key}=' for key in _KEYS)}); got {text!r}"
    )


def find_roles(
    columns: Mapping[str, str], named: Mapping[str, str], *, takes: str | None, where: str, spelled: str
) -> Roles:
    """The columns of input and label.

    Args:
        columns: what each holds.
        named: as `divide` gives them.
        takes: images, texts or audio where the model says so.
        where: the table, for messages.

    Raises:
        DataError: a column that is named is not there.
        UsageError: none, or several, could be the input or the label; the names of the columns look like an example.
    """
    labels = _labels(columns, named, where, spelled)
    numbers = [name for name, holds in columns.items() if holds in (WHOLE, REAL) and _NUMBER.fullmatch(name)]
    if numbers and not labels and named.keys().isdisjoint(("label", "x")):
        raise UsageError(
            f"\0data\0 {spelled}: {where} has no label column, and a column name is a number: {listed(columns)} "
            "(is the header line missing?)",
            hint=f"add a header line, or name the label column: {spelled}:FILE:label={numbers[0]} (label= if there is "
            "none)",
        )
    for kind in named.keys() - {"label"}:
        inputs = _named(named[kind], columns, where)
        if kind != "x" and len(inputs) > (2 if kind == "text" else 1):
            most = "one column, or two for pairs" if kind == "text" else "one column"
            raise UsageError(f"\0data\0 {spelled}: {kind}= takes {most}; got {named[kind]!r}")
        return Roles(kind, inputs, labels)
    others = {name: holds for name, holds in columns.items() if name not in labels}
    if takes == "images" or (takes is None and FILE in others.values()):
        return Roles("image", _one(_files(others, _IMAGE_NAMES), others, "image", where, spelled), labels)
    if takes == "audio":
        return Roles("audio", _one(_files(others, _AUDIO_NAMES), others, "audio", where, spelled), labels)
    return Roles("text", _texts(others, where, spelled), labels)


def _labels(columns: Mapping[str, str], named: Mapping[str, str], where: str, spelled: str) -> tuple[str, ...]:
    if "label" in named:
        names = _named(named["label"], columns, where) if named["label"] else ()
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise UsageError(f"\0data\0 {spelled}: label= names column {quoted(twice)} twice")
        return names
    found = [name for name in columns if name.casefold() in LABEL_NAMES]
    if len(found) > 1:
        raise UsageError(
            f"\0data\0 {spelled}: several columns of {where} could be the label: {listed(found)}",
            hint=f"choose one: {spelled}:FILE:label={found[0]}",
        )
    return tuple(found)


def _texts(others: Mapping[str, str], where: str, spelled: str) -> tuple[str, ...]:
    """One column of texts, or the two of a well-known pair."""
    texts = [name for name, holds in others.items() if holds == TEXT]
    folded = {name.casefold(): name for name in texts}
    for pair in _TEXT_PAIRS:
        if all(name in folded for name in pair):
            return folded[pair[0]], folded[pair[1]]
    known = [folded[name] for name in _TEXT_NAMES if name in folded]
    return _one(known or texts, others, "text", where, spelled)


def _files(others: Mapping[str, str], known: Collection[str]) -> list[str]:
    """Columns of encoded files, or of their paths by the names that are known for them."""
    stored = [name for name, holds in others.items() if holds == FILE]
    return stored or [name for name, holds in others.items() if holds == TEXT and name.casefold() in known]


def _one(found: list[str], others: Mapping[str, str], kind: str, where: str, spelled: str) -> tuple[str, ...]:
    """The one column that was found. Raises UsageError for none or several."""
    if len(found) == 1:
        return (found[0],)
    if found:
        message = f"several columns of {where} could be the {kind}: {listed(found, limit=20)}"
        both = f", or use both as a pair: {kind}={found[0]}+{found[1]}" if kind == "text" else ""
        hint = f"choose one: {spelled}:FILE:{kind}={found[0]}{both}"
    else:
        every = ", ".join(f"{quoted(name)} ({holds})" for name, holds in list(others.items())[:20]) or "none"
        message = f"found no {kind} column in {where}; its columns, apart from the label: {every}"
        numbers = [name for name, holds in others.items() if holds in (WHOLE, REAL, LIST)]
        as_numbers = f", or use numbers as inputs: x={'+'.join(numbers[:3])}" if numbers and kind == "text" else ""
        hint = f"name the column: {spelled}:FILE:{kind}=COLUMN{as_numbers}"
    raise UsageError(f"\0data\0 {spelled}: {message}", hint=hint)


def _named(text: str, columns: Mapping[str, str], where: str) -> tuple[str, ...]:
    """One column or several, joined by +, which belongs to a name where there is such a column."""
    names = (text,) if text in columns else tuple(text.split("+"))
    for name in names:
        if name not in columns:
            raise DataError(
                f"{where} has no column {quoted(name)}; it has {listed(columns, limit=20)}", code="no_column"
            )
    return names

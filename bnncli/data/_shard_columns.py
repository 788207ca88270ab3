"""Which files of the examples in shards are the input and the label: as named, or as the first example tells."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from bnncli.data import _sound
from bnncli.data._pixels import SUFFIXES
from bnncli.data._shards import Example, Part
from bnncli.errors import DataError, UsageError
from bnncli.names import listed, quoted

_OF_KIND = {
    "image": tuple(sorted(suffix[1:] for suffix in SUFFIXES)), "text": ("txt",), "x": ("npy",),
    "audio": tuple(sorted(suffix[1:] for suffix in _sound.SUFFIXES)),
}  # fmt: skip
_KIND_TAKEN = {"images": "image", "texts": "text", "audio": "audio"}
_LABEL_FIELDS = ("label", "cls", "class", "target")
_JSON = "json"


class ShardColumn(NamedTuple):
    """Files of the examples by their suffix, one of several, or a field of them where they are JSON."""

    suffixes: tuple[str, ...]
    field: str | None = None

    def __str__(self) -> str:
        return "/".join(self.suffixes) + (f".{self.field}" if self.field is not None else "")

    def part(self, example: Example) -> Part | None:
        """The file of an example; None where it has none."""
        return next((example.parts[suffix] for suffix in self.suffixes if suffix in example.parts), None)

    def value(self, data: bytes, where: str) -> Any:
        """What a file says, without spaces around, or its field. Raises DataError."""
        try:
            return data.decode() if self.field is None else json.loads(data)[self.field]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            what = "is not UTF-8 text" if self.field is None else f"has no field {quoted(self.field)}"
            raise DataError(f"{where} {what} ({type(error).__name__}: {str(error)[:100]})") from error


def parse_columns(text: str | None) -> dict[str, str]:
    """`image=jpg,label=cls` by what each is of. Raises UsageError for what there is not."""
    found: dict[str, str] = {}
    for one in (text or "").split(",") if text is not None else ():
        what, equals, name = one.partition("=")
        if not equals or not name or what not in (*_OF_KIND, "label") or what in found:
            raise UsageError(
                "\0data\0 webdataset: expected columns such as image=jpg,label=cls (keys: "
                f"{', '.join((*_OF_KIND, 'label'))}); got {text!r}"
            )
        found[what] = name
    if len(found.keys() & _OF_KIND.keys()) > 1:
        raise UsageError(f"\0data\0 webdataset: expected only one of {', '.join(_OF_KIND)} as the input; got {text!r}")
    return found


def input_column(first: Example, named: Mapping[str, str], takes: str | None) -> tuple[str, ShardColumn]:
    """Kind (image, text, x or audio) and column of the input.

    Args:
        first: the example that tells what there is.
        named: columns that the user names.
        takes: images, texts or audio where the model says so.

    Raises:
        UsageError: there is no such column, or none or several could be it.
    """
    for kind in _OF_KIND.keys() & named.keys():
        return kind, _named(named[kind], first)
    found = {kind: [name for name in first.parts if name in names] for kind, names in _OF_KIND.items()}
    if takes in _KIND_TAKEN:
        found = {kind: names if kind == _KIND_TAKEN[takes] else [] for kind, names in found.items()}
    elif any(names for kind, names in found.items() if kind != "audio"):
        found["audio"] = []  # only a model of audio takes it
    every = [(kind, name) for kind, names in found.items() for name in names]
    if len(every) == 1:
        kind, _ = every[0]
        return kind, ShardColumn(_OF_KIND[kind])
    what = (
        f"several could be the input: {listed(name for _, name in every)}" if every else "none of them is a known input"
    )
    hint = (
        "name the input: webdataset:PATTERN:image=SUFFIX, text=SUFFIX, x=SUFFIX, audio=SUFFIX, or a JSON field as "
        "text=json.FIELD"
    )
    raise UsageError(
        f"\0data\0 webdataset: example {quoted(first.key)} has {listed(first.parts, limit=20)}; {what}", hint=hint
    )


def label_column(first: Example, named: Mapping[str, str], fields: Mapping[str, Any]) -> ShardColumn | None:
    """The column of the labels; None where there is none.

    Args:
        fields: of the first example's JSON file; empty where it has none.

    Raises:
        UsageError: there is no such column, or several fields could be it.
    """
    if "label" in named:
        return _named(named["label"], first)
    if "cls" in first.parts:
        return ShardColumn(("cls",))
    found = [field for field in _LABEL_FIELDS if field in fields]
    if len(found) > 1:
        message = f"\0data\0 webdataset: several fields of {quoted(first.key)} could be the label: {listed(found)}"
        raise UsageError(message, hint=f"choose one: webdataset:PATTERN:label={_JSON}.{found[0]}")
    return ShardColumn((_JSON,), found[0]) if found else None


def _named(name: str, first: Example) -> ShardColumn:
    """The column of a suffix, of several with + or ;, or of a field after the suffix json."""
    suffix, dot, field = name.partition(".")
    column = (
        ShardColumn((suffix,), field)
        if dot and name not in first.parts
        else ShardColumn(tuple(name.lower().split("+")))
    )
    if column.part(first) is None:
        raise UsageError(
            f"\0data\0 webdataset: example {quoted(first.key)} has no {quoted(name)}; it has {listed(first.parts, limit=20)}"
        )
    return column

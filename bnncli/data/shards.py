"""Examples in tar files (WebDataset): neighbouring files whose names differ after the first dot form one example."""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from itertools import groupby, product
from pathlib import Path
from typing import IO, Any, NamedTuple

from bnncli.data import sound
from bnncli.data.pixels import SUFFIXES
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.names import by_number, format_names, quote_name
from bnncli.system.input_files import is_failure, open_regular

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST_SHARDS = 1_000_000
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_ABOUT_THE_SHARD = re.compile(r"__[^/]*__($|/)")  # members that are not examples
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Part(NamedTuple):
    """Location of one file's content in a shard: name, first byte, and size."""

    name: str
    start: int
    size: int


class ShardExample(NamedTuple):
    """The files of one example, by the lower-case part of their names after the first dot."""

    key: str
    parts: dict[str, Part]


def shard_paths(pattern: str) -> list[Path]:
    """Return the files of a pattern: `{0000..0010}` and `{a,b}` in order; `*`, `?` and `[...]` sorted naturally.

    Raises:
        MissingInput: one of them is missing, or none matches.
        UsageError: the pattern is a network address, or names too many files.
    """
    if re.match(r"(https?|s3|gs|hdfs|pipe|ftp):", pattern):
        raise UsageError(f"\0data\0 webdataset: expected local files, not an address on the network; got {pattern!r}")
    found: list[Path] = []
    for text in _alternatives(str(Path(pattern).expanduser())):
        is_glob = glob.has_magic(text) and not os.path.exists(text)
        matches = sorted(glob.glob(text), key=by_number) if is_glob else [text]
        if not matches:
            raise MissingInput(f"no file matches {quote_name(text, limit=300)}", path=text)
        found += map(Path, matches)
    return found


def _alternatives(pattern: str) -> list[str]:
    """Expand braces; the last of several varies fastest."""
    if os.path.exists(pattern):
        return [pattern]
    pieces = _BRACES.split(pattern)  # text, inside, text, inside, ..., text
    choices, count = [], 1
    for index, piece in enumerate(pieces):
        choices.append(_expand_braces(piece) if index % 2 else [piece])
        count *= len(choices[-1])
        if count > _MOST_SHARDS:
            raise UsageError(
                f"\0data\0 webdataset: {quote_name(pattern, limit=300)} expands to more than {_MOST_SHARDS} files"
            )
    return ["".join(parts) for parts in product(*choices)]


def _expand_braces(text: str) -> list[str]:
    """Expand a pair of braces: a range of numbers with the width as written, or texts between commas."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return text.split(",") if "," in text else ["{" + text + "}"]
    first, last = int(match[1]), int(match[2])
    width = max(map(len, match.groups())) if any(one.startswith("0") for one in match.groups()) else 0
    if abs(last - first) >= _MOST_SHARDS:
        raise UsageError(f"\0data\0 webdataset: {{{text}}} expands to more than {_MOST_SHARDS} files")
    return [f"{number:0{width}}" for number in range(first, last + 1, 1) or range(first, last - 1, -1)]


def examples_of(path: Path) -> Iterator[ShardExample]:
    """Yield the examples of a shard in order, from its headers.

    Raises:
        MissingInput: there is no such file.
        DataError: it is not a tar file, is compressed, truncated or damaged, or repeats a key or a file of an example.
    """
    named = ((match, part) for part in _parts(path) if (match := _NAME.fullmatch(part.name)) is not None)
    keys: set[str] = set()
    for key, group in groupby(named, key=lambda one: one[0][1]):
        if key in keys:
            raise DataError(
                f"{quote_name(path, limit=300)} has the key {quote_name(key)} twice, with other keys in between", path=path, code="bad_keys",
                hint="the files of an example must be adjacent; sort the archive's members by name",
            )  # fmt: skip
        keys.add(key)
        parts: dict[str, Part] = {}
        for match, part in group:
            if parts.setdefault(match[2].lower(), part) is not part:
                raise DataError(f"{quote_name(path, limit=300)} has two files named {quote_name(part.name)}", path=path)
        yield ShardExample(key, parts)


def _parts(path: Path) -> Iterator[Part]:
    """Yield the files in a shard, except those about the shard itself."""
    last = ""
    with open_regular(path) as stream:
        _check_plain(stream, path)
        try:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps every header
                    last = member.name
                    if member.issparse():
                        raise DataError(
                            f"{quote_name(path, limit=300)}: {quote_name(last)} is stored as a sparse file; create the "
                            "archive without sparse files",
                            path=path,
                        )
                    if member.isreg() and not _ABOUT_THE_SHARD.match(member.name):
                        yield Part(member.name, member.offset_data, member.size)
                _check_end(stream, archive.offset)
        except (tarfile.TarError, ValueError, EOFError, OSError) as error:
            if is_failure(error):
                raise
            where = f" after {quote_name(last)}" if last else ""
            raise DataError(
                f"{quote_name(path, limit=300)} is not a complete tar file: {error}{where}", path=path, hint="copy or download it again"
            ) from error  # fmt: skip


def _check_plain(stream: IO[bytes], path: Path) -> None:
    """Raise DataError for a compressed file, whose examples have no offsets."""
    head = stream.read(8)
    stream.seek(0)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            message = (
                f"{quote_name(path, limit=300)} is compressed ({name}), which prevents random access to its examples"
            )
            raise DataError(message, path=path, hint="decompress the archive; the images inside are compressed anyway")


def _check_end(stream: IO[bytes], place: int) -> None:
    """Raise ReadError if headers end without an end mark; tarfile takes a damaged header for one."""
    stream.seek(place)
    block = stream.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is truncated")
    if any(block):
        raise tarfile.ReadError("a header is damaged")


def read_part(stream: IO[bytes], start: int, size: int, *, where: str) -> bytes:
    """Read one file of an open shard. Raises DataError if it is truncated."""
    stream.seek(start)
    data = stream.read(size)
    if len(data) != size:
        raise DataError(f"{where} is truncated: it has {len(data)} of {size} bytes")
    return data


_OF_KIND = {
    "image": tuple(sorted(suffix[1:] for suffix in SUFFIXES)), "text": ("txt",), "x": ("npy",),
    "audio": tuple(sorted(suffix[1:] for suffix in sound.SUFFIXES)),
}  # fmt: skip
_KIND_TAKEN = {"images": "image", "texts": "text", "audio": "audio"}
_LABEL_FIELDS = ("label", "cls", "class", "target")
_JSON = "json"


class ShardColumn(NamedTuple):
    """Files of the examples by suffix, one of several, or a field of them if they are JSON."""

    suffixes: tuple[str, ...]
    field: str | None = None

    def __str__(self) -> str:
        return "/".join(self.suffixes) + (f".{self.field}" if self.field is not None else "")

    def part(self, example: ShardExample) -> Part | None:
        """Return the file of an example; None if it has none."""
        return next((example.parts[suffix] for suffix in self.suffixes if suffix in example.parts), None)

    def value(self, data: bytes, where: str) -> Any:
        """Return a file's stripped text, or its field. Raises DataError."""
        try:
            return data.decode() if self.field is None else json.loads(data)[self.field]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            what = "is not UTF-8 text" if self.field is None else f"has no field {quote_name(self.field)}"
            raise DataError(f"{where} {what} ({type(error).__name__}: {str(error)[:100]})") from error


def input_column(first: ShardExample, named: Mapping[str, str], takes: str | None) -> tuple[str, ShardColumn]:
    """Return kind (image, text, x or audio) and column of the input.

    Args:
        first: example that shows what exists.
        named: columns named by the user.
        takes: images, texts or audio, if the model says so.

    Raises:
        UsageError: there is no such column, or the input is missing or ambiguous.
    """
    for kind in _OF_KIND.keys() & named.keys():
        return kind, _resolve_column(named[kind], first)
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
        f"several could be the input: {format_names(name for _, name in every)}"
        if every
        else "none of them is a known input"
    )
    hint = (
        "name the input: webdataset:PATTERN:image=SUFFIX, text=SUFFIX, x=SUFFIX, audio=SUFFIX, or a JSON field as "
        "text=json.FIELD"
    )
    raise UsageError(
        f"\0data\0 webdataset: example {quote_name(first.key)} has {format_names(first.parts, limit=20)}; {what}",
        hint=hint,
    )


def label_column(first: ShardExample, named: Mapping[str, str], fields: Mapping[str, Any]) -> ShardColumn | None:
    """Return the column of the labels; None if there is none.

    Args:
        fields: of the first example's JSON file; empty without one.

    Raises:
        UsageError: there is no such column, or several fields match.
    """
    if "label" in named:
        return _resolve_column(named["label"], first) if named["label"] else None
    if "cls" in first.parts:
        return ShardColumn(("cls",))
    found = [field for field in _LABEL_FIELDS if field in fields]
    if len(found) > 1:
        message = (
            f"\0data\0 webdataset: several fields of {quote_name(first.key)} could be the label: {format_names(found)}"
        )
        raise UsageError(message, hint=f"choose one: webdataset:PATTERN:label={_JSON}.{found[0]}")
    return ShardColumn((_JSON,), found[0]) if found else None


def _resolve_column(name: str, first: ShardExample) -> ShardColumn:
    """Return the column of a suffix, of several joined by + or ;, or of a field after the suffix json."""
    suffix, dot, field = name.partition(".")
    column = (
        ShardColumn((suffix,), field)
        if dot and name not in first.parts
        else ShardColumn(tuple(name.lower().split("+")))
    )
    if column.part(first) is None:
        raise UsageError(
            f"\0data\0 webdataset: example {quote_name(first.key)} has no {quote_name(name)}; it has {format_names(first.parts, limit=20)}"
        )
    return column

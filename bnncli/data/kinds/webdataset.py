"""`webdataset:PATTERN[:image=jpg,label=cls]`: tar files with each example's files next to each other.

PATTERN is a file, or several by {0000..0010}, {train,extra}, * and ?. The input is `image` (jpg, png, webp and others),
`text` (txt), `audio` (wav, flac, mp3 and others) or `x` (npy). The label is `cls`, or a field of a JSON file, as in
label=json.class. What is not named is inferred. Labels are integers from 0, or names, numbered in sorted order. Rows
are the examples in shard order.
"""

from __future__ import annotations

import io
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from bnncli.data.arrays import read_npy
from bnncli.data.columns import GROUP
from bnncli.data.pixels import Preprocess, check_same_size, common_mode, decode_image, open_image, resize_and_crop
from bnncli.data.shards import (
    Part,
    ShardColumn,
    ShardExample,
    examples_of,
    input_column,
    label_column,
    read_part,
    shard_paths,
)
from bnncli.data.sound import decode_sound
from bnncli.data.tables import convert_labels, format_unlabelled_note, split_columns
from bnncli.errors import DataError, UsageError
from bnncli.names import format_names, quote_name
from bnncli.numerics.digests import file_sha256
from bnncli.options.declaration import Form
from bnncli.progress import Progress
from bnncli.system.input_files import open_regular

FORM = Form("webdataset:PATTERN[:image=jpg,label=cls]", 90, "Tar files with the files of each example side by side.")

_MOST_LABEL_BYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class ShardDataset:
    """Examples in tar files, by the location of their inputs.

    Attributes:
        kind: of the input: image, text, audio or x (an array).
        keys: names of the examples.
        places: (N, 3) int64: shard number, first byte, and size.
    """

    shards: tuple[Path, ...]
    kind: str
    column: ShardColumn
    label_column: ShardColumn | None
    keys: tuple[str, ...]
    places: np.ndarray
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    mode: str
    preprocess: Preprocess
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys."""
        return self.keys

    @property
    def is_labeled(self) -> bool:
        """Return whether examples have labels."""
        return self.labels is not None

    @property
    def is_sized(self) -> bool:
        """Return whether images are resized and cropped when read."""
        return self.kind == "image"

    @property
    def items(self) -> str:
        """images if the model has a transform for them; texts; audio; else arrays."""
        if self.kind in ("text", "audio"):
            return "texts" if self.kind == "text" else "audio"
        return "images" if self.kind == "image" and self.preprocess.transform is not None else "arrays"

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray | list[Any], np.ndarray | None]:
        """Return inputs of the rows as an array (n, ...) or a list of images, texts or clips, and labels (n,).

        Raises:
            DataError: a file is truncated or cannot be decoded, or arrays or images differ in size.
            Untrusted: an npy file has Python objects.
        """
        labels = None if self.labels is None else self.labels[rows]
        found: list[Any] = []
        for row, data, where in self._files(rows):
            item = self._decode(data, where)
            if self.items == "arrays" and self.kind == "image":
                item = resize_and_crop(item, self.preprocess, self.keys[row])
                check_same_size(item, found[0] if found else item, self.keys[row], self.keys[int(rows[0])])
            elif self.items == "arrays" and found and (item.shape, item.dtype) != (found[0].shape, found[0].dtype):
                came = f"{item.dtype} of shape {item.shape}; others are {found[0].dtype} of shape {found[0].shape}"
                raise DataError(f"{where} is {came}")
            found.append(item)
        return np.stack(found) if self.items == "arrays" else found, labels

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return digests of the shards, the columns, the mode of decoded images, and the rows."""
        hashes = []
        for path in self.shards:
            with open_regular(path) as stream:
                hashes.append(file_sha256(stream, progress))
        columns = np.array([self.kind, str(self.column), str(self.label_column), self.mode])
        return {"sha256": np.array(hashes), "columns": columns, "rows": rows}

    def first_modes(self) -> str:
        """Return L if the first readable image of every class is grey, else RGB. What is not readable is reported when it is read."""
        labels = np.zeros(len(self), np.int64) if self.labels is None else self.labels
        modes = set()
        for label in np.unique(labels):
            for row in np.flatnonzero(labels == label):
                ((_, data, where),) = self._files(np.array([row]))
                with suppress(DataError), open_image(io.BytesIO(data), where) as image:
                    modes.add(image.mode)
                    break
        return common_mode(modes)

    def _files(self, rows: np.ndarray) -> Iterator[tuple[int, bytes, str]]:
        """Yield row, input bytes and name for messages; neighbours in a shard share the open file."""
        numbers = self.places[rows, 0]
        for neighbours in np.split(rows, np.flatnonzero(np.diff(numbers)) + 1):
            path = self.shards[self.places[neighbours[0], 0]]
            with open_regular(path) as stream:
                for row in neighbours.tolist():
                    where = _where(path, self.keys[row], self.kind)
                    yield row, read_part(stream, *self.places[row, 1:].tolist(), where=where), where

    def _decode(self, data: bytes, where: str) -> Any:
        if self.kind == "x":
            return _array(data, where)
        if self.kind == "text":
            text = self.column.value(data, where)
            if not isinstance(text, str):
                raise DataError(f"{where}: expected a string, got {type(text).__name__}")
            return text
        if self.kind == "audio":
            return decode_sound(data, where)
        with open_image(io.BytesIO(data), where) as image:
            return decode_image(image, self.mode, self.preprocess, where)


def exists(place: str) -> bool:
    """Return whether the text as it stands is a file."""
    return Path(place).expanduser().is_file()


def files(place: str) -> list[Path]:
    """Return all files that it is read from."""
    return shard_paths(split_columns(place, "webdataset")[0])


def open_dataset(place: str, preprocess: Preprocess) -> ShardDataset:
    """Index the examples of the shards; reads headers and labels, but no inputs.

    Raises:
        UsageError: a column is unknown or ambiguous.
        MissingInput: a shard is missing.
        DataError: a shard is damaged, there are no examples, one lacks its input or label, or labels break a rule.
    """
    pattern, named = split_columns(place, "webdataset")
    if GROUP in named:
        raise UsageError("\0data\0 webdataset: group= is not supported here; write the examples as parquet or jsonl")
    where = f"webdataset:{pattern}"
    shards = shard_paths(pattern)
    path, first = next(((path, example) for path in shards for example in examples_of(path)), (None, None))
    if path is None or first is None:
        raise DataError(f"{where}: no examples", code="empty_split")
    takes = preprocess.transform.takes if preprocess.transform is not None else None
    kind, column = input_column(first, named, takes)
    label = label_column(first, named, _fields(path, first))
    keys, places, values = _index(shards, kind, column, label)
    labels, classes = convert_labels(values, None, where=f"{where}: {label}") if label is not None else (None, None)
    mode = preprocess.transform.mode if preprocess.transform is not None else ""
    found = ShardDataset(
        tuple(shards), kind, column, label, tuple(keys), places, labels, classes, mode or "RGB", preprocess
    )
    if label is not None and labels is None:
        found = replace(found, note=format_unlabelled_note([str(label)]))
    return replace(found, mode=found.first_modes()) if kind == "image" and not mode else found


def _fields(path: Path, example: ShardExample) -> Mapping[str, Any]:
    """Return the fields of an example's JSON file; empty if it has no JSON object."""
    part = example.parts.get("json")
    if part is None:
        return {}
    with open_regular(path) as stream:
        data = read_part(stream, part.start, part.size, where=_where(path, example.key, "json"))
    with suppress(ValueError, RecursionError):
        fields = json.loads(data)
        return fields if isinstance(fields, dict) else {}
    return {}


def _index(
    shards: list[Path], kind: str, column: ShardColumn, label: ShardColumn | None
) -> tuple[list[str], np.ndarray, list[Any]]:
    """Return keys, locations (N, 3) of the inputs, and labels of all examples."""
    keys: list[str] = []
    places = array("q")
    values: list[Any] = []
    for number, path in enumerate(shards):
        with open_regular(path) as stream:
            for example in examples_of(path):
                part = _part(column, example, path, kind)
                keys.append(example.key)
                places.extend((number, part.start, part.size))
                if label is not None:
                    values.append(_label(label, example, path, stream))
    return keys, np.array(places, np.int64).reshape(-1, 3), values


def _part(column: ShardColumn, example: ShardExample, path: Path, kind: str) -> Part:
    """Return the file of a column. Raises DataError if an example has none."""
    part = column.part(example)
    if part is None:
        message = (
            f"{_where(path, example.key, kind)} ({column}) is missing; the example has "
            f"{format_names(example.parts, limit=20)}"
        )
        raise DataError(message, path=path, code="bad_labels" if kind == "label" else None)
    return part


def _label(column: ShardColumn, example: ShardExample, path: Path, stream: IO[bytes]) -> Any:
    """Return the label of an example: an integer if its text is one."""
    part, where = _part(column, example, path, "label"), _where(path, example.key, "label")
    if part.size > _MOST_LABEL_BYTES:
        raise DataError(f"{where} has {part.size} bytes, which is too large for a label", path=path, code="bad_labels")
    value = column.value(read_part(stream, part.start, part.size, where=where), where)
    if column.field is not None:
        return value
    text = value.strip()
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def _where(path: Path, key: str, kind: str) -> str:
    return f"{quote_name(path, limit=300)}: the {kind} of {quote_name(key)}"


def _array(data: bytes, where: str) -> np.ndarray:
    """Read numbers from an npy file, in native byte order. Raises as `read_npy` does."""
    found = read_npy(io.BytesIO(data), where)
    if found.dtype.kind not in "fiu":
        raise DataError(f"{where}: expected numbers, got {found.dtype}")
    return np.ascontiguousarray(found, found.dtype.newbyteorder("="))

"""Arrow and Parquet files as tables, with one batch of rows in memory at a time."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bnncli.data.tables import FILE, LIST, OTHER, REAL, TEXT, WHOLE
from bnncli.errors import DataError, DeviceError, UsageError
from bnncli.names import by_number, format_names, is_split, quote_name
from bnncli.numerics.digests import file_sha256
from bnncli.progress import Progress
from bnncli.system.input_files import is_failure, open_regular, read_error

_NUMBERS = {"float", "double", *(f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64))}


def arrow_library(module: str, asked: str) -> Any:
    """Import a module of pyarrow.

    Args:
        asked: what needs it, as the user typed it.

    Raises:
        UsageError: it is not installed or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        message = f"{asked} needs pyarrow, which {why}"
        raise UsageError(message, code="missing_library", hint="pip install 'bnncli[parquet]'") from error


def columns_of(schema: Any, asked: str, where: str) -> dict[str, str]:
    """Return what each column of a schema holds. Raises DataError if two have the same name."""
    types = arrow_library("pyarrow", asked).types
    names = list(schema.names)
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise DataError(f"{where} has several columns named {format_names(double)}")
    return {field.name: _classify_type(field.type, types) for field in schema}


def _classify_type(kind: Any, types: Any) -> str:
    if types.is_dictionary(kind):
        kind = kind.value_type
    checks = (
        (TEXT, ("is_string", "is_large_string", "is_string_view")),
        (WHOLE, ("is_integer", "is_boolean")),
        (REAL, ("is_floating",)),
        (LIST, ("is_list", "is_large_list", "is_fixed_size_list")),
        (FILE, ("is_binary", "is_large_binary", "is_fixed_size_binary")),
    )
    for holds, names in checks:
        if any(getattr(types, name)(kind) for name in names):
            return holds
    if types.is_struct(kind) and {"bytes", "path"} <= {kind.field(place).name for place in range(kind.num_fields)}:
        return FILE
    return OTHER


def plain_numbers(column: Any) -> np.ndarray | None:
    """Return the numbers (n,) of a column, or (n, L) of a column of lists of L; None if any is missing or not a number."""
    if column.null_count:
        return None
    if str(column.type) in _NUMBERS:
        return np.from_dlpack(column)  # to_numpy imports pandas if it is installed
    if not str(column.type).startswith(("list<", "large_list<", "fixed_size_list<")) or len(column) == 0:
        return None
    size = getattr(column.type, "list_size", None)
    sizes = {size} if size is not None else {*np.diff(np.from_dlpack(column.offsets)).tolist()}
    inner = plain_numbers(column.flatten())
    if inner is None or inner.ndim != 1 or len(sizes) != 1 or not len(inner):
        return None
    return inner.reshape(len(column), -1)


def python_values(column: Any) -> list[Any]:
    """Return the values of a column as Python objects, None for missing ones."""
    is_plain = str(column.type) in _NUMBERS and not column.null_count
    found: list[Any] = np.from_dlpack(column).tolist() if is_plain else column.to_pylist()
    return found


def class_names_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Return the class names that Hugging Face datasets stores in a schema."""
    try:
        stored = json.loads((metadata or {}).get(b"huggingface", b"{}"))
        return feature_class_names(stored["info"]["features"])
    except (ValueError, LookupError, TypeError, RecursionError):  # others may store anything under this key
        return {}


def feature_class_names(features: Any) -> dict[str, tuple[str, ...]]:
    """Return the class names of each feature that is a ClassLabel or a list of them."""
    if not isinstance(features, Mapping):
        return {}
    inner = {name: _inner(feature) for name, feature in features.items()}
    named = {name: feature.get("names") for name, feature in inner.items() if feature.get("_type") == "ClassLabel"}
    return {name: tuple(map(str, names)) for name, names in named.items() if isinstance(names, list)}


def _inner(feature: Any) -> Mapping[str, Any]:
    """Return a feature, or that of a list's values, for which the library has used three forms."""
    if isinstance(feature, list) and len(feature) == 1:
        return _inner(feature[0])
    if not isinstance(feature, Mapping):
        return {}
    return (
        _inner(feature["feature"])
        if feature.get("_type") in ("Sequence", "List", "LargeList") and "feature" in feature
        else feature
    )


def files_of(place: str, suffixes: Iterable[str], spelled: str) -> tuple[Path, list[Path]]:
    """Return the file, folder or pattern, and its files, sorted by the numbers in their names.

    Raises:
        UsageError: a folder has the files of several splits.
        DataError: a pattern or folder matches no such files.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        found = [file for suffix in suffixes for file in path.rglob(f"*{suffix}") if _is_shown(file, path)]
        splits = sorted({split for file in found if (split := _split_of(file)) is not None})
        if len(splits) > 1:
            raise UsageError(
                f"\0data\0 {spelled}: {quote_name(path, limit=300)} has files from several splits: {format_names(splits)}",
                hint=f"use a pattern, such as {spelled}:{path}/**/{splits[0]}-*{found[0].suffix}",
            )
    elif any(letter in place for letter in "*?[") and not path.exists():
        fixed = Path(
            *[part for part in path.parts if not any(letter in part for letter in "*?[")][: _first_pattern(path)]
        )
        found = [file for file in fixed.glob(str(path.relative_to(fixed))) if file.is_file()]
    else:
        return path, [path]
    if not found:
        what = (
            f"no {spelled} files in {quote_name(path, limit=300)}"
            if path.is_dir()
            else f"no file matches {quote_name(path, limit=300)}"
        )
        raise DataError(what, path=path, code="empty_split")
    return path, sorted(found, key=by_number)


def _first_pattern(path: Path) -> int:
    """Return the number of path components before the first pattern."""
    return next(place for place, part in enumerate(path.parts) if any(letter in part for letter in "*?["))


def _is_shown(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _split_of(file: Path) -> str | None:
    """Return the split of a file named like train-00000-of-00002 or test, else None."""
    first = file.stem.partition("-")[0]
    return first if is_split(first) else None


_ROWS_AT_ONCE = 1024  # of Parquet, whose row groups may exceed memory
_BUFFER = 1 << 20


class Blocks(Protocol):
    """A file of blocks of rows, each read from its start."""

    @property
    def schema(self) -> Any:
        """The pyarrow schema."""

    def sizes(self) -> list[int]:
        """Return the number of rows in each block."""

    def batches(self, block: int, names: list[str]) -> Iterator[Any]:
        """Yield the record batches of a block, with these columns, in order."""


class ParquetBlocks:
    """The row groups of a Parquet file."""

    def __init__(self, path: Path, asked: str) -> None:
        library = arrow_library("pyarrow.parquet", asked)
        self._file = library.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER)
        self.schema = self._file.schema_arrow

    def sizes(self) -> list[int]:
        """Return the number of rows in each row group."""
        metadata = self._file.metadata
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def batches(self, block: int, names: list[str]) -> Iterator[Any]:
        """Yield the rows of a row group in batches."""
        return self._file.iter_batches(_ROWS_AT_ONCE, row_groups=[block], columns=names, use_threads=False)


class ArrowBlocks:
    """The record batches of an Arrow file or stream (as Hugging Face datasets writes), memory-mapped."""

    def __init__(self, path: Path, asked: str) -> None:
        library = arrow_library("pyarrow", asked)
        with open_regular(path) as stream:
            is_file = stream.read(6) == b"ARROW1"
        mapped = library.memory_map(str(path))
        reader = library.ipc.open_file(mapped) if is_file else library.ipc.open_stream(mapped)
        self.schema = reader.schema
        if is_file:
            self._count, self._batch = reader.num_record_batches, reader.get_batch
        else:
            found = list(reader)  # references into the mapped file; nothing is read
            self._count, self._batch = len(found), found.__getitem__

    def sizes(self) -> list[int]:
        """Return the number of rows in each batch."""
        return [self._batch(block).num_rows for block in range(self._count)]

    def batches(self, block: int, names: list[str]) -> Iterator[Any]:
        """Yield the batch."""
        yield self._batch(block).select(names)


class _Open(NamedTuple):
    """The current position within a block."""

    process: int
    file: int
    block: int
    names: tuple[str, ...]
    batches: Iterator[Any]
    start: int
    batch: Any


class BlockTable:
    """The rows of files with one schema, one file after the other."""

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        kind: type[ParquetBlocks] | type[ArrowBlocks],
        spelled: str,
        *,
        asked: str | None = None,
    ) -> None:
        """Create a table.

        Args:
            spelled: kind of the files.
            asked: what the user typed that needs pyarrow; None for data of this kind.

        Raises:
            MissingInput, DataError: files are damaged or have different columns.
            UsageError: pyarrow is not installed.
        """
        self.path, self._files, self._kind, self._spelled = path, list(files), kind, spelled
        self._asked = asked or f"\0data\0 {spelled}"
        arrow_library("pyarrow", self._asked)
        self.columns: dict[str, str] = {}
        self.class_names: Mapping[str, tuple[str, ...]] = {}
        self._spans: list[tuple[int, int]] = []  # file and block
        self._open: _Open | None = None
        self._blocks: tuple[int, int, Blocks] | None = None  # the open file, and the process that opened it
        sizes = []
        for number, file in enumerate(self._files):
            blocks = self._opened(number)
            with self._damage(file):
                columns, counts = columns_of(blocks.schema, self._asked, quote_name(file, limit=300)), blocks.sizes()
            if number == 0:
                self.columns, self.class_names = columns, class_names_of(blocks.schema.metadata)
            if columns.keys() != self.columns.keys():
                odd = sorted(columns.keys() ^ self.columns.keys())[0]
                raise DataError(
                    f"{quote_name(file, limit=300)} and {quote_name(self._files[0].name)} have different columns: only "
                    f"one of them has {quote_name(odd)}",
                    path=file,
                )
            self._spans += [(number, block) for block in range(len(counts))]
            sizes += counts
        self._starts = np.array([0, *accumulate(sizes)], np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None, "_blocks": None}

    def values(self, names: Sequence[str]) -> tuple[int, list[list[Any]]]:
        """Return the number of rows, and all values of some columns."""
        found: list[list[Any]] = [[] for _ in names]
        for number, block in self._spans if names else ():
            with self._damage(self._files[number]):
                for batch in self._opened(number).batches(block, list(names)):
                    for column, name in zip(found, names, strict=True):
                        column += python_values(batch.column(name))
        return int(self._starts[-1]), found

    def numbers(self, names: Sequence[str]) -> np.ndarray | None:
        """Return some columns as (N, columns) float64, or a list column as (N, L); None if they are not all numbers."""
        found, count = np.empty((0, 0)), 0
        for number, block in self._spans:
            with self._damage(self._files[number]):
                for batch in self._opened(number).batches(block, list(names)):
                    columns = [plain_numbers(batch.column(name)) for name in names]
                    if any(one is None or (one.ndim == 2 and len(columns) > 1) for one in columns):
                        return None
                    part = np.column_stack([one for one in columns if one is not None])
                    if count == 0:
                        found = np.empty((int(self._starts[-1]), part.shape[1]))
                    if part.shape[1] != found.shape[1]:
                        return None
                    found[count : count + len(part)] = part
                    count += len(part)
        return found if count else None

    def read(self, rows: np.ndarray, names: Sequence[str]) -> list[list[Any]]:
        """Return values of columns in the rows (n,); for ascending rows, each batch is decompressed once."""
        found: list[list[Any]] = [[] for _ in names]
        spans = np.searchsorted(self._starts, rows, side="right") - 1
        place = 0
        while place < len(rows):
            span = int(spans[place])
            start, batch = self._batch_of(span, int(rows[place] - self._starts[span]), tuple(names))
            first = int(self._starts[span]) + start
            stop = place + 1
            while stop < len(rows) and first <= rows[stop] < first + batch.num_rows:
                stop += 1
            taken = batch.take(arrow_library("pyarrow", self._asked).array(rows[place:stop] - first))
            for column, name in zip(found, names, strict=True):
                column += taken.column(name).to_pylist()
            place = stop
        return found

    def digests(self, progress: Progress) -> list[str]:
        """Return the digest of each file."""
        found = []
        for file in self._files:
            with open_regular(file) as stream:
                found.append(file_sha256(stream, progress))
        return found

    def _batch_of(self, span: int, row: int, names: tuple[str, ...]) -> tuple[int, Any]:
        """Return the batch with a row of a block, and the batch's first row."""
        number, block = self._spans[span]
        now = self._open
        if now is None or now[:4] != (os.getpid(), number, block, names) or row < now.start:
            with self._damage(self._files[number]):
                batches = iter(self._opened(number).batches(block, list(names)))
                now = _Open(os.getpid(), number, block, names, batches, 0, next(batches))
        with self._damage(self._files[number]):
            while row >= now.start + now.batch.num_rows:
                now = now._replace(start=now.start + now.batch.num_rows, batch=next(now.batches))
        self._open = now
        return now.start, now.batch

    def _opened(self, number: int) -> Blocks:
        """Return a file opened in this process; open files are not shared between processes."""
        if self._blocks is None or self._blocks[:2] != (os.getpid(), number):
            file = self._files[number]
            with open_regular(file), self._damage(file):
                self._blocks = os.getpid(), number, self._kind(file, self._asked)
        return self._blocks[2]

    def _damage(self, file: Path) -> _Damage:
        return _Damage(file, self._spelled, self._asked)


class _Damage:
    """Convert errors of pyarrow inside the block to bnncli's."""

    def __init__(self, file: Path, spelled: str, asked: str) -> None:
        self._file, self._spelled, self._asked = file, spelled, asked

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        library = arrow_library("pyarrow", self._asked)
        shown = quote_name(self._file, limit=300)
        if isinstance(error, MemoryError):
            raise DeviceError(f"not enough memory to read {shown}", code="out_of_memory") from error
        if isinstance(error, OSError) and is_failure(error):
            raise read_error(error, self._file) from error
        if isinstance(error, (library.ArrowException, OSError, StopIteration, UnicodeDecodeError)):
            why = " ".join(str(error).split())[:200] or "it ends before its last row"
            raise DataError(f"{shown} is not a complete {self._spelled} file: {why}", path=self._file) from error

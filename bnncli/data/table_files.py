"""Tables in files, read a batch of rows at a time by pyarrow: csv, tsv, JSON lines, CoNLL, Parquet and Arrow.

Text has no random access, so it is checked row by row and copied into a temporary Arrow file, which is memory-mapped.
"""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import hashlib
import io
import json
import mmap
import re
import shlex
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from bnncli.errors import DataError, DeviceError, UsageError, WriteError
from bnncli.lazy import pyarrow
from bnncli.names import by_number, count_noun, format_names, is_split, quote_name
from bnncli.numerics.digests import file_sha256
from bnncli.progress import Progress
from bnncli.system.input_files import is_failure, open_regular, read_error

# What a column holds, judged by the schema, or by the first rows of text.
TEXT, WHOLE, REAL, FILE, LIST, OTHER = (
    "text",
    "whole numbers",
    "real numbers",
    "images or sound",
    "lists",
    "something else",
)

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_FIRST_ROWS = 100  # rows to judge what columns hold
_ROWS_AT_ONCE = 1024
_CELLS_AT_ONCE = 1 << 20


def _values(batch: Any, names: Sequence[str]) -> list[list[Any]]:
    """Return the values of some columns of a batch, None for missing ones."""
    return [batch.column(name).to_pylist() for name in names]


@dataclass(frozen=True)
class Blocks:
    """A file of blocks of rows, each read from its start.

    Attributes:
        columns: what each holds.
        sizes: number of rows in each block.
        batches: returns the record batches of a block, with some columns, in order.
        digest: returns the digest of the content.
        class_names: of numeric columns, if the file states them.
        values: returns the values of some columns of a batch.
    """

    columns: Mapping[str, str]
    sizes: Sequence[int]
    batches: Callable[[int, list[str]], Iterable[Any]]
    digest: Callable[[Progress], str]
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: Callable[[Any, Sequence[str]], list[list[Any]]] = _values


def open_parquet(path: Path) -> Blocks:
    """Open the row groups of a Parquet file, which may exceed memory."""
    from pyarrow import parquet

    file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]

    def batches(block: int, names: list[str]) -> Iterable[Any]:
        found: Iterable[Any] = file.iter_batches(_ROWS_AT_ONCE, row_groups=[block], columns=names, use_threads=False)
        return found

    return _with_schema(path, file.schema_arrow, sizes, batches)


def open_arrow(path: Path) -> Blocks:
    """Open the record batches of an Arrow file or stream (as Hugging Face datasets writes), memory-mapped."""
    with open_regular(path) as stream:
        is_file = stream.read(6) == b"ARROW1"
    mapped = pyarrow.memory_map(str(path))
    reader = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
    if is_file:
        count, batch = reader.num_record_batches, reader.get_batch
    else:
        found = list(reader)  # references into the mapped file; nothing is read
        count, batch = len(found), found.__getitem__
    sizes = [batch(block).num_rows for block in range(count)]
    return _with_schema(path, reader.schema, sizes, lambda block, names: [batch(block).select(names)])


def _with_schema(
    path: Path, schema: Any, sizes: list[int], batches: Callable[[int, list[str]], Iterable[Any]]
) -> Blocks:
    """Return the blocks of a file that has a schema. Raises DataError if column names repeat."""

    def digest(progress: Progress) -> str:
        with open_regular(path) as stream:
            return file_sha256(stream, progress)

    _check_names(schema.names, path)
    columns = {one.name: _classify_type(one.type) for one in schema}
    return Blocks(columns, sizes, batches, digest, _class_names_of(schema.metadata))


def open_delimited(path: Path, delimiter: str = ",") -> Blocks:
    """Open a csv or tsv file (RFC 4180) with column names in the first line, gzipped or not.

    In a tsv file, quotation marks are ordinary characters unless it can only be read with quoted fields.
    """
    csv.field_size_limit(sys.maxsize)  # texts, or a header read as one field, exceed the default
    try:
        return _read_delimited(path, delimiter, is_quoted=delimiter != "\t")
    except DataError as error:
        if delimiter != "\t":
            raise
        try:
            return _read_delimited(path, delimiter, is_quoted=True)
        except DataError:
            raise error from None


def _read_delimited(path: Path, delimiter: str, *, is_quoted: bool) -> Blocks:
    with _open_lines(path) as lines:
        lines.row = -1
        first = next(iter(lines), "")
        found = _find_delimiter(first, lines)
        delimiter = delimiter if delimiter != "," else found
        records = _records(lines, first, delimiter, is_quoted=is_quoted)
        header = [name.strip() or f"Unnamed: {place}" for place, name in enumerate(next(records))]  # as pandas does
        _check_header(header, first, delimiter, lines)
        batches = _copy(header, records)
    columns = batches[0].slice(0, _FIRST_ROWS).columns if batches else [[]] * len(header)
    holds = [_classify_fields([str(value) for value in column]) for column in columns]
    return Blocks(
        dict(zip(header, holds, strict=True)),
        [batch.num_rows for batch in batches],
        lambda block, names: [batches[block].select(names)],
        lambda progress: lines.sha256.hexdigest(),
    )


def open_json_lines(path: Path) -> Blocks:
    """Open a file of one JSON object per line, gzipped or not; the batches hold the lines as they are."""
    with _open_lines(path) as lines:
        batches = _copy(["line"], _json_lines(lines))
    columns: dict[str, str] = {}
    for record in _parse_lines(batches[0].slice(0, _FIRST_ROWS)) if batches else ():
        for name, value in record.items():
            if value is not None:
                columns.setdefault(name, _classify_value(value))
    if not columns:
        raise DataError(f"{lines.shown} is empty: expected one JSON object per line", path=path, code="empty_split")
    return _json_blocks(columns, batches, lines)


def open_conll(path: Path) -> Blocks:
    """Open a file of one word and its tags per line, and an empty line after each text, gzipped or not; a row is a text.

    The columns are words, 2, 3, ..., tags. In a .conllu file they have the names of that format (form, upos, ...), and _
    is a missing tag.
    """
    is_universal = ".conllu" in path.suffixes
    names: list[str] = []
    with _open_lines(path) as lines:
        batches = _copy(["line"], _conll_texts(lines, names, is_universal=is_universal))
    if not batches:
        expected = "one word and its tags per line, and an empty line after each text"
        raise DataError(f"{lines.shown} is empty: expected {expected}", path=path, code="empty_split")
    return _json_blocks(dict.fromkeys(names, LIST), batches, lines)


_UNIVERSAL = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


def _conll_texts(lines: _Lines, names: list[str], *, is_universal: bool) -> Iterator[tuple[str]]:
    """Yield each text as a JSON object of lists, and add the names of the columns. Raises DataError, naming the line."""
    fields: list[list[str | None]] = []
    delimiter: str | None = None
    has_comment = False
    for line in chain(lines, [""]):
        if line.isspace() or not line or line.startswith("-DOCSTART-"):
            if fields:
                yield (json.dumps(dict(zip(names, zip(*fields, strict=True), strict=True))),)
                lines.row += 1
            fields, lines.start = [], lines.number + 1
            continue
        if is_universal and line.startswith("#"):
            continue
        if not names:
            has_comment = line.startswith("# ")
            delimiter = "\t" if "\t" in line or is_universal else None
            width = len(_UNIVERSAL) if is_universal else len(line.rstrip("\r\n").split(delimiter))
            numbered = ["words", *map(str, range(2, width)), *(["tags"] if width > 1 else [])]
            names += _UNIVERSAL if is_universal else numbered
        found: list[str | None] = [*line.rstrip("\r\n").split(delimiter)]
        if len(found) != len(names):
            message = f"{lines.shown}: line {lines.number} has {count_noun(len(found), 'field')}, expected {len(names)}"
            hint = "remove lines of comments: grep -v '^# '" if has_comment or line.startswith("# ") else None
            raise DataError(message, path=lines.path, hint=hint)
        if is_universal:
            if not str(found[0]).isdecimal():  # several words at once (1-2), or one that was left out (1.1)
                continue
            found = [
                None if value == "_" and name not in ("form", "lemma") else value
                for name, value in zip(names, found, strict=True)
            ]
        fields.append(found)


def _json_blocks(columns: Mapping[str, str], batches: Sequence[Any], lines: _Lines) -> Blocks:
    """Return the blocks of rows that are stored as JSON objects, one in a line."""

    def values(batch: Any, names: Sequence[str]) -> list[list[Any]]:
        records = _parse_lines(batch)
        return [[record.get(name) for record in records] for name in names]

    return Blocks(
        columns,
        [batch.num_rows for batch in batches],
        lambda block, names: [batches[block]],
        lambda progress: lines.sha256.hexdigest(),
        values=values,
    )


def _parse_lines(batch: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in batch.column(0).to_pylist()]


class _Lines:
    """The lines of a UTF-8 text file, without a byte order mark, hashed and counted as they are read.

    Attributes:
        number: of lines read.
        row, start: the record that is being read, -1 for a header, and its first line.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path, self.shown, self._stream = path, quote_name(path, limit=300), stream
        self.number, self.row, self.start = 0, 0, 1
        self.sha256 = hashlib.sha256()

    def where(self) -> str:
        """Name the record that is being read."""
        return f"{self.shown}: " + (f"row {self.row} (line {self.start})" if self.row >= 0 else f"line {self.start}")

    def __iter__(self) -> Iterator[str]:
        for line in self._stream:
            self.sha256.update(line)
            self.number += 1
            if self.number == 1:
                if line[:2] in UTF16_MARKS:
                    name = shlex.quote(str(self.path))
                    hint = f"iconv -f UTF-16 -t UTF-8 {name} > NEW_FILE" if name.isprintable() else None
                    raise DataError(f"{self.shown} is in UTF-16, expected UTF-8", path=self.path, hint=hint)
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.where()} is not UTF-8 text (byte {line[error.start]:#04x})",
                    hint="if it is WINDOWS-1252, convert it: iconv -f WINDOWS-1252 -t UTF-8",
                ) from error
            yield text


@contextmanager
def _open_lines(path: Path) -> Iterator[_Lines]:
    """Open the lines of a file, gzipped or not. Raises MissingInput; DataError, also inside the block, for damage."""
    with open_regular(path) as stream:
        is_zipped = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        if not is_zipped:
            yield _Lines(path, stream)
            return
        try:
            yield _Lines(path, io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=stream)), 1 << 20))
        except (EOFError, OSError, zlib.error) as error:
            if is_failure(error):
                raise
            raise DataError(f"{quote_name(path, limit=300)} is not a complete gzip file: {error}", path=path) from error


def _copy(names: Sequence[str], rows: Iterator[Sequence[str]]) -> list[Any]:
    """Copy rows of texts into a temporary file and return its record batches, memory-mapped. Raises WriteError."""
    text = pyarrow.large_string()
    schema = pyarrow.schema([(name, text) for name in names])
    size = max(1, min(_ROWS_AT_ONCE, _CELLS_AT_ONCE // len(names)))
    try:
        with tempfile.TemporaryFile() as file:  # without a name, so that nothing is left of it after a kill
            with pyarrow.ipc.new_stream(file, schema) as writer:
                while chosen := list(islice(rows, size)):
                    columns = [pyarrow.array(column, text) for column in zip(*chosen, strict=True)]
                    writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            file.flush()
            mapped = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return list(pyarrow.ipc.open_stream(mapped))  # references into the file; nothing is read
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left in {quote_name(tempfile.gettempdir())} for a copy of the table"
            raise WriteError(message, hint="free space, or name another folder in TMPDIR") from error
        raise


def _records(lines: _Lines, first: str, delimiter: str, *, is_quoted: bool) -> Iterator[list[str]]:
    """Yield the fields of the header and of every row, skipping empty lines. Raises DataError, naming the row."""
    quoting: Any = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    width = 0
    try:
        for fields in csv.reader(chain([first], lines), delimiter=delimiter, quoting=quoting, strict=True):
            if fields:
                width = width or len(fields)
                if len(fields) != width:
                    message = f"{lines.where()} has {count_noun(len(fields), 'field')}, expected {width}"
                    raise DataError(message, path=lines.path, hint=_IF_SPLIT)
                yield fields if is_quoted else [_unquote(field) for field in fields]
                lines.row += 1
            lines.start = lines.number + 1
    except csv.Error as error:
        raise DataError(f"{lines.where()} is damaged: {error}", path=lines.path, hint=_IF_SPLIT) from error


_IF_SPLIT = "put quotation marks around fields that contain the delimiter or a line break"


def _find_delimiter(first: str, lines: _Lines) -> str:
    """Return the delimiter of a csv file that gives the most column names. Raises DataError for an odd first line."""
    if not first.strip():
        message = f"{lines.where() if first else lines.shown} is empty: expected a header line with column names"
        raise DataError(message, path=lines.path, code="empty_split")
    if "\r" in first.rstrip("\r\n"):
        message = f"{lines.shown}: lines end in bare carriage returns, expected line feeds"
        raise DataError(message, path=lines.path, hint="convert them: tr '\\r' '\\n'")
    return max(",;\t", key=lambda one: len(next(csv.reader([first], delimiter=one))))


def _check_header(header: Sequence[str], first: str, delimiter: str, lines: _Lines) -> None:
    """Raise DataError if column names repeat, or if the file has another delimiter."""
    other = next((one for one in ",;\t|" if one in header[0]), None)
    if len(header) == 1 and '"' not in first and other is not None:
        raise DataError(
            f"{lines.shown} has only one column, {quote_name(header[0])}: expected the delimiter {delimiter!r}, found "
                f"{other!r}",
            path=lines.path, hint="use csv:, which reads commas, semicolons and tabs regardless of the file's suffix",
        )  # fmt: skip
    _check_names(header, lines.path)


def _check_names(names: Sequence[str], path: Path) -> None:
    """Raise DataError if column names repeat."""
    double = sorted(name for name, count in Counter(names).items() if count > 1)
    if double:
        raise DataError(f"{quote_name(path, limit=300)} has several columns named {format_names(double)}", path=path)


def _unquote(field: str) -> str:
    """Remove the quotation marks around a field and undouble those inside."""
    inner = field[1:-1]
    is_whole = len(field) > 1 and field[0] == field[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if is_whole else field


def _classify_fields(values: Sequence[str]) -> str:
    """Return what the fields of a column hold."""
    found = TEXT
    for kind, holds in ((float, REAL), (int, WHOLE)):
        try:
            for value in values:
                kind(value)
        except ValueError:
            return found
        found = holds if values else TEXT
    return found


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _json_lines(lines: _Lines) -> Iterator[tuple[str]]:
    """Yield the lines that are not empty. Raises DataError for one that is not a JSON object."""
    for line in lines:
        if not line.isspace():
            is_document = lines.row == 0 and line.lstrip()[:1] in ("[", "{")
            advice = "; to split one JSON array into lines, run: jq -c '.[]'" if is_document else ""
            try:
                record = json.loads(line)
                if _SURROGATE.search(line):  # a half of a pair is no character
                    json.dumps(record, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise DataError(f"{lines.where()} is not JSON: {error}{advice}", path=lines.path) from error
            if not isinstance(record, dict):
                came = type(record).__name__
                message = f'{lines.where()}: expected an object such as {{"text": ..., "label": ...}}, got {came}'
                raise DataError(f"{message}{advice}", path=lines.path)
            yield (line,)
            lines.row += 1
        lines.start = lines.number + 1


_HOLDS = {str: TEXT, bool: WHOLE, int: WHOLE, float: REAL, list: LIST}


def _classify_value(value: Any) -> str:
    if isinstance(value, dict):
        return FILE if value.keys() <= {"path", "bytes"} and "path" in value else OTHER
    return _HOLDS.get(type(value), OTHER)


def _classify_type(kind: Any) -> str:
    """Return what a column of an Arrow type holds."""
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    checks = (
        (TEXT, (types.is_string, types.is_large_string, types.is_string_view)),
        (WHOLE, (types.is_integer, types.is_boolean)),
        (REAL, (types.is_floating,)),
        (LIST, (types.is_list, types.is_large_list, types.is_fixed_size_list)),
        (FILE, (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)),
    )
    for holds, own in checks:
        if any(check(kind) for check in own):
            return holds
    if types.is_struct(kind) and {"bytes", "path"} <= {kind.field(place).name for place in range(kind.num_fields)}:
        return FILE
    return OTHER


def _class_names_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
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


class Table:
    """The rows of files with the same columns, one file after the other.

    Attributes:
        path: the file or folder, for messages; paths of images and sound are relative to its folder.
        columns: what each holds.
        class_names: of numeric columns, if the files state them.
    """

    noun = "column"

    def __init__(
        self,
        path: Path,
        files: Sequence[Path],
        kind: Callable[[Path], Blocks],
        spelled: str,
        class_names: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Open a table.

        Args:
            spelled: kind of the files, for messages.
            class_names: stated beside the files.

        Raises:
            MissingInput, DataError: files are damaged or have different columns.
        """
        self.path, self._files, self._kind, self._spelled = path, list(files), kind, spelled
        self._opened: tuple[int, Blocks] | None = None  # a file by its number
        self._current: _Position | None = None
        self._spans: list[tuple[int, int]] = []  # file and block
        sizes: list[int] = []
        for number, file in enumerate(self._files):
            blocks = self._blocks(number)
            if number == 0:
                self.columns, self.class_names = blocks.columns, {**blocks.class_names, **(class_names or {})}
            if blocks.columns.keys() != self.columns.keys():
                odd = sorted(blocks.columns.keys() ^ self.columns.keys())[0]
                raise DataError(
                    f"{quote_name(file, limit=300)} and {quote_name(self._files[0].name)} have different columns: only "
                    f"one of them has {quote_name(odd)}",
                    path=file,
                )
            self._spans += [(number, block) for block in range(len(blocks.sizes))]
            sizes += blocks.sizes
        self._starts = np.array([0, *accumulate(sizes)], np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_current": None}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def values(self, names: Sequence[str]) -> list[list[Any]]:
        """Return all values of some columns."""
        found: list[list[Any]] = [[] for _ in names]
        for number, batch in self._scan(names) if names else ():
            self._append(found, number, batch, names)
        return found

    def numbers(self, names: Sequence[str]) -> np.ndarray | None:
        """Return some columns, or lists of L numbers, as float64 (N, columns or L); None if any is not a finite number.

        Numbers in texts are rounded correctly, as by `float`.
        """
        found, start = np.empty((len(self), len(names))), 0
        for _, batch in self._scan(names):
            try:
                part = np.column_stack([_convert_to_floats(batch.column(name)) for name in names])
                found = found if start else np.empty((len(self), part.shape[1]))
                if part.shape[1] != found.shape[1]:  # a width of 1 would be broadcast
                    return None
                found[start : start + len(batch)] = part
            except (pyarrow.ArrowException, KeyError, ValueError):
                return None
            start += len(batch)
        return found if np.isfinite(found).all() else None

    def read(self, rows: np.ndarray, names: Sequence[str]) -> list[list[Any]]:
        """Return values of columns in the rows (n,); for ascending rows, each batch is decompressed once."""
        found: list[list[Any]] = [[] for _ in names]
        spans = np.searchsorted(self._starts, rows, side="right") - 1
        place = 0
        while place < len(rows):
            span = int(spans[place])
            first, batch = self._batch_of(span, int(rows[place]), tuple(names))
            stop = place + 1
            while stop < len(rows) and first <= rows[stop] < first + batch.num_rows:
                stop += 1
            taken = batch.take(pyarrow.array(rows[place:stop] - first))
            self._append(found, self._spans[span][0], taken, names)
            place = stop
        return found

    def _scan(self, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield the number of the file and each batch, with these columns, in order."""
        for number, block in self._spans:
            with self._damage(self._files[number]):
                for batch in self._blocks(number).batches(block, [*dict.fromkeys(names)]):
                    yield number, batch

    def _append(self, found: list[list[Any]], number: int, batch: Any, names: Sequence[str]) -> None:
        """Append the values of a file's batch to those found in each column."""
        with self._damage(self._files[number]):
            for column, values in zip(found, self._blocks(number).values(batch, names), strict=True):
                column += values

    def digests(self, progress: Progress) -> list[str]:
        """Return the digest of each file's content."""
        return [self._blocks(number).digest(progress) for number in range(len(self._files))]

    def _batch_of(self, span: int, row: int, names: tuple[str, ...]) -> tuple[int, Any]:
        """Return the batch of a block that has a row, and the first row of the batch."""
        number, block = self._spans[span]
        now = self._current
        with self._damage(self._files[number]):
            if now is None or (now.span, now.names) != (span, names) or row < now.first:
                batches = iter(self._blocks(number).batches(block, [*dict.fromkeys(names)]))
                now = _Position(span, names, batches, int(self._starts[span]), next(batches))
            while row >= now.first + now.batch.num_rows:
                now = now._replace(first=now.first + now.batch.num_rows, batch=next(now.batches))
        self._current = now
        return now.first, now.batch

    def _blocks(self, number: int) -> Blocks:
        if self._opened is None or self._opened[0] != number:
            file = self._files[number]
            with open_regular(file), self._damage(file):
                self._opened = number, self._kind(file)
        return self._opened[1]

    @contextmanager
    def _damage(self, file: Path) -> Iterator[None]:
        """Convert errors of pyarrow inside the block to bnncli's."""
        shown = quote_name(file, limit=300)
        try:
            yield
        except MemoryError as error:
            raise DeviceError(f"not enough memory to read {shown}", code="out_of_memory") from error
        except (pyarrow.ArrowException, OSError, StopIteration, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and is_failure(error):
                raise read_error(error, file) from error
            why = " ".join(str(error).split())[:200] or "it ends before its last row"
            raise DataError(f"{shown} is not a complete {self._spelled} file: {why}", path=file) from error


def _convert_to_floats(column: Any) -> np.ndarray:
    """Return the numbers (n,) of a column, or (n, L) of lists. Raises ValueError, also as ArrowInvalid, for others."""
    from pyarrow import compute

    is_list = _classify_type(column.type) == LIST
    numbers = column.flatten() if is_list else column
    if column.null_count or numbers.null_count:
        raise ValueError("a value is missing")
    found: np.ndarray = np.from_dlpack(numbers.cast("float64"))  # to_numpy imports pandas if it is installed
    if not is_list:
        return found
    (size,) = compute.unique(compute.list_value_length(column)).to_pylist()
    return found.reshape(len(column), size)


class _Position(NamedTuple):
    """The batch that was read last, and those after it in its block."""

    span: int
    names: tuple[str, ...]
    batches: Iterator[Any]
    first: int
    batch: Any


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
        found = [Path(file) for file in glob(str(path), recursive=True) if Path(file).is_file()]
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


def _is_shown(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _split_of(file: Path) -> str | None:
    """Return the split of a file named like train-00000-of-00002 or test, else None."""
    first = file.stem.partition("-")[0]
    return first if is_split(first) else None

"""Delimited text (RFC 4180) and files of lines, gzipped or not, with random access."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from bnncli.data.tables import REAL, TEXT, WHOLE
from bnncli.errors import DataError
from bnncli.names import format_names, quote_name
from bnncli.numerics.digests import file_sha256
from bnncli.progress import Progress
from bnncli.system.input_files import convert_read_errors, is_failure, open_regular

_GZIP_MAGIC = b"\x1f\x8b"
_RUN = 1 << 22  # bytes read at once
_UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def utf16_error(path: Path) -> DataError:
    """Return the error for a file of UTF-16 text."""
    name = shlex.quote(str(path))
    hint = f"iconv -f UTF-16 -t UTF-8 {name} > NEW_FILE" if name.isprintable() else "iconv -f UTF-16 -t UTF-8"
    return DataError(f"{quote_name(path, limit=300)} is in UTF-16, expected UTF-8", path=path, hint=hint)


class LineFile:
    """A file of UTF-8 text. A gzipped file is decompressed into an anonymous temporary file.

    Attributes:
        start: byte where the text begins, after a byte order mark.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises MissingInput, or DataError if it is damaged or UTF-16."""
        self.path = path
        self._stream = _open_decompressed(path)
        head = os.pread(self._stream.fileno(), 3, 0)
        if head[:2] in UTF16_MARKS:
            raise utf16_error(path)
        self.start = len(_UTF8_MARK) if head == _UTF8_MARK else 0

    def __del__(self) -> None:
        if "_stream" in self.__dict__:
            self._stream.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def lines(self) -> Iterator[bytes]:
        """Return an iterator over the lines, with their line ends."""
        self._stream.seek(self.start)
        return iter(self._stream.readline, b"")

    def runs(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield position and bytes of runs of whole lines from `start` on, some megabytes each; the last line may lack its end."""
        parts: list[bytes] = []
        place = end = start
        while part := self._part(end):
            end += len(part)
            cut = part.rfind(b"\n") + 1
            parts.append(part[:cut] if cut else part)
            if cut:
                yield place, b"".join(parts)
                place, parts = end - len(part) + cut, [part[cut:]]
        if place < end:
            yield place, b"".join(parts)

    def _part(self, start: int) -> bytes:
        with convert_read_errors(self.path):
            return os.pread(self._stream.fileno(), _RUN, start)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`. Raises DataError if the file has become shorter."""
        parts, place = [], start
        with convert_read_errors(self.path):
            while place < stop and (part := os.pread(self._stream.fileno(), stop - place, place)):
                parts.append(part)
                place += len(part)
        if place < stop:
            raise DataError(
                f"{quote_name(self.path, limit=300)} changed while it was being read",
                path=self.path,
                code="input_replaced",
            )
        return b"".join(parts)

    def digest(self, progress: Progress) -> str:
        """Return the digest of the text, whether gzipped or not."""
        with convert_read_errors(self.path):
            return file_sha256(self._stream, progress)


def decode_line(line: bytes, where: str) -> str:
    """Decode UTF-8 bytes. Raises DataError."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text (byte {error.object[error.start]:#04x})",
            hint="if it is WINDOWS-1252, convert it: iconv -f WINDOWS-1252 -t UTF-8",
        ) from error


def _open_decompressed(path: Path) -> IO[bytes]:
    """Open the file, or its decompressed contents."""
    with open_regular(path) as stream:
        if stream.read(2) != _GZIP_MAGIC:
            return os.fdopen(os.dup(stream.fileno()), "rb")
        stream.seek(0)
        # It lives as long as the data set.
        plain = cast(IO[bytes], tempfile.TemporaryFile())  # noqa: SIM115
        try:
            shutil.copyfileobj(cast(IO[bytes], gzip.GzipFile(fileobj=stream)), plain, 1 << 20)
        except (EOFError, OSError, zlib.error) as error:
            plain.close()
            if is_failure(error):
                raise
            raise DataError(f"{quote_name(path, limit=300)} is not a complete gzip file: {error}", path=path) from error
    plain.flush()
    return plain


_LINE_END = ord("\n")


class PlainRows(NamedTuple):
    """A run of rows without special cases.

    Attributes:
        starts: (n + 1,) byte offsets of their starts in the file, and of the end of the last.
        text: the rows, each ended by a single newline, without quotation marks.
        ends: (n, columns) positions in `text` of the character that ends each field.
    """

    starts: NDArray[np.int64]
    text: bytes
    ends: NDArray[np.int64]


def plain_rows(lines: LineFile, start: int, *, delimiter: str, num_columns: int) -> Iterator[PlainRows | None]:
    """Yield runs of rows from a byte on, some megabytes each; yield None and stop at anything unusual."""
    for place, raw in lines.runs(start):
        text = plain_text(raw, delimiter)
        ends = None if text is None else _ends(text, delimiter.encode(), num_columns)
        if text is None or ends is None:
            yield None
            return
        breaks = ends[:, -1] if text is raw else np.flatnonzero(_codes(raw) == _LINE_END)
        starts = np.concatenate([[0], breaks[: len(ends) - 1] + 1, [len(raw)]])
        yield PlainRows(place + starts, text, ends)


def plain_text(raw: bytes, delimiter: str) -> bytes | None:
    """Return whole lines ended by single newlines, with quotes around fields removed; None if there are other quotes."""
    text = raw if raw.endswith(b"\n") else raw + b"\n"
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n")
    if b'"' in text:
        around = re.escape(delimiter.encode())
        whole = re.findall(rb'(?<![^%b\n])"[^"%b\r\n]+"(?=[%b\n])' % (around, around, around), text)
        if 2 * len(whole) != text.count(b'"'):
            return None
        text = text.translate(None, b'"')
    return text if b"\r" not in text and _is_utf8(text) else None


def column_texts(rows: PlainRows, places: Sequence[int]) -> list[list[str]]:
    """Return the fields of some columns."""
    codes, found = _codes(rows.text), []
    for place in places:
        ends = rows.ends[:, place]
        starts = 1 + (rows.ends[:, place - 1] if place else np.append(-1, rows.ends[:-1, -1]))
        until = np.cumsum(ends + 1 - starts)  # within the selected fields, each including the character that ends it
        taken = codes[np.repeat(ends + 1 - until, ends + 1 - starts) + np.arange(until[-1])]
        taken[until - 1] = _LINE_END
        found.append(taken.tobytes().decode().split("\n")[:-1])
    return found


def number_parser(delimiter: str, num_columns: int, places: Sequence[int]) -> Callable[[bytes], np.ndarray | None]:
    """Return a function from the text of plain rows to numbers (n, columns) float64, or None if a field is not finite."""
    try:
        csv = importlib.import_module("pyarrow.csv")
    except ImportError:
        return lambda text: _finite(_parse_numbers, text, delimiter, places)
    options = _arrow_options(csv, delimiter, num_columns, places)
    return lambda text: _finite(_parse_with_arrow, text, csv, options)


def _ends(text: bytes, delimiter: bytes, num_columns: int) -> NDArray[np.int64] | None:
    """Return the positions (n, columns) of the ends of fields; None if a row has more or fewer fields."""
    codes = _codes(text)
    is_line_end = codes == _LINE_END
    places = np.flatnonzero(is_line_end | (codes == delimiter[0]))
    if len(places) % num_columns:
        return None
    ends = places.reshape(-1, num_columns)
    # As many lines as rows, each ending where a row must end, so all other ends are delimiters.
    is_whole = is_line_end[ends[:, -1]].all() and np.count_nonzero(is_line_end) == len(ends)
    is_empty = num_columns == 1 and np.diff(ends[:, 0], prepend=-1).min() == 1
    return ends if is_whole and not is_empty else None


def _codes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)


def _is_utf8(text: bytes) -> bool:
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def _finite(parse: Callable[..., np.ndarray], *parts: Any) -> np.ndarray | None:
    try:
        found = parse(*parts)
    except ValueError:  # pyarrow's errors are ValueErrors
        return None
    return found if np.isfinite(found).all() else None


def _parse_numbers(text: bytes, delimiter: str, places: Sequence[int]) -> np.ndarray:
    return np.loadtxt(io.BytesIO(text), delimiter=delimiter, usecols=places, comments=None, ndmin=2)


def _arrow_options(csv: Any, delimiter: str, num_columns: int, places: Sequence[int]) -> dict[str, Any]:
    """Return options without missing values and quoting, so that anything but numbers is refused."""
    names = [str(place) for place in range(num_columns)]
    wanted = [names[place] for place in places]
    types = dict.fromkeys(wanted, "float64")
    return {
        "parse_options": csv.ParseOptions(delimiter=delimiter, quote_char=False),
        "convert_options": csv.ConvertOptions(include_columns=wanted, column_types=types, null_values=[]),
        "read": {"column_names": names, "use_threads": False},
    }


def _parse_with_arrow(text: bytes, csv: Any, options: dict[str, Any]) -> np.ndarray:
    parts = dict(options)
    read = csv.ReadOptions(block_size=max(len(text), 1), **parts.pop("read"))
    table = csv.read_csv(io.BytesIO(text), read_options=read, **parts)
    # to_numpy of a column imports pandas if it is installed
    return np.stack([np.concatenate([*map(np.from_dlpack, column.chunks)]) for column in table.columns], axis=1)


_FIRST_ROWS = 100  # rows to infer what columns hold
_RETURN = "\udc0d"  # replaces a carriage return while a line is parsed; no valid UTF-8 decodes to it


class DelimitedTable:
    """Rows of a csv or tsv file.

    Attributes:
        columns: what each holds, inferred from the first rows.
    """

    class_names: Mapping[str, tuple[str, ...]] = {}

    def __init__(self, path: Path, *, delimiter: str) -> None:
        """Open a table. Raises MissingInput, or DataError if it has no columns or its first rows are damaged."""
        self.path, self._lines = path, LineFile(path)
        self._where = quote_name(path, limit=300)
        self._delimiter = delimiter
        self._is_quoted, self._is_plain = delimiter != "\t", False
        self._starts = np.zeros(0, np.int64)
        self._header = self._read_header()
        first = list(islice(self._rows(), _FIRST_ROWS))
        self._first, rows = first[0][0] if first else None, [fields for _, fields in first]
        self.columns = {
            name: _classify_fields([fields[place] for fields in rows if place < len(fields)])
            for place, name in enumerate(self._header)
        }

    def values(self, names: Sequence[str]) -> tuple[int, list[list[Any]]]:
        """Return the number of rows and all texts of some columns. Raises DataError for a damaged row, naming it."""
        plain = self._plain_values(names)
        if plain is not None:
            return plain
        try:
            return self._all_values(names)
        except DataError:
            if self._is_quoted:
                raise
            self._is_quoted = True  # fields contain tabs or line ends
            try:
                return self._all_values(names)
            except DataError:
                self._is_quoted = False
        return self._all_values(names)

    def numbers(self, names: Sequence[str]) -> np.ndarray | None:
        """Return some columns as (N, columns) float64, after `values`; None if they must be parsed row by row.

        Numbers are rounded correctly, as by `float`.
        """
        if not self._is_plain or self._first is None:
            return None
        places, found = [self._header.index(name) for name in names], np.empty((len(self._starts) - 1, len(names)))
        parse, count = number_parser(self._delimiter, len(self._header), places), 0
        for _, raw in self._lines.runs(self._first):
            text = plain_text(raw, self._delimiter)
            numbers = None if text is None else parse(text)
            if numbers is None or count + len(numbers) > len(found):
                return None
            found[count : count + len(numbers)] = numbers
            count += len(numbers)
        return found if count == len(found) else None

    def _plain_values(self, names: Sequence[str]) -> tuple[int, list[list[Any]]] | None:
        """Return the same as `values`; None if there are no rows or anything is unusual."""
        self._is_plain = False
        if self._first is None:
            return None
        places, starts = [self._header.index(name) for name in names], [np.array([self._first])]
        found: list[list[Any]] = [[] for _ in names]
        for rows in plain_rows(self._lines, self._first, delimiter=self._delimiter, num_columns=len(self._header)):
            if rows is None:
                return None
            starts.append(rows.starts[1:])
            for column, texts in zip(found, column_texts(rows, places), strict=True):
                column += texts
        self._starts, self._is_plain = np.concatenate(starts), True
        return len(self._starts) - 1, found

    def _all_values(self, names: Sequence[str]) -> tuple[int, list[list[Any]]]:
        places = [self._header.index(name) for name in names]
        found: list[list[Any]] = [[] for _ in names]
        starts: list[int] = []
        for start, fields in self._rows():
            if len(fields) != len(self._header):
                raise DataError(
                    f"{self._row(len(starts), start)} has {len(fields)} fields, expected {len(self._header)}",
                    path=self.path, hint="put quotation marks around fields that contain the delimiter or a line break",
                )  # fmt: skip
            starts.append(start)
            for column, place in zip(found, places, strict=True):
                column.append(fields[place])
        self._starts = np.array([*starts, self._end], np.int64)
        return len(starts), found

    def read(self, rows: np.ndarray, names: Sequence[str]) -> list[list[Any]]:
        """Return texts of columns in the rows (n,); consecutive rows are read at once."""
        places = [self._header.index(name) for name in names]
        found: list[list[Any]] = [[] for _ in names]
        cuts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        for first, last in pairwise(cuts):
            start, stop = self._starts[rows[first]], self._starts[rows[last - 1] + 1]
            text = self._lines.read(int(start), int(stop)).decode()
            fields = [one for one in self._parsed(_lines_of(text)) if one]
            for column, place in zip(found, places, strict=True):
                column += [one[place] for one in fields]
        return found

    def digests(self, progress: Progress) -> list[str]:
        """Return the digest of the text."""
        return [self._lines.digest(progress)]

    def _read_header(self) -> list[str]:
        """Read the column names and determine the delimiter."""
        csv.field_size_limit(sys.maxsize)  # texts, or a header read as one field, exceed the default
        first = next(self._lines.lines(), b"")
        if not first.strip():
            raise DataError(
                f"{self._where} is empty: expected a header line with column names", path=self.path, code="empty_split"
            )
        if b"\r" in first.rstrip(b"\r\n"):
            raise DataError(
                f"{self._where}: lines end in bare carriage returns, expected line feeds",
                path=self.path,
                hint="convert them: tr '\\r' '\\n'",
            )
        if self._delimiter == ",":
            self._delimiter = max(
                ",;\t", key=lambda one: len(next(csv.reader([decode_line(first, self._where)], delimiter=one)))
            )
        found = next((fields for _, fields in self._records()), [])
        header = [name.strip() for name in found]
        if (
            len(header) == 1
            and b'"' not in first
            and (other := next((one for one in ",;\t|" if one in header[0]), None))
        ):
            raise DataError(
                f"{self._where} has only one column, {quote_name(header[0])}: expected the delimiter "
                    f"{self._delimiter!r}, found {other!r}",
                path=self.path, hint="use csv:, which reads commas, semicolons and tabs regardless of the file's suffix",
            )  # fmt: skip
        double = sorted({name for name in header if name and header.count(name) > 1})
        if double:
            raise DataError(f"{self._where} has several columns named {format_names(double)}", path=self.path)
        return header

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield file offset and fields of every row."""
        return islice(self._records(), 1, None)

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield file offset and fields of the header and every row, skipping empty lines."""
        self._end, count = self._lines.start, -1

        def texts() -> Iterator[str]:
            for line in self._lines.lines():
                self._end += len(line)
                try:
                    yield line.decode()
                except UnicodeDecodeError:
                    yield decode_line(line, self._row(count, start))

        start = self._end
        try:
            for fields in self._parsed(texts()):
                if fields:
                    yield start, fields
                    count += 1
                start = self._end
        except csv.Error as error:
            raise DataError(f"{self._row(count, start)} is damaged: {error}", path=self.path) from error

    def _parsed(self, lines: Iterator[str] | list[str]) -> Iterator[list[str]]:
        has_returns = False

        def kept() -> Iterator[str]:
            nonlocal has_returns
            for line in lines:
                if "\r" in line:
                    line = _replace_returns(line)
                    has_returns = has_returns or _RETURN in line
                yield line

        for fields in csv.reader(
            kept(),
            delimiter=self._delimiter,
            quoting=csv.QUOTE_MINIMAL if self._is_quoted else csv.QUOTE_NONE,
            strict=True,
        ):
            if has_returns and any(_RETURN in field for field in fields):
                fields = [field.replace(_RETURN, "\r") for field in fields]
            yield fields if self._is_quoted else [_unquote(field) for field in fields]

    def _row(self, count: int, start: int) -> str:
        """Name a row by its number and its first line."""
        line = 1 + self._lines.read(self._lines.start, start).count(b"\n")
        return f"{self._where}: " + (f"row {count} (line {line})" if count >= 0 else f"line {line}")


def _replace_returns(line: str) -> str:
    """Replace carriage returns inside a line, which the csv module refuses and its writer does not quote."""
    body = line.removesuffix("\n").removesuffix("\r")
    return body.replace("\r", _RETURN) + line[len(body) :]


def _lines_of(text: str) -> list[str]:
    """Split at newlines only, keeping them; texts may contain other line ends."""
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")]


def _unquote(field: str) -> str:
    """Remove the quotation marks around a field and undouble those inside."""
    inner = field[1:-1]
    is_whole = len(field) > 1 and field[0] == field[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if is_whole else field


def _classify_fields(values: list[str]) -> str:
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

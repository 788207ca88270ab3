"""Tables of delimited text (RFC 4180): csv and tsv, in UTF-8, the first line naming the columns.

Rows are found by reading the file once; later only their bytes are read. A quoted field may have delimiters and line ends in
it. A file delimited by tabs whose lines have as many fields each is taken line by line, as such files are published whose
texts have single quotation marks in them; a field that is quoted as a whole loses its quotation marks there too.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.data._columns import REAL, TEXT, WHOLE
from bnncli.data._lines import LineFile, decoded
from bnncli.data._plain_text import number_parser, plain_rows, plain_text, texts_of
from bnncli.errors import DataError
from bnncli.names import listed, quoted
from bnncli.progress import Progress

_FIRST_ROWS = 100  # tell what columns hold
_RETURN = "\udc0d"  # stands for a carriage return while a line is parsed: no UTF-8 decodes to it


class DelimitedTable:
    """Rows of a csv or tsv file.

    Attributes:
        columns: what each holds, as far as the first rows tell.
    """

    class_names: Mapping[str, tuple[str, ...]] = {}

    def __init__(self, path: Path, *, delimiter: str) -> None:
        """Raises MissingInput, or DataError for a file without columns or one that is damaged in its first rows."""
        self.path, self._lines = path, LineFile(path)
        self._where = quoted(path, limit=300)
        self._delimiter = delimiter
        self._is_quoted, self._is_plain = delimiter != "\t", False
        self._starts = np.zeros(0, np.int64)
        self._header = self._read_header()
        first = list(islice(self._rows(), _FIRST_ROWS))
        self._first, rows = first[0][0] if first else None, [fields for _, fields in first]
        self.columns = {
            name: _held([fields[place] for fields in rows if place < len(fields)])
            for place, name in enumerate(self._header)
        }

    def values(self, names: Sequence[str]) -> tuple[int, list[list[Any]]]:
        """How many rows there are, and all texts of some columns. Raises DataError for a damaged row, naming it."""
        plain = self._plain_values(names)
        if plain is not None:
            return plain
        try:
            return self._all_values(names)
        except DataError:
            if self._is_quoted:
                raise
            self._is_quoted = True  # fields with tabs or line ends in them
            try:
                return self._all_values(names)
            except DataError:
                self._is_quoted = False
        return self._all_values(names)

    def numbers(self, names: Sequence[str]) -> np.ndarray | None:
        """(N, columns) float64 of some columns, once `values` has been asked for; None where only row by row it can be told.

        They are the numbers nearest to the texts, as `float` has them.
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
        """As `values`; None where there are no rows, or something is out of the ordinary."""
        self._is_plain = False
        if self._first is None:
            return None
        places, starts = [self._header.index(name) for name in names], [np.array([self._first])]
        found: list[list[Any]] = [[] for _ in names]
        for rows in plain_rows(self._lines, self._first, delimiter=self._delimiter, num_columns=len(self._header)):
            if rows is None:
                return None
            starts.append(rows.starts[1:])
            for column, texts in zip(found, texts_of(rows, places), strict=True):
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
        """Texts of columns in the rows (n,); neighbours are read at once."""
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
        """Of the text."""
        return [self._lines.digest(progress)]

    def _read_header(self) -> list[str]:
        """The names of the columns; the delimiter is what divides them."""
        csv.field_size_limit(sys.maxsize)  # texts are longer than its default, and so is a header read as one field
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
                ",;\t", key=lambda one: len(next(csv.reader([decoded(first, self._where)], delimiter=one)))
            )
        found = next((fields for _, fields in self._records()), [])
        header = [name.strip() for name in found]
        if (
            len(header) == 1
            and b'"' not in first
            and (other := next((one for one in ",;\t|" if one in header[0]), None))
        ):
            raise DataError(
                f"{self._where} has only one column, {quoted(header[0])}: expected the delimiter "
                    f"{self._delimiter!r}, found {other!r}",
                path=self.path, hint="use csv:, which reads commas, semicolons and tabs regardless of the file's suffix",
            )  # fmt: skip
        double = sorted({name for name in header if name and header.count(name) > 1})
        if double:
            raise DataError(f"{self._where} has several columns named {listed(double)}", path=self.path)
        return header

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Place in the file and fields of every row."""
        return islice(self._records(), 1, None)

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Place in the file and fields of the header and every row; empty lines are none."""
        self._end, count = self._lines.start, -1

        def texts() -> Iterator[str]:
            for line in self._lines.lines():
                self._end += len(line)
                try:
                    yield line.decode()
                except UnicodeDecodeError:
                    yield decoded(line, self._row(count, start))

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
                    line = _without_returns(line)
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
            yield fields if self._is_quoted else [_unquoted(field) for field in fields]

    def _row(self, count: int, start: int) -> str:
        """What a row is called: by its number, and the line where it begins."""
        line = 1 + self._lines.read(self._lines.start, start).count(b"\n")
        return f"{self._where}: " + (f"row {count} (line {line})" if count >= 0 else f"line {line}")


def _without_returns(line: str) -> str:
    """A line without carriage returns but at its end: the csv module refuses them, and its writer does not quote them."""
    body = line.removesuffix("\n").removesuffix("\r")
    return body.replace("\r", _RETURN) + line[len(body) :]


def _lines_of(text: str) -> list[str]:
    """Lines with what ends them, ended by newlines alone: texts have other line ends in them."""
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")]


def _unquoted(field: str) -> str:
    """A field without the quotation marks around it, where those in it are doubled."""
    inner = field[1:-1]
    is_whole = len(field) > 1 and field[0] == field[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if is_whole else field


def _held(values: list[str]) -> str:
    """What the fields of a column are."""
    found = TEXT
    for kind, holds in ((float, REAL), (int, WHOLE)):
        try:
            for value in values:
                kind(value)
        except ValueError:
            return found
        found = holds if values else TEXT
    return found

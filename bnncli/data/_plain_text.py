"""Delimited text with nothing out of the ordinary in it, many lines at once: texts and numbers of its columns.

Out of the ordinary are empty lines, rows of other lengths, fields with delimiters, line ends or quotation marks in them, and
bytes that are no UTF-8. Whoever reads row by row takes what of that is allowed and tells what is not: here it is only said that
there is some. Numbers are those nearest to what is written, as Python's `float` has them, with pyarrow and without.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.data._lines import LineFile

_LINE_END = ord("\n")


class PlainRows(NamedTuple):
    """A run of rows.

    Attributes:
        starts: (n + 1,) bytes of the file where they begin, and where the last one ends.
        text: the rows, each ended by a newline alone, without quotation marks.
        ends: (n, columns) places in `text` of what ends each field.
    """

    starts: NDArray[np.int64]
    text: bytes
    ends: NDArray[np.int64]


def plain_rows(lines: LineFile, start: int, *, delimiter: str, num_columns: int) -> Iterator[PlainRows | None]:
    """Runs of rows from a byte of the file on, some megabytes each; None, and no more, where something is out of the ordinary."""
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
    """Whole lines, each ended by a newline alone, without quotation marks around fields; None where there are other marks."""
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


def texts_of(rows: PlainRows, places: Sequence[int]) -> list[list[str]]:
    """The fields of some columns."""
    codes, found = _codes(rows.text), []
    for place in places:
        ends = rows.ends[:, place]
        starts = 1 + (rows.ends[:, place - 1] if place else np.append(-1, rows.ends[:-1, -1]))
        until = np.cumsum(ends + 1 - starts)  # in the fields alone, each with what ends it
        taken = codes[np.repeat(ends + 1 - until, ends + 1 - starts) + np.arange(until[-1])]
        taken[until - 1] = _LINE_END
        found.append(taken.tobytes().decode().split("\n")[:-1])
    return found


def number_parser(delimiter: str, num_columns: int, places: Sequence[int]) -> Callable[[bytes], np.ndarray | None]:
    """What makes numbers (n, columns) float64 of plain rows' text; None where a field is no finite number."""
    try:
        csv = importlib.import_module("pyarrow.csv")
    except ImportError:
        return lambda text: _finite(_parsed, text, delimiter, places)
    options = _arrow_options(csv, delimiter, num_columns, places)
    return lambda text: _finite(_parsed_by_arrow, text, csv, options)


def _ends(text: bytes, delimiter: bytes, num_columns: int) -> NDArray[np.int64] | None:
    """Places (n, columns) of what ends each field; None where a row has more fields or fewer."""
    codes = _codes(text)
    is_line_end = codes == _LINE_END
    places = np.flatnonzero(is_line_end | (codes == delimiter[0]))
    if len(places) % num_columns:
        return None
    ends = places.reshape(-1, num_columns)
    # As many lines as there are rows, each ended where a row must end: all others in it are delimiters.
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
    except ValueError:  # pyarrow's are of this kind
        return None
    return found if np.isfinite(found).all() else None


def _parsed(text: bytes, delimiter: str, places: Sequence[int]) -> np.ndarray:
    return np.loadtxt(io.BytesIO(text), delimiter=delimiter, usecols=places, comments=None, ndmin=2)


def _arrow_options(csv: Any, delimiter: str, num_columns: int, places: Sequence[int]) -> dict[str, Any]:
    """Nothing stands for a missing value, and nothing is quoted: what is no number is refused."""
    names = [str(place) for place in range(num_columns)]
    wanted = [names[place] for place in places]
    types = dict.fromkeys(wanted, "float64")
    return {
        "parse_options": csv.ParseOptions(delimiter=delimiter, quote_char=False),
        "convert_options": csv.ConvertOptions(include_columns=wanted, column_types=types, null_values=[]),
        "read": {"column_names": names, "use_threads": False},
    }


def _parsed_by_arrow(text: bytes, csv: Any, options: dict[str, Any]) -> np.ndarray:
    parts = dict(options)
    read = csv.ReadOptions(block_size=max(len(text), 1), **parts.pop("read"))
    table = csv.read_csv(io.BytesIO(text), read_options=read, **parts)
    # to_numpy of a column imports pandas where that is installed
    return np.stack([np.concatenate([*map(np.from_dlpack, column.chunks)]) for column in table.columns], axis=1)

"""`jsonl:FILE[:text=COL,label=COL]`: one JSON object per line; may be gzipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.data.delimited import LineFile, decode_line
from bnncli.data.pixels import Preprocess
from bnncli.data.tables import FILE, LIST, OTHER, REAL, TEXT, WHOLE, TableDataset, split_columns, table_dataset
from bnncli.errors import DataError
from bnncli.names import quote_name
from bnncli.options.declaration import Form
from bnncli.progress import Progress

FORM = Form("jsonl:FILE[:text=COL,label=COL]", 13, "One JSON object per line; may be gzipped.")

_FIRST_ROWS = 100  # rows to infer the columns
_HOLDS = {str: TEXT, bool: WHOLE, int: WHOLE, float: REAL, list: LIST}


def exists(place: str) -> bool:
    """Return whether the text as it stands is a file."""
    return Path(place).expanduser().is_file()


def files(place: str) -> list[Path]:
    """Return all files that it is read from."""
    return [Path(split_columns(place, "jsonl")[0]).expanduser()]


def open_dataset(place: str, preprocess: Preprocess) -> TableDataset:
    """Open texts, images by path, or numbers, and labels, from named or inferred columns.

    Raises:
        MissingInput: there is no such file.
        DataError: a line is not a JSON object, a column is missing, or labels break a rule.
        UsageError: the roles of columns are ambiguous.
    """
    path, named = split_columns(place, "jsonl")
    return table_dataset(JsonLines(Path(path).expanduser()), named, preprocess, spelled="jsonl")


class JsonLines:
    """Objects of a file, one per line; empty lines are skipped.

    Attributes:
        columns: what each holds, in the first rows.
    """

    class_names: Mapping[str, tuple[str, ...]] = {}

    def __init__(self, path: Path) -> None:
        """Open a table. Raises MissingInput, or DataError if it has no objects or its first rows are damaged."""
        self.path, self._lines = path, LineFile(path)
        self._where = quote_name(path, limit=300)
        self._starts = self._ends = np.zeros(0, np.int64)
        self.columns: dict[str, str] = {}
        for _, _, record in islice(self._records(), _FIRST_ROWS):
            for name, value in record.items():
                if value is not None:
                    self.columns.setdefault(name, _classify_value(value))
        if not self.columns:
            raise DataError(f"{self._where} is empty: expected one JSON object per line", path=path, code="empty_split")

    def values(self, names: Sequence[str]) -> tuple[int, list[list[Any]]]:
        """Return the number of rows and all values of some columns. Raises DataError for a damaged line, naming it."""
        found: list[list[Any]] = [[] for _ in names]
        starts, ends = [], []
        for start, end, record in self._records():
            starts.append(start)
            ends.append(end)
            for column, name in zip(found, names, strict=True):
                column.append(record.get(name))
        self._starts, self._ends = np.array(starts, np.int64), np.array(ends, np.int64)
        return len(starts), found

    def read(self, rows: np.ndarray, names: Sequence[str]) -> list[list[Any]]:
        """Return values of columns in the rows (n,)."""
        spans = zip(self._starts[rows].tolist(), self._ends[rows].tolist(), strict=True)
        records = [json.loads(self._lines.read(start, end)) for start, end in spans]
        return [[record.get(name) for record in records] for name in names]

    def digests(self, progress: Progress) -> list[str]:
        """Return the digest of the text."""
        return [self._lines.digest(progress)]

    def _records(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield start and end in the file, and the object of every row."""
        end, row = self._lines.start, 0
        for number, line in enumerate(self._lines.lines(), start=1):
            start, end = end, end + len(line)
            if line.isspace():
                continue
            where = f"{self._where}: row {row} (line {number})"
            try:
                record = json.loads(decode_line(line, where))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON: {error}{_advice(row, line)}", path=self.path) from error
            if not isinstance(record, dict):
                message = (
                    f'{where}: expected an object such as {{"text": ..., "label": ...}}, got {type(record).__name__}'
                )
                raise DataError(f"{message}{_advice(row, line)}", path=self.path)
            yield start, end, record
            row += 1


def _advice(row: int, line: bytes) -> str:
    """Return advice for a file that is one document."""
    is_document = row == 0 and line.lstrip()[:1] in (b"[", b"{")
    return "; to split one JSON array into lines, run: jq -c '.[]'" if is_document else ""


def _classify_value(value: Any) -> str:
    if isinstance(value, dict):
        return FILE if value.keys() <= {"path", "bytes"} and "path" in value else OTHER
    return _HOLDS.get(type(value), OTHER)

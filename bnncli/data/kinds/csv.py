"""`csv:FILE[:text=COL,label=COL]`: comma-separated text with column names in the first line; may be gzipped."""

from __future__ import annotations

from pathlib import Path

from bnncli.data.delimited import DelimitedTable
from bnncli.data.pixels import Preprocess
from bnncli.data.tables import TableDataset, split_columns, table_dataset
from bnncli.options.declaration import Form

FORM = Form("csv:FILE[:text=COL,label=COL]", 11, "A comma-separated table with column names; may be gzipped.")


def exists(place: str) -> bool:
    """Return whether the text as it stands is a file."""
    return Path(place).expanduser().is_file()


def files(place: str) -> list[Path]:
    """Return all files that it is read from."""
    return [Path(split_columns(place, "csv")[0]).expanduser()]


def open_dataset(place: str, preprocess: Preprocess) -> TableDataset:
    """Open texts, images by path, or numbers, and labels, from named or inferred columns.

    Raises:
        MissingInput: there is no such file.
        DataError: a row is damaged, a column is missing, or labels break a rule.
        UsageError: the roles of columns are ambiguous.
    """
    path, named = split_columns(place, "csv")
    return table_dataset(DelimitedTable(Path(path).expanduser(), delimiter=","), named, preprocess, spelled="csv")

"""`tsv:FILE[:text=COL,label=COL]`: a table of text separated by tabs, gzipped or not, whose first line names the columns."""

from __future__ import annotations

from pathlib import Path

from bnncli.data.delimited import DelimitedTable
from bnncli.data.pixels import Preprocess
from bnncli.data.tables import TableDataset, divide, table_dataset
from bnncli.options.declaration import Form

FORM = Form("tsv:FILE[:text=COL,label=COL]", 12, "A tab-separated table with column names; may be gzipped.")


def exists(place: str) -> bool:
    """Whether the text names a file as it stands."""
    return Path(place).expanduser().is_file()


def files(place: str) -> list[Path]:
    """All that it is read from."""
    return [Path(divide(place, "tsv")[0]).expanduser()]


def open_dataset(place: str, preprocess: Preprocess) -> TableDataset:
    """Texts, images by their paths, or numbers, and labels; of columns that are named or found.

    Raises:
        MissingInput: no such file.
        DataError: a damaged row, a missing column, labels that break a rule.
        UsageError: it cannot be told which column is what.
    """
    path, named = divide(place, "tsv")
    return table_dataset(DelimitedTable(Path(path).expanduser(), delimiter="\t"), named, preprocess, spelled="tsv")

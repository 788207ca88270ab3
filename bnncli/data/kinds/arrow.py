"""`arrow:FILE-or-DIR[:text=COL,label=COL]`: Arrow or Feather tables, or a pattern such as `DIR/train-*.arrow`."""

from __future__ import annotations

from pathlib import Path

from bnncli.data.arrow_files import ArrowBlocks, BlockTable, files_of
from bnncli.data.pixels import Preprocess
from bnncli.data.tables import TableDataset, split_columns, table_dataset
from bnncli.options.declaration import Form

FORM = Form("arrow:FILE-or-DIR[:text=COL,label=COL]", 15, "Arrow or Feather tables.")

_SUFFIXES = (".arrow", ".feather", ".ipc")


def exists(place: str) -> bool:
    """Return whether the text as it stands is a file or folder."""
    return Path(place).expanduser().exists()


def files(place: str) -> list[Path]:
    """Return all files that it is read from."""
    return files_of(split_columns(place, "arrow")[0], _SUFFIXES, "arrow")[1]


def open_dataset(place: str, preprocess: Preprocess) -> TableDataset:
    """Open texts, images or numbers, and labels, from named or inferred columns.

    Raises:
        MissingInput: there is no such file or folder.
        DataError: there are no files, one is damaged, a column is missing, or labels break a rule.
        UsageError: the roles of columns are ambiguous, or pyarrow is not installed.
    """
    text, named = split_columns(place, "arrow")
    path, found = files_of(text, _SUFFIXES, "arrow")
    return table_dataset(BlockTable(path, found, ArrowBlocks, "arrow"), named, preprocess, spelled="arrow")

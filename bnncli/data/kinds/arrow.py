"""`arrow:FILE-or-DIR[:text=COL,label=COL]`: Arrow or Feather tables; a pattern such as `DIR/train-*.arrow` as well."""

from __future__ import annotations

from pathlib import Path

from bnncli.data.arrow_files import ArrowBlocks, BlockTable, files_of
from bnncli.data.pixels import Preprocess
from bnncli.data.tables import TableDataset, divide, table_dataset
from bnncli.options.declaration import Form

FORM = Form("arrow:FILE-or-DIR[:text=COL,label=COL]", 15, "Arrow or Feather tables.")

_SUFFIXES = (".arrow", ".feather", ".ipc")


def exists(place: str) -> bool:
    """Whether the text names a file or a folder as it stands."""
    return Path(place).expanduser().exists()


def files(place: str) -> list[Path]:
    """All that it is read from."""
    return files_of(divide(place, "arrow")[0], _SUFFIXES, "arrow")[1]


def open_dataset(place: str, preprocess: Preprocess) -> TableDataset:
    """Texts, images or numbers, and labels; of columns that are named or found.

    Raises:
        MissingInput: no such file or folder.
        DataError: no or damaged files, a missing column, labels that break a rule.
        UsageError: it cannot be told which column is what, or pyarrow is not installed.
    """
    text, named = divide(place, "arrow")
    path, found = files_of(text, _SUFFIXES, "arrow")
    return table_dataset(BlockTable(path, found, ArrowBlocks, "arrow"), named, preprocess, spelled="arrow")

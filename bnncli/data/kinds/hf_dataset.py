"""`hf-dataset:DIR[:split]`: a Hugging Face dataset folder, from `save_to_disk` or the cache; read without the library.

`save_to_disk` writes Arrow files, `state.json` with their names, and `dataset_info.json` with the features. A
DatasetDict is such a folder for each split plus `dataset_dict.json` with their names. The cache has the Arrow files of
all splits, named NAME-SPLIT.arrow or NAME-SPLIT-00000-of-00002.arrow, beside one `dataset_info.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bnncli.data.pixels import Preprocess
from bnncli.data.table_files import Table, feature_class_names, open_arrow
from bnncli.data.tables import TableDataset, WordDataset, split_columns, table_dataset
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.names import format_names, quote_name
from bnncli.options.declaration import Form
from bnncli.system.input_files import read_object

FORM = Form("hf-dataset:DIR[:split]", 16, "A Hugging Face dataset on disk.")

_SPELLED = "hf-dataset"
_INFO, _STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"


def exists(place: str) -> bool:
    """Return whether the text as it stands is a folder."""
    return Path(place).expanduser().is_dir()


def files(place: str) -> list[Path]:
    """Return all files that it is read from."""
    home, found, _ = _find_split(*_split_place(split_columns(place, _SPELLED)[0]))
    return [*found, *(file for file in (home / _INFO, home / _STATE) if file.is_file())]


def open_dataset(place: str, preprocess: Preprocess) -> TableDataset | WordDataset:
    """Open texts, words, images or numbers, and labels, from named or inferred columns.

    Raises:
        MissingInput: there is no such folder.
        DataError: it is not a dataset folder, a file is damaged, a column is missing, or labels break a rule.
        UsageError: it has several splits and none is named, or the roles of columns are ambiguous.
    """
    text, named = split_columns(place, _SPELLED)
    folder, split = _split_place(text)
    if not folder.is_dir():
        raise MissingInput(f"no folder {quote_name(folder, limit=300)}", path=folder)
    home, found, info = _find_split(folder, split)
    table = Table(home, found, open_arrow, _SPELLED, feature_class_names(info.get("features")))
    return table_dataset(table, named, preprocess, spelled=_SPELLED)


def _split_place(text: str) -> tuple[Path, str | None]:
    """Return the folder and the split named after it; a colon belongs to the folder if such a folder exists."""
    before, colon, after = text.rpartition(":")
    path = Path(text).expanduser()
    return (path, None) if path.exists() or not colon else (Path(before).expanduser(), after)


def _find_split(folder: Path, split: str | None) -> tuple[Path, list[Path], Mapping[str, Any]]:
    """Return the folder of a split, its files, and the contents of `dataset_info.json`."""
    if (folder / _SPLITS).is_file():
        splits = read_object(folder / _SPLITS).get("splits")
        folder = folder / _choose_split(split, splits if isinstance(splits, list) else [], folder)
        split = None
    if (folder / _STATE).is_file():
        if split is not None:
            raise UsageError(f"\0data\0 {_SPELLED}: {quote_name(folder, limit=300)} is a single split; omit {split!r}")
        return folder, _list_saved_files(folder), read_object(folder / _INFO) if (folder / _INFO).is_file() else {}
    if (folder / _INFO).is_file():
        return folder, _list_cached_files(folder, split), read_object(folder / _INFO)
    inner = sorted(file.parent for file in folder.glob(f"**/{_INFO}"))
    if len(inner) == 1:
        return _find_split(inner[0], split)
    hint = (
        f"give one of {format_names(inner, limit=3)}"
        if inner
        else "for a folder of plain files, use parquet: or arrow:"
    )
    message = f"{quote_name(folder, limit=300)} is not a saved Hugging Face data set: it has no {_STATE}, {_SPLITS} or {_INFO}"
    raise DataError(message, path=folder, hint=hint)


def _list_saved_files(folder: Path) -> list[Path]:
    """Return the files that `save_to_disk` wrote, in row order."""
    state = read_object(folder / _STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{quote_name(folder, limit=300)} is a row selection written by an old release of datasets", path=folder,
            hint="save it again: load_from_disk(...).flatten_indices().save_to_disk(...)",
        )  # fmt: skip
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        return [folder / Path(name).name for name in names]
    except (LookupError, TypeError) as error:
        raise DataError(f"{quote_name(folder / _STATE, limit=300)} names no files", path=folder / _STATE) from error


def _list_cached_files(folder: Path, split: str | None) -> list[Path]:
    """Return the files of a split in the cache, in row order."""
    of_split: dict[str, list[Path]] = {}
    for file in sorted(folder.glob("*.arrow")):
        match = re.fullmatch(r".+?-([^-]+?)(?:-\d{5}-of-\d{5})?", file.stem)
        if match and not file.name.startswith("cache-"):
            of_split.setdefault(match[1], []).append(file)
    return of_split[_choose_split(split, list(of_split), folder)]


def _choose_split(split: str | None, splits: list[str], folder: Path) -> str:
    """Return the named split, or the only one. Raises UsageError."""
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None or split not in splits:
        came = f"there is no split {split!r}; it" if split is not None else "it has several splits: it"
        message = f"{came} has {format_names(splits)}" if splits else "it has no split"
        raise UsageError(
            f"\0data\0 {_SPELLED}: {quote_name(folder, limit=300)}: {message}",
            hint=f"choose one: {_SPELLED}:{folder}:{splits[0]}" if splits else None,
        )
    return split

"""Files in one folder for each class, or unlabelled ones directly in a folder."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bnncli.data._classes import are_numbers
from bnncli.errors import DataError, MissingInput
from bnncli.names import counted, is_split, listed, quoted
from bnncli.system.input_files import reading


class Filed(NamedTuple):
    """Files (N,), as paths in their folder; labels (N,) and the classes, or None where there are no class folders; what was left out."""

    files: tuple[str, ...]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    note: str = ""


def files_in(folder: Path, suffixes: Collection[str], what: str) -> Filed:
    """The files of a folder that end so, in the order of their sorted names within sorted classes: numbers as numbers.

    Args:
        what: they are, for messages.

    Raises:
        MissingInput: no such folder.
        DataError: no such files in it, or some both in it and in class folders.
    """
    if not folder.is_dir():
        raise MissingInput(f"no folder {quoted(folder, limit=300)}", path=folder)
    with reading(folder):
        entries = list(folder.iterdir())
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not _is_hidden(entry.name))
        loose = sorted(entry.name for entry in entries if _is_of(entry.name, suffixes) and entry.is_file())
    if are_numbers(classes):
        classes.sort(key=lambda name: (int(name), name))
    if classes and all(is_split(name) for name in classes):
        raise DataError(
            f"{quoted(folder, limit=300)} contains split folders, expected class folders: {listed(classes)}",
            path=folder, hint=f"give one of them, such as {folder / classes[0]}",
        )  # fmt: skip
    if loose and classes:
        raise DataError(f"{folder} has both {what} and folders; expected one folder for each class", path=folder)
    groups = [_files_under(folder, name, suffixes, what) for name in classes] if classes else [loose]
    files = tuple(name for group in groups for name in group)
    if not files:
        raise DataError(f"no {what} in {folder}", code="empty_split", path=folder)
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups]) if classes else None
    num_others = _count_hidden(folder)
    note = (
        f"skipped {counted(num_others, 'hidden file')} (names starting with a dot, {_MAC_FOLDER})" if num_others else ""
    )
    return Filed(files, labels, tuple(classes) or None, note)


_MAC_FOLDER = "__MACOSX"  # what archives made on a Mac have beside their files


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == _MAC_FOLDER


def _count_hidden(folder: Path) -> int:
    """How many files are hidden, or in hidden folders."""
    found = 0
    for parent, _, names in os.walk(folder):
        inside = any(map(_is_hidden, Path(os.path.relpath(parent, folder)).parts[parent == str(folder) :]))
        found += len(names) if inside else sum(map(_is_hidden, names))
    return found


def _files_under(folder: Path, class_name: str, suffixes: Collection[str], what: str) -> list[str]:
    """Files of one class at any depth, as sorted paths relative to the folder. Raises DataError where all are of another kind."""
    found: list[str] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder / class_name, followlinks=True):
        folders[:] = [one for one in folders if not _is_hidden(one) and not _leads_back(os.path.join(parent, one))]
        others += [name for name in names if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names if _is_of(name, suffixes)]
    if others and not found:
        raise DataError(
            f"{quoted(folder / class_name, limit=300)} has files, but no {what}: {listed(others)}",
            path=folder / class_name, hint=f"supported suffixes of {what}: {', '.join(sorted(suffixes))}",
        )  # fmt: skip
    return sorted(found)


def _leads_back(folder: str) -> bool:
    """Whether it is a link to a folder that it lies in."""
    return os.path.islink(folder) and Path(folder).parent.resolve().is_relative_to(Path(folder).resolve())


def _is_of(name: str, suffixes: Collection[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes and not name.startswith(".")

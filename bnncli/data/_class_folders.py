"""Files in one folder for each class, or unlabelled ones directly in a folder."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bnncli.data._classes import are_numbers
from bnncli.errors import DataError, MissingInput
from bnncli.machine.input_files import reading
from bnncli.names import is_split, listed, quoted


class Filed(NamedTuple):
    """Files (N,), as paths in their folder; labels (N,) and the classes, or None where there are no class folders."""

    files: tuple[str, ...]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None


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
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        loose = sorted(entry.name for entry in entries if _is_of(entry.name, suffixes) and entry.is_file())
    if are_numbers(classes):
        classes.sort(key=lambda name: (int(name), name))
    if classes and all(is_split(name) for name in classes):
        raise DataError(
            f"{quoted(folder, limit=300)} has the folders of splits and none of classes: {listed(classes)}",
            path=folder, hint=f"name one of them, as {folder / classes[0]}",
        )  # fmt: skip
    if loose and classes:
        raise DataError(f"{folder} has both {what} and folders; expected one folder for each class", path=folder)
    groups = [_files_under(folder, name, suffixes, what) for name in classes] if classes else [loose]
    files = tuple(name for group in groups for name in group)
    if not files:
        raise DataError(f"no {what} in {folder}", code="empty_split", path=folder)
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups]) if classes else None
    return Filed(files, labels, tuple(classes) or None)


def _files_under(folder: Path, class_name: str, suffixes: Collection[str], what: str) -> list[str]:
    """Files of one class at any depth, as sorted paths relative to the folder. Raises DataError where all are of another kind."""
    found: list[str] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder / class_name, followlinks=True):
        folders[:] = [name for name in folders if not _leads_back(os.path.join(parent, name))]
        others += [name for name in names if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(parent, name), folder) for name in names if _is_of(name, suffixes)]
    if others and not found:
        raise DataError(
            f"{quoted(folder / class_name, limit=300)} has files, and none of them are {what}: {listed(others)}",
            path=folder / class_name, hint=f"{what} end in {', '.join(sorted(suffixes))}",
        )  # fmt: skip
    return sorted(found)


def _leads_back(folder: str) -> bool:
    """Whether it is a link to a folder that it lies in."""
    return os.path.islink(folder) and Path(folder).parent.resolve().is_relative_to(Path(folder).resolve())


def _is_of(name: str, suffixes: Collection[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes and not name.startswith(".")

"""What was told of data when they were opened, kept: a command that has nothing to do reads their bytes, and opens nothing.

Finding every example of a large table or of many shards takes long, and some of it needs libraries that are slow to
import. What was found then is told again where every file has the bytes that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bnncli.data._preprocess import Preprocess
from bnncli.errors import BnnError
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from bnncli.data._split import Dataset, Stored

_REVISION = 1  # raised when a kind tells other things of the same bytes
_IDENTITY = "identity."


class Memory(Protocol):
    """Arrays by name that outlast a command."""

    def read(self) -> Mapping[str, np.ndarray]:
        """What was kept; nothing where there is none, or it is damaged."""

    def offer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Have them kept when the command has done its work."""


@dataclass(frozen=True, eq=False)
class KnownDataset:
    """A data set of which is known what it tells when it is opened; that is done when its rows are needed."""

    told: Mapping[str, np.ndarray]
    open: Callable[[], Dataset] = field(repr=False)

    @property
    def labels(self) -> np.ndarray | None:
        """(rows,) or (rows, L), or None."""
        return self.told.get("labels")

    @property
    def is_labeled(self) -> bool:
        """Whether there are labels."""
        return "labels" in self.told

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Names in the order of the labels."""
        return tuple(self.told["classes"].tolist()) if "classes" in self.told else None

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """Of the examples."""
        return tuple(self.told["names"].tolist()) if "names" in self.told else None

    @property
    def is_sized(self) -> bool:
        """Whether images are resized when they are read."""
        return bool(self.told["is_sized"])

    @property
    def items(self) -> str:
        """Arrays, images or texts."""
        return str(self.told["items"])

    def __len__(self) -> int:
        return int(self.told["num_rows"])

    @cached_property
    def opened(self) -> Dataset:
        """The data set itself."""
        return self.open()

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """As the data set itself."""
        return self.opened.read(rows)

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """As the data set itself."""
        found = {name.removeprefix(_IDENTITY): array for name, array in self.told.items() if name.startswith(_IDENTITY)}
        return {**found, "rows": rows}


def known_or_opened(
    kind: str, module: Any, place: str, preprocess: Preprocess, memory: Memory | None
) -> Dataset | KnownDataset:
    """The data set of a place; not opened where all of its files have the bytes that they had when it was.

    Args:
        module: of the kind. One with `files(place)` has all in them that its data sets tell; others are always opened.
        memory: of this place; None opens.

    Raises:
        BnnError: as the module's `open_dataset`.
    """
    dataset: Dataset
    if memory is None or not hasattr(module, "files"):
        dataset = module.open_dataset(place, preprocess)
        return dataset
    try:
        files = module.files(place)
        states = _states(files)
        key = _key(kind, place, preprocess, files)
    except (BnnError, OSError):  # opening tells what it is
        dataset = module.open_dataset(place, preprocess)
        return dataset
    told = memory.read()
    if str(told.get("key")) == key:
        return KnownDataset(told, partial(module.open_dataset, place, preprocess))
    dataset = module.open_dataset(place, preprocess)
    if getattr(dataset, "paths", None) is not None:  # of images, which are files of their own
        return dataset
    if not dataset.is_labeled:  # its other columns may tell why
        return dataset
    told = _told(dataset, key)
    if _states(files) == states:
        memory.offer(told)
    return KnownDataset(told, lambda: dataset)


def _key(kind: str, place: str, preprocess: Preprocess, files: Sequence[Path]) -> str:
    """What a data set's facts depend on."""
    digests = []
    for file in files:
        with open_regular(file) as stream:
            digests.append([file.name, file_sha256(stream)])
    transform = preprocess.transform
    takes = None if transform is None else [transform.takes, transform.mode]
    return json_sha256([_REVISION, kind, place, takes, digests])


def _told(dataset: Dataset, key: str) -> dict[str, np.ndarray]:
    identity = dataset.identity(np.zeros(0, np.int64), SILENT) or {}
    found = {f"{_IDENTITY}{name}": np.asarray(array) for name, array in identity.items() if name != "rows"}
    parts = {"labels": dataset.labels, "classes": dataset.classes, "names": dataset.names}
    found |= {name: np.asarray(value) for name, value in parts.items() if value is not None}
    facts = {"key": key, "num_rows": len(dataset), "is_sized": dataset.is_sized, "items": dataset.items}
    return found | {name: np.asarray(value) for name, value in facts.items()}


def _states(files: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Which files have the names, their sizes and when they were written."""
    found = [file.stat() for file in files]
    return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]

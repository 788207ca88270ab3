"""What a command remembers of files, within one run of it and beside the features of a run."""

from __future__ import annotations

import io
import os
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.artifacts.atomic import publish_bytes
from bnncli.errors import BnnError

STEP_NS = 50_000_000  # five times the slowest clock of Linux file systems that count in nanoseconds
_SECOND_NS = 1_000_000_000

State = tuple[int, ...]


@dataclass(frozen=True)
class _Known:
    """States of files that were checked, and headers by state."""

    checked: set[State] = field(default_factory=set)
    headers: dict[State, Any] = field(default_factory=dict)


_KNOWN: ContextVar[_Known | None] = ContextVar("known", default=None)


@contextmanager
def checks_remembered() -> Iterator[None]:
    """Within, a file that was checked and has not changed since need not be checked again; without, nothing is kept."""
    token = _KNOWN.set(_Known())
    try:
        yield
    finally:
        _KNOWN.reset(token)


def state_of(found: os.stat_result) -> State:
    """What changes when a file is changed or replaced."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_checked(state: State) -> bool:
    """Whether this command has checked the file in this state."""
    known = _KNOWN.get()
    return known is not None and state in known.checked


def is_settled(state: State) -> bool:
    """Whether every change from now on shows in the state."""
    changed = state[-1]
    return bool(changed % _SECOND_NS) and time.time_ns() - changed > STEP_NS


def remember(state: State) -> None:
    """Take note that the file was checked; its state was settled before the check began."""
    known = _KNOWN.get()
    if known is not None:
        known.checked.add(state)


def known_header(state: State) -> Any:
    """The header that was read from the file in this state; None where this command has read none."""
    known = _KNOWN.get()
    return None if known is None else known.headers.get(state)


def remember_header(state: State, header: Any) -> None:
    """Keep a header; the file's state was settled before it was read, and is the same after."""
    known = _KNOWN.get()
    if known is not None:
        known.headers[state] = header


_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError)


def detector_file(features: Path) -> Path:
    """Where the combined score is kept that was fitted to the features of a run, by the file of any split."""
    return features.with_name(".combined.npz")


def read_known(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file; nothing where there is none, or it is damaged."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return dict(archive)
    except _DAMAGE:
        return {}


def write_known(path: Path, arrays: Mapping[str, np.ndarray], *, is_compressed: bool) -> None:
    """Write arrays as an npz file; where that fails they are found again next time."""
    stream = io.BytesIO()
    (np.savez_compressed if is_compressed else np.savez)(stream, allow_pickle=False, **arrays)
    with suppress(BnnError):
        publish_bytes(path, stream.getvalue(), may_replace=True, poll=False)


class KnownData:
    """What is known of the data that the features of one split are made of, in a file beside them."""

    def __init__(self, features: Path) -> None:
        self._path = features.with_name(f".{features.stem}.data.npz")
        self._offered: Mapping[str, np.ndarray] | None = None

    def read(self) -> Mapping[str, np.ndarray]:
        """What was kept; nothing where there is none, or it is damaged."""
        return read_known(self._path)

    def offer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Have them kept by `keep`."""
        self._offered = arrays

    def keep(self) -> None:
        """Write what was offered; where that fails the data are opened again next time."""
        if self._offered is not None:
            write_known(self._path, self._offered, is_compressed=True)
        self._offered = None

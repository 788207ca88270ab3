"""What is known beside the features of a run, so that it need not be found again: no artifact, and never missed."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from bnncli.errors import BnnError
from bnncli.storage.atomic import publish_bytes

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

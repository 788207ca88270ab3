"""What is known of the data that features are made of, beside the features: no artifact, and never missed."""

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


class KnownData:
    """Arrays in an npz file beside the features of one split."""

    def __init__(self, features: Path) -> None:
        self._path = features.with_name(f".{features.stem}.data.npz")
        self._offered: Mapping[str, np.ndarray] | None = None

    def read(self) -> Mapping[str, np.ndarray]:
        """What was kept; nothing where there is none, or it is damaged."""
        try:
            with open(self._path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
                return dict(archive)
        except _DAMAGE:
            return {}

    def offer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Have them kept by `keep`."""
        self._offered = arrays

    def keep(self) -> None:
        """Write what was offered; where that fails the data are opened again next time."""
        if self._offered is None:
            return
        stream = io.BytesIO()
        np.savez_compressed(stream, allow_pickle=False, **self._offered)
        with suppress(BnnError):
            publish_bytes(self._path, stream.getvalue(), may_replace=True, poll=False)
        self._offered = None

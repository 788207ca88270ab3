"""Raw draws of an unfinished run: a file of float32 records (C, P), one a transition, that grows as draws come.

A draw is on disk before the resume state that counts it. Nothing is read back before the end, and then by mapping.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from bnncli.storage.atomic import sync, write_error
from bnncli.storage.resume import draws_path, remove_state, state_path, unusable

BUFFER_BYTES = 64 << 20  # draws stay on their device until there are so many, or until a state is saved


class DrawFile:
    """The draws of the run that will make `artifact`; nothing is written before the first flush.

    Args:
        artifact: what the draws are for; they lie beside it.
        num_chains, num_params: C and P of a record.
        buffer_bytes: draws kept in memory before they are written.
    """

    def __init__(self, artifact: Path, *, num_chains: int, num_params: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.path = draws_path(artifact)
        self._state = state_path(artifact)
        self._shape = (num_chains, num_params)
        self._record = 4 * num_chains * num_params
        self._buffer_bytes = buffer_bytes
        self._buffer: list[Tensor] = []
        self._stream: BinaryIO | None = None
        self._written = 0
        self._hash = hashlib.sha256()

    def continue_from(self, num_draws: int, digest: bytes) -> None:
        """Go on after that many draws of the file that is there; what was written later is dropped.

        Args:
            num_draws: that the state counts.
            digest: of these draws, as `digest` said when the state was saved.

        Raises:
            DataError: the file is gone, shorter, or its draws are others.
        """
        if num_draws == 0:
            return
        try:
            stream = self._open(os.O_RDWR)
        except FileNotFoundError:
            raise unusable(self._state, f"its draws ({self.path.name}) are gone") from None
        except OSError as error:
            raise write_error(error, self.path) from None
        self._stream, self._written = stream, num_draws
        if stream.seek(0, 2) < num_draws * self._record:
            raise unusable(self._state, f"its draws ({self.path.name}) are truncated")
        stream.seek(0)
        for first in range(0, num_draws * self._record, BUFFER_BYTES):
            self._hash.update(stream.read(min(BUFFER_BYTES, num_draws * self._record - first)))
        if self.digest != digest:
            raise unusable(self._state, f"its draws ({self.path.name}) are damaged")
        stream.truncate(num_draws * self._record)
        stream.seek(0, 2)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the draws on disk."""
        return self._hash.digest()

    def _open(self, flags: int) -> BinaryIO:
        """The file itself, never what a link in its place points to."""
        return os.fdopen(os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of every chain."""
        self._buffer.append(theta)
        if len(self._buffer) * self._record >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what is in memory, to the disk itself.

        Raises:
            OutputExists, WriteError: the folder cannot be written, the disk is full.
        """
        try:
            if self._stream is None:
                remove_state(self._state)  # of an earlier run, whose draws this file takes the place of
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.unlink(missing_ok=True)
                self._stream = self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if self._buffer:
                records = torch.stack(self._buffer).to("cpu", torch.float32).contiguous().numpy()
                content = records.astype("<f4", copy=False).data
                self._stream.write(content)
                self._hash.update(content)
                self._written += len(self._buffer)
                self._buffer.clear()
            self._stream.flush()
            sync(self.path)
        except OSError as error:
            raise write_error(error, self.path) from None

    def draws(self) -> Tensor:
        """All draws (C, T, P), mapped from the file; changing them changes nothing on disk."""
        self.flush()
        if not self._written:
            return torch.empty(self._shape[0], 0, self._shape[1])
        mapped = np.memmap(self.path, "<f4", "c", shape=(self._written, *self._shape))
        return torch.from_numpy(mapped).transpose(0, 1)

    def close(self) -> None:
        """Close the file; nothing can be added then, and draws that are mapped stay."""
        if self._stream is not None:
            self._stream.close()

    def remove(self) -> None:
        """Close the file and remove it; draws that are mapped stay."""
        self.close()
        remove_state(self.path)

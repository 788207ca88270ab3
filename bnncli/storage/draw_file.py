"""Raw draws of an unfinished run: a file of float32 records (C, P), one a transition, that grows as draws come.

A draw is on disk before the resume state that counts it. Nothing is read back before the end, and then by mapping. Draws
are written on a thread of their own, a few batches behind the run at most, so that neither the disk nor the copy from a
GPU stops the chains; they are synced once, before a state counts them or somebody reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from bnncli.lazy import torch
from bnncli.storage.atomic import sync, write_error
from bnncli.storage.resume import draws_path, remove_state, state_path, unusable

if TYPE_CHECKING:
    from torch import Tensor

BUFFER_BYTES = 64 << 20  # draws stay on their device until there are so many, or until a state is saved
QUEUED = 2  # batches that wait for the writer, beside the one that it writes


class _PendingDraws(NamedTuple):
    """Draws (C, P) or (S, C, P) in the CPU's memory, and the event that says they have arrived; None where they have."""

    records: list[Tensor]
    arrival: Any = None

    @classmethod
    def of(cls, records: list[Tensor]) -> _PendingDraws:
        """The draws; from a GPU by a copy into pinned memory that nobody waits for yet."""
        device = records[0].device
        if device.type != "cuda":
            return cls(records)
        stacked = torch.stack(records).float()
        host = torch.empty(stacked.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(device))
        return cls([host], arrival)


class _Writer:
    """Appends batches to an open file in their order, on a thread of its own, and hashes them.

    Args:
        stream: positioned at its end.
        digest: of what it holds, to go on with.
    """

    def __init__(self, stream: BinaryIO, digest: Any) -> None:
        self._stream, self._digest = stream, digest
        self._queue: queue.Queue[_PendingDraws | None] = queue.Queue(QUEUED)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="draws", daemon=True)
        self._thread.start()

    def put(self, pending: _PendingDraws) -> None:
        """Have them written; waits while too many do already. Raises what writing an earlier one failed with."""
        self._queue.put(pending)
        self._raise()

    def settle(self) -> None:
        """Wait until all are with the system. Raises what writing failed with."""
        self._queue.join()
        self._raise()
        self._stream.flush()

    def stop(self) -> None:
        """End the thread, once it has written what waits."""
        self._queue.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                if self._failure is None:  # what comes after a hole would be read as what was to be there
                    self._write(pending)
            except Exception as error:  # of any kind: it belongs to the main thread
                self._failure = error
            except BaseException as error:  # a thread that ended would be waited for without end
                self._failure = RuntimeError(f"the writer of draws was ended by {error!r}")
                self._failure.__cause__ = error
            finally:
                self._queue.task_done()

    def _write(self, pending: _PendingDraws) -> None:
        if pending.arrival is not None:
            pending.arrival.synchronize()
        for record in pending.records:
            content = record.float().contiguous().numpy().astype("<f4", copy=False).data
            self._stream.write(content)
            self._digest.update(content)


class DrawFile:
    """The draws of the run that will make `artifact`; there is no file before the first batch or flush.

    Args:
        artifact: what the draws are for; they lie beside it.
        num_chains, num_params: C and P of a record.
        buffer_bytes: draws kept in memory before they are sent to be written; a few times as many may be on their way.
    """

    def __init__(self, artifact: Path, *, num_chains: int, num_params: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.path = draws_path(artifact)
        self._state = state_path(artifact)
        self._shape = (num_chains, num_params)
        self._record = 4 * num_chains * num_params
        self._buffer_bytes = buffer_bytes
        self._buffer: list[Tensor] = []
        self._stream: BinaryIO | None = None
        self._writer: _Writer | None = None
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
        """SHA-256 of the draws on disk; after a flush, of all."""
        return self._hash.digest()

    def _open(self, flags: int) -> BinaryIO:
        """The file itself, never what a link in its place points to."""
        return os.fdopen(os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of every chain, which nobody changes any more.

        Raises:
            OutputExists, WriteError: the folder cannot be written, the disk is full; perhaps at an earlier draw.
        """
        self._buffer.append(theta)
        if len(self._buffer) * self._record >= self._buffer_bytes:
            with self._failing():
                self._send()

    def flush(self) -> None:
        """Write what is in memory, and wait until all of it is on the disk itself.

        Raises:
            OutputExists, WriteError: the folder cannot be written, the disk is full; perhaps at an earlier draw.
        """
        with self._failing():
            self._send().settle()
            sync(self.path)

    def _send(self) -> _Writer:
        """Have the buffer written, by the writer that is there or one for a new file."""
        if self._stream is None:
            remove_state(self._state)  # of an earlier run, whose draws this file takes the place of
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            self._stream = self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if self._writer is None:
            self._writer = _Writer(self._stream, self._hash)
        if self._buffer:
            records, self._buffer = self._buffer, []
            self._written += len(records)
            self._writer.put(_PendingDraws.of(records))
        return self._writer

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Failures to write inside the block, or before it on the writer's thread, as users see them."""
        try:
            yield
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
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        if self._stream is not None:
            with contextlib.suppress(OSError):  # what no state counts and nobody has read is not missed
                self._stream.close()

    def remove(self) -> None:
        """Close the file and remove it; draws that are mapped stay."""
        self.close()
        remove_state(self.path)

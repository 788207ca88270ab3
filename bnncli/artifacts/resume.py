"""Resume states of unfinished runs: a safetensors file, and growing raw records, beside the target artifact."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import queue
import shlex
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from bnncli.artifacts.atomic import publish_bytes, publish_immediately, sync, write_error
from bnncli.artifacts.headers import SCHEMA, add_digest
from bnncli.artifacts.posteriors import METADATA_KEY, read_document
from bnncli.artifacts.provenance import Source, params_hash
from bnncli.errors import BnnError, DataError
from bnncli.lazy import torch
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.system.input_files import convert_read_errors
from bnncli.system.workers import is_leader, team

if TYPE_CHECKING:
    from torch import Tensor


KIND = "resume"
_STATE, _DRAWS, _ROWS = ".resume.safetensors", ".resume.draws", ".resume.rows"


def state_path(artifact: Path) -> Path:
    """Return .<name>.resume.safetensors beside the artifact."""
    return artifact.with_name(f".{artifact.stem}{_STATE}")


def draws_path(artifact: Path) -> Path:
    """Return .<name>.resume.draws beside the artifact: raw draws until they become an artifact."""
    return artifact.with_name(f".{artifact.stem}{_DRAWS}")


def rows_path(artifact: Path) -> Path:
    """Return .<name>.resume.rows beside the artifact: raw features until they become an artifact."""
    return artifact.with_name(f".{artifact.stem}{_ROWS}")


def find_leftovers(folder: Path) -> list[Path]:
    """Return every resume state and file of raw draws or features under a folder, sorted."""
    return sorted(path for suffix in (_STATE, _DRAWS, _ROWS) for path in folder.rglob(f".*{suffix}") if path.is_file())


def artifact_stem(leftover: Path) -> str:
    """Return the name of the artifact that a path from `leftovers` belongs to."""
    name = leftover.name.removeprefix(".")
    return name.removesuffix(_STATE).removesuffix(_DRAWS).removesuffix(_ROWS)


def identity_of(
    params: Mapping[str, Any],
    *,
    algo_rev: int,
    seed: int,
    sources: Sequence[Source],
    weights_digest: str | None,
) -> dict[str, Any]:
    """Return the identity of a run: equal exactly if one run may continue the other."""
    return {
        "params_hash": params_hash(params),
        "algo_rev": algo_rev,
        "seed": seed,
        "inputs": {source.role: source.content_digest for source in sources},
        "weights_digest": weights_digest,
    }


def write_state(path: Path, tensors: Mapping[str, Tensor], identity: Mapping[str, Any]) -> None:
    """Replace the state at `path` atomically, despite a pending signal.

    Args:
        tensors: everything the run needs, on any device, including counters and random states.
        identity: from identity_of.

    Raises:
        OutputExists, WriteError: as in publish.
    """
    from safetensors.torch import save

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    document = {
        "kind": KIND,
        "schema": SCHEMA,
        "content_digest": tensor_digest(stored),
        "identity": dict(identity),
    }
    metadata = {METADATA_KEY: canonical_json(add_digest(document))}
    with publish_immediately():  # not one of the command's outputs
        publish_bytes(path, save(stored, metadata=metadata), may_replace=True, poll=False)


def read_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Read the tensors of the state at `path`; None if there is none.

    Raises:
        DataError: it is damaged or belongs to another request; the message says what differs, the hint how to discard
            it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not path.exists():
        return None
    with convert_read_errors(path):
        content = path.read_bytes()
    try:
        document = read_document(path)
        tensors = load(content)
    except (DataError, SafetensorError, ValueError, KeyError) as error:
        raise unusable_state_error(
            path, " ".join(str(error).removeprefix(str(path)).strip(": ").split())[:120]
        ) from None
    if document.get("kind") != KIND or document.get("schema") != SCHEMA:
        raise unusable_state_error(path, "it is not a resume state of this version")
    if tensor_digest(tensors) != document.get("content_digest"):
        raise unusable_state_error(path, "its content does not match its digest")
    differing = _differences(document.get("identity"), dict(identity))
    if differing:
        raise unusable_state_error(path, f"it was saved with {differing}", code="resume_mismatch")
    return tensors


def read_recorded_choice(path: Path, name: str) -> Any:
    """Return a choice recorded in the state at `path` by name; None if missing or unreadable."""
    try:
        identity = read_document(path)["identity"]
        return identity.get(name)
    except (BnnError, AttributeError, KeyError):
        return None  # read_state reports what is wrong


def remove_state(path: Path) -> None:
    """Remove a state (or raw draws or features) if it exists and is not another worker's to remove."""
    if not is_leader():
        return
    with contextlib.suppress(OSError):
        path.unlink()


def unusable_state_error(path: Path, why: str, *, code: str = "damaged") -> DataError:
    """Return the error for a state that cannot be continued."""
    hint = f"start over without \0resume\0; to discard the state: rm {shlex.quote(str(path))}"
    return DataError(f"cannot resume from {path}: {why}", hint=hint, code=code, path=path)


class SaveClock:
    """Decides when the next state is due: `every` seconds after the last one, immediately for 0."""

    def __init__(self, every: float) -> None:
        self.every = every
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Return True if a state should be saved now, and restart the clock."""
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True


_WORDS = {
    "params_hash": "other options",
    "algo_rev": "another revision of the algorithm",
    "seed": "another seed",
    "weights_digest": "another checkpoint",
    "groups": "networks grouped into different batches (with workers or \0shards\0 they are separate; otherwise they form "
    "one batch)",
}


def _differences(there: Any, asked: Mapping[str, Any]) -> str:
    """Describe what differs between two identities; empty if nothing does."""
    if not isinstance(there, dict):
        return "no identity"
    keys = [key for key in {**asked, **there} if key != "inputs"]
    words = [_WORDS.get(key, f"another {key}") for key in keys if there.get(key) != asked.get(key)]
    old, new = there.get("inputs"), asked.get("inputs", {})
    old = old if isinstance(old, dict) else {}
    words += [f"another {role}" for role in sorted({*old, *new}) if old.get(role) != new.get(role)]
    return ", ".join(words) or ("another identity" if there != asked else "")


BUFFER_BYTES = 64 << 20  # records stay on their device up to this size, or until a state is saved
QUEUED = 2  # batches waiting for the writer, besides the one being written


class _Pending(NamedTuple):
    """Batches of records in CPU memory, and the event that marks their arrival; None if they have arrived."""

    records: list[Tensor]
    arrival: Any = None

    @classmethod
    def of(cls, records: list[Tensor], dtype: torch.dtype) -> _Pending:
        """Convert records to the file's type; from a GPU by an asynchronous copy into pinned memory."""
        device = records[0].device
        if device.type != "cuda":
            return cls(records)
        stacked = torch.cat(records).to(dtype)
        host = torch.empty(stacked.shape, dtype=dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(device))
        return cls([host], arrival)


class _Writer:
    """Appends batches to an open file in order, on its own thread, and hashes them.

    Args:
        stream: positioned at its end.
        digest: of its content, to be continued.
        dtype: of stored records.
    """

    def __init__(self, stream: BinaryIO, digest: Any, dtype: torch.dtype) -> None:
        self._stream, self._digest, self._dtype = stream, digest, dtype
        self._queue: queue.Queue[_Pending | None] = queue.Queue(QUEUED)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def put(self, pending: _Pending) -> None:
        """Queue records for writing; blocks while too many are queued. Raises the error of an earlier write."""
        self._queue.put(pending)
        self._raise()

    def settle(self) -> None:
        """Wait until all records are with the operating system. Raises the error of a write."""
        self._queue.join()
        self._raise()
        self._stream.flush()

    def stop(self) -> None:
        """Stop the thread after it has written the queued records."""
        self._queue.put(None)
        self._thread.join()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                if self._failure is None:  # records after a gap would be taken for the missing ones
                    self._write(pending)
            except Exception as error:  # any error belongs to the main thread
                self._failure = error
            except BaseException as error:  # a dead thread would be waited for forever
                self._failure = RuntimeError(f"the record writer stopped with {error!r}")
                self._failure.__cause__ = error
            finally:
                self._queue.task_done()

    def _write(self, pending: _Pending) -> None:
        if pending.arrival is not None:
            pending.arrival.synchronize()
        for record in pending.records:
            content = record.to(self._dtype).contiguous().numpy().data
            self._stream.write(content)
            self._digest.update(content)


class RecordFile:
    """The records of the run that will create `artifact`; the file exists from the first batch or flush on.

    Args:
        path: of the raw file; of the workers of one command each has its own, and the first has this.
        artifact: target of the records; the state that counts them is beside it.
        shape, dtype: of a record.
        what: description of the records, for messages.
        buffer_bytes: records buffered in memory before writing; a few times as many may be in flight.
    """

    def __init__(
        self,
        path: Path,
        artifact: Path,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        what: str,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        others = team()
        self._leaders = path
        self.path = path if others is None or others.is_leader else path.with_name(f".{others.rank}{path.name}")
        self._state = state_path(artifact)
        self.shape, self._dtype, self._what = shape, dtype, what
        self._record = dtype.itemsize * math.prod(shape)
        self._buffer_bytes = buffer_bytes
        self._buffer: list[Tensor] = []
        self._num_buffered = 0
        self._stream: BinaryIO | None = None
        self._writer: _Writer | None = None
        self._written = 0
        self._hash = hashlib.sha256()

    def continue_from(self, num_records: int, digest: bytes) -> None:
        """Continue after this many records of the existing file, dropping later ones.

        Args:
            num_records: from the state.
            digest: of these records, from `digest` when the state was saved.

        Raises:
            DataError: the file is missing, shorter, or has other records.
        """
        if num_records == 0:
            return
        try:
            if self.path != self._leaders:
                shutil.copyfile(self._leaders, self.path)
            stream = self._open(os.O_RDWR)
        except FileNotFoundError:
            raise unusable_state_error(self._state, f"its {self._what} ({self.path.name}) are missing") from None
        except OSError as error:
            raise write_error(error, self.path) from None
        self._stream, self._written = stream, num_records
        if stream.seek(0, 2) < num_records * self._record:
            raise unusable_state_error(self._state, f"its {self._what} ({self.path.name}) are truncated")
        stream.seek(0)
        for first in range(0, num_records * self._record, BUFFER_BYTES):
            self._hash.update(stream.read(min(BUFFER_BYTES, num_records * self._record - first)))
        if self.digest != digest:
            raise unusable_state_error(self._state, f"its {self._what} ({self.path.name}) are damaged")
        stream.truncate(num_records * self._record)
        stream.seek(0, 2)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the records on disk; after a flush, of all."""
        return self._hash.digest()

    def _open(self, flags: int) -> BinaryIO:
        """Open the file itself, without following a link."""
        return os.fdopen(os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")

    def extend(self, records: Tensor) -> None:
        """Add records (n, *shape), which must not be changed afterwards.

        Raises:
            OutputExists, WriteError: the folder is not writable or the disk full; possibly for an earlier record.
        """
        self._buffer.append(records)
        self._num_buffered += len(records)
        if self._num_buffered * self._record >= self._buffer_bytes:
            with self._failing():
                self._send()

    def flush(self) -> None:
        """Write buffered records, and sync them to disk.

        Raises:
            OutputExists, WriteError: the folder is not writable or the disk full; possibly for an earlier record.
        """
        with self._failing():
            self._send().settle()
            sync(self.path)

    def _send(self) -> _Writer:
        """Queue the buffer, creating file and writer if needed."""
        if self._stream is None:
            remove_state(self._state)  # of an earlier run, whose records this file replaces
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            self._stream = self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if self._writer is None:
            self._writer = _Writer(self._stream, self._hash, self._dtype)
        if self._buffer:
            records, self._buffer = self._buffer, []
            self._written, self._num_buffered = self._written + self._num_buffered, 0
            self._writer.put(_Pending.of(records, self._dtype))
        return self._writer

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Convert write failures inside the block, or earlier on the writer's thread, to user-facing errors."""
        try:
            yield
        except OSError as error:
            raise write_error(error, self.path) from None

    def records(self) -> Tensor:
        """Return all records (T, *shape), memory-mapped copy-on-write."""
        self.flush()
        if not self._written:
            return torch.empty(0, *self.shape, dtype=self._dtype)
        stored = {torch.float32: "<f4", torch.float16: "<f2"}[self._dtype]
        return torch.from_numpy(np.memmap(self.path, stored, "c", shape=(self._written, *self.shape)))

    def collected(self) -> Tensor:
        """Return all records; if they are all still in memory, no file is created. Needs at least one record."""
        return self.records() if self._stream is not None else torch.cat(self._buffer)

    def close(self) -> None:
        """Close the file for further records; mapped records stay valid."""
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        if self._stream is not None:
            with contextlib.suppress(OSError):  # records that no state counts and nobody has read are not missed
                self._stream.close()

    def remove(self) -> None:
        """Close and remove the file; mapped records stay valid."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


class DrawFile(RecordFile):
    """The draws of the run that will create `artifact`.

    Args:
        artifact: target of the draws, which are beside it.
        num_chains, num_params: C and P of a record.
        buffer_bytes: as in RecordFile.
    """

    def __init__(self, artifact: Path, *, num_chains: int, num_params: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        shape = (num_chains, num_params)
        path = draws_path(artifact)
        super().__init__(path, artifact, shape=shape, dtype=torch.float32, what="draws", buffer_bytes=buffer_bytes)

    def append(self, theta: Tensor) -> None:
        """Add one draw (C, P) of every chain; raises as `extend` does."""
        self.extend(theta.unsqueeze(0))

    def draws(self) -> Tensor:
        """Return all draws (C, T, P), memory-mapped copy-on-write."""
        return self.records().transpose(0, 1)

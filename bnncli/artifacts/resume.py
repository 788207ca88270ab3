"""Resume states of unfinished runs: a safetensors file, and raw records that grow, beside the artifact they are for."""

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

from bnncli.artifacts.atomic import publish_bytes, published_at_once, sync, write_error
from bnncli.artifacts.headers import SCHEMA, with_digest
from bnncli.artifacts.posteriors import METADATA_KEY, read_document
from bnncli.artifacts.provenance import Source, params_hash
from bnncli.errors import BnnError, DataError
from bnncli.lazy import torch
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.system.input_files import reading
from bnncli.system.workers import is_leader, team

if TYPE_CHECKING:
    from torch import Tensor


KIND = "resume"
_STATE, _DRAWS, _ROWS = ".resume.safetensors", ".resume.draws", ".resume.rows"


def state_path(artifact: Path) -> Path:
    """.<name>.resume.safetensors beside the artifact."""
    return artifact.with_name(f".{artifact.stem}{_STATE}")


def draws_path(artifact: Path) -> Path:
    """.<name>.resume.draws beside the artifact: raw draws, as long as they are not an artifact."""
    return artifact.with_name(f".{artifact.stem}{_DRAWS}")


def rows_path(artifact: Path) -> Path:
    """.<name>.resume.rows beside the artifact: raw features, as long as they are not an artifact."""
    return artifact.with_name(f".{artifact.stem}{_ROWS}")


def leftovers(folder: Path) -> list[Path]:
    """Every resume state and file of raw draws or features under a folder, sorted."""
    return sorted(path for suffix in (_STATE, _DRAWS, _ROWS) for path in folder.rglob(f".*{suffix}") if path.is_file())


def artifact_stem(leftover: Path) -> str:
    """The name of the artifact that a path of `leftovers` belongs to."""
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
    """What a state belongs to: equal for two runs exactly when one may continue the other."""
    return {
        "params_hash": params_hash(params),
        "algo_rev": algo_rev,
        "seed": seed,
        "inputs": {source.role: source.content_digest for source in sources},
        "weights_digest": weights_digest,
    }


def write_state(path: Path, tensors: Mapping[str, Tensor], identity: Mapping[str, Any]) -> None:
    """Replace the state at `path`; a kill leaves the old one or the new one. A signal that has come does not stop it.

    Args:
        tensors: everything the run needs, any device; counters and random states as tensors too.
        identity: from identity_of.

    Raises:
        OutputExists, WriteError: as publish does.
    """
    from safetensors.torch import save

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    document = {
        "kind": KIND,
        "schema": SCHEMA,
        "content_digest": tensor_digest(stored),
        "identity": dict(identity),
    }
    metadata = {METADATA_KEY: canonical_json(with_digest(document))}
    with published_at_once():  # it is no part of what the command is to make
        publish_bytes(path, save(stored, metadata=metadata), may_replace=True, poll=False)


def read_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """The tensors of the state at `path`; None where there is none.

    Raises:
        DataError: it is damaged, or belongs to another request; the message says what differs, the hint how to discard it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not path.exists():
        return None
    with reading(path):
        content = path.read_bytes()
    try:
        document = read_document(path)
        tensors = load(content)
    except (DataError, SafetensorError, ValueError, KeyError) as error:
        raise unusable(path, " ".join(str(error).removeprefix(str(path)).strip(": ").split())[:120]) from None
    if document.get("kind") != KIND or document.get("schema") != SCHEMA:
        raise unusable(path, "it is not a resume state of this version")
    if tensor_digest(tensors) != document.get("content_digest"):
        raise unusable(path, "its content does not match its digest")
    differing = _differences(document.get("identity"), dict(identity))
    if differing:
        raise unusable(path, f"it was saved with {differing}", code="resume_mismatch")
    return tensors


def recorded_choice(path: Path, name: str) -> Any:
    """What the state at `path` says of a choice that its run made, by name; None where it says nothing, or cannot be read."""
    try:
        identity = read_document(path)["identity"]
        return identity.get(name)
    except (BnnError, AttributeError, KeyError):
        return None  # what is wrong with it is told by read_state


def remove_state(path: Path) -> None:
    """Remove a state (or raw draws or features); nothing when there is none, or it is another worker's to remove."""
    if not is_leader():
        return
    with contextlib.suppress(OSError):
        path.unlink()


def unusable(path: Path, why: str, *, code: str = "damaged") -> DataError:
    """The error for a state that cannot be continued."""
    hint = f"start over without \0resume\0; to discard the state: rm {shlex.quote(str(path))}"
    return DataError(f"cannot resume from {path}: {why}", hint=hint, code=code, path=path)


class SaveClock:
    """Tells when the next state is due: `every` seconds after the last one, at once for 0."""

    def __init__(self, every: float) -> None:
        self.every = every
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """True when a state should be saved now; the caller saves it, and the clock starts again."""
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
    """What differs between two identities, in words; empty when nothing does."""
    if not isinstance(there, dict):
        return "no identity"
    keys = [key for key in {**asked, **there} if key != "inputs"]
    words = [_WORDS.get(key, f"another {key}") for key in keys if there.get(key) != asked.get(key)]
    old, new = there.get("inputs"), asked.get("inputs", {})
    old = old if isinstance(old, dict) else {}
    words += [f"another {role}" for role in sorted({*old, *new}) if old.get(role) != new.get(role)]
    return ", ".join(words) or ("another identity" if there != asked else "")


BUFFER_BYTES = 64 << 20  # records stay on their device until there are so many, or until a state is saved
QUEUED = 2  # batches that wait for the writer, beside the one that it writes


class _Pending(NamedTuple):
    """Records, several in a tensor, in the CPU's memory, and the event that says they have arrived; None where they have."""

    records: list[Tensor]
    arrival: Any = None

    @classmethod
    def of(cls, records: list[Tensor], dtype: torch.dtype) -> _Pending:
        """The records in the file's type; from a GPU by a copy into pinned memory that nobody waits for yet."""
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
    """Appends batches to an open file in their order, on a thread of its own, and hashes them.

    Args:
        stream: positioned at its end.
        digest: of what it holds, to go on with.
        dtype: that records are stored in.
    """

    def __init__(self, stream: BinaryIO, digest: Any, dtype: torch.dtype) -> None:
        self._stream, self._digest, self._dtype = stream, digest, dtype
        self._queue: queue.Queue[_Pending | None] = queue.Queue(QUEUED)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def put(self, pending: _Pending) -> None:
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
    """The records of the run that will make `artifact`; there is no file before the first batch or flush.

    Args:
        path: of the raw file; of workers that share a command each has its own, and the first has this.
        artifact: what the records are for; the state that counts them lies beside it.
        shape, dtype: of a record.
        what: the records, for messages.
        buffer_bytes: records kept in memory before they are sent to be written; a few times as many may be on their way.
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
        """Go on after that many records of the file that is there; what was written later is dropped.

        Args:
            num_records: that the state counts.
            digest: of these records, as `digest` said when the state was saved.

        Raises:
            DataError: the file is gone, shorter, or its records are others.
        """
        if num_records == 0:
            return
        try:
            if self.path != self._leaders:
                shutil.copyfile(self._leaders, self.path)
            stream = self._open(os.O_RDWR)
        except FileNotFoundError:
            raise unusable(self._state, f"its {self._what} ({self.path.name}) are missing") from None
        except OSError as error:
            raise write_error(error, self.path) from None
        self._stream, self._written = stream, num_records
        if stream.seek(0, 2) < num_records * self._record:
            raise unusable(self._state, f"its {self._what} ({self.path.name}) are truncated")
        stream.seek(0)
        for first in range(0, num_records * self._record, BUFFER_BYTES):
            self._hash.update(stream.read(min(BUFFER_BYTES, num_records * self._record - first)))
        if self.digest != digest:
            raise unusable(self._state, f"its {self._what} ({self.path.name}) are damaged")
        stream.truncate(num_records * self._record)
        stream.seek(0, 2)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the records on disk; after a flush, of all."""
        return self._hash.digest()

    def _open(self, flags: int) -> BinaryIO:
        """The file itself, never what a link in its place points to."""
        return os.fdopen(os.open(self.path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")

    def extend(self, records: Tensor) -> None:
        """Keep records (n, *shape), which nobody changes any more.

        Raises:
            OutputExists, WriteError: the folder cannot be written, the disk is full; perhaps at an earlier record.
        """
        self._buffer.append(records)
        self._num_buffered += len(records)
        if self._num_buffered * self._record >= self._buffer_bytes:
            with self._failing():
                self._send()

    def flush(self) -> None:
        """Write what is in memory, and wait until all of it is on the disk itself.

        Raises:
            OutputExists, WriteError: the folder cannot be written, the disk is full; perhaps at an earlier record.
        """
        with self._failing():
            self._send().settle()
            sync(self.path)

    def _send(self) -> _Writer:
        """Have the buffer written, by the writer that is there or one for a new file."""
        if self._stream is None:
            remove_state(self._state)  # of an earlier run, whose records this file takes the place of
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
        """Failures to write inside the block, or before it on the writer's thread, as users see them."""
        try:
            yield
        except OSError as error:
            raise write_error(error, self.path) from None

    def records(self) -> Tensor:
        """All records (T, *shape), mapped from the file; changing them changes nothing on disk."""
        self.flush()
        if not self._written:
            return torch.empty(0, *self.shape, dtype=self._dtype)
        stored = {torch.float32: "<f4", torch.float16: "<f2"}[self._dtype]
        return torch.from_numpy(np.memmap(self.path, stored, "c", shape=(self._written, *self.shape)))

    def collected(self) -> Tensor:
        """The same; where all of them are still in memory there is no file, and none is made. At least one record."""
        return self.records() if self._stream is not None else torch.cat(self._buffer)

    def close(self) -> None:
        """Close the file; nothing can be added then, and records that are mapped stay."""
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
        if self._stream is not None:
            with contextlib.suppress(OSError):  # what no state counts and nobody has read is not missed
                self._stream.close()

    def remove(self) -> None:
        """Close the file and remove it; records that are mapped stay."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


class DrawFile(RecordFile):
    """The draws of the run that will make `artifact`.

    Args:
        artifact: what the draws are for; they lie beside it.
        num_chains, num_params: C and P of a record.
        buffer_bytes: as of RecordFile.
    """

    def __init__(self, artifact: Path, *, num_chains: int, num_params: int, buffer_bytes: int = BUFFER_BYTES) -> None:
        shape = (num_chains, num_params)
        path = draws_path(artifact)
        super().__init__(path, artifact, shape=shape, dtype=torch.float32, what="draws", buffer_bytes=buffer_bytes)

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of every chain; raises as `extend` does."""
        self.extend(theta.unsqueeze(0))

    def draws(self) -> Tensor:
        """All draws (C, T, P), mapped from the file; changing them changes nothing on disk."""
        return self.records().transpose(0, 1)

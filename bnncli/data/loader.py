"""Load rows of a data set as tensors, batch by batch, read and decoded ahead by worker processes."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from bnncli.data.pixels import ImageCounts, count_images
from bnncli.data.transform import Transform, apply_transform
from bnncli.errors import BnnError, DataError, DeviceError, MissingInput, ReadError

if TYPE_CHECKING:
    from bnncli.data.splits import Dataset, Stored


_CHECKED = 32  # rows read at once to find unreadable ones


class Chunk(NamedTuple):
    """Rows that were read, on the CPU.

    Attributes:
        inputs: (n, ...), or one tensor per argument name of the network.
        labels: (n,) or None.
        is_ready: whether the network takes the inputs unchanged.
        num_truncated, num_converted, lengths: see Transformed.
        images: counts of changes to decoded images.
    """

    inputs: Tensor | dict[str, Tensor]
    labels: Tensor | None
    is_ready: bool = False
    num_truncated: int = 0
    num_converted: int = 0
    lengths: tuple[int, ...] | None = None
    images: ImageCounts = ImageCounts()


def read_ahead(
    dataset: Dataset,
    rows: np.ndarray,
    batch_size: int,
    *,
    num_workers: int,
    transform: Transform | None = None,
    where: str = "",
    turns: slice = slice(None),
) -> Iterator[Chunk]:
    """Yield batches of the rows (N,) in order, as stored or transformed.

    Args:
        turns: which batches to read, by index.

    Raises:
        BnnError: as raised by the data set's `read`; the transform does not support its result; or a worker died.
    """
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)[turns]]
    batches = _Chunks(dataset, chunks, transform, where)
    # Without workers a loader would take longer than a small batch. The loader is created inside the loop, which closes
    # it: a caller holding an exception would keep local variables, and with them the workers, alive.
    for outcome in (
        _load_in_process(batches) if num_workers == 0 else _load_with_workers(_loader(batches, num_workers), where)
    ):
        if isinstance(outcome, BnnError):
            raise outcome
        yield outcome


def find_unreadable(
    dataset: Dataset,
    rows: np.ndarray,
    *,
    num_workers: int,
    transform: Transform | None = None,
    where: str = "",
) -> Iterator[tuple[int, list[tuple[int, str]]]]:
    """Read all rows (N,) and yield, block by block, the number of rows and those that cannot be read, each with the reason.

    Raises:
        BnnError: another failure than of a row, such as a dead worker or too many open files.
    """
    chunks = [rows[start : start + _CHECKED] for start in range(0, len(rows), _CHECKED)]
    checks = _Checks(dataset, chunks, transform, where)
    outcomes = (
        (checks[index] for index in range(len(checks)))
        if num_workers == 0
        else _load_with_workers(_loader(checks, num_workers), where)
    )
    for chunk, outcome in zip(chunks, outcomes, strict=True):
        if isinstance(outcome, BnnError):
            raise outcome
        yield len(chunk), outcome


def _load_in_process(batches: _Chunks) -> Iterator[Chunk | BnnError]:
    return (batches[index] for index in range(len(batches)))


# How workers start: on Linux as copies of this process, which take any data set. Elsewhere, where libraries do not
# survive that, as torch chooses: as new processes, which are sent the data set.
WORKER_START = "fork" if sys.platform == "linux" else None


def _loader(batches: _Chunks, num_workers: int) -> torch_data.DataLoader[Any]:
    return torch_data.DataLoader(
        batches, batch_size=None, num_workers=num_workers, worker_init_fn=_quiet_worker, collate_fn=_convert_to_arrays,
        multiprocessing_context=WORKER_START,
    )  # fmt: skip


def _load_with_workers(loader: torch_data.DataLoader[Any], where: str) -> Iterator[Any]:
    """Yield what the loader's workers return, and stop them at the end.

    Raises:
        DeviceError: a worker died.
        DataError: the data set cannot be sent to workers.
    """
    with _disable_child_signal():
        try:
            batches = iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            message = f"{where}: cannot be sent to data loading workers: {' '.join(str(error).split())[:200]}"
            raise DataError(message, code="not_sendable", hint="use \0num_workers\0 0") from error
        try:
            while True:
                try:
                    outcome = next(batches)
                except StopIteration:
                    return
                except (RuntimeError, OSError, EOFError) as error:
                    if str(error).startswith("Caught "):  # raised in a worker while reading
                        raise
                    raise _worker_death_error(batches, error, where) from error
                yield _map_parts(outcome, _convert_to_tensor) if isinstance(outcome, Chunk) else outcome
        finally:
            batches._shutdown_workers()  # type: ignore[attr-defined]  # torch waits for the collector to do it


@contextmanager
def _disable_child_signal() -> Iterator[None]:
    """Disable torch's SIGCHLD handler, which would raise in the main thread, for example inside the network.

    A reader learns of a dead worker within seconds anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handling: Any = torch_data._utils.signal_handling
    is_set, handling._SIGCHLD_handler_set = handling._SIGCHLD_handler_set, True
    before = signal.getsignal(signal.SIGCHLD)
    if is_set:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        handling._SIGCHLD_handler_set = is_set
        if is_set:
            signal.signal(signal.SIGCHLD, before)


def _worker_death_error(batches: Any, error: Exception, where: str) -> DeviceError:
    """Return the error for a worker that died."""
    if "Too many open files" in str(error):
        hint = "raise the limit with ulimit -n, or use fewer \0num_workers\0"
        return DeviceError(f"{where}: too many open files", code="too_many_files", hint=hint)
    wait([process.sentinel for process in batches._workers], timeout=1)  # its pipes close shortly before it exits
    codes = [process.exitcode for process in batches._workers if process.exitcode]
    if not codes:
        how = f"stopped ({' '.join(str(error).split())[:200] or type(error).__name__})"
    else:
        how = f"was killed by {signal.Signals(-codes[0]).name}" if codes[0] < 0 else f"exited with code {codes[0]}"
    return DeviceError(
        f"{where}: a data loading worker {how}", code="reader_died",
        hint="memory or space in /dev/shm may have run out: use fewer \0num_workers\0 (with 0, the main process "
            "loads the data) or a smaller \0batch_size\0",
    )  # fmt: skip


class _Chunks(torch_data.Dataset[Any]):
    """A data set whose items are whole batches; expected errors are items too, so that workers can return them."""

    def __init__(self, dataset: Dataset, chunks: list[np.ndarray], transform: Transform | None, where: str) -> None:
        self.dataset, self.chunks = dataset, chunks
        self.transform, self.where = transform, where

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Chunk | BnnError:
        rows = self.chunks[index]
        try:
            with count_images() as counted:
                raw, found = self.dataset.read(rows)
            images = reduce(ImageCounts.plus, counted, ImageCounts())
            labels = None if found is None else torch.from_numpy(found)
            items = None if self.transform is None else _select_transformable(raw)
            if self.transform is not None and items is not None:
                where = f"{self.where} rows {rows[0]} to {rows[-1]}"
                made = apply_transform(self.transform, items, where)
                return Chunk(_tensors(made.inputs), labels, True, *made[1:], images=images)
        except BnnError as error:
            return error
        return Chunk(_tensors(raw), labels, isinstance(raw, Mapping), images=images)


class _Checks(_Chunks):
    """The same batches, as lists of their unreadable rows with the reasons."""

    def __getitem__(self, index: int) -> list[tuple[int, str]] | BnnError:  # type: ignore[override]
        if not isinstance(super().__getitem__(index), BnnError):
            return []
        found = []
        for row in self.chunks[index]:
            outcome = _Chunks(self.dataset, [row[None]], self.transform, self.where)[0]
            if isinstance(outcome, DataError | MissingInput | ReadError):
                found.append((int(row), outcome.message))
            elif isinstance(outcome, BnnError):
                return outcome
        return found


def _convert_to_arrays(outcome: Any) -> Any:
    """Convert a chunk's tensors to arrays, which workers send through a pipe; all else passes unchanged.

    Tensors would go through /dev/shm. Containers have 64 MiB of it by default, and a worker that finds it full sends
    nothing, so the command would hang.
    """
    return _map_parts(outcome, _convert_to_array) if isinstance(outcome, Chunk) else outcome


def _map_parts(chunk: Chunk, change: Callable[[Any], Any]) -> Chunk:
    inputs: Any = chunk.inputs
    inputs = {name: change(part) for name, part in inputs.items()} if isinstance(inputs, dict) else change(inputs)
    return chunk._replace(inputs=inputs, labels=change(chunk.labels))


def _convert_to_array(part: Any) -> Any:
    is_plain = isinstance(part, Tensor) and part.dtype != torch.bfloat16  # unsupported by NumPy
    return part.numpy() if is_plain else part


def _convert_to_tensor(part: Any) -> Any:
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def _select_transformable(raw: Stored) -> list[Any] | np.ndarray | None:
    """Return images, texts or sound; None for other arrays, which the network takes unchanged."""
    array = raw.numpy() if isinstance(raw, Tensor) else raw
    is_image = isinstance(array, np.ndarray) and array.dtype == np.uint8
    return array if is_image or isinstance(array, list) else None  # type: ignore[return-value]


def _tensors(inputs: Any) -> Any:
    """Convert arrays to tensors."""
    if isinstance(inputs, Mapping):
        return {name: torch.as_tensor(array) for name, array in inputs.items()}
    return torch.as_tensor(inputs)


def _quiet_worker(worker: int) -> None:
    """Reset signal handlers in a worker; the parent stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

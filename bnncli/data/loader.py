"""Rows of a data set as tensors, batch by batch, read and decoded ahead by other processes."""

from __future__ import annotations

import signal
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

from bnncli.data.pixels import ImageCounts, counting_images
from bnncli.data.transform import Transform, transformed
from bnncli.errors import BnnError, DeviceError

if TYPE_CHECKING:
    from bnncli.data.splits import Dataset, Stored


class Chunk(NamedTuple):
    """Rows that were read, on the CPU.

    Attributes:
        inputs: (n, ...), or one by each name of the network's arguments.
        labels: (n,) or None.
        is_ready: whether the network takes the inputs as they are.
        num_truncated, num_converted, lengths: see Transformed.
        images: what was done to images when they were decoded.
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
    """The rows (N,) in their order, as stored, or as the transform makes them.

    Args:
        turns: which of the batches, by their place; no other is read.

    Raises:
        BnnError: as the data set's `read`; the transform cannot take what it gives; a process that reads died.
    """
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)[turns]]
    batches = _Chunks(dataset, chunks, transform, where)
    # Without a loader where none reads ahead: it takes longer than one small batch. And in the loop itself, which closes it: an error
    # that somebody holds would keep what a name here holds, and with that its processes.
    for outcome in _here(batches) if num_workers == 0 else _from_workers(_loader(batches, num_workers), where):
        if isinstance(outcome, BnnError):
            raise outcome
        yield outcome


def _here(batches: _Chunks) -> Iterator[Chunk | BnnError]:
    return (batches[index] for index in range(len(batches)))


def _loader(batches: _Chunks, num_workers: int) -> torch_data.DataLoader[Any]:
    return torch_data.DataLoader(
        batches, batch_size=None, num_workers=num_workers, worker_init_fn=_quiet_worker, collate_fn=_as_arrays
    )  # fmt: skip


def _from_workers(loader: torch_data.DataLoader[Any], where: str) -> Iterator[Any]:
    """What the loader's processes hand over; they are gone when this ends, however it does. Raises DeviceError when one dies."""
    with _no_alarm():
        batches = iter(loader)
        try:
            while True:
                try:
                    outcome = next(batches)
                except StopIteration:
                    return
                except (RuntimeError, OSError, EOFError) as error:
                    if str(error).startswith("Caught "):  # it happened in a process: that reads on
                        raise
                    raise _ended(batches, error, where) from error
                yield outcome if isinstance(outcome, BnnError) else _over_parts(outcome, _as_tensor)
        finally:
            batches._shutdown_workers()  # type: ignore[attr-defined]  # torch waits for the collector to do it


@contextmanager
def _no_alarm() -> Iterator[None]:
    """Around processes that read ahead: no handler of torch's, which raises in whatever the main thread does when one dies.

    That could be the network, which would be blamed. Who waits for a process that died learns of it within seconds.
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


def _ended(batches: Any, error: Exception, where: str) -> DeviceError:
    """The error for a process that reads ahead and is no more."""
    if "Too many open files" in str(error):
        hint = "raise the limit with ulimit -n, or use fewer \0num_workers\0"
        return DeviceError(f"{where}: too many open files", code="too_many_files", hint=hint)
    wait([process.sentinel for process in batches._workers], timeout=1)  # its pipes end a little before it does
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
    """Whole batches as the items of a data set; an expected error is an item too, so that workers can hand it over."""

    def __init__(self, dataset: Dataset, chunks: list[np.ndarray], transform: Transform | None, where: str) -> None:
        self.dataset, self.chunks = dataset, chunks
        self.transform, self.where = transform, where

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Chunk | BnnError:
        rows = self.chunks[index]
        try:
            with counting_images() as counted:
                raw, found = self.dataset.read(rows)
            images = reduce(ImageCounts.plus, counted, ImageCounts())
            labels = None if found is None else torch.from_numpy(found)
            items = None if self.transform is None else _for_transform(raw)
            if self.transform is not None and items is not None:
                where = f"{self.where} rows {rows[0]} to {rows[-1]}"
                made = transformed(self.transform, items, where)
                return Chunk(_tensors(made.inputs), labels, True, *made[1:], images=images)
        except BnnError as error:
            return error
        return Chunk(_tensors(raw), labels, isinstance(raw, Mapping), images=images)


def _as_arrays(outcome: Any) -> Any:
    """Give a chunk arrays for its tensors (errors pass as they are): arrays cross to another process through a pipe.

    Tensors cross through /dev/shm. A container has 64 MiB of it by default, and a process that finds it full sends nothing: the
    command would wait for ever.
    """
    return outcome if isinstance(outcome, BnnError) else _over_parts(outcome, _as_array)


def _over_parts(chunk: Chunk, change: Callable[[Any], Any]) -> Chunk:
    inputs: Any = chunk.inputs
    inputs = {name: change(part) for name, part in inputs.items()} if isinstance(inputs, dict) else change(inputs)
    return chunk._replace(inputs=inputs, labels=change(chunk.labels))


def _as_array(part: Any) -> Any:
    is_plain = isinstance(part, Tensor) and part.dtype != torch.bfloat16  # which NumPy does not know
    return part.numpy() if is_plain else part


def _as_tensor(part: Any) -> Any:
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def _for_transform(raw: Stored) -> list[Any] | np.ndarray | None:
    """Images, texts or sound; None for other arrays, which are what the network takes."""
    array = raw.numpy() if isinstance(raw, Tensor) else raw
    is_image = isinstance(array, np.ndarray) and array.dtype == np.uint8
    return array if is_image or isinstance(array, list) else None  # type: ignore[return-value]


def _tensors(inputs: Any) -> Any:
    """Arrays as tensors."""
    if isinstance(inputs, Mapping):
        return {name: torch.as_tensor(array) for name, array in inputs.items()}
    return torch.as_tensor(inputs)


def _quiet_worker(worker: int) -> None:
    """Workers do not run the parent's signal handlers: the parent stops them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

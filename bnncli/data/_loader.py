"""Rows of a data set as tensors, batch by batch, read and decoded ahead by other processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from bnncli.data._transform import Transform, transformed
from bnncli.errors import BnnError

if TYPE_CHECKING:
    from bnncli.data._split import Dataset, Stored


class Chunk(NamedTuple):
    """Rows that were read, on the CPU.

    Attributes:
        inputs: (n, ...), or one by each name of the network's arguments.
        labels: (n,) or None.
        is_ready: whether the network takes the inputs as they are.
        num_truncated, num_converted, lengths: see Transformed.
    """

    inputs: Tensor | dict[str, Tensor]
    labels: Tensor | None
    is_ready: bool = False
    num_truncated: int = 0
    num_converted: int = 0
    lengths: tuple[int, ...] | None = None


def read_ahead(
    dataset: Dataset,
    rows: np.ndarray,
    batch_size: int,
    *,
    num_workers: int,
    transform: Transform | None = None,
    where: str = "",
) -> Iterator[Chunk]:
    """The rows (N,) in their order, as stored, or as the transform makes them.

    Raises:
        BnnError: as the data set's `read`; the transform cannot take what it gives.
    """
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    loader = torch_data.DataLoader(
        _Chunks(dataset, chunks, transform, where),
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=_quiet_worker,
    )
    for outcome in loader:
        if isinstance(outcome, BnnError):
            raise outcome
        yield outcome


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
            raw, found = self.dataset.read(rows)
            labels = None if found is None else torch.from_numpy(found)
            items = None if self.transform is None else _for_transform(raw)
            if self.transform is not None and items is not None:
                where = f"{self.where} rows {rows[0]} to {rows[-1]}"
                made = transformed(self.transform, items, where)
                return Chunk(_tensors(made.inputs), labels, True, *made[1:])
        except BnnError as error:
            return error
        return Chunk(_tensors(raw), labels, isinstance(raw, Mapping))


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

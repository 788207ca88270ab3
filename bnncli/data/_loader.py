"""Rows of a data set as tensors, batch by batch, read and decoded ahead by other processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data

from bnncli.errors import BnnError

if TYPE_CHECKING:
    from bnncli.data._split import Dataset


def read_ahead(
    dataset: Dataset, rows: np.ndarray, batch_size: int, *, num_workers: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs (n, ...) as stored and labels (n,), or None, of the rows (N,) in their order, on the CPU.

    Raises:
        BnnError: as the data set's `read`.
    """
    chunks = _Chunks(dataset, [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)])
    loader = torch_data.DataLoader(chunks, batch_size=None, num_workers=num_workers, worker_init_fn=_quiet_worker)
    for outcome in loader:
        if isinstance(outcome, BnnError):
            raise outcome
        yield outcome


class _Chunks(torch_data.Dataset[Any]):
    """Whole batches as the items of a data set; an expected error is an item too, so that workers can hand it over."""

    def __init__(self, dataset: Dataset, chunks: list[np.ndarray]) -> None:
        self.dataset = dataset
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | None] | BnnError:
        try:
            inputs, labels = self.dataset.read(self.chunks[index])
        except BnnError as error:
            return error
        return torch.as_tensor(inputs), None if labels is None else torch.from_numpy(labels)


def _quiet_worker(worker: int) -> None:
    """Workers do not run the parent's signal handlers: the parent stops them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

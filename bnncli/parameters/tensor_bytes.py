"""Measure the bytes of the tensors that a piece of work holds at its peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_FEW, _MORE = 2, 6  # examples to measure on; what does not grow with them is not counted


def bytes_per_example(work: Callable[[int], object]) -> int:
    """Return the bytes by which the peak of `work` grows with each example, on any device."""
    work(1)  # exclude what a network allocates on its first call
    return max(0, (peak_bytes(lambda: work(_MORE)) - peak_bytes(lambda: work(_FEW))) // (_MORE - _FEW))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak bytes of all tensors created by `work`, on any device."""
    with _Live() as live:
        work()
    return live.peak


class _Live(TorchDispatchMode):
    """Tracks the storage of every tensor returned by a kernel until it is freed, except views of existing ones."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        returned = func(*args, **(kwargs or {}))
        for storage in _storages(returned):
            key = storage._cdata
            if key not in given and key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key, None).atexit = False
        self.peak = max(self.peak, sum(self.sizes.values()))
        return returned


def _storages(found: object) -> list[torch.UntypedStorage]:
    """Return the storages of all dense tensors; sparse ones have none of their own."""
    tensors = [tensor for tensor in tree_iter(found) if isinstance(tensor, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]

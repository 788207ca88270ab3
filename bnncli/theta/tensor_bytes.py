"""Bytes of the tensors that a piece of work holds at its peak, counted as they are made and freed.

That is what a device's memory has to hold. What kernels take inside themselves is not seen: on a CPU a convolution lays its
channels out anew, by eights or sixteens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that tensors made by the work hold together, on whichever devices."""
    with _Live() as live:
        work()
    return live.peak


@dataclass(frozen=True)
class Growth:
    """Bytes as a function of examples.

    Args:
        fixed: whatever their number.
        each: of one.
    """

    fixed: int
    each: int

    def of(self, count: int) -> int:
        """Bytes of so many."""
        return self.fixed + count * self.each


def growth(work: Callable[[int], object], few: int, more: int) -> Growth:
    """What work on so many examples takes at its peak, as measured on few and on more."""
    low, high = (peak_bytes(lambda count=count: work(count)) for count in (few, more))  # type: ignore[misc]
    each = max(0, (high - low) // (more - few))
    return Growth(max(0, low - few * each), each)


class _Live(TorchDispatchMode):
    """Sees every tensor that a kernel returns; its storage is counted until that is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_iter(returned):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return returned

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self.sizes:
            self.sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

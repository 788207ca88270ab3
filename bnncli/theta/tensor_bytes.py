"""Bytes of the tensors that a piece of work holds at its peak, counted as they are made and freed.

That is what a device's memory has to hold. What kernels take inside themselves is not seen, such as a CPU's convolutions that lay
their channels out anew, but for one thing: there a sum in another precision copies all of its input first.
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
    return sum(_storages_at_peak(work))


@dataclass(frozen=True)
class Growth:
    """Bytes as a function of examples.

    Args:
        fixed: whatever their number.
        each: of one.
        storages: bytes of each at the peak of `num_examples`.
        num_examples: that they are of.
    """

    fixed: int
    each: int
    storages: tuple[int, ...]
    num_examples: int

    def of(self, count: int) -> int:
        """Bytes of so many."""
        return self.fixed + count * self.each

    def of_smaller(self, count: int, least: int) -> int:
        """Of those, bytes of storages that with so many examples are smaller than `least` bytes."""
        small = sum(size for size in self.storages if size * count < least * self.num_examples)
        return self.of(count) * small // max(1, sum(self.storages))

    def times(self, factor: int) -> Growth:
        """Of work in another precision."""
        storages = tuple(size * factor for size in self.storages)
        return Growth(self.fixed * factor, self.each * factor, storages, self.num_examples)


def growth(work: Callable[[int], object], few: int, more: int) -> Growth:
    """What work on so many examples takes at its peak, as measured on few and on more."""
    low, high = (_storages_at_peak(lambda count=count: work(count)) for count in (few, more))  # type: ignore[misc]
    each = max(0, (sum(high) - sum(low)) // (more - few))
    return Growth(max(0, sum(low) - few * each), each, high, more)


def _storages_at_peak(work: Callable[[], object]) -> tuple[int, ...]:
    with _Live() as live:
        work()
    return live.at_peak


class _Live(TorchDispatchMode):
    """Sees every tensor that a kernel returns; its storage is counted until that is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.at_peak: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = _copied_bytes(func, args, kwargs or {})
        if inside and self.now + inside > self.peak:
            self.peak, self.at_peak = self.now + inside, (*self.sizes.values(), inside)
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
            if self.now > self.peak:
                self.peak, self.at_peak = self.now, tuple(self.sizes.values())
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def _copied_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the copy that a sum makes of its input."""
    dtype = kwargs.get("dtype")
    if dtype is None or func.overloadpacket is not torch.ops.aten.sum:
        return 0
    summed: torch.Tensor = args[0]
    is_copied = summed.device.type == "cpu" and summed.dtype != dtype
    return summed.numel() * dtype.itemsize if is_copied else 0

"""Count the bytes of the tensors that a piece of work holds at its peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak bytes of all tensors created by `work`, on any device."""
    return sum(_watch(work).at_peak)


@dataclass(frozen=True)
class Growth:
    """Bytes as a function of the number of examples.

    Args:
        fixed: independent of the number.
        each: per example.
        storages: bytes of each at the peak with `num_examples`.
        num_examples: for which they were measured.
        small_fixed, small_each: peak of storages below a size, at any time.
    """

    fixed: int
    each: int
    storages: tuple[int, ...]
    num_examples: int
    small_fixed: int = 0
    small_each: int = 0

    def of(self, count: int) -> int:
        """Return the bytes for `count` examples."""
        return self.fixed + count * self.each

    def holes(self, count: int, least: int) -> int:
        """Return bytes in holes between storages smaller than `least` bytes for `count` examples.

        As much as these hold at the peak, or all that they held together at another time, part of which they refill.
        """
        small = sum(size for size in self.storages if size * count < least * self.num_examples)
        at_peak = self.of(count) * small // max(1, sum(self.storages))
        return max(at_peak, self.small_fixed + count * self.small_each - at_peak)

    def times(self, factor: int) -> Growth:
        """Return the growth in another precision."""
        storages = tuple(size * factor for size in self.storages)
        fixed, each, small_fixed, small_each = (
            factor * size for size in (self.fixed, self.each, self.small_fixed, self.small_each)
        )
        return Growth(fixed, each, storages, self.num_examples, small_fixed, small_each)


def measure_growth(work: Callable[[int], object], few: int, more: int, *, small: float = 0.0) -> Growth:
    """Measure the peak bytes of work on few and on more examples.

    Args:
        small: bytes per example below which a storage counts as small.
    """
    low, high = (_watch(lambda count=count: work(count), int(small * count)) for count in (few, more))  # type: ignore[misc]
    fixed, each = _line(few, sum(low.at_peak), more, sum(high.at_peak))
    return Growth(fixed, each, high.at_peak, more, *_line(few, low.small_peak, more, high.small_peak))


def _line(few: int, low: int, more: int, high: int) -> tuple[int, int]:
    """Return intercept and slope, neither below 0."""
    each = max(0, (high - low) // (more - few))
    return max(0, low - few * each), each


def _watch(work: Callable[[], object], small: int = 0) -> _Live:
    with _Live(small) as live:
        work()
    return live


class _Live(TorchDispatchMode):
    """Tracks the storage of every tensor returned by a kernel until it is freed, except views of existing ones."""

    def __init__(self, small: int = 0) -> None:
        super().__init__()
        self.small, self.small_now, self.small_peak = small, 0, 0
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.at_peak: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = _copied_bytes(func, args, kwargs or {})
        if inside and self.now + inside > self.peak:
            self.peak, self.at_peak = self.now + inside, (*self.sizes.values(), inside)
        given = {storage._cdata for storage in _storages((args, kwargs))}
        returned = func(*args, **(kwargs or {}))
        for storage in _storages(returned):
            if storage._cdata not in given:
                self._note(storage)
        return returned

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self.sizes:
            self.sizes[key] = size
            self.now += size
            if size < self.small:
                self.small_now += size
                self.small_peak = max(self.small_peak, self.small_now)
            if self.now > self.peak:
                self.peak, self.at_peak = self.now, tuple(self.sizes.values())
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        size = self.sizes.pop(key, 0)
        self.now -= size
        if size < self.small:
            self.small_now -= size


def _storages(found: object) -> list[torch.UntypedStorage]:
    """Return the storages of all dense tensors; sparse ones have none of their own."""
    tensors = [tensor for tensor in tree_iter(found) if isinstance(tensor, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]


def _copied_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of the copy that a sum makes of its input."""
    dtype = kwargs.get("dtype")
    if dtype is None or func.overloadpacket is not torch.ops.aten.sum:
        return 0
    summed: torch.Tensor = args[0]
    is_copied = summed.device.type == "cpu" and summed.dtype != dtype
    return summed.numel() * dtype.itemsize if is_copied else 0

"""Passes of a network over a part of a batch at a time, where the activations of all of it would take much memory.

What a network holds at its peak is measured on two examples, so that a batch of any size has room: of 256 photographs the first
layers alone would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from bnncli.data._split import Inputs
from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.parameters.module import peak_bytes
from bnncli.system.memory import budget

if TYPE_CHECKING:
    from torch import Tensor

Read: TypeAlias = "Callable[[Inputs], tuple[Tensor, Tensor]]"
_CPU_BYTES = 2**29  # of activations at once: more gains a CPU nothing
_SHARE = 2  # one part in so many of a GPU's memory that is free
_FEW = 2  # examples to measure on


class InParts:
    """Gives the features (n, D) and the output of a batch as `read` does, of as many examples at once as have room.

    Args:
        read: one pass; its outputs have a row for each example.
        device: that it computes on.
    """

    def __init__(self, read: Read, device: torch.device) -> None:
        self.read, self.device = read, device
        self._bytes: dict[tuple[torch.Size, ...], int] = {}

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Of inputs (n, ...), or a dictionary of them."""
        count = len(next(iter(_tensors(inputs))))
        size = self._at_once(inputs, count)
        if count <= size:
            return self.read(inputs)
        parts = [self.read(_rows(inputs, start, start + size)) for start in range(0, count, size)]
        with torch.inference_mode():
            features, output = (torch.cat(found) for found in zip(*parts, strict=True))
        return features, output

    def _at_once(self, inputs: Inputs, count: int) -> int:
        """How many examples of this shape have room."""
        room = _CPU_BYTES if self.device.type == "cpu" else budget(self.device) // _SHARE
        if count <= _FEW or count * sum(one[0].numel() * _much_of(one) for one in _tensors(inputs)) <= room:
            return count
        shapes = tuple(one.shape[1:] for one in _tensors(inputs))
        if shapes not in self._bytes:
            self._bytes[shapes] = self._measured(inputs)
        return max(_FEW, room // max(1, self._bytes[shapes]))

    def _measured(self, inputs: Inputs) -> int:
        """Bytes that an example takes at the peak; 0 where the network takes no few examples, and so no part of a batch."""
        try:
            return peak_bytes(lambda: self.read(_rows(inputs, 0, _FEW))) // _FEW
        except DataError:
            return 0


def _much_of(values: Tensor) -> int:
    """Bytes of activations that a network hardly exceeds for each of its values: of a picture's, or of tokens."""
    return 64 if values.is_floating_point() else 2**15


def _tensors(inputs: Inputs) -> Iterator[Tensor]:
    yield from inputs.values() if isinstance(inputs, Mapping) else (inputs,)


def _rows(inputs: Inputs, start: int, stop: int) -> Inputs:
    if isinstance(inputs, Mapping):
        return {name: value[start:stop] for name, value in inputs.items()}
    return inputs[start:stop]

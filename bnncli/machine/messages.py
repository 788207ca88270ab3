"""Values as bytes, for another process of the same command: any that can be pickled, with tensors in them."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def pack(value: Any) -> Tensor:
    """A value as bytes (n,) uint8."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """The value that was packed; tensors are on the CPU."""
    return pickle.loads(packed.numpy().data)


class _Pickler(pickle.Pickler):
    """Takes of a tensor the values that it shows, not all that lies in the memory that it is a part of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.detach().cpu().contiguous().numpy(),)
        return NotImplemented

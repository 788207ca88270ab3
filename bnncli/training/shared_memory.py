"""Many small tensors as views of one vector, so that an optimizer has one update to make and not a hundred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def join_memory(tensors: Sequence[Tensor]) -> Tensor:
    """The vector that the tensors become views of, with a gradient that theirs are views of; all of one device and type."""
    whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
    whole.grad = torch.zeros_like(whole)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, own, gradient in zip(tensors, whole.split(sizes), whole.grad.split(sizes), strict=True):
        tensor.data = own.view_as(tensor)
        tensor.grad = gradient.view_as(tensor)
    return whole

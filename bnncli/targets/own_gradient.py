"""A function that computes its own gradient, as autograd sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass


ValueAndGradient: TypeAlias = "Callable[[Tensor], tuple[Tensor, Tensor]]"


class ValueWithGradient(torch.autograd.Function):
    """Lets autograd through a function that computes its own gradient: apply(theta (S, P), value_and_grad) -> (S,)."""

    @staticmethod
    def forward(ctx: Any, theta: Tensor, value_and_grad: ValueAndGradient) -> Tensor:
        """The values; their gradient is kept for backward."""
        value, gradient = value_and_grad(theta.detach())
        ctx.save_for_backward(gradient.to(theta.dtype))
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """The kept gradient times the upstream one."""
        (gradient,) = ctx.saved_tensors
        return upstream.to(gradient.dtype).unsqueeze(-1) * gradient, None

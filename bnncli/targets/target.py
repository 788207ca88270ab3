"""What a log posterior over theta says of itself: all that samplers, flows, the ELBO and importance weights know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from bnncli.theta.layout import ParamLayout

ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]


class LogJoint(Protocol):
    """Something whose log density over theta has a gradient: a target, or what a minibatch tells of it."""

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint (S,), nats, and its gradient (S, P), for theta (S, P)."""


class Target(LogJoint, Protocol):
    """An unnormalised log posterior over theta (P,): the log likelihood of N examples plus the log prior.

    Values and gradients of the whole are float64.
    """

    @property
    def layout(self) -> ParamLayout:
        """How theta lies."""

    @property
    def device(self) -> torch.device:
        """Where the work is done, and its results are."""

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the products."""

    @property
    def num_examples(self) -> int:
        """N."""

    @property
    def is_resident(self) -> bool:
        """Whether all that a gradient reads is on the device, where a step can be captured as a graph."""

    def log_joint(self, theta: Tensor) -> Tensor:
        """Log likelihood plus log prior, (S,), nats, for theta (S, P); autograd may pass through it."""

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """What a minibatch reads of the examples in index (B,): tensors (B, ...) on the device."""

    def minibatch(self, *examples: Tensor) -> LogJoint:
        """The target as some of its examples tell it, without bias: one of `examples`' tensors, or rows of them."""


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

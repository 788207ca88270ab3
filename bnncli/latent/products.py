"""Products whose gradients are written by hand, where autograd would spend more than the arithmetic.

A network's weight gradients are its largest arrays: autograd would allocate each anew and join them at the end. The networks
of a flow are small: there the nodes of the graph cost more than the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu


def product(inputs: Tensor, weight: Tensor, start: Tensor, gradient: Tensor | None = None) -> Tensor:
    """start + inputs weight^T, (R, n, out).

    Args:
        inputs: (R, n, in). weight: (R, out, in).
        start: (R, 1 or n, out).
        gradient: (R, out, in), to which the gradient of the weight is added in the backward pass, which must reach
            start or inputs; without it autograd has the weight's gradient.
    """
    if gradient is None or not torch.is_grad_enabled():
        return torch.baddbmm(start, inputs, weight.transpose(1, 2))
    result: Tensor = _Product.apply(inputs, start, weight, gradient)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, start: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.gradient, ctx.num_rows = weight, gradient, start.shape[1]
        return torch.baddbmm(start, inputs, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (inputs,) = ctx.saved_tensors
        ctx.gradient.baddbmm_(gradient.transpose(1, 2), inputs)
        to_inputs = torch.bmm(gradient, ctx.weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return to_inputs, None, None, None
        is_shared = ctx.num_rows == 1 and gradient.shape[1] > 1
        return to_inputs, gradient.sum(dim=1, keepdim=True) if is_shared else gradient, None, None


def small_network(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], slope: float) -> Tensor:
    """Outputs (R, n, out) of linear layers with leaky ReLU between them; one node for autograd, not five a layer.

    Args:
        inputs: (R, n, in).
        weights: (R, out, in) of each layer. biases: (R, out).
        slope: of the leaky ReLU below 0.

    A weight that has a `.grad` gets its gradient written there (not added) and none from autograd: a network is used once a
    step, and its memory is used again.
    """
    result: Tensor = _SmallNetwork.apply(inputs, slope, *weights, *biases)
    return result


class _SmallNetwork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, slope: float, *parameters: Tensor) -> Tensor:
        count = len(parameters) // 2
        hidden, kept = inputs, [inputs]
        for weight, bias in zip(parameters[:count], parameters[count:], strict=True):
            if len(kept) > 1:
                leaky_relu(hidden, slope, inplace=True)
            hidden = torch.baddbmm(bias.unsqueeze(1), hidden, weight.transpose(1, 2))
            kept.append(hidden)
        ctx.slope, ctx.count = slope, count
        ctx.memory = [weight.grad if weight.is_leaf else None for weight in parameters[:count]]
        ctx.save_for_backward(*kept[:-1], *parameters[:count])
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        to_weights: list[Tensor | None] = []
        to_biases: list[Tensor] = []
        for index in reversed(range(ctx.count)):
            to_weights.insert(0, _weight_gradient(gradient, hidden[index], ctx.memory[index]))
            to_biases.insert(0, gradient.sum(dim=1))
            gradient = torch.bmm(gradient, weights[index])
            if index > 0:
                # A leaky ReLU keeps the sign, so that its output says where its input was below 0.
                gradient = torch.ops.aten.leaky_relu_backward(gradient, hidden[index], ctx.slope, True)
        return gradient, None, *to_weights, *to_biases


def _weight_gradient(gradient: Tensor, inputs: Tensor, memory: Tensor | None) -> Tensor | None:
    """Of a linear layer; None when it was written to memory that is there."""
    if memory is None:
        return torch.bmm(gradient.transpose(1, 2), inputs)
    torch.bmm(gradient.transpose(1, 2), inputs, out=memory)
    return None

"""The diagonal of the Gauss-Newton matrix for some of the chosen parameters, with the others at their values in theta."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.network_curvature._columns import Columns
from bnncli.parameters.layouts import ParamPart, consecutive_parts
from bnncli.system.signals import between_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # of per-example gradients at once


def diagonal_of(target: NetworkTarget, theta: Tensor, parts: list[ParamPart], columns: Columns) -> list[Tensor]:
    """Return the diagonal for each of `parts`, float64: squared per-example gradients, summed over the columns.

    Takes one forward pass for the columns, another for the gradients, and one backward pass per column.
    """
    layout = target.layout
    network = layout.network
    assert network is not None
    theta = theta.to(target.device, target.dtype)
    if not parts:
        return []
    some = replace(layout, parts=consecutive_parts([(part.name, part.shape, part.is_bias) for part in parts]))
    every = layout.split(theta)
    own = some.join(every)
    total = torch.zeros(some.num_params, dtype=torch.float64, device=target.device)

    def logits(flat: Tensor, example: Tensor) -> Tensor:
        return network(example.unsqueeze(0), {**every, **some.split(flat)})[0]

    def gradients(example: Tensor, cotangents: Tensor) -> Tensor:
        pull = torch.func.vjp(lambda flat: logits(flat, example), own)[1]
        return torch.func.vmap(pull)(cotangents)[0]

    elements = _ELEMENTS.get(target.device.type, 2**24)
    size = max(1, elements // ((columns.num_drawn or target.layout.num_outputs) * some.num_params))
    size = min(size, target.rows_at_once(1, theta.dtype))
    for start in range(0, target.num_examples, size):
        between_blocks("the Hessian")
        rows = slice(start, start + size)
        inputs = target.inputs[rows].to(target.device).reshape(-1, *layout.input_shape)
        with torch.no_grad():
            outputs = layout.logits(inputs, theta.unsqueeze(0))[0]
        cotangents = torch.stack([column for column, _ in columns.of(outputs, rows)], dim=1)
        total += torch.func.vmap(gradients)(inputs, cotangents).square().sum(dim=(0, 1), dtype=torch.float64)
    return [total[part.place] for part in some.parts]

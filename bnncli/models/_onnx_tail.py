"""What an ONNX graph does to the logits behind its head, done again in PyTorch, where the steps of the head's proof can be seen.

onnxruntime gives results and not how they came about. Its output is compared with this one before this one is taken for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bnncli.models._graph_head import POOL, SHAPE

# Largest difference of the two that rounding explains, of each number and in units of 1 + the largest.
RELATIVE, ABSOLUTE = 1e-3, 1e-6
_OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
}
_OF_ALL: dict[str, Callable[[Tensor, int], Tensor]] = {"Softmax": torch.softmax, "LogSoftmax": torch.log_softmax}


class TailStep(NamedTuple):
    """One step behind a head.

    Attributes:
        does: as GraphStep.does.
        operator: such as Softmax.
        inputs: constants in its order; None for what comes from the head.
        attributes: of the node.
    """

    does: str
    operator: str
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any]


class Tail(nn.Module):
    """The steps between the logits (n, K) and an output of the graph."""

    def __init__(self, steps: Sequence[TailStep]) -> None:
        super().__init__()
        self._steps = steps

    def forward(self, logits: Tensor, output: Tensor) -> Tensor:
        """What the steps make of the logits, in the output's shape, where that is the output; the output itself elsewhere."""
        if not any(step.does not in (SHAPE, POOL) for step in self._steps) or logits.numel() != output.numel():
            return output
        found: Tensor | None = logits
        for step in self._steps:
            found = None if found is None else _done(step, found)
        if found is None:
            return output
        found = found.reshape(output.shape)
        allowed = ABSOLUTE * (1 + output.abs().max()) + RELATIVE * output.abs()
        return found if bool(((found - output).abs() <= allowed).all()) else output


def _done(step: TailStep, logits: Tensor) -> Tensor | None:
    """What a step makes of logits (n, K); None where that is not known."""
    if step.does in (SHAPE, POOL):
        return logits
    if step.operator == "Sigmoid":
        return logits.sigmoid()
    if step.operator in _OF_ALL:
        return _OF_ALL[step.operator](logits, 1) if step.attributes.get("axis", -1) in (1, -1) else None
    arrays = [None if array is None else torch.from_numpy(np.array(array)).to(logits) for array in step.inputs]
    if step.operator in _OF_TWO and len(arrays) == 2:
        first, second = (logits if array is None else _as_row(array, logits.shape[1]) for array in arrays)
        return None if first is None or second is None else _OF_TWO[step.operator](first, second)
    if step.operator == "BatchNormalization":
        scale, shift, mean, variance = (array for array in arrays[1:5])
        if scale is None or shift is None or mean is None or variance is None:
            return None
        return (logits - mean) / (variance + step.attributes.get("epsilon", 1e-5)).sqrt() * scale + shift
    return None


def _as_row(array: Tensor, num_outputs: int) -> Tensor | None:
    """A constant for every logit or for each one; None for any other shape."""
    return array.reshape(-1) if array.numel() in (1, num_outputs) else None

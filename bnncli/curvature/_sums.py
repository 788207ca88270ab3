"""Sums over the examples of a function of features and probabilities, block by block in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.system import signals
from bnncli.targets.blocks import BLOCK_ELEMENTS

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.last_layer import LastLayerTarget

_BLOCK_EXAMPLES = {"cpu": 2**13, "cuda": 2**16}


def sum_over_examples(
    target: LastLayerTarget, theta: Tensor, sums: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Sum `sums` over blocks of examples.

    `sums` takes features (n, F), with a final column of ones if there is a bias, and probabilities (K, n) at theta
    (P,).
    """
    layout, probabilities = target.layout, target.row_probabilities(theta)

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        signals.raise_if_interrupted("the Hessian")
        return sums(layout.augment_features(block), probabilities(rows, block))

    size = _BLOCK_EXAMPLES.get(target.device.type, 2**13)
    columns = max(layout.num_outputs, BLOCK_ELEMENTS.get(target.device.type, 2**19) // size)
    return target.blocks.sum(work, columns=columns, dtype=target.dtype)


def scaled(part: Tensor, target: LastLayerTarget) -> Tensor:
    """Multiply the part by the scale of the target's likelihood."""
    return part if target.likelihood_scale == 1.0 else torch.mul(part, target.likelihood_scale)

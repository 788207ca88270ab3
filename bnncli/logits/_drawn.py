"""The covariance of a network's logits, estimated without bias from draws of its linearised Gaussian: J D^T D J^T / S."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from bnncli.logits._pulled import Pulled
from bnncli.parameters.module import ModuleLayout
from bnncli.targets.blocks import slices

if TYPE_CHECKING:
    from torch import Tensor

_ELEMENTS = {"cpu": 2**25, "cuda": 2**28}  # of a block: intermediate values of all draws in a forward pass


def drawn_spread(layout: ModuleLayout, theta: Tensor, deviations: Tensor) -> Pulled:
    """Return the covariance from deviations D (S, P) of theta (P,), each pushed through the network in forward mode."""

    def roots(inputs: Tensor) -> Iterator[Iterable[Tensor]]:
        size = max(1, _ELEMENTS.get(inputs.device.type, 2**25) // (len(deviations) * layout.widest))
        for some in slices(0, max(1, len(inputs)), size):
            pushed = layout.push(inputs[some], theta.to(inputs.dtype), deviations.to(inputs.dtype))
            yield (pushed.permute(1, 2, 0) * len(deviations) ** -0.5,)

    return Pulled(roots)

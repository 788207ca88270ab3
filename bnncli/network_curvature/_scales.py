"""The weights and biases of normalisation layers, whose per-example gradients are cheap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch
from bnncli.network_curvature._uses import own_weights, with_bias
from bnncli.parameters.layouts import ParamPart

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout


@dataclass(frozen=True)
class Scale:
    """The weight (C,) of a normalisation layer, and its bias if that is chosen too and directly follows.

    Args:
        module: name of the layer.
        parts: of theta.
    """

    module: str
    parts: tuple[ParamPart, ...]

    def use(self, module: Any, inputs: Tensor) -> ScaleUse:
        """Record a call of the layer with inputs (n, ...)."""
        functional, has_bias = torch.nn.functional, len(self.parts) > 1
        if isinstance(module, torch.nn.LayerNorm):
            normalized = functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
            return ScaleUse(normalized, has_bias, num_last=len(module.normalized_shape))
        if isinstance(module, torch.nn.GroupNorm):
            return ScaleUse(functional.group_norm(inputs, module.num_groups, eps=module.eps), has_bias)
        normalized = functional.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)
        return ScaleUse(normalized, has_bias)


@dataclass(frozen=True)
class ScaleUse:
    """One call of a normalisation layer.

    Args:
        normalized: (n, C, ...), before the weight; (n, ..., C) if the weight applies to the last dimensions.
        has_bias: whether the bias is included.
        num_last: number of last dimensions the weight applies to; 0 if it applies to the second dimension.
    """

    normalized: Tensor
    has_bias: bool
    num_last: int = 0

    @property
    def num_examples(self) -> int:
        """n."""
        return len(self.normalized)

    def of(self, some: slice) -> ScaleUse:
        """Restrict to some of the examples."""
        return replace(self, normalized=self.normalized[some])

    def per_example(self, gradient: Tensor) -> Tensor:
        """Return the gradients (n, P) of weight and bias, given the gradient at the output."""
        slopes = gradient * self.normalized
        return torch.cat([self._summed(one) for one in ([slopes, gradient] if self.has_bias else [slopes])], dim=1)

    def _summed(self, tensor: Tensor) -> Tensor:
        """Sum over positions, (n, C)."""
        if self.num_last:
            return (
                tensor.flatten(-self.num_last).flatten(1, -2).sum(dim=1)
                if tensor.ndim > 1 + self.num_last
                else tensor.flatten(1)
            )
        return tensor.flatten(2).sum(dim=2) if tensor.ndim > 2 else tensor


def scales_of(layout: ModuleLayout) -> list[Scale]:
    """Return the scales of batch, layer and group norms, in theta order."""
    nn = torch.nn
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [
        Scale(name, with_bias(layout, index))
        for index, name, module in own_weights(layout)
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm))
        or (isinstance(module, batch_norms) and module.running_mean is not None)
    ]

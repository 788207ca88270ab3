"""The prior of a latent binary network: spike and slab for weights, Gaussian for biases, the same in a layer.

Skaaret-Lund (2022), section 4; Hubin and Storvik (2019), arXiv 1903.07594, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class LayerPrior(NamedTuple):
    """The prior of one layer, (R or 1, 1, 1) each; balance is log_sd - 1/2 - log_odds."""

    mean: Tensor
    log_sd: Tensor
    precision: Tensor
    log_odds: Tensor
    log_inclusion: Tensor
    log_exclusion: Tensor
    balance: Tensor

    @property
    def flat(self) -> LayerPrior:
        """The same for weights that lie in one row, (R or 1, 1)."""
        return LayerPrior(*(part[..., 0] for part in self))


@dataclass(frozen=True)
class SpikeAndSlab:
    """Prior of every weight of a network; slabs may differ by layer and repeat.

    Args:
        inclusion: (R or 1, L) float64, prior probability that a weight of the layer is there, between 0 and 1.
        slab_mean: (R or 1, L), mean of a weight that is there.
        slab_sd: (R or 1, L), its standard deviation.
        bias_sd: standard deviation of the biases, whose mean is zero.

    `is_uniform` says whether it is the same in all layers.
    """

    is_uniform: ClassVar[bool]  # of each instance, but no field: it follows from them
    _layers: ClassVar[dict[tuple[torch.dtype, torch.device], tuple[LayerPrior, ...]]]

    inclusion: Tensor
    slab_mean: Tensor
    slab_sd: Tensor
    bias_sd: float = 1.0

    def __post_init__(self) -> None:
        if not bool(((self.inclusion > 0) & (self.inclusion < 1)).all()):
            raise ValueError("expected a prior inclusion probability between 0 and 1")
        if not bool((self.slab_sd > 0).all()) or not self.bias_sd > 0:
            raise ValueError("expected positive prior standard deviations")
        alike = [bool((part == part[:, :1]).all()) for part in self.tensors().values()]
        object.__setattr__(self, "is_uniform", all(alike))  # asked for once: on a GPU it is a wait
        object.__setattr__(self, "_layers", {})

    @classmethod
    def constant(
        cls,
        num_layers: int,
        *,
        inclusion: float = 0.05,
        slab_mean: float = 0.0,
        slab_sd: float = 1.0,
        bias_sd: float = 1.0,
    ) -> SpikeAndSlab:
        """The same prior for all layers; the defaults are the thesis's."""
        parts = [torch.full((1, num_layers), value, dtype=torch.float64) for value in (inclusion, slab_mean, slab_sd)]
        return cls(parts[0], parts[1], parts[2], bias_sd)

    @property
    def bias_log_sd(self) -> float:
        """Logarithm of the biases' standard deviation."""
        return math.log(self.bias_sd)

    def layers(self, like: Tensor) -> tuple[LayerPrior, ...]:
        """That of each layer, in the precision and on the device of a tensor; made once."""
        key = like.dtype, like.device
        if key not in self._layers:
            self._layers[key] = tuple(self._layer(index, like) for index in range(self.inclusion.shape[1]))
        return self._layers[key]

    def _layer(self, index: int, like: Tensor) -> LayerPrior:
        inclusion, mean, sd = (part[:, index, None, None] for part in (self.inclusion, self.slab_mean, self.slab_sd))
        parts = (mean, sd.log(), sd.pow(-2), torch.logit(inclusion), inclusion.log(), torch.log1p(-inclusion))
        mean, log_sd, precision, log_odds, log_inclusion, log_exclusion = (part.to(like) for part in parts)
        balance = log_sd - 0.5 - log_odds
        return LayerPrior(mean, log_sd, precision, log_odds, log_inclusion, log_exclusion, balance)

    def to(self, device: torch.device | str) -> SpikeAndSlab:
        """A copy on another device."""
        return self.from_tensors({name: part.to(device) for name, part in self.tensors().items()}, self.bias_sd)

    def tensors(self) -> dict[str, Tensor]:
        """Inclusion, mean and standard deviation of the slab, by name."""
        return {"inclusion": self.inclusion, "slab_mean": self.slab_mean, "slab_sd": self.slab_sd}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], bias_sd: float) -> SpikeAndSlab:
        """The inverse of tensors()."""
        return cls(tensors["inclusion"], tensors["slab_mean"], tensors["slab_sd"], bias_sd)

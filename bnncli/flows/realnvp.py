"""Real NVP: one half of theta is scaled and shifted by functions of the other half.

Dinh, Sohl-Dickstein and Bengio (2017), arXiv:1605.08803, equations 7 and 8. Scale and shift act on the moved half
alone, or the log determinant would be wrong and the layer not invertible.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from bnncli.flows import ALL_DATA, SPACES, Recipe, load_tensors, place_buffer, tensors_of
from bnncli.flows._layers import Conditioner, bounded_log_scale, half_sizes, join_halves, settings_in, split_halves
from bnncli.options.declaration import HIDDEN
from bnncli.parameters.layouts import ParamLayout

SETTINGS = {"hidden": HIDDEN}


class Realnvp(nn.Module):
    """F(z) = (z_kept, exp(s) z_moved + shift), s = 2 tanh(raw / 2), (shift, raw) = network(z_kept).

    Starts as the identity: the network's outputs are 0.

    Args:
        layout: of theta; only P matters.
        generator: of the network's first weights.
        hidden: hidden units of the network.
        index: place among the layers: even ones keep the first half, odd ones the second.
    """

    recipe: ClassVar[Recipe] = ALL_DATA
    settings: ClassVar[tuple[str, ...]] = (*SETTINGS, "index")
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = (
        "(shift, raw) = network.weight / hidden tanh(network.hidden_weight z_kept + network.hidden_bias) + network.bias; "
        "log scale = 2 tanh(raw / 2); even index keeps the first half"
    )

    def __init__(
        self, layout: ParamLayout, generator: torch.Generator, *, hidden: int = HIDDEN.default, index: int = 0
    ) -> None:
        super().__init__()
        self.hidden, self.index = hidden, index
        self.register_buffer("place", place_buffer(index, generator))
        num_kept, num_moved = half_sizes(layout.num_params, index)
        self.network = Conditioner(num_kept, 2 * num_moved, hidden=hidden, generator=generator)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J| = sum_i s_i, (S,)."""
        kept, moved = split_halves(z, self.index)
        shift, log_scale = self._shift_and_log_scale(kept)
        return join_halves(kept, torch.addcmul(shift, log_scale.exp(), moved), self.index), log_scale.sum(dim=1)

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y: the kept half gives scale and shift again."""
        kept, moved = split_halves(y, self.index)
        shift, log_scale = self._shift_and_log_scale(kept)
        return join_halves(kept, (moved - shift) * (-log_scale).exp(), self.index)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `network.*`, float64, and `place` (1,), the index."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return load_tensors(cls(layout, torch.Generator(), **settings_in(tensors)), tensors)

    def summary(self) -> dict[str, float]:
        """Return the norms of the network's last weights for shift and log scale, and of their values where z_kept = 0."""
        with torch.no_grad():
            shift, log_scale = self._shift_and_log_scale(self.network.hidden_weight.new_zeros(1, self._num_kept))
            weights = self.network.weight.chunk(2)
            return {
                "shift_at_0": float(shift.norm()),
                "log_scale_at_0": float(log_scale.norm()),
                "shift_weight_norm": float(weights[0].norm()),
                "log_scale_weight_norm": float(weights[1].norm()),
            }

    @property
    def _num_kept(self) -> int:
        return self.network.hidden_weight.shape[1]

    def _shift_and_log_scale(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return both, (S, number moved), for the kept half (S, number kept)."""
        shift, raw = self.network(kept).chunk(2, dim=1)
        return shift, bounded_log_scale(raw)

"""Inverse autoregressive flow: each coordinate is scaled and shifted by functions of the ones before it.

Kingma et al. (2016), arXiv:1606.04934, equation 10, in the form exp(s) z + mu; the masks that keep the network
autoregressive are MADE's: Germain et al. (2015), arXiv:1502.03509, equations 8 to 13.
"""

from __future__ import annotations

from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from bnncli.flows import ALL_DATA, SPACES, Recipe, load_tensors, place_buffer, tensors_of
from bnncli.flows._layers import Conditioner, bounded_log_scale, settings_in
from bnncli.options.declaration import HIDDEN
from bnncli.parameters.layouts import ParamLayout

SETTINGS = {"hidden": HIDDEN}


class Iaf(nn.Module):
    """F(z)_i = exp(s_i) z_i + mu_i, (mu, raw) = network(z), s = 2 tanh(raw / 2), both of the coordinates before i alone.

    Forward is one pass. The inverse computes the coordinates one after the other, P small steps for all draws
    at once. Starts as the identity: the network's outputs are 0.

    Args:
        layout: of theta; only P matters.
        generator: of the network's first weights.
        hidden: hidden units; unit k sees the first 1 + k (P - 2) / (hidden - 1) coordinates, so few units make the
          dependence coarse.
        index: place among the layers: odd ones take the coordinates in reverse order.
    """

    recipe: ClassVar[Recipe] = ALL_DATA
    settings: ClassVar[tuple[str, ...]] = (*SETTINGS, "index")
    spaces: ClassVar[tuple[str, ...]] = SPACES
    maps: ClassVar[str] = (
        "(mu, raw) = network.weight / hidden tanh(network.hidden_weight z + network.hidden_bias) + network.bias with MADE's "
        "masks; log scale = 2 tanh(raw / 2); odd index goes backwards"
    )

    def __init__(
        self, layout: ParamLayout, generator: torch.Generator, *, hidden: int = HIDDEN.default, index: int = 0
    ) -> None:
        super().__init__()
        self.hidden, self.index = hidden, index
        self.register_buffer("place", place_buffer(index, generator))
        size = layout.num_params
        degrees = torch.arange(1, size + 1, device=generator.device)
        degrees = degrees if index % 2 == 0 else degrees.flip(0)
        reach = torch.linspace(1, max(size - 1, 1), hidden, dtype=torch.float64, device=generator.device).round()
        self.network = Conditioner(
            size,
            2 * size,
            hidden=hidden,
            generator=generator,
            input_mask=(degrees <= reach.unsqueeze(1)).double(),
            output_mask=(reach < degrees.unsqueeze(1)).double().repeat(2, 1),
        )

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image of z (S, P) and log|det J| = sum_i s_i, (S,)."""
        shift, raw = self.network(z).chunk(2, dim=1)
        log_scale = bounded_log_scale(raw)
        return torch.addcmul(shift, log_scale.exp(), z), log_scale.sum(dim=1)

    def inverse(self, y: Tensor) -> Tensor:
        """Return z (S, P) with F(z) = y: each coordinate, once found, adds its part to the hidden units for the next."""
        hidden_weight, weight = self.network.masked_weights()
        size, bias = y.shape[1], self.network.bias
        hidden = self.network.hidden_bias.expand(y.shape[0], -1)
        z = torch.zeros_like(y)
        for i in range(size) if self.index % 2 == 0 else reversed(range(size)):
            active = torch.tanh(hidden)
            shift = active @ weight[i] + bias[i]
            log_scale = bounded_log_scale(active @ weight[size + i] + bias[size + i])
            z[:, i] = (y[:, i] - shift) * (-log_scale).exp()
            hidden = torch.addcmul(hidden, z[:, i : i + 1], hidden_weight[:, i])
        return z

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `network.*`, float64, and `place` (1,), the index."""
        return tensors_of(self)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return load_tensors(cls(layout, torch.Generator(), **settings_in(tensors)), tensors)

    def summary(self) -> dict[str, float]:
        """Return the norms of the shift and the log scale at z = 0, and of the network's last weights for each."""
        with torch.no_grad():
            weight = self.network.masked_weights()[1]
            shift, raw = self.network(weight.new_zeros(1, weight.shape[0] // 2)).chunk(2, dim=1)
            return {
                "shift_at_0": float(shift.norm()),
                "log_scale_at_0": float(bounded_log_scale(raw).norm()),
                "shift_weight_norm": float(weight.chunk(2)[0].norm()),
                "log_scale_weight_norm": float(weight.chunk(2)[1].norm()),
            }

"""An encoder with LoRA adapters at queries and values, in plain torch: what the part `seconds` names as --model."""

from __future__ import annotations

import torch
from torch import nn


class Adapted(nn.Linear):
    """A linear layer with an adapter of low rank beside its weight."""

    def __init__(self, width: int, rank: int = 4) -> None:
        super().__init__(width, width)
        self.lora_A, self.lora_B = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output and the adapter's."""
        adapted: torch.Tensor = super().forward(x) + self.lora_B(self.lora_A(x))
        return adapted


class Layer(nn.Module):
    """Attention and two linear layers, with norms before them."""

    def __init__(self, width: int, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.value = Adapted(width), Adapted(width)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens (n, T, width) after the layer."""
        normed = self.norms[0](x)
        parts = [
            project(normed).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*parts)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = x + self.inner(self.norms[1](x))
        return hidden


class Encoder(nn.Module):
    """Sixteen tokens of an example of 64 numbers, six layers, and four classes of the tokens' mean."""

    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, 4)."""
        logits: torch.Tensor = self.head(self.layers(self.embed(x.reshape(-1, 16, 4))).mean(dim=1))
        return logits


def make(*, width: int = 384, layers: int = 6) -> nn.Module:
    """What --model names."""
    return Encoder(width, layers)

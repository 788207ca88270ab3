"""Parts of flow layers: the conditioner of coupling layers, and orthonormal columns as a product of Householder reflections."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from bnncli.flows import uniform, zeros


def reflection_vectors(size: int, rank: int, generator: torch.Generator) -> nn.Parameter:
    """Draw vectors (P, R) whose orthonormal_columns are a uniformly random frame of R directions.

    Their length affects only how fast Adam turns the frame: with sqrt(P) a step turns a direction by about the learning
    rate, whatever P is.
    """
    draw = torch.randn(size, rank, generator=generator, device=generator.device, dtype=torch.float64)
    packed, _ = torch.geqrf(draw)
    lower = packed.tril(-1)
    unit = torch.eye(size, rank, device=lower.device, dtype=lower.dtype)
    return torch.nn.Parameter((lower + unit) * math.sqrt(size))


def orthonormal_columns(vectors: Tensor) -> Tensor:
    """Return the first R columns (P, R) of the product of the reflections along the columns of vectors (P, R)."""
    rank = vectors.shape[1]
    gram = vectors.T @ vectors
    inverse_core = gram.triu(1) + torch.diag(0.5 * gram.diagonal())
    core_rows = torch.linalg.solve_triangular(inverse_core, vectors[:rank].T, upper=True)
    return torch.eye(*vectors.shape, device=vectors.device, dtype=vectors.dtype) - vectors @ core_rows


# A layer scales a coordinate by at most e^2 = 7.4: larger steps make such flows diverge.
LOG_SCALE_BOUND = 2.0


class Conditioner(nn.Module):
    """Map (S, num_inputs) to (S, num_outputs) by one hidden layer of tanh; all outputs are 0 at the start.

    The outputs are weight tanh(...) / hidden + bias: the tanh bounds them for any input, and without the division (Yang
    and Hu 2021, arXiv:2011.14522) one step of Adam would move them by its learning rate times the number of hidden
    units, which drowned every gain in noise. The hidden layer starts from U(-1/sqrt(n), 1/sqrt(n)), n its inputs.

    Args:
        num_inputs, num_outputs: sizes; either may be 0.
        hidden: hidden units.
        generator: of the first hidden weights.
        input_mask: (hidden, num_inputs), 0 where a weight is left out; none is left out by default.
        output_mask: (num_outputs, hidden), likewise.
    """

    input_mask: Tensor | None
    output_mask: Tensor | None

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        hidden: int,
        generator: torch.Generator,
        input_mask: Tensor | None = None,
        output_mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        bound = 1 / math.sqrt(max(num_inputs, 1))
        self.hidden_weight = nn.Parameter(uniform((hidden, num_inputs), bound, generator))
        self.hidden_bias = nn.Parameter(uniform((hidden,), bound, generator))
        self.weight = zeros(num_outputs, hidden, generator=generator)
        self.bias = zeros(num_outputs, generator=generator)
        self.register_buffer("input_mask", input_mask, persistent=False)
        self.register_buffer("output_mask", output_mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (S, num_outputs) for x (S, num_inputs)."""
        hidden_weight, weight = self.masked_weights()
        return linear(torch.tanh(linear(x, hidden_weight, self.hidden_bias)), weight, self.bias)

    def masked_weights(self) -> tuple[Tensor, Tensor]:
        """Return the effective weights of both layers: divided, and masked with zeros."""
        hidden_weight = self.hidden_weight if self.input_mask is None else self.hidden_weight * self.input_mask
        weight = self.weight / self.hidden_bias.shape[0]
        return hidden_weight, weight if self.output_mask is None else weight * self.output_mask


def half_sizes(num_params: int, index: int) -> tuple[int, int]:
    """Return how many coordinates layer `index` keeps and how many it moves: even layers keep the first half, odd the second."""
    first = num_params // 2
    return (first, num_params - first) if index % 2 == 0 else (num_params - first, first)


def split_halves(z: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Split z (S, P) into the coordinates that layer `index` keeps and those it moves."""
    first = z.shape[-1] // 2
    halves = z[..., :first], z[..., first:]
    return halves if index % 2 == 0 else (halves[1], halves[0])


def join_halves(kept: Tensor, moved: Tensor, index: int) -> Tensor:
    """Invert split_halves, (S, P)."""
    return torch.cat([kept, moved] if index % 2 == 0 else [moved, kept], dim=-1)


def bounded_log_scale(raw: Tensor) -> Tensor:
    """Return log scales in (-2, 2), with slope 1 at 0."""
    return LOG_SCALE_BOUND * torch.tanh(raw / LOG_SCALE_BOUND)


def settings_in(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return hidden and index of the layer that stored these tensors."""
    return {"hidden": tensors["network.hidden_bias"].shape[0], "index": int(tensors["place"])}

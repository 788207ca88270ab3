"""Orthonormal columns as a differentiable function of unconstrained vectors: a product of Householder reflections.

H_1 ... H_R = I - V T V^T with T^{-1} = striu(V^T V) + diag(V^T V) / 2 (Joffrain et al. 2006, ACM TOMS 32(2), "UT
transform"): orthogonal for any V, with no loop over the reflections.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def reflection_vectors(size: int, rank: int, generator: torch.Generator) -> nn.Parameter:
    """Vectors (P, R) whose orthonormal_columns are a uniformly random frame of R directions.

    Their length does not matter to the frame, only to how fast Adam turns it: sqrt(P) makes a step turn a direction by
    about its learning rate, whatever P is.
    """
    draw = torch.randn(size, rank, generator=generator, device=generator.device, dtype=torch.float64)
    packed, _ = torch.geqrf(draw)
    lower = packed.tril(-1)
    unit = torch.eye(size, rank, device=lower.device, dtype=lower.dtype)
    return torch.nn.Parameter((lower + unit) * math.sqrt(size))


def orthonormal_columns(vectors: Tensor) -> Tensor:
    """The first R columns (P, R) of the product of the reflections along the columns of vectors (P, R)."""
    rank = vectors.shape[1]
    gram = vectors.T @ vectors
    inverse_core = gram.triu(1) + torch.diag(0.5 * gram.diagonal())
    core_rows = torch.linalg.solve_triangular(inverse_core, vectors[:rank].T, upper=True)
    return torch.eye(*vectors.shape, device=vectors.device, dtype=vectors.dtype) - vectors @ core_rows

"""Random numbers that are the same each time."""

import torch
from torch import Tensor


def seeded(seed: int = 0) -> torch.Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers of a shape, float64."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def antithetic(count: int, size: int, seed: int = 0) -> Tensor:
    """Standard normals (count, size), float64: a half and its negatives, as a search for the prior draws theta."""
    half = torch.randn(count // 2, size, generator=seeded(seed), dtype=torch.float64)
    return torch.cat([half, -half])

"""Random numbers that are the same each time."""

import torch


def seeded(seed: int = 0) -> torch.Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)

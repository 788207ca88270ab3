"""Quasi-random normals: scrambled Sobol points through the normal quantile.

Sobol points with the direction numbers of Joe and Kuo (2008), a random linear scrambling and a digital shift (Matousek
1998, "On the L2-discrepancy for anchored boxes"), both as SciPy has them; every point is then moved to a uniform place
in its cell of 2^-32, so that each is exactly uniform and none is 0 or 1. Means over the points are unbiased, and their
error falls faster than 1 / sqrt(S) for integrands that are smooth or of few effective dimensions (Owen 1997). PyTorch's
own SobolEngine was tried and loses the stratification of single coordinates in thousands of dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST_DIMENSIONS = 21_201  # of the direction numbers
_BITS = 32


def quasi_normal(num_samples: int, dim: int, generator: torch.Generator) -> Tensor:
    """Points (S, dim) float64 on the CPU, each standard normal, together evenly spread; best where S is a power of two.

    Args:
        num_samples: S.
        dim: at most 21,201.
        generator: decides the scrambling.

    Raises:
        UsageError: too many dimensions.
    """
    from scipy.stats import qmc  # slow to import

    if dim > MOST_DIMENSIONS:
        raise UsageError(
            f"\0qmc\0: Sobol points support at most {MOST_DIMENSIONS} dimensions, but {dim} are needed",
            hint="for a gaussian posterior, \0integrator\0 logit-mc \0qmc\0 needs one dimension per logit; otherwise "
            "omit \0qmc\0",
        )
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    sequence = qmc.Sobol(dim, scramble=True, bits=_BITS, rng=seed)
    balanced = 1 << (num_samples - 1).bit_length()  # SciPy warns of anything else; balance_warning says it to users
    points = torch.from_numpy(sequence.random(balanced)[:num_samples])
    inside = torch.rand(num_samples, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    return torch.special.ndtri((points + inside * 2.0**-_BITS).clamp(tiny, 1 - 2.0**-53))


def balance_warning(num_samples: int, num_scrambles: int = 1) -> str | None:
    """What to say when Sobol points are not as even as they could be; None for a power of two in each scramble."""
    size, rest = divmod(num_samples, num_scrambles)
    if rest == 0 and size & (size - 1) == 0:
        return None
    lower = num_scrambles << (size.bit_length() - 1)
    return (
        f"\0qmc\0 spreads {num_samples} draws less evenly than {num_scrambles} times a power of two: use "
        f"\0samples\0 {lower} or {2 * lower}"
    )

"""Squared mean discrepancy (MMD) between draws that may come from chains: estimate, standard error, and a valid test.

Draws of one chain are not exchangeable, even after thinning: every second draw of an oscillating chain is positively
correlated, and permuting single draws would find differences that do not exist. Chains, and long stretches of them, are
nearly independent. Both sides are therefore cut into B blocks. With d_a the difference of the mean kernel features of
the a-th pair of blocks, the estimate is the U-statistic sum_{a != b} <d_a, d_b> / (B (B - 1)) of Gretton et al. (2012),
JMLR 13, eq. (4), with blocks in place of draws. It is unbiased under any dependence within blocks. Under equal
distributions, d_a and -d_a are equally likely up to the skewness of a block mean (exactly if both sides are chains of
one kind), so the test flips signs: Canay, Romano and Shaikh (2017), "Randomization tests under an approximate symmetry
assumption", Econometrica 85. The variance of the two sides' blocks may differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.evaluation.mmd import (
    NUM_DRAWS,
    NUM_PERMUTATIONS,
    TIE,
    Distances,
    kernels,
    mmd2_of,
    permutation_p_value_of,
    thin,
    thinned_places,
)
from bnncli.lazy import torch
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

MIN_INDEPENDENT = 20  # independent draws needed for a test
NUM_BLOCKS = 16  # target; 2^15 sign patterns
MIN_BLOCKS = 8  # 2^7 sign patterns, so the smallest p-value is 0.008
MOST_BLOCKS = 64
INDEPENDENT_IN_BLOCK = 10  # independent draws per stretch, so that neighbouring stretches are nearly independent


@dataclass(frozen=True)
class ThinnedDraws:
    """Draws to compare.

    Args:
        draws: (n, P).
        blocks: (n,) int64, numbered from 0 without gaps; draws of different blocks are independent. None: all draws
            are.
        untested: why no test is possible, or None.
    """

    draws: Tensor
    blocks: Tensor | None = None
    untested: str | None = None

    def to(self, device: torch.device) -> ThinnedDraws:
        """Move the draws to another device."""
        return replace(self, draws=self.draws.to(device))

    @property
    def num_blocks(self) -> int:
        """Number of independent blocks; the number of draws if all are independent."""
        return len(self.draws) if self.blocks is None else int(self.blocks.max()) + 1


@dataclass(frozen=True)
class Compared:
    """The squared discrepancy of two posteriors.

    Args:
        value: unbiased; without a test, biased upwards by the autocorrelation within chains.
        standard_error: jackknife over independent units; None if untested.
        p_value: test of equal distributions, at least 1 / (1 + num_permutations); None if untested.
        num_permutations: number of permutations of draws, or sign patterns of blocks.
        num_blocks: per side; None if single draws are permuted.
        untested: why there is no test, or None.
    """

    value: float
    standard_error: float | None
    p_value: float | None
    num_permutations: int
    num_blocks: int | None
    untested: str | None


def thin_draws(draws: Tensor, num_independent: int | None, *, count: int = NUM_DRAWS) -> ThinnedDraws:
    """Thin draws (C, T, P) evenly to at most `count`, and find independent blocks among them.

    Args:
        draws: (C, T, P).
        num_independent: smallest effective number of draws over all parameters, 0 if unknown. None: the draws are
            independent, not chains.
    """
    num_chains, length = check_shapes(draws=(draws, "C T P"))["C"], draws.shape[1]
    thinned = thin(draws, count)
    if num_independent is None:
        return ThinnedDraws(thinned)
    if num_independent < MIN_INDEPENDENT:
        known = f"only about {num_independent} of the draws are independent"
        known = known if num_independent else "the number of independent draws is unknown"
        reason = f"{known}; expected at least {MIN_INDEPENDENT}"
        return ThinnedDraws(thinned, untested=reason)
    stretches = _stretches(num_chains, length, num_independent)
    num_blocks = min(num_chains * stretches, MOST_BLOCKS)
    if num_blocks < MIN_BLOCKS:
        reason = f"only about {num_blocks} segments of the chains are independent; expected at least {MIN_BLOCKS}"
        return ThinnedDraws(thinned, untested=reason)
    places = thinned_places(num_chains * length, count)
    stretch = places // length * stretches + places % length * stretches // length
    return ThinnedDraws(thinned, stretch * num_blocks // (num_chains * stretches))


def compare_draws(
    x: ThinnedDraws,
    y: ThinnedDraws,
    distances: Distances,
    bandwidth: float,
    *,
    generator: torch.Generator,
    num_permutations: int = NUM_PERMUTATIONS,
) -> Compared:
    """Return the squared discrepancy of x and y, its standard error and p-value, from the distances of their draws.

    Raises:
        DataError: the bandwidth is not positive.
    """
    untested = x.untested or y.untested
    if untested is not None:
        return Compared(mmd2_of(distances, bandwidth).unbiased, None, None, num_permutations, None, untested)
    if x.blocks is None and y.blocks is None:
        found = mmd2_of(distances, bandwidth)
        p_value = permutation_p_value_of(distances, bandwidth, generator=generator, num_permutations=num_permutations)
        return Compared(found.unbiased, found.standard_error, p_value, num_permutations, None, None)
    num_blocks = min(x.num_blocks, y.num_blocks)
    if num_blocks < MIN_BLOCKS:
        reason = f"only {num_blocks} independent draws; expected at least {MIN_BLOCKS}"
        return Compared(mmd2_of(distances, bandwidth).unbiased, None, None, num_permutations, None, reason)
    products = _products(x, y, kernels(distances, bandwidth), num_blocks)
    value, error = _estimate(products)
    p_value = _sign_p_value(products, generator=generator, num_permutations=num_permutations)
    return Compared(value, error, p_value, num_permutations, num_blocks, None)


def _stretches(num_chains: int, length: int, num_independent: int) -> int:
    """Return the number of stretches per chain: enough for NUM_BLOCKS if each holds enough independent draws."""
    most = num_independent // (num_chains * INDEPENDENT_IN_BLOCK)
    return max(1, min(-(-NUM_BLOCKS // num_chains), most, length))


def _products(x: ThinnedDraws, y: ThinnedDraws, kernel: Distances, num_blocks: int) -> Tensor:
    """Return <d_a, d_b> (B, B), with a zero diagonal."""
    mean_x, mean_y = (_block_means(side, num_blocks, like=kernel.xy) for side in (x, y))
    cross = mean_x @ kernel.xy @ mean_y.T
    products = mean_x @ kernel.xx @ mean_x.T + mean_y @ kernel.yy @ mean_y.T - cross - cross.T
    return products.fill_diagonal_(0)


def _block_means(side: ThinnedDraws, num_blocks: int, *, like: Tensor) -> Tensor:
    """Return the matrix (B, n) that averages over each block; blocks beyond B are merged with their neighbours."""
    own = torch.arange(len(side.draws)) if side.blocks is None else side.blocks.cpu()
    place = own * num_blocks // side.num_blocks
    belongs = (place == torch.arange(num_blocks).unsqueeze(1)).to(like)
    return belongs / belongs.sum(dim=1, keepdim=True)


def _estimate(products: Tensor) -> tuple[float, float]:
    """Return the U-statistic over pairs of blocks, and its jackknife standard error over blocks."""
    size = len(products)
    total, own = products.sum(), products.sum(dim=1)
    without = (total - 2 * own) / ((size - 1) * (size - 2))
    variance = (size - 1) / size * (without - without.mean()).square().sum()
    return float(total) / (size * (size - 1)), math.sqrt(float(variance))


def _sign_p_value(products: Tensor, *, generator: torch.Generator, num_permutations: int) -> float:
    """Return (1 + #{flipped >= observed}) / (1 + number of patterns)."""
    size = len(products)
    flips = torch.randint(2, (num_permutations, size), generator=generator, device=generator.device)
    signs = torch.cat([torch.ones(1, size), 2.0 * flips.cpu() - 1]).to(products)
    values = ((signs @ products) * signs).sum(dim=1) / (size * (size - 1))
    return (1 + int((values[1:] >= values[0] - TIE).sum())) / (1 + num_permutations)

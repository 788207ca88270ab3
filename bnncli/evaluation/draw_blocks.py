"""Squared mean discrepancy between draws of which some are chains: estimate, standard error, and a test that holds its level.

Draws of one chain are not exchangeable, however they are thinned: every second draw of a chain that swings is positively
correlated, and relabelling single draws then finds differences that are not there. What is independent are chains, and
long stretches of them. So both sides are cut into as many blocks, d_a is the difference of the mean kernel features of
the a-th pair, and all that is said comes from the products of different pairs, sum_{a != b} <d_a, d_b> / (B (B - 1)): the
U-statistic of Gretton et al. (2012), JMLR 13, eq. (4), with blocks for draws. It is unbiased whatever happens within
blocks. Under equal distributions each d_a is as likely as -d_a, up to the skewness of a mean over a block (exactly where
both sides are chains of one kind), so that the test flips signs: Canay, Romano and Shaikh (2017), "Randomization tests
under an approximate symmetry assumption", Econometrica 85. Blocks of both sides may differ in their variance.
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

MIN_INDEPENDENT = 20  # draws, below which nothing is tested
NUM_BLOCKS = 16  # aimed at: 2^15 patterns of signs
MIN_BLOCKS = 8  # 2^7 patterns, so that p comes down to 0.008
MOST_BLOCKS = 64
INDEPENDENT_IN_BLOCK = 10  # independent draws in a stretch, so that neighbouring stretches hardly depend on each other


@dataclass(frozen=True)
class ThinnedDraws:
    """Draws as they are compared.

    Args:
        draws: (n, P).
        blocks: (n,) int64 from 0 up, without gaps: draws of different blocks are independent; None: all draws are.
        untested: why nothing can be tested with them; None where it can.
    """

    draws: Tensor
    blocks: Tensor | None = None
    untested: str | None = None

    def to(self, device: torch.device) -> ThinnedDraws:
        """The same on another device."""
        return replace(self, draws=self.draws.to(device))

    @property
    def num_blocks(self) -> int:
        """Of chains; the draws where all are independent."""
        return len(self.draws) if self.blocks is None else int(self.blocks.max()) + 1


@dataclass(frozen=True)
class Compared:
    """The squared discrepancy of two posteriors.

    Args:
        value: unbiased; where the draws cannot be tested, too large by what the draws of a chain have in common.
        standard_error: by the jackknife over what is independent; None where untested.
        p_value: of equal distributions, at least 1 / (1 + num_permutations); None where untested.
        num_permutations: relabellings of draws, or patterns of signs of blocks, that the seen one is held against.
        num_blocks: of each side; None where single draws are relabelled.
        untested: why there is no test; None where there is one.
    """

    value: float
    standard_error: float | None
    p_value: float | None
    num_permutations: int
    num_blocks: int | None
    untested: str | None


def thin_draws(draws: Tensor, num_independent: int | None, *, count: int = NUM_DRAWS) -> ThinnedDraws:
    """At most `count` of draws (C, T, P), spread evenly, and what is independent among them.

    Args:
        draws: (C, T, P).
        num_independent: the smallest effective number of draws over all parameters, 0 where unknown; None: independent
            draws, not chains.
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
    """The squared discrepancy of x and y with its standard error and p-value, from the distances of their draws.

    Raises:
        DataError: a bandwidth that is not positive.
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
    """In how many stretches each chain is cut: enough for NUM_BLOCKS, as long as each holds independent draws."""
    most = num_independent // (num_chains * INDEPENDENT_IN_BLOCK)
    return max(1, min(-(-NUM_BLOCKS // num_chains), most, length))


def _products(x: ThinnedDraws, y: ThinnedDraws, kernel: Distances, num_blocks: int) -> Tensor:
    """<d_a, d_b> (B, B), with zeros on the diagonal."""
    mean_x, mean_y = (_block_means(side, num_blocks, like=kernel.xy) for side in (x, y))
    cross = mean_x @ kernel.xy @ mean_y.T
    products = mean_x @ kernel.xx @ mean_x.T + mean_y @ kernel.yy @ mean_y.T - cross - cross.T
    return products.fill_diagonal_(0)


def _block_means(side: ThinnedDraws, num_blocks: int, *, like: Tensor) -> Tensor:
    """The matrix (B, n) that takes the mean over each block; blocks beyond B are merged with their neighbours."""
    own = torch.arange(len(side.draws)) if side.blocks is None else side.blocks.cpu()
    place = own * num_blocks // side.num_blocks
    belongs = (place == torch.arange(num_blocks).unsqueeze(1)).to(like)
    return belongs / belongs.sum(dim=1, keepdim=True)


def _estimate(products: Tensor) -> tuple[float, float]:
    """The U-statistic over pairs of blocks, and its standard error by the jackknife over blocks."""
    size = len(products)
    total, own = products.sum(), products.sum(dim=1)
    without = (total - 2 * own) / ((size - 1) * (size - 2))
    variance = (size - 1) / size * (without - without.mean()).square().sum()
    return float(total) / (size * (size - 1)), math.sqrt(float(variance))


def _sign_p_value(products: Tensor, *, generator: torch.Generator, num_permutations: int) -> float:
    """(1 + #{flipped >= seen}) / (1 + number of patterns)."""
    size = len(products)
    flips = torch.randint(2, (num_permutations, size), generator=generator, device=generator.device)
    signs = torch.cat([torch.ones(1, size), 2.0 * flips.cpu() - 1]).to(products)
    values = ((signs @ products) * signs).sum(dim=1) / (size * (size - 1))
    return (1 + int((values[1:] >= values[0] - TIE).sum())) / (1 + num_permutations)

"""Squared maximum mean discrepancy (MMD) between two sets of draws of theta.

Gretton et al. (2012), "A kernel two-sample test", JMLR 13, eq. (3) (unbiased) and (5) (biased), with the kernel
exp(-d^2 / bandwidth^2). The bandwidth depends only on the reference draws, so values are comparable. The permutation
test (section 5 there; p-value of Phipson and Smyth 2010) shows whether the draws differ at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

NUM_PERMUTATIONS = 999
NUM_DRAWS = 600  # per side; the biased estimate for equal distributions is then about 0.002
_PUBLISHED_DRAWS = 50
_MOST_VALUES = 2**25  # in the draws of one posterior: 128 MiB
_FEWEST_DRAWS = 50
TIE = 1e-12  # rounding of the statistic, whose kernel values are at most 1
_BLOCK = 2**22  # float64 values per block of parameters
_BLOCK_COPIES = 4  # of a block while distances are computed: both sides, one uncentred, and squares
_PAIR_COPIES = 3  # of the float64 kernel between all draws: distances, kernels, and the joint matrix
_LABEL_COPIES = 3  # of the float64 labels of all permutations: labels, their products, and both multiplied


@dataclass(frozen=True)
class Mmd:
    """Both estimates of the squared discrepancy, and the kernel's bandwidth.

    Args:
        unbiased: U-statistic; about 0, possibly negative, for equal distributions.
        biased: V-statistic; never negative, about 2/n (1 - mean kernel) for equal distributions, at most 2.
        bandwidth: of the kernel, in units of theta.
        standard_error: of the unbiased estimate, by the jackknife over independent draws of both sides (Efron and Stein
            1981: conservative on average; about sqrt(2) too large for equal distributions). None for fewer than three
            draws per side.
    """

    unbiased: float
    biased: float
    bandwidth: float
    standard_error: float | None = None


def thin(draws: Tensor, count: int = NUM_DRAWS) -> Tensor:
    """Return at most `count` draws (n, P) of draws (C, T, P), evenly spaced over and along the chains."""
    check_shapes(draws=(draws, "C T P"))
    flat = draws.flatten(0, 1)
    return flat if len(flat) <= count else flat[thinned_places(len(flat), count).to(draws.device)]


def thinned_places(total: int, count: int = NUM_DRAWS) -> Tensor:
    """Return indices (n,) int64 of at most `count` evenly spaced draws out of `total`, chains concatenated."""
    if total <= count:
        return torch.arange(total)
    # Midpoints of `count` equal stretches: every chain has an equal share, up to one draw.
    return (2 * torch.arange(count) + 1) * total // (2 * count)


def num_compared(num_params: int) -> int:
    """Return the number of draws to compare: 600, decreasing to 50 above 55,924 parameters."""
    return max(_FEWEST_DRAWS, min(NUM_DRAWS, _MOST_VALUES // num_params))


def comparing_bytes(num_draws: int, num_params: int) -> int:
    """Return the bytes needed to compare draws (n, P) on each side, with permutations, in addition to the draws."""
    block = 8 * min(_BLOCK, num_draws * num_params)
    relabelled = 8 * 2 * num_draws * (_PAIR_COPIES * 2 * num_draws + _LABEL_COPIES * NUM_PERMUTATIONS)
    looked_at = 6 * num_draws * num_params  # isfinite: float32 absolute values and two boolean arrays
    return max(looked_at, _BLOCK_COPIES * block + relabelled)


class Distances(NamedTuple):
    """Squared distances between draws x (n, P) and y (m, P), float64: xx (n, n), yy (m, m), xy (n, m).

    One pass over the parameters serves every kernel.
    """

    xx: Tensor
    yy: Tensor
    xy: Tensor


def squared_distances(x: Tensor, y: Tensor) -> Distances:
    """Return the squared distances of draws x (n, P) and y (m, P), with n and m at least 2.

    Raises:
        DataError: a side has fewer than two draws, or draws are not finite.
    """
    sizes = check_shapes(x=(x, "n P"), y=(y, "m P"))
    n, m = sizes["n"], sizes["m"]
    if min(n, m) < 2:
        raise DataError(f"the squared discrepancy needs at least two draws per side, got {n} and {m}")
    y = y.to(x.device)
    center = torch.cat([part.double().mean(dim=0) for part in y.split(_width(y), dim=1)])
    found = Distances(*(_squared_distances(a, b, center=center) for a, b in ((x, x), (y, y), (x, y))))
    if not math.isfinite(sum(float(part.sum()) for part in found)):
        raise DataError("expected finite draws, got NaN or infinity")
    return found


def median_bandwidth(draws: Tensor) -> float:
    """Return the median distance between pairs of rows of draws (n, P), float64.

    Raises:
        DataError: there are fewer than two draws, or half of the pairs coincide.
    """
    check_shapes(draws=(draws, "n P"))
    if draws.shape[0] < 2:
        raise DataError(f"a median distance needs at least two draws, got {draws.shape[0]}")
    return median_of(_squared_distances(draws, draws, center=draws[0]))


def median_of(squared: Tensor) -> float:
    """Return the median distance from squared distances (n, n). Raises DataError as median_bandwidth does."""
    rows, columns = torch.triu_indices(len(squared), len(squared), offset=1, device=squared.device)
    median = float(np.median(squared[rows, columns].sqrt().cpu().numpy()))
    # Coinciding draws give distances at rounding level relative to the spread, not exactly 0.
    if median <= 1e-6 * float(squared.max()) ** 0.5:
        raise DataError("half of the pairs of reference draws coincide, so their median distance is 0")
    return median


def published_bandwidth(x: Tensor, y: Tensor) -> float:
    """Return the median distance over pairs of the first 50 draws of x (n, P) and y (m, P) pooled.

    The rule of the refinement paper's published script (Kristiadi, Eschenhagen and Hennig 2022). It depends on x, so
    values are not comparable between posteriors. Raises DataError as median_bandwidth does.
    """
    return median_bandwidth(torch.cat([part[:_PUBLISHED_DRAWS].to(y) for part in (y, x)]))


def mmd2(x: Tensor, y: Tensor, bandwidth: float) -> Mmd:
    """Return both estimates of the squared MMD between draws x (n, P) and y (m, P), in float64.

    Args:
        x: (n, P), n at least 2.
        y: (m, P), m at least 2.
        bandwidth: of the kernel exp(-d^2 / bandwidth^2), positive.

    Raises:
        DataError: as in squared_distances, or the bandwidth is not positive.
    """
    return mmd2_of(squared_distances(x, y), bandwidth)


def mmd2_of(distances: Distances, bandwidth: float) -> Mmd:
    """Return both estimates of the squared MMD from the distances of the draws.

    Raises:
        DataError: the bandwidth is not positive.
    """
    xx, yy, xy = kernels(distances, bandwidth)
    n, m = xy.shape
    own_x, own_y = xx.sum(dim=1), yy.sum(dim=1)
    sum_xx, sum_yy, cross = float(own_x.sum()), float(own_y.sum()), 2 * float(xy.sum()) / (n * m)
    error = _jackknife_error(own_x - 1, own_y - 1, xy.sum(dim=1), xy.sum(dim=0)) if min(n, m) > 2 else None
    return Mmd(
        unbiased=(sum_xx - n) / (n * (n - 1)) + (sum_yy - m) / (m * (m - 1)) - cross,
        biased=max(0.0, sum_xx / n**2 + sum_yy / m**2 - cross),
        bandwidth=bandwidth,
        standard_error=error,
    )


def kernels(distances: Distances, bandwidth: float) -> Distances:
    """Apply the kernel to squared distances. Raises DataError if the bandwidth is not positive."""
    if not bandwidth > 0:
        raise DataError(f"expected a positive bandwidth, got {bandwidth}")
    return Distances(*((part / -(bandwidth**2)).exp_() for part in distances))


def _jackknife_error(own_x: Tensor, own_y: Tensor, cross_x: Tensor, cross_y: Tensor) -> float:
    """Return the jackknife standard error of the unbiased estimate; own sums exclude the draw itself."""
    sums = [own_x.sum(), own_y.sum()]
    variance = torch.zeros_like(sums[0])
    for side, (own, across) in enumerate(((own_x, cross_x), (own_y, cross_y))):
        n, m = len(own), (len(own_y), len(own_x))[side]
        without = (sums[side] - 2 * own) / ((n - 1) * (n - 2)) - 2 * (across.sum() - across) / ((n - 1) * m)
        variance += (n - 1) / n * (without - without.mean()).square().sum()
    return float(variance.sqrt())


def permutation_p_value(
    x: Tensor, y: Tensor, bandwidth: float, *, generator: torch.Generator, num_permutations: int = NUM_PERMUTATIONS
) -> float:
    """Return the permutation p-value of the unbiased estimate: (1 + #{permuted >= observed}) / (1 + B).

    All draws must be independent; for chains, even thinned ones, use bnncli.evaluation.draw_blocks.

    Args:
        x: (n, P), n at least 2.
        y: (m, P), m at least 2.
        bandwidth: of the kernel exp(-d^2 / bandwidth^2), positive.
        generator: random generator of the permutations.
        num_permutations: B.

    Raises:
        DataError: as in mmd2.
    """
    distances = squared_distances(x, y)
    return permutation_p_value_of(distances, bandwidth, generator=generator, num_permutations=num_permutations)


def permutation_p_value_of(
    distances: Distances, bandwidth: float, *, generator: torch.Generator, num_permutations: int = NUM_PERMUTATIONS
) -> float:
    """Return the permutation p-value from the distances of the draws.

    One kernel matrix K serves all permutations: with z in {0, 1}^(n + m) marking the first sample, all sums follow from
    z K z and z K 1.
    """
    xx, yy, xy = kernels(distances, bandwidth)
    n, m = xy.shape
    kernel = torch.cat([torch.cat([xx, xy], dim=1), torch.cat([xy.T, yy], dim=1)]).fill_diagonal_(0)
    is_first = _relabelled(num_permutations, n, m, generator=generator).to(kernel.device).double()
    # The observed labelling uses the same products, so that ties are exact.
    is_first = torch.cat([(torch.arange(n + m, device=kernel.device) < n).double().unsqueeze(0), is_first])
    to_all, total = is_first @ kernel.sum(dim=1), kernel.sum()
    within_x = (is_first @ kernel).mul_(is_first).sum(dim=1)
    cross = to_all - within_x
    within_y = total - within_x - 2 * cross
    values = within_x / (n * (n - 1)) + within_y / (m * (m - 1)) - 2 * cross / (n * m)
    return (1 + int((values[1:] >= values[0] - TIE).sum())) / (1 + num_permutations)


def _relabelled(num_permutations: int, n: int, m: int, *, generator: torch.Generator) -> Tensor:
    """Return which draws each permutation puts first, (B, n + m), n in every row: argsort(random numbers) < n.

    The bits of floats in [0, 1) are integers below 2^30 in the same order. With the label as the lowest bit, they can
    be sorted as values, ten times as fast; equal numbers keep their order.
    """
    numbers = torch.rand(num_permutations, n + m, generator=generator, device=generator.device).cpu()
    is_later = (torch.arange(n + m) >= n).to(torch.int32)
    keys = numbers.view(torch.int32).mul_(2).add_(is_later).numpy()
    keys.sort(axis=1)
    return torch.from_numpy(keys % 2 == 0)


def _squared_distances(x: Tensor, y: Tensor, *, center: Tensor) -> Tensor:
    """Return squared distances (n, m) between rows, float64, centred so that a common offset costs no precision.

    Distances add up over parameters, so blocks of columns keep the float64 copies small.
    """
    squared = torch.zeros(x.shape[0], y.shape[0], dtype=torch.float64, device=x.device)
    width = _width(x, y)
    for begin in range(0, x.shape[1], width):
        block = slice(begin, begin + width)
        a, b = x[:, block].double() - center[block], y[:, block].double() - center[block]
        squared.add_(a.square().sum(dim=1)[:, None]).add_(b.square().sum(dim=1)).addmm_(a, b.T, alpha=-2)
    return squared.clamp_(min=0)


def _width(*sides: Tensor) -> int:
    """Return the number of parameters per block for draws (n, P)."""
    return max(1, _BLOCK // max(len(side) for side in sides))

"""Distances between draws of theta: maximum mean discrepancy with a test, means, covariances, marginals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.shapes import check_shapes
from bnncli.targets.blocks import slices

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
    return flat if len(flat) <= count else flat[thin_indices(len(flat), count).to(draws.device)]


def thin_indices(total: int, count: int = NUM_DRAWS) -> Tensor:
    """Return indices (n,) int64 of at most `count` evenly spaced draws out of `total`, chains concatenated."""
    if total <= count:
        return torch.arange(total)
    # Midpoints of `count` equal stretches: every chain has an equal share, up to one draw.
    return (2 * torch.arange(count) + 1) * total // (2 * count)


def num_draws_to_compare(num_params: int) -> int:
    """Return the number of draws to compare: 600, decreasing to 50 above 55,924 parameters."""
    return max(_FEWEST_DRAWS, min(NUM_DRAWS, _MOST_VALUES // num_params))


def comparison_bytes(num_draws: int, num_params: int) -> int:
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
    return median_distance(_squared_distances(draws, draws, center=draws[0]))


def median_distance(squared: Tensor) -> float:
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
    return mmd2_from_distances(squared_distances(x, y), bandwidth)


def mmd2_from_distances(distances: Distances, bandwidth: float) -> Mmd:
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

    All draws must be independent; for chains, even thinned ones, use bnncli.evaluation.distances.

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
    return permutation_p_value_from_distances(
        distances, bandwidth, generator=generator, num_permutations=num_permutations
    )


def permutation_p_value_from_distances(
    distances: Distances, bandwidth: float, *, generator: torch.Generator, num_permutations: int = NUM_PERMUTATIONS
) -> float:
    """Return the permutation p-value from the distances of the draws.

    One kernel matrix K serves all permutations: with z in {0, 1}^(n + m) marking the first sample, all sums follow from
    z K z and z K 1.
    """
    xx, yy, xy = kernels(distances, bandwidth)
    n, m = xy.shape
    kernel = torch.cat([torch.cat([xx, xy], dim=1), torch.cat([xy.T, yy], dim=1)]).fill_diagonal_(0)
    is_first = _draw_labels(num_permutations, n, m, generator=generator).to(kernel.device).double()
    # The observed labelling uses the same products, so that ties are exact.
    is_first = torch.cat([(torch.arange(n + m, device=kernel.device) < n).double().unsqueeze(0), is_first])
    to_all, total = is_first @ kernel.sum(dim=1), kernel.sum()
    within_x = (is_first @ kernel).mul_(is_first).sum(dim=1)
    cross = to_all - within_x
    within_y = total - within_x - 2 * cross
    values = within_x / (n * (n - 1)) + within_y / (m * (m - 1)) - 2 * cross / (n * m)
    return (1 + int((values[1:] >= values[0] - TIE).sum())) / (1 + num_permutations)


def _draw_labels(num_permutations: int, n: int, m: int, *, generator: torch.Generator) -> Tensor:
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
class Discrepancy:
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
    places = thin_indices(num_chains * length, count)
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
) -> Discrepancy:
    """Return the squared discrepancy of x and y, its standard error and p-value, from the distances of their draws.

    Raises:
        DataError: the bandwidth is not positive.
    """
    untested = x.untested or y.untested
    if untested is not None:
        return Discrepancy(
            mmd2_from_distances(distances, bandwidth).unbiased, None, None, num_permutations, None, untested
        )
    if x.blocks is None and y.blocks is None:
        found = mmd2_from_distances(distances, bandwidth)
        p_value = permutation_p_value_from_distances(
            distances, bandwidth, generator=generator, num_permutations=num_permutations
        )
        return Discrepancy(found.unbiased, found.standard_error, p_value, num_permutations, None, None)
    num_blocks = min(x.num_blocks, y.num_blocks)
    if num_blocks < MIN_BLOCKS:
        reason = f"only {num_blocks} independent draws; expected at least {MIN_BLOCKS}"
        return Discrepancy(
            mmd2_from_distances(distances, bandwidth).unbiased, None, None, num_permutations, None, reason
        )
    products = _products(x, y, kernels(distances, bandwidth), num_blocks)
    value, error = _estimate(products)
    p_value = _sign_p_value(products, generator=generator, num_permutations=num_permutations)
    return Discrepancy(value, error, p_value, num_permutations, num_blocks, None)


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


MIN_COVARIANCE_DRAWS = 4
# sqrt(2 / pi) times the integral of sqrt(F (1 - F)) with F the standard normal CDF: sqrt(n) times the mean
# 1-Wasserstein distance between n draws of N(0, 1) and N(0, 1).
GAUSSIAN_WASSERSTEIN = 1.2883792


def reference_scale(draws: Tensor) -> Tensor:
    """Return the standard deviation (P,) float64 of each parameter over the reference's draws (m, P).

    Raises:
        DataError: there are fewer than two draws, or a parameter is constant.
    """
    num_draws, num_params = draws.shape
    if num_draws < 2:
        raise DataError(f"a standard deviation needs at least two draws, got {num_draws}")
    scale = torch.cat([draws[:, block].double().std(dim=0) for block in _parameters(num_params, num_draws)])
    stuck = (~(scale > 0)).nonzero().flatten()
    if len(stuck):
        raise DataError(f"parameter {int(stuck[0])} does not vary in the reference's draws")
    return scale


def wasserstein_distances(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return 1-Wasserstein distances (P,) float64 between the marginals of x (n, P) and y (m, P), in units of scale (P,).

    The integral of the absolute difference of the quantile functions, which jump at the same levels for all parameters.
    """
    sizes = check_shapes(x=(x, "n P"), y=(y, "m P"), scale=(scale, "P"))
    n, m = sizes["n"], sizes["m"]
    # In units of 1 / (n m): x jumps at multiples of m, y at multiples of n.
    jumps = torch.cat([torch.arange(n, device=x.device) * m, torch.arange(m, device=x.device) * n]).unique()
    widths = torch.diff(jumps, append=jumps.new_full((1,), n * m)).double() / (n * m)
    found = [x.new_empty(0, dtype=torch.float64)]
    for block in _parameters(sizes["P"], n + m):
        ours, theirs = (part[:, block].double().sort(dim=0).values for part in (x, y.to(x.device)))
        gap = (ours[jumps // m] - theirs[jumps // n]).abs_()
        found.append(widths @ gap)
    return torch.cat(found) / scale


def wasserstein_floor(n: int, m: int) -> float:
    """Return the mean distance between n and m independent draws of N(0, 1), for large n and m."""
    return GAUSSIAN_WASSERSTEIN * math.sqrt(1 / n + 1 / m)


def mean_error(mean: Tensor, reference_mean: Tensor, scale: Tensor) -> float:
    """Return the root mean square difference of two means (P,), float64, in units of scale (P,)."""
    check_shapes(mean=(mean, "P"), reference_mean=(reference_mean, "P"), scale=(scale, "P"))
    return float(((mean.to(scale) - reference_mean.to(scale)) / scale).square().mean().sqrt())


def mean_floor(n: float, m: float) -> float:
    """Return the root mean square error between the means of n and m independent draws of one distribution; inf: exact."""
    return math.sqrt(1 / n + 1 / m)


def covariance_error(x: Tensor, y: Tensor, scale: Tensor) -> float:
    """Return ||S_x - S_y|| / ||S_y||, Frobenius norm, of the covariances in units of scale (P,).

    The square root of an unbiased estimate of the square, or 0 if that estimate is negative. A point mass has error 1.

    Args:
        x: (n, P) independent draws, n at least 4.
        y: (m, P) independent draws, m at least 4.

    Raises:
        DataError: there are too few draws, or S_y is within the noise.
    """
    sizes = check_shapes(x=(x, "n P"), y=(y, "m P"), scale=(scale, "P"))
    n, m = sizes["n"], sizes["m"]
    if min(n, m) < MIN_COVARIANCE_DRAWS:
        raise DataError(f"a covariance error needs at least {MIN_COVARIANCE_DRAWS} draws per side, got {n} and {m}")
    own_x, own_y, cross = (scale.new_zeros(a, b) for a, b in ((n, n), (m, m), (n, m)))
    for block in _parameters(sizes["P"], n + m):
        ours, theirs = (part[:, block].to(scale) / scale[block] for part in (x, y))
        ours, theirs = (part - part.mean(dim=0) for part in (ours, theirs))
        own_x += ours @ ours.T
        own_y += theirs @ theirs.T
        cross += ours @ theirs.T
    square_x, square_y = _squared_trace(own_x), _squared_trace(own_y)
    product = float(cross.square().sum()) / ((n - 1) * (m - 1))
    if not square_y > 0:
        raise DataError("the covariance of the reference's draws is below their noise")
    return math.sqrt(max(0.0, square_x + square_y - 2 * product) / square_y)


def covariance_floor(n: int, m: int) -> float:
    """Return the smallest error that n and m draws can detect: the root of the standard deviation of its square.

    For equal Gaussians of many independent parameters (Li and Chen 2012, section 3); sqrt(sqrt(2)) times this for one.
    """
    return math.sqrt(2 * (1 / n + 1 / m))


def _squared_trace(products: Tensor) -> float:
    """Return an unbiased estimate of tr(S^2) from the inner products (n, n) of n draws centred at any one point."""
    n = len(products)
    others = products.clone().fill_diagonal_(0)
    rows = others.sum(dim=1)
    total = others.square().sum() + rows.sum().square() / ((n - 1) * (n - 2)) - 2 * rows.square().sum() / (n - 2)
    return float(total) / (n * (n - 3))


def _parameters(num_params: int, num_draws: int) -> Iterator[slice]:
    """Return slices of parameters whose draws fit a block."""
    return slices(0, num_params, max(1, _BLOCK // num_draws))


Row = dict[str, Any]

MOST_DRAWS = 1000  # per side, for marginals and covariances
_MOST_DRAWN_VALUES = 2**20  # draws times P, for marginals and covariances
_UNIT = "standard deviation of the reference's draws"
_RULES = {
    "unbiased": "median distance of the reference's draws",
    "biased": "median distance of the reference's draws",
    "published": "median distance of the first 50 draws of the reference and the first 50 of the posterior, together: "
    "differs by posterior",
}


@dataclass(frozen=True)
class WeightDraws:
    """The draws of a posterior in weight space.

    Args:
        draws: (C, T, P), or (S, P) for a single chain.
        num_independent: effective number of independent draws, 0 if unknown; None: all are independent.
        mean: (P,), exact mean if known.
    """

    draws: Tensor
    num_independent: int | None = None
    mean: Tensor | None = None

    @property
    def chains(self) -> Tensor:
        """Draws as (C, T, P)."""
        return self.draws if self.draws.ndim == 3 else self.draws.unsqueeze(0)

    @property
    def num_draws(self) -> int:
        """Number of draws, C T."""
        return self.chains.shape[0] * self.chains.shape[1]

    def independent(self, most: int) -> int:
        """Return the effective number of independent draws among `most` evenly spaced ones."""
        count = min(most, self.num_draws)
        return count if self.num_independent is None else min(count, self.num_independent)

    def center(self) -> Tensor:
        """Return the mean (P,) float64: exact if known, else of all draws."""
        return self.draws.double().flatten(0, -2).mean(dim=0) if self.mean is None else self.mean.double()


def num_distance_draws(num_params: int) -> int:
    """Return the number of draws to measure distances with: 1,000, decreasing to 600 for many parameters."""
    return max(NUM_DRAWS, min(MOST_DRAWS, _MOST_DRAWN_VALUES // num_params))


class DrawPair:
    """Draws of a posterior and of a reference, with cached statistics that several distances need.

    Args:
        reference: name of the reference posterior.
        generator: random generator of permutations.
        device: device for thinned draws.
    """

    def __init__(
        self,
        ours: WeightDraws,
        theirs: WeightDraws,
        *,
        reference: str,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self.ours, self.theirs, self.reference = ours, theirs, reference
        self.generator, self.device = generator, torch.device(device)

    @property
    def sides(self) -> tuple[WeightDraws, WeightDraws]:
        """Both sides, ours first."""
        return self.ours, self.theirs

    def thinned(self, *counts: int) -> tuple[Tensor, Tensor]:
        """Return thinned draws (n, P) and (m, P); `counts` is one limit for both sides or one for each."""
        pairs = zip(self.sides, (counts * 2)[:2], strict=True)
        x, y = (thin(side.chains, count).to(self.device) for side, count in pairs)
        return x, y

    def independent(self, most: int) -> list[int]:
        """Return the effective number of independent draws per side among at most `most`."""
        return [side.independent(most) for side in self.sides]

    @property
    def most_draws(self) -> int:
        """Draws per side for marginals and covariances."""
        return num_distance_draws(self.theirs.chains.shape[2])

    @cached_property
    def marginals(self) -> tuple[Tensor, Tensor]:
        """Draws (n, P) and (m, P) for the comparison of marginals."""
        return self.thinned(self.most_draws)

    @cached_property
    def scale(self) -> Tensor:
        """(P,), the unit of every parameter. Raises DataError if a parameter of the reference is constant."""
        return reference_scale(self.marginals[1])


class Distance(NamedTuple):
    """A distance between draws, in one or several forms.

    Args:
        forms: per form, a row with its defining settings and no value.
        measure: returns the fields that each form's row gains, such as its value. Raises DataError if undefined.
    """

    forms: Sequence[Row]
    measure: Callable[[DrawPair], Sequence[Row]]


def reference_rows(
    ours: WeightDraws | None,
    theirs: WeightDraws | None,
    distances: Mapping[str, Distance],
    *,
    reference: str,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> list[Row]:
    """Return the rows of every distance by name, with the reason for undefined ones.

    Args:
        ours: None if the posterior has no draws of theta.
        theirs: draws of the reference, or None. Identical draws are undefined: a posterior has no distance to itself.
        reference, generator, device: as in DrawPair.
    """
    reason = _why_undefined(ours, theirs, reference)
    pair = None
    if ours is not None and theirs is not None and reason is None:
        pair = DrawPair(ours, theirs, reference=reference, generator=generator, device=device)
    return [
        row for name, distance in distances.items() for row in _distance_rows(name, distance, pair, reference, reason)
    ]


def undefined_rows(distances: Mapping[str, Distance], *, reference: str, reason: str) -> list[Row]:
    """Return the rows of every distance, undefined for this reason."""
    return [
        row for name, distance in distances.items() for row in _distance_rows(name, distance, None, reference, reason)
    ]


def _distance_rows(
    name: str, distance: Distance, pair: DrawPair | None, reference: str, reason: str | None
) -> list[Row]:
    if pair is not None:
        try:
            found = distance.measure(pair)
        except DataError as error:
            reason = error.message
        else:
            told = {"name": name, "reference": reference}
            return [{**form, **told, **row} for form, row in zip(distance.forms, found, strict=True)]
    known = [
        {key: value for key, value in form.items() if key not in ("name", "n", "reference")} for form in distance.forms
    ]
    nothing = {"value": None, "n": None, "reference": reference, "undefined": reason}
    return [{"name": name, **form, **nothing} for form in known]


def _mmd2(pair: DrawPair) -> list[Row]:
    x, y = (thin_draws(side.chains, side.num_independent).to(pair.device) for side in pair.sides)
    distances = squared_distances(x.draws, y.draws)
    bandwidth = median_distance(distances.yy)
    shared: Row = {"n": [len(x.draws), len(y.draws)], "bandwidth": bandwidth}
    found = [
        _compute_unbiased_mmd(x, y, distances, bandwidth, generator=pair.generator),
        {"value": mmd2_from_distances(distances, bandwidth).biased},
        _compute_published_mmd(pair, distances),
    ]
    return [shared | row for row in found]


def _compute_published_mmd(pair: DrawPair, distances: Distances) -> Row:
    """The biased estimate with the published bandwidth, which is 0 if a posterior repeats a point."""
    try:
        bandwidth = published_bandwidth(*(side.chains.flatten(0, 1) for side in pair.sides))
    except DataError:
        reason = "half of the pairs of draws that set the bandwidth coincide, so their median distance is 0"
        return {"value": None, "n": None, "bandwidth": None, "undefined": reason}
    return {"value": mmd2_from_distances(distances, bandwidth).biased, "bandwidth": bandwidth}


def _compute_unbiased_mmd(
    x: ThinnedDraws, y: ThinnedDraws, distances: Distances, bandwidth: float, *, generator: torch.Generator
) -> Row:
    """Return estimate, standard error and test; with too few independent draws, only the estimate from all draws."""
    found = compare_draws(x, y, distances, bandwidth, generator=generator)
    row: Row = {"value": found.value, "standard_error": found.standard_error, "p_value": found.p_value}
    if found.p_value is None:
        return row | {"p_value_undefined": found.untested}
    return row | {
        "p_value_draws": [len(x.draws), len(y.draws)],
        "permutations": found.num_permutations,
        "blocks": found.num_blocks,
    }


def _wasserstein(pair: DrawPair) -> list[Row]:
    x, y = pair.marginals
    found = wasserstein_distances(x, y, pair.scale)
    independent = pair.independent(pair.most_draws)
    floor = wasserstein_floor(*independent) if min(independent) > 0 else None
    shared = {"n": [len(x), len(y)]}
    return [
        {**shared, "value": float(found.mean()), "noise_floor": floor},
        {**shared, "value": float(found.max()), "noise_floor": None},
    ]


def _mean_error(pair: DrawPair) -> list[Row]:
    ours, theirs = pair.sides
    counts: list[float] = [side.independent(side.num_draws) for side in (ours, theirs)]
    if ours.mean is not None:
        counts[0] = math.inf
    row = {
        "value": mean_error(ours.center(), theirs.center(), pair.scale),
        "mean": "draws" if ours.mean is None else "exact",
        "n": [ours.num_draws, theirs.num_draws],
        "noise_floor": mean_floor(*counts) if min(counts) > 0 else None,
    }
    return [row]


def _covariance_error(pair: DrawPair) -> list[Row]:
    """Return the error between draws thinned to the effective number of independent draws."""
    scale, counts = pair.scale, pair.independent(pair.most_draws)
    shared = {"n": [len(side) for side in pair.marginals]}
    if min(counts) < MIN_INDEPENDENT:
        return [{**shared, "value": None, "undefined": _too_few(counts)}]
    try:
        value = covariance_error(*pair.thinned(*counts), scale)
    except DataError as error:
        return [{**shared, "value": None, "undefined": error.message}]
    return [{"value": value, "n": counts, "noise_floor": covariance_floor(*counts)}]


def _too_few(counts: list[int]) -> str:
    return f"only about {min(counts)} of the draws are independent; expected at least {MIN_INDEPENDENT}"


def _why_undefined(ours: WeightDraws | None, theirs: WeightDraws | None, reference: str) -> str | None:
    """Return why the distance is undefined, or None."""
    if theirs is None:
        return f"no draws of {reference}"
    if ours is None:
        return "no draws of theta"
    x, y = ours.chains, theirs.chains
    if x.shape[2] != y.shape[2]:
        return f"theta has {x.shape[2]} parameters, but the draws of {reference} have {y.shape[2]}"
    if min(ours.num_draws, theirs.num_draws) < 2:
        return "fewer than two draws"
    if ours.draws is theirs.draws or (x.shape == y.shape and torch.equal(x.cpu(), y.cpu())):
        return f"the draws are identical to the reference {reference}"
    return None


# None fixes the position of a key whose value is known later: rows keep this order.
_SCALED: Row = {"n": None, "reference": None, "unit": _UNIT, "higher_is_better": False, "name": None}
_KERNEL: Row = {"name": None, "kernel": "rbf", "higher_is_better": False, "reference": None, "n": None}
MMD2 = Distance(
    [{**_KERNEL, "estimator": name, "bandwidth_rule": rule, "bandwidth": None} for name, rule in _RULES.items()], _mmd2
)
WASSERSTEIN = Distance([{**_SCALED, "order": 1, "over": over} for over in ("mean", "largest")], _wasserstein)
MEAN_ERROR = Distance([{**_SCALED, "over": "root mean square"}], _mean_error)
COVARIANCE_ERROR = Distance(
    [{**_SCALED, "norm": "frobenius", "estimator": "root of the unbiased square"}], _covariance_error
)

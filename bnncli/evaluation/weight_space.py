"""Distances in weight space between the draws of two posteriors: marginals, means, covariances.

All are in units of the reference's standard deviation of each parameter, and come with their expected value for draws
of the same Gaussian. The unbiased estimate of the trace of a squared covariance is the U-statistic of Li and Chen
(2012), "Two sample tests for high-dimensional covariance matrices", Annals of Statistics 40, arXiv 1206.0917, eq.
(2.1), summed as in Song, Smola, Gretton, Bedo and Borgwardt (2012), JMLR 13, eq. (4). It needs inner products of draws
and no P by P matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.shapes import check_shapes
from bnncli.targets.blocks import slices

if TYPE_CHECKING:
    from torch import Tensor

MIN_COVARIANCE_DRAWS = 4
# sqrt(2 / pi) times the integral of sqrt(F (1 - F)) with F the standard normal CDF: sqrt(n) times the mean
# 1-Wasserstein distance between n draws of N(0, 1) and N(0, 1).
GAUSSIAN_WASSERSTEIN = 1.2883792
_BLOCK = 2**22  # float64 values per block of parameters


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

"""E softmax(f) for one Gaussian f to near machine precision: the reference that integrators are compared with.

softmax depends only on the logits minus their mean, so the integral runs over the range of P S P, P = I - 11^T / K, in
at most K - 1 dimensions: by the trapezoid rule on a product grid (Trefethen and Weideman 2014, "The exponentially
convergent trapezoidal rule", SIAM Review 56(3)) where that has few enough nodes, as K <= 3 always has in practice;
else by scrambled Sobol points (Owen 1995), whose independent scramblings give the standard error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from bnncli.integrators.quadrature import binary_moments, binary_probs
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of

if TYPE_CHECKING:
    from torch import Tensor

_MAX_NODES = 2**22
_CHUNK_LOGITS = 2**20
_WINDOW = 9.0  # standard deviations: 2e-19 of the mass lies beyond
_ROUNDING = 1e-14
NUM_SCRAMBLES = 16
SOBOL_LOGITS = 2**26  # of all points together


class Exact(NamedTuple):
    """Probabilities (C,) float64, their error bound (quadrature) or standard error (Sobol), and the method."""

    probs: Tensor
    error: float
    method: str


def exact_probs(mean: Tensor, covariance: Tensor, *, seed: int = 0, sobol_logits: int = SOBOL_LOGITS) -> Exact:
    """Compute E softmax(f), f ~ N(mean (K,), covariance (K, K)); with a single logit, [1 - p, p].

    Args:
        seed: of the scramblings.
        sobol_logits: K times the number of Sobol points, at most.
    """
    mean, covariance = mean.double().cpu(), covariance.double().cpu()
    likelihood = likelihood_of(len(mean))
    if likelihood.num_classes == 2:
        probs = binary_probs(*binary_moments(mean[None], covariance[None], likelihood))[0][0]
        return Exact(probs, _ROUNDING, "quadrature in one dimension")
    mean = mean - mean.mean()
    root = _sum_zero_root(covariance)
    if root.shape[1] == 0:
        return Exact(torch.softmax(mean, dim=0), _ROUNDING, "softmax of fixed logits")
    counts = _grid_counts(root)
    if math.prod(counts) <= _MAX_NODES:
        return _product_rule(mean, root, counts)
    return _sobol(mean, root, seed, sobol_logits)


def _sum_zero_root(covariance: Tensor) -> Tensor:
    """Return L (K, r) with L L^T = P S P and r its rank."""
    centred = covariance - covariance.mean(dim=0)
    centred = centred - centred.mean(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh((centred + centred.T) / 2)
    is_kept = values > 1e-14 * covariance.diagonal().max()
    return vectors[:, is_kept] * values[is_kept].sqrt()


def _grid_counts(root: Tensor) -> list[int]:
    """Return the nodes of each axis that leave an error near 1e-14.

    sum_k e^f_k has no zero where the imaginary parts of the logits lie within pi of each other: in axis j a strip of
    half width pi / (largest difference of column j). A Gaussian alone would do with a step of 0.7.
    """
    spreads = (root.amax(dim=0) - root.amin(dim=0)).tolist()
    return [math.ceil(2 * _WINDOW / min(0.4, 0.55 / spread)) for spread in spreads]


def _product_rule(mean: Tensor, root: Tensor, counts: list[int]) -> Exact:
    """Integrate on two grids, the second shifted by half a step along every axis: their errors have opposite signs, and cancel."""
    axes = [torch.arange(count, dtype=torch.float64) * (2 * _WINDOW / count) - _WINDOW for count in counts]
    sums = []
    for shift in (0.0, 0.5):
        shifted = [axis + shift * 2 * _WINDOW / len(axis) for axis in axes]
        total, mass = torch.zeros_like(mean), 0.0
        for nodes in _product(shifted, _CHUNK_LOGITS // len(mean)):
            weights = torch.exp(-0.5 * nodes.square().sum(dim=1))
            total += weights @ torch.softmax(mean + nodes @ root.T, dim=1)
            mass += float(weights.sum())
        sums.append(total / mass)
    error = float((sums[0] - sums[1]).abs().max()) / 2
    method = f"product trapezoid rule, {' x '.join(map(str, counts))} nodes, twice"
    return Exact((sums[0] + sums[1]) / 2, max(error, _ROUNDING), method)


def _product(axes: list[Tensor], size: int) -> Iterator[Tensor]:
    """Yield nodes (n, r) of the product grid, at most `size` at a time."""
    counts = [len(axis) for axis in axes]
    for begin in range(0, math.prod(counts), size):
        places = torch.unravel_index(torch.arange(begin, min(begin + size, math.prod(counts))), counts)
        yield torch.stack([axis[place] for axis, place in zip(axes, places, strict=True)], dim=1)


def _sobol(mean: Tensor, root: Tensor, seed: int, logits: int) -> Exact:
    """Average over independently scrambled Sobol sequences, 2^20 points in all where K is at most 64."""
    size = 2 ** (min(20, int(math.log2(logits / len(mean)))) - int(math.log2(NUM_SCRAMBLES)))
    means = torch.zeros(NUM_SCRAMBLES, len(mean), dtype=torch.float64)
    for scramble in range(NUM_SCRAMBLES):
        engine = torch.quasirandom.SobolEngine(root.shape[1], scramble=True, seed=NUM_SCRAMBLES * seed + scramble)
        for begin in range(0, size, _CHUNK_LOGITS // len(mean)):
            count = min(_CHUNK_LOGITS // len(mean), size - begin)
            uniform = (
                engine.draw(count, dtype=torch.float64) + 2.0**-31
            )  # Sobol points are multiples of 2^-30, 0 among them
            means[scramble] += torch.softmax(mean + torch.special.ndtri(uniform) @ root.T, dim=1).sum(dim=0) / size
    error = float((means.std(dim=0) / math.sqrt(NUM_SCRAMBLES)).max())
    return Exact(means.mean(dim=0), error, f"{NUM_SCRAMBLES} scrambles of {size} Sobol points")

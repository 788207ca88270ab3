"""Activations of a latent binary layer, from the moments of its weights or from weights that were drawn.

Local reparametrisation: Kingma, Salimans and Welling (2015), arXiv 1506.02557; for spike and slab, Skaaret-Lund (2022),
equation (4.2), with the variance put right: Var(w) = alpha sigma^2 + alpha (1 - alpha) mu^2. Mean and variance of an
activation are exact; that it is Gaussian is an approximation, good where many inputs add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.latent.factors import Moments
from bnncli.latent.products import product
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def draw_activations(
    inputs: Tensor,
    weight: Moments,
    bias_mean: Tensor,
    bias_variance: Tensor,
    noise: Tensor,
    multiplier: Tensor | None = None,
    *,
    gradient: Moments | None = None,
) -> Tensor:
    """Gaussian draws (R, n, out) of x w^T + b with their exact mean and variance.

    Args:
        inputs: (R, n, in).
        weight: moments of one layer's weights, (R, out, in) each.
        bias_mean, bias_variance: (R, out).
        noise: standard normal, (R, n, out).
        multiplier: z of each input, (R, n, in) or (R, 1, in).
        gradient: as in `product`, of each moment.
    """
    to_mean, to_noise, to_switching = gradient or (None, None, None)
    scaled = inputs if multiplier is None else inputs * multiplier
    mean = product(scaled, weight.mean, bias_mean.unsqueeze(1), to_mean)
    squared = inputs.square()
    variance = product(squared, weight.noise, bias_variance.unsqueeze(1), to_noise)
    if weight.switching is not None:
        other = squared if multiplier is None else scaled.square()
        variance = product(other, weight.switching, variance, to_switching)
    return torch.addcmul(mean, variance.sqrt(), noise)

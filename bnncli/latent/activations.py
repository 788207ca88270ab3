"""Activations of a latent binary layer, from the moments of its weights or from weights that were drawn.

Local reparametrisation: Kingma, Salimans and Welling (2015), arXiv 1506.02557; for spike and slab, Skaaret-Lund (2022),
equation (4.2), with the variance put right: Var(w) = alpha sigma^2 + alpha (1 - alpha) mu^2. Mean and variance of an
activation are exact; that it is Gaussian is an approximation, good where many inputs add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bnncli.latent.factors import Moments

_LEAST_VARIANCE = 1e-20  # added, so that the derivative of the square root is finite where nothing varies


def draw_activations(
    inputs: Tensor, weight: Moments, bias_mean: Tensor, bias_sd: Tensor, noise: Tensor, multiplier: Tensor | None = None
) -> Tensor:
    """Gaussian draws (R, n, out) of x w^T + b with their exact mean and variance.

    Args:
        inputs: (R, n, in).
        weight: moments of one layer's weights, (R, out, in) each.
        bias_mean, bias_sd: (R, out).
        noise: standard normal, (R, n, out).
        multiplier: z of each input, (R, n, in) or (R, 1, in).
    """
    scaled = inputs if multiplier is None else inputs * multiplier
    mean = torch.baddbmm(bias_mean.unsqueeze(1), scaled, weight.mean.transpose(1, 2))
    floor = bias_sd.square().unsqueeze(1) + _LEAST_VARIANCE
    squared = inputs.square()
    if weight.switching is None:
        variance = torch.baddbmm(floor, squared, weight.noise.transpose(1, 2))
    elif multiplier is None:
        variance = torch.baddbmm(floor, squared, (weight.noise + weight.switching).transpose(1, 2))
    else:
        variance = torch.baddbmm(floor, squared, weight.noise.transpose(1, 2))
        variance = torch.baddbmm(variance, scaled.square(), weight.switching.transpose(1, 2))
    return torch.addcmul(mean, variance.sqrt(), noise)

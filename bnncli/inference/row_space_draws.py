"""Draws of theta inside the span of the features, completed by independent draws of the prior outside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.posteriors import standard_normal
from bnncli.targets.row_space import RowSpace
from bnncli.theta.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor


def complete(theta: Tensor, generator: torch.Generator, *, rows: RowSpace, prior: Prior) -> tuple[Tensor, Tensor]:
    """All of theta (S, P), for draws (S, K (r + 1)) of it inside; and the log prior density of what is added, (S,).

    Args:
        generator: of what is added.
        rows: the span.
        prior: of all of theta; isotropic over the weights.
    """
    noise = standard_normal(theta.shape[0], rows.layout.num_params, generator, theta.device).to(theta)
    weight, bias = rows.layout.split(noise)
    nothing = None if bias is None else torch.zeros_like(bias)
    noise = rows.layout.join(weight, nothing)
    outside = noise - rows.lift(rows.reduce(noise))
    precision = prior.weight_precision
    constant = 0.5 * rows.num_outside * math.log(precision / (2 * math.pi))
    return rows.lift_about(theta, prior) + outside * precision**-0.5, constant - 0.5 * outside.double().square().sum(
        dim=1
    )

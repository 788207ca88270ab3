"""The validation loss of a Gaussian over a last layer by draws of the logits, where draws of theta would take long.

The logits of an example are exactly normal: a draw takes K normals of its own (as `integrators.logit_mc`) in place of P that are
multiplied by the covariance's root. K = 1,000 and D = 1,280 with Kronecker factors: 128 draws for 2,439 examples take 60 CPU s
by theta, half of them for draws that no example has seen yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from bnncli.numerics.row_noise import row_shifts, shifted_normal, uniform_points
from bnncli.posteriors.gaussian import Gaussian

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.targets.target import CurvedTarget, HeldOutByLogits
    from bnncli.theta.layout import LogitLayout

_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits that are made at a time


def losses_by_logits(
    held_out: HeldOutByLogits, target: CurvedTarget, theta: Tensor, covariance: Covariance, *, noise: Tensor
) -> Tensor:
    """The loss of each example under N(theta, covariance), (M,) float64 nats; see HeldOut.losses.

    Args:
        noise: (S, K), standard normal, which each example shifts (`numerics.row_noise`).
    """
    gaussian = Gaussian(theta, covariance, cast("LogitLayout", target.layout), target.prior)
    points = uniform_points(noise)

    def drawn(features: Tensor) -> Iterator[Tensor]:
        mean, root = gaussian.logit_root(features)
        size = max(1, _ELEMENTS.get(features.device.type, 2**20) // mean.numel())
        shifts = row_shifts(features, mean.shape[1])
        for some in points.split(size):
            yield root.apply(shifted_normal(some, shifts, mean)).transpose(0, 1) + mean.T.unsqueeze(1)

    return held_out.losses_by(drawn, num_draws=len(noise))

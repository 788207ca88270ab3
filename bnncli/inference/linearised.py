"""The validation loss of a Gaussian over a network's parameters, as it predicts: with the network linearised at its mean.

Draws of the weights put into the network itself would judge another predictive, which is far worse under a weak prior (Immer, Korzepa
and Bauer 2021, arXiv:2008.08400), and choose too strong a one. Draws are of the logits themselves where their covariance is
found a layer at a time, else products of the logits' Jacobian with draws of theta, whichever takes less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from bnncli import registry
from bnncli.covariances import num_varying
from bnncli.logits import root_of_covariances
from bnncli.logits._network import covariances_together, is_by_layer
from bnncli.numerics.row_noise import row_shifts, shifted_normal, uniform_points
from bnncli.posteriors.gaussian import Gaussian
from bnncli.theta.layout import ClassifierLayout, LogitLayout

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.targets.target import CurvedTarget, HeldOut, LinearisedHeldOut
    from bnncli.theta.layout import ParamLayout

_TOGETHER = 2**24  # numbers in all covariances that are judged together


def noise_size(layout: ParamLayout, structure: str, num_draws: int) -> int:
    """Normals that a draw takes: K for the logits of an example, P for theta."""
    return layout.num_params if _draws_theta(layout, structure, num_draws) else cast(LogitLayout, layout).num_outputs


def linearised_losses(
    held_out: HeldOut, target: CurvedTarget, theta: Tensor, covariances: Sequence[Covariance], *, noise: Tensor
) -> Tensor:
    """The loss of each example under each N(theta, covariance), (C, M) float64 nats; see HeldOut.losses.

    Args:
        covariances: C of one structure, which share one Jacobian where they are `shared_by`, and are one alone where not.
        noise: (S, K), which each example shifts (`numerics.row_noise`), or (S, P), standard normal, as `noise_size` says.
    """
    layout, num_draws = cast(ClassifierLayout, target.layout), len(noise)
    examples = cast("LinearisedHeldOut", held_out)
    first = Gaussian(theta, covariances[0], cast(LogitLayout, layout), target.prior).logits
    if _draws_theta(layout, covariances[0].structure, num_draws):
        (covariance,) = covariances
        deviations = covariance.unwhiten(noise[:, : num_varying(covariance)]).to(target.dtype)

        def pushed(inputs: Tensor) -> Iterator[Tensor]:
            assert first.push is not None
            yield (first.mean(inputs) + first.push(inputs, deviations)).permute(2, 0, 1)

        return examples.losses_of(pushed, num_draws=num_draws, width=2 * layout.widest)
    points = uniform_points(noise)
    together = covariances_together(covariances, cast(LogitLayout, layout), theta)

    def drawn(inputs: Tensor) -> Iterator[Tensor]:
        mean = first.mean(inputs)
        normals = shifted_normal(points, row_shifts(inputs, mean.shape[1]), mean)
        for covariance in together(inputs):
            root = root_of_covariances(covariance).to(inputs)
            yield root.apply(normals).transpose(0, 1) + mean.T.unsqueeze(1)

    num_outputs = layout.num_outputs
    width = num_outputs + 2 * len(covariances) * num_outputs**2 // num_draws
    return examples.losses_of(drawn, num_draws=num_draws, width=width)


def shared_by(layout: ParamLayout, structure: str, num_draws: int) -> int:
    """How many covariances of a structure are to be judged together: 1 where that saves no work, or takes much memory."""
    if _draws_theta(layout, structure, num_draws):
        return 1
    return max(1, _TOGETHER // int(registry.load_class("network_curvature", structure).num_elements(layout)))


def _draws_theta(layout: ParamLayout, structure: str, num_draws: int) -> bool:
    return num_draws < cast(LogitLayout, layout).num_outputs or not is_by_layer(structure)

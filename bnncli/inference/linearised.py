"""The validation loss of a Gaussian over a network's parameters, as it predicts: with the network linearised at its mean.

Draws of the weights put into the network itself would judge another predictive, which is far worse under a weak prior (Immer, Korzepa
and Bauer 2021, arXiv:2008.08400), and choose too strong a one. Draws are of the logits themselves where their covariance is
found a layer at a time, else products of the logits' Jacobian with draws of theta, whichever takes less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from bnncli.covariances import num_varying
from bnncli.logits._network import is_by_layer
from bnncli.posteriors.gaussian import Gaussian
from bnncli.theta.layout import ClassifierLayout, LogitLayout

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.targets.target import CurvedTarget, HeldOut, LinearisedHeldOut
    from bnncli.theta.layout import ParamLayout


def noise_size(layout: ParamLayout, structure: str, num_draws: int) -> int:
    """Normals that a draw takes: K for the logits of an example, P for theta."""
    return layout.num_params if _draws_theta(layout, structure, num_draws) else cast(LogitLayout, layout).num_outputs


def linearised_losses(
    held_out: HeldOut, target: CurvedTarget, theta: Tensor, covariance: Covariance, *, noise: Tensor
) -> Tensor:
    """The loss of each example under N(theta, covariance), (M,) float64 nats; see HeldOut.losses.

    Args:
        noise: (S, K) or (S, P), standard normal, as `noise_size` says.
    """
    layout, num_draws = cast(ClassifierLayout, target.layout), len(noise)
    gaussian = Gaussian(theta, covariance, cast(LogitLayout, target.layout), target.prior).logits
    examples = cast("LinearisedHeldOut", held_out)
    if _draws_theta(target.layout, covariance.structure, num_draws):
        deviations = covariance.unwhiten(noise[:, : num_varying(covariance)]).to(target.dtype)

        def pushed(inputs: Tensor) -> Tensor:
            assert gaussian.push is not None
            return (gaussian.mean(inputs) + gaussian.push(inputs, deviations)).permute(2, 0, 1)

        return examples.losses_of(pushed, num_draws=num_draws, width=2 * layout.widest)

    def drawn(inputs: Tensor) -> Tensor:
        mean, root = gaussian.root(inputs)
        return root.apply(noise.to(mean)).transpose(0, 1) + mean.T.unsqueeze(1)

    return examples.losses_of(drawn, num_draws=num_draws, width=layout.num_outputs)


def _draws_theta(layout: ParamLayout, structure: str, num_draws: int) -> bool:
    return num_draws < cast(LogitLayout, layout).num_outputs or not is_by_layer(structure)

"""The loss of each training example under the Gaussian of all others, without another fit: leave-one-out cross-validation.

At the mode of the log posterior of a last layer with precision H, the gradient of all other examples is that of the one left out, g (K,)
with respect to its logits, with the sign turned, and their precision is H less J^T Lambda J, where J are the derivatives of its logits f and
Lambda (K, K) is the Hessian of its loss. One Newton step then moves its logits to f + T g and leaves them with the covariance
T = (S^-1 - Lambda)^-1, S = J H^-1 J^T their covariance under all examples (Rad and Maleki 2020, arXiv 1801.10243, sec. 2; of the
whole Gaussian as Vehtari et al. 2016, arXiv 1412.7461, sec. 3.3). Of another structure than the full one S is that structure's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from bnncli.lazy import torch
from bnncli.logits import root_of_covariances
from bnncli.numerics.row_noise import row_shifts, shifted_normal, uniform_points
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.held_out import HeldOutFeatures
from bnncli.targets.logit_blocks import row_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.covariances import Covariance
    from bnncli.likelihoods import Likelihood
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.target import CurvedTarget
    from bnncli.theta.layout import LogitLayout

MOST_ROWS = 10_000  # examples, which tell a mean loss
_OPERATIONS = 1e10  # of all examples: K^3 each
_MOST_LEVERAGE = 1 - 1e-6  # under a rough structure an example may seem to tell more than all do


@dataclass(frozen=True)
class LeftOut(HeldOutFeatures):
    """Examples of a target itself, each to be predicted by the posterior of all others.

    Args:
        scale: of the target's log likelihood.
    """

    scale: float

    @classmethod
    def of(cls, target: LastLayerTarget, generator: torch.Generator) -> LeftOut:
        """All examples of a target, or a random choice of so many that their losses are soon found."""
        count = min(target.num_examples, MOST_ROWS, int(_OPERATIONS / target.layout.num_outputs**3))
        order = torch.randperm(target.num_examples, generator=generator, device=generator.device)
        index = order[:count].sort().values
        labels = target.labels[index.to(target.device)]
        return cls(target.rows(index.to(target.features.device)), labels, target.layout, target.likelihood_scale)


def left_out_losses(
    held_out: LeftOut, target: CurvedTarget, theta: Tensor, covariance: Covariance, *, noise: Tensor
) -> Tensor:
    """The loss of each example under the Gaussian without it, (M,) float64 nats; see HeldOut.losses.

    Args:
        theta: (P,), the mode.
        covariance: of all examples there.
        noise: (S, K), standard normal, which each example shifts (`numerics.row_noise`).
    """
    gaussian = Gaussian(theta, covariance, cast("LogitLayout", target.layout), target.prior)
    points, likelihood = uniform_points(noise), held_out.layout.likelihood
    losses = torch.empty(len(held_out.features), dtype=torch.float64, device=held_out.features.device)
    columns = noise.numel() + 4 * noise.shape[1] ** 2
    for rows in row_blocks(len(losses), columns, losses.device):
        features, labels = held_out.features[rows], held_out.labels[rows]
        moments = gaussian.logit_moments(features.double())
        mean, without = logits_without_own(*moments, labels, likelihood, scale=held_out.scale)
        normal = shifted_normal(points, row_shifts(features, mean.shape[1]), mean)
        drawn = root_of_covariances(without).apply(normal).transpose(0, 1) + mean.T.unsqueeze(1)
        logs = likelihood.decision_logs(drawn, labels).logsumexp(dim=1)
        losses[rows] = math.log(len(noise)) - logs.mean(dim=0)
    return losses


def logits_without_own(
    mean: Tensor, covariance: Tensor, labels: Tensor, likelihood: Likelihood, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Mean (n, K) and covariance (n, K, K) of the logits of examples, each without its own label.

    Args:
        mean, covariance: of all examples' posterior, float64.
        labels: (n,), or (n, C) where classes do not exclude each other.
        scale: of the log likelihood.
    """
    _, probabilities = likelihood.normalize_(mean.T.unsqueeze(1).clone())
    probabilities = probabilities[:, 0]
    root = likelihood.hessian_root(probabilities).permute(2, 0, 1) * scale**0.5  # R with Lambda = R R^T
    spread = covariance @ root
    values, vectors = torch.linalg.eigh(root.mT @ spread)
    part = spread @ vectors / (1 - values.clamp(0, _MOST_LEVERAGE)).sqrt().unsqueeze(1)
    without = covariance + part @ part.mT  # (S^-1 - R R^T)^-1 = S + S R (1 - R^T S R)^-1 R^T S
    gradient = (probabilities - likelihood.indicators(labels, mean.dtype)).T * scale
    return mean + (without @ gradient.unsqueeze(2)).squeeze(2), without

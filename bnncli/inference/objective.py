"""What refinement maximises: estimates of the ELBO of a flow, whose gradients reach the layers.

Two estimators with the same value and the same expected gradient. The plain one differentiates log p(theta) and the
layers' log determinants. The path one differentiates log p(theta) - log q(theta) along theta alone (Roeder, Wu and Duvenaud
2017, arXiv:1703.09194): its noise vanishes as q nears the posterior. It needs the score of q at the image, which layers
with a constant Jacobian carry forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.covariances._subspace import Subspace
from bnncli.flows import FlowLayer, push
from bnncli.lazy import torch
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.own_gradient import ValueWithGradient
from bnncli.targets.target import Target

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """The ELBO of a flow on base, less the base's entropy.

    Args:
        target: the log posterior, with all data.
        mean: (P,), the base's, in the steps' precision.
        base: on the target's device, its covariance in the steps' precision.
        space: whitened, theta = mean + L F(z), or weight, theta = F(mean + L z).
        subspace: of whitened coordinates, where the layers act there alone.
    """

    target: Target
    mean: Tensor
    base: Gaussian
    space: str
    subspace: Subspace | None = None

    @classmethod
    def of(cls, target: Target, base: Gaussian, space: str, subspace: Subspace | None = None) -> Objective:
        """The objective in the target's precision and on its device."""
        covariance = base.covariance.to(device=target.device, dtype=target.dtype)
        single = Gaussian(base.mean.to(target.device), covariance, base.layout, base.prior)
        inside = None if subspace is None else subspace.to(device=target.device, dtype=target.dtype)
        return cls(target, single.mean.to(target.dtype), single, space, inside)

    def estimate(self, layers: Sequence[FlowLayer], noise: Tensor, *examples: Tensor) -> Tensor:
        """Each draw's estimate, (S,), nats.

        Args:
            layers: applied in order.
            noise: (S, P), standard normal.
            examples: the target's `examples` of a minibatch; all data when not given.
        """
        whitened = self.space == "whitened"
        first = noise if whitened else self.mean + self.base.covariance.unwhiten(noise)
        first = first if self.subspace is None else self.subspace.reduce(first)
        has_score = whitened and all(hasattr(layer, "push_score") for layer in layers)
        score = -first if has_score else None
        x, total = push(layers, first)
        if score is not None:
            with torch.no_grad():
                for layer in layers:
                    score = layer.push_score(score)  # type: ignore[attr-defined]
        image = x if self.subspace is None else noise + self.subspace.lift(x - first)
        theta = self.mean + self.base.covariance.unwhiten(image) if whitened else image

        joint = self.target.minibatch(*examples) if examples else self.target
        log_joint = ValueWithGradient.apply(theta, joint.log_joint_and_grad).to(noise.dtype)
        if score is None:
            return log_joint + total
        path = log_joint - (score * x).sum(dim=1)
        return path + (log_joint + total - path).detach()

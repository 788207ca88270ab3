"""What refinement maximises: estimates of the ELBO of a flow, whose gradients reach the layers.

Two estimators with the same value and the same expected gradient. The plain one differentiates log p(theta) and the
layers' log determinants. The path one differentiates log p(theta) - log q(theta) along theta alone (Roeder, Wu and Duvenaud
2017, arXiv:1703.09194): its noise vanishes as q nears the posterior. It needs the score of q at the image, which layers
with a constant Jacobian carry forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnncli.flows import FlowLayer, push
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.last_layer import LastLayerTarget, ValueWithGradient, batch_log_likelihood_and_grad


@dataclass(frozen=True)
class Objective:
    """The ELBO of a flow on base, less the base's entropy.

    Args:
        target: the log posterior, with all data.
        mean: (P,), the base's, in the steps' precision.
        base: on the target's device, its covariance in the steps' precision.
        space: whitened, theta = mean + L F(z), or weight, theta = F(mean + L z).
    """

    target: LastLayerTarget
    mean: Tensor
    base: Gaussian
    space: str

    @classmethod
    def of(cls, target: LastLayerTarget, base: Gaussian, space: str) -> Objective:
        """The objective in the target's precision and on its device."""
        covariance = base.covariance.to(device=target.device, dtype=target.dtype)
        single = Gaussian(base.mean.to(target.device), covariance, base.layout, base.prior)
        return cls(target, single.mean.to(target.dtype), single, space)

    def estimate(
        self,
        layers: Sequence[FlowLayer],
        noise: Tensor,
        features: Tensor | None = None,
        indicators: Tensor | None = None,
    ) -> Tensor:
        """Each draw's estimate, (S,), nats.

        Args:
            layers: applied in order.
            noise: (S, P), standard normal.
            features, indicators: (B, D) and (K, B) of a minibatch; all data when not given.
        """
        whitened = self.space == "whitened"
        x = noise if whitened else self.mean + self.base.covariance.unwhiten(noise)
        has_score = whitened and all(hasattr(layer, "push_score") for layer in layers)
        score = -noise if has_score else None
        x, total = push(layers, x)
        if score is not None:
            with torch.no_grad():
                for layer in layers:
                    score = layer.push_score(score)  # type: ignore[attr-defined]
        theta = self.mean + self.base.covariance.unwhiten(x) if whitened else x

        def log_joint_and_grad(theta: Tensor) -> tuple[Tensor, Tensor]:
            if features is None or indicators is None:
                return self.target.log_joint_and_grad(theta)
            return self._batch_log_joint_and_grad(theta, features, indicators)

        log_joint = ValueWithGradient.apply(theta, log_joint_and_grad).to(noise.dtype)
        if score is None:
            return log_joint + total
        path = log_joint - (score * x).sum(dim=1)
        return path + (log_joint + total - path).detach()

    def _batch_log_joint_and_grad(self, theta: Tensor, features: Tensor, indicators: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint (S,) and its gradient (S, P) from one minibatch, unbiased for all data."""
        target = self.target
        scale = target.likelihood_scale * target.num_examples / features.shape[0]
        value, gradient = batch_log_likelihood_and_grad(features, indicators, theta, target.layout)
        joint = torch.add(target.log_prior(theta), value, alpha=scale)
        return joint, torch.add(target.prior.gradient(theta, target.layout), gradient, alpha=scale)

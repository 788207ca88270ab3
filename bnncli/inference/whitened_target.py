"""A target as a function of z, theta = mean + L z: the coordinates in which a Gaussian near it is standard normal, and steps of one length suit all directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bnncli.covariances import Covariance
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.target import LogJoint, Target
from bnncli.theta.layout import ParamLayout


@dataclass(frozen=True)
class WhiteCoordinates:
    """theta = mean + L z.

    Args:
        mean: (P,).
        covariance: L L^T.
    """

    mean: Tensor
    covariance: Covariance

    @classmethod
    def of(cls, gaussian: Gaussian, device: torch.device | str, dtype: torch.dtype) -> WhiteCoordinates:
        """The Gaussian's, elsewhere and in another precision."""
        return cls(gaussian.mean.to(device, dtype), gaussian.covariance.to(device=device, dtype=dtype))

    def theta(self, z: Tensor) -> Tensor:
        """theta (S, P) at z (S, P)."""
        return self.mean + self.covariance.unwhiten(z)

    def z(self, theta: Tensor) -> Tensor:
        """z (S, P) of theta (S, P)."""
        return self.covariance.whiten(theta.to(self.mean) - self.mean)

    def products(self, product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The function (M, P) -> (M, P) float64 that multiplies by L^T H L, of one that multiplies by H."""
        covariance = self.covariance

        def multiply(vectors: Tensor) -> Tensor:
            image = covariance.unwhiten(vectors.to(self.mean))
            return covariance.pull_back(product(image.double()).to(self.mean)).double()

        return multiply


@dataclass(frozen=True)
class WhitenedLogJoint:
    """What a minibatch tells of a target, at z."""

    joint: LogJoint
    whitening: WhiteCoordinates

    def log_joint_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint (S,) at mean + L z, nats, and its gradient in z (S, P), for z (S, P)."""
        log_joint, gradient = self.joint.log_joint_and_grad(self.whitening.theta(z))
        return log_joint, self.whitening.covariance.pull_back(gradient.to(self.whitening.mean))


@dataclass(frozen=True)
class WhitenedTarget(WhitenedLogJoint):
    """A whole target, at z, the constant log|det L| left out."""

    joint: Target

    @property
    def layout(self) -> ParamLayout:
        """That of theta."""
        return self.joint.layout

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self.joint.device

    @property
    def dtype(self) -> torch.dtype:
        """The target's."""
        return self.joint.dtype

    @property
    def num_examples(self) -> int:
        """The target's."""
        return self.joint.num_examples

    @property
    def is_resident(self) -> bool:
        """The target's."""
        return self.joint.is_resident

    @property
    def is_capturable(self) -> bool:
        """The target's."""
        return self.joint.is_capturable

    def log_joint(self, z: Tensor) -> Tensor:
        """Log joint (S,) at mean + L z, nats."""
        return self.joint.log_joint(self.whitening.theta(z))

    def examples(self, index: Tensor) -> tuple[Tensor, ...]:
        """As the target's."""
        return self.joint.examples(index)

    def minibatch(self, *examples: Tensor) -> LogJoint:
        """As the target's, at z."""
        return WhitenedLogJoint(self.joint.minibatch(*examples), self.whitening)

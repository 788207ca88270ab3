"""Coordinates z, theta = mean + L z, in which a Gaussian is standard normal, so that steps of one length suit all directions of a target near it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.covariances import Covariance
from bnncli.lazy import torch
from bnncli.posteriors.gaussian import Gaussian
from bnncli.targets.target import LogJoint

if TYPE_CHECKING:
    from torch import Tensor


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
    """A target, or what a minibatch tells of it, as a function of z, without the constant log|det L|."""

    joint: LogJoint
    coordinates: WhiteCoordinates

    def log_joint_and_grad(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint (S,) at mean + L z, nats, and its gradient in z (S, P), for z (S, P)."""
        log_joint, gradient = self.joint.log_joint_and_grad(self.coordinates.theta(z))
        return log_joint, self.coordinates.covariance.pull_back(gradient.to(self.coordinates.mean))

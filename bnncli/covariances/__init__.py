"""Structures of a Gaussian's covariance over theta: each file knows its curvature, its square root and its storage.

Sigma = (H + Lambda)^{-1} = L L^T, H the Hessian of the summed negative log likelihood, Lambda the prior's diagonal of
precisions. Statistics of H are summed over blocks of examples, so that H is never built example by example.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from bnncli.logits import LogitRoot
from bnncli.theta.head import HeadLayout
from bnncli.theta.prior import Prior


class Covariance(Protocol):
    """The algebra that every covariance offers; theta order throughout, float64 unless moved with `to`."""

    @property
    def structure(self) -> str:
        """The name of its kind: a file of this folder."""

    @property
    def num_params(self) -> int:
        """P."""

    def unwhiten(self, z: Tensor) -> Tensor:
        """z L^T, (S, P): draws of N(0, Sigma) from draws z of N(0, I)."""

    def whiten(self, x: Tensor) -> Tensor:
        """L^{-1} x, (S, P): the inverse of unwhiten."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P): the gradient in z, given the gradient in theta."""

    def log_det_scale(self) -> float:
        """log|det L|: half the log determinant of Sigma."""

    def logit_variance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """Exact variance of each logit, (n, K), at features (n, D): the diagonal alone, nothing of size K^2 an example."""

    def logit_projected_variance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """Exact variance of each logit minus the logits' mean, (n, K), at the cost of logit_variance.

        The diagonal of P S P with P = I - 11^T / K and S the logits' covariance.
        """

    def logit_covariance(self, features: Tensor, layout: HeadLayout) -> Tensor:
        """Exact covariance of the logits, J Sigma J^T, (n, K, K), at features (n, D)."""

    def logit_root(self, features: Tensor, layout: HeadLayout) -> LogitRoot:
        """Roots of the logits' covariances at features (n, D), for draws of the logits."""

    def to_tensors(self) -> dict[str, Tensor]:
        """What a posterior file stores of it."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy elsewhere or in another precision."""


class Structure(Covariance, Protocol):
    """What a file of this folder has besides: how its covariance is made of a target's examples, and read from a file."""

    @staticmethod
    def num_elements(layout: HeadLayout) -> int:
        """Numbers in one copy of the matrices that it consists of."""

    @staticmethod
    def curvature_sums(features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
        """Float64 sums over one block: features (n, F), a column of ones last if there is a bias; (K, n)."""

    @staticmethod
    def hessian(sums: tuple[Tensor, ...], layout: HeadLayout, num_examples: int) -> dict[str, Tensor]:
        """H under its names in a posterior file (`hessian.*`), from the summed curvature_sums."""

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: HeadLayout) -> Self:
        """Sigma. Raises NumericError when it is not positive definite."""

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: HeadLayout) -> Self:
        """The inverse of to_tensors."""


def project_independent(variance: Tensor) -> Tensor:
    """The diagonal of P S P, (n, K), for S = diag(variance (n, K)): S_kk (1 - 2/K) + sum_l S_ll / K^2."""
    num_outputs = variance.shape[1]
    return variance * (1 - 2 / num_outputs) + variance.sum(dim=1, keepdim=True) / num_outputs**2

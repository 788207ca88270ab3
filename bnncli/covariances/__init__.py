"""Structures of a Gaussian's covariance over theta: each file knows the algebra of one, and its storage.

Sigma = (H + Lambda)^{-1} = L L^T, H the Hessian of the summed negative log likelihood, which `curvature` makes, Lambda the
prior's diagonal of precisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, Self

from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor


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

    def to_tensors(self) -> dict[str, Tensor]:
        """What a posterior file stores of it."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy elsewhere or in another precision."""


class Root(Protocol):
    """L with L L^T = Sigma, as far as chains need it."""

    def unwhiten(self, z: Tensor) -> Tensor:
        """z L^T, (S, P)."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P)."""


class MovableRoot(Root, Protocol):
    """The same, as what solves systems needs it."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy elsewhere or in another precision."""


def cheapest_root(covariance: Covariance) -> MovableRoot:
    """A covariance's own L, or a rotation of it that takes fewer products: for systems, whose coordinates nobody sees."""
    rotated: Callable[[], MovableRoot] | None = getattr(covariance, "rotated", None)
    return covariance if rotated is None else rotated()


def root_for_many(covariance: Covariance, device: torch.device, dtype: torch.dtype | None) -> Root:
    """L for thousands of products of a few vectors on a device, in the covariance's own precision or another."""
    packed: Callable[[], Root | None] | None = getattr(covariance, "packed", None)
    if packed is not None and device.type == "cpu" and dtype == torch.float32 and (found := packed()) is not None:
        return found
    return covariance.to(device=device, dtype=dtype)


def varying_places(covariance: Covariance) -> Tensor | None:
    """Places in theta (N,) of the parameters that vary, where a structure fixes all others at the mean: its L is (P, N). None for all."""
    return getattr(covariance, "varying", None)


def num_varying(covariance: Covariance) -> int:
    """N, the numbers z that a draw is made of: P where all parameters vary."""
    places = varying_places(covariance)
    return covariance.num_params if places is None else len(places)


class StructuredCovariance(Covariance, Protocol):
    """What a file of this folder has besides: how its covariance is read from a file, and, where a curvature has its name, made of that."""

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Self:
        """Sigma, of the parts of H in this structure.

        Where the structure's curvature has `fixed` parts, it may be given `before`, another covariance: of that is kept what
        belongs to a part that is the same tensor.

        Raises:
            NumericError: it is not positive definite.
        """

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """The inverse of to_tensors."""

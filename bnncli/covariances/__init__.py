"""Structures of a Gaussian covariance over theta, one per file: its linear algebra and its storage.

Sigma = (H + Lambda)^{-1} = L L^T, where H is the Hessian of the summed negative log likelihood, from `curvature`, and
Lambda the diagonal matrix of prior precisions.
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
    """Interface of every covariance; parameters in theta order, float64 unless moved with `to`."""

    @property
    def structure(self) -> str:
        """Name of the structure: a file of this folder."""

    @property
    def num_params(self) -> int:
        """P."""

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P): draws of N(0, Sigma) from draws z of N(0, I)."""

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P), the inverse of unwhiten."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P): the gradient in z, given the gradient in theta."""

    def log_det_scale(self) -> float:
        """Return log|det L|, half the log determinant of Sigma."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors stored in a posterior file."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy on another device or in another precision."""


class Root(Protocol):
    """L with L L^T = Sigma, as far as chains need it."""

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""


class MovableRoot(Root, Protocol):
    """A root that can be moved, as linear solvers need it."""

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy on another device or in another precision."""


def cheapest_root(covariance: Covariance) -> MovableRoot:
    """Return L or a rotation of it that takes fewer products, for linear systems, where the coordinates do not matter."""
    rotated: Callable[[], MovableRoot] | None = getattr(covariance, "rotated", None)
    return covariance if rotated is None else rotated()


def root_for_many(covariance: Covariance, device: torch.device, dtype: torch.dtype | None) -> Root:
    """Return L for thousands of products with a few vectors on a device, in the covariance's precision or another."""
    packed: Callable[[], Root | None] | None = getattr(covariance, "packed", None)
    if packed is not None and device.type == "cpu" and dtype == torch.float32 and (found := packed()) is not None:
        return found
    return covariance.to(device=device, dtype=dtype)


def varying_places(covariance: Covariance) -> Tensor | None:
    """Return the places (N,) of the parameters that vary, if the others are fixed; L is (P, N). None for all."""
    return getattr(covariance, "varying", None)


def num_varying(covariance: Covariance) -> int:
    """Return N, the length of z in a draw; P if all parameters vary."""
    places = varying_places(covariance)
    return covariance.num_params if places is None else len(places)


class StructuredCovariance(Covariance, Protocol):
    """What a file of this folder adds: constructors from stored tensors and, if a curvature matches, from a Hessian."""

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Self:
        """Return Sigma from the parts of H in this structure.

        If the structure's curvature has `fixed` parts, it may take `before`, another covariance, and reuse what was
        computed from a part that is the same tensor.

        Raises:
            NumericError: H + Lambda is not positive definite.
        """

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""

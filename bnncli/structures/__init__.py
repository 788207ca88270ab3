"""Structures of a Gaussian over theta, one per file: how its Hessian is summed, its algebra, the logits' variance.

Sigma = (H + Lambda)^{-1} = L L^T, where H is the Hessian of the summed negative log likelihood and Lambda the diagonal
matrix of prior precisions. A structure's file has up to three classes, for the structure `kron` for example:

- `Kron`, the covariance: solves, draws, log determinant, storage, and the covariance of the logits of a last layer
- `LastLayerKron`: H of a last linear layer, for which the generalised Gauss-Newton matrix (GGN) equals the Hessian
- `NetworkKron`: H of a network, sum_n J_n^T H_n J_n, where J_n (K, P) is the Jacobian of the logits in theta at example
  n and H_n the Hessian of their likelihood. This GGN equals the Hessian if the network is linear in theta, and is
  always positive semidefinite (Schraudolph 2002; Martens 2020, arXiv:1412.1193).

Literal declarations such as `order` are read without imports (`registry.read_declared`). The other files are shared:
`factorisation` (roots of matrices), `logits`, `logit_gaussian` and `network_logits` (the Gaussian of the logits),
`network_sums` (per-example gradients by layer), `row_space` and `directions` (posteriors over a part of theta).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

from bnncli.lazy import torch
from bnncli.parameters.layouts import MatrixLayout, ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.network import NetworkTarget, with_smaller_blocks
from bnncli.targets.target import Curvature, CurvedTarget, count_passes

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout


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
    """Covariance of a structure, with constructors from stored tensors and, if it has a curvature, from a Hessian."""

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


class Operations(NamedTuple):
    """Cost of a Hessian and its covariance, in operations.

    Args:
        products: matrix products over the examples.
        factors: float64 factorisations.
        elementwise: elementwise work over the examples.
        products_once, factors_once: parts independent of theta, which a search computes once.
    """

    products: float = 0.0
    factors: float = 0.0
    elementwise: float = 0.0
    products_once: float = 0.0
    factors_once: float = 0.0


class LastLayerCurvature(Curvature, Protocol):
    """A structure's H of a last layer, with its cost and its rank among the structures."""

    order: ClassVar[int]
    """Sort key, from the structure that captures most of the posterior (lowest) to the least."""
    about: ClassVar[str]
    """A few words for `--help`; may be empty."""
    is_same_in_span: ClassVar[bool]
    """Whether a fit in the row space of the features equals the fit over all of theta, that is, no basis is special."""
    is_fitted_in_span: ClassVar[bool]
    """Whether it is fitted in the row space, where that is smaller."""

    @staticmethod
    def num_elements(layout: MatrixLayout) -> int:
        """Return the number of elements in one copy of the matrices of H and of the covariance."""

    @staticmethod
    def operations(layout: MatrixLayout, num_examples: int) -> Operations:
        """Return the cost of H and its covariance, as in Golub and Van Loan (2013), Matrix Computations, 4.2 and 8.3."""

    @staticmethod
    def most_elements(layout: MatrixLayout, *, largest_full: int, in_span: bool) -> float:
        """Return the largest number of elements chosen by default, over all of theta or in the span of the features."""


def ggn(
    target: CurvedTarget, theta: Tensor, structure: str, *, before: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the Hessian of -log likelihood at theta (P,), in the named parts of the structure.

    Args:
        before: Hessian of the same structure and examples; its parts that do not depend on theta are reused.

    Raises:
        UsageError: the target does not have this structure.
    """
    kind = target.curvature(structure)
    kept: dict[str, Any] = {"before": before} if kind.fixed and before is not None else {}
    count_pass(target)
    if isinstance(target, NetworkTarget):
        return with_smaller_blocks(lambda target: kind.hessian(target, theta, **kept))(target)
    return kind.hessian(target, theta, **kept)


def count_pass(target: CurvedTarget) -> None:
    """Count the passes of one Hessian: a backward pass per logit for a network, one for a head (concave target)."""
    count_passes(1.0 if target.is_concave else getattr(getattr(target, "likelihood", None), "num_outputs", 1))


def structure_of(hessian: dict[str, Tensor]) -> str:
    """Return the structure of a Hessian, from the names of its parts."""
    return next(iter(hessian)).split(".")[1]


class NetworkCurvature(Curvature, Protocol):
    """A structure's H of a network, with its rank among the structures and its cost."""

    order: ClassVar[int]
    """Sort key, from the structure that captures most of the posterior (lowest) to the least."""
    about: ClassVar[str]
    """A few words for `--help`; may be empty."""

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return the number of elements in one copy of the matrices of H and of the covariance."""

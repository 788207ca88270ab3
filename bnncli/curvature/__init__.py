"""Curvature computes H of a target, the Hessian of the summed negative log likelihood, without the prior.

A target names what computes its H in each structure (`CurvedTarget.curvature`). Each file here is one structure for a
last linear layer, for which the generalised Gauss-Newton matrix (GGN) equals the Hessian: its sum over examples, its
cost, and its rank among the structures. Literal declarations are read without imports (`registry.declared`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from bnncli.parameters.layouts import MatrixLayout
from bnncli.targets.target import Curvature, CurvedTarget, count_passes

if TYPE_CHECKING:
    from torch import Tensor


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


class StructuredCurvature(Curvature, Protocol):
    """What a file of this folder adds: its cost, and its rank among the structures."""

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
    return kind.hessian(target, theta, **kept)


def count_pass(target: CurvedTarget) -> None:
    """Count the passes of one Hessian: a backward pass per logit for a network, one for a head (concave target)."""
    count_passes(1.0 if target.is_concave else getattr(getattr(target, "likelihood", None), "num_outputs", 1))


def structure_of(hessian: dict[str, Tensor]) -> str:
    """Return the structure of a Hessian, from the names of its parts."""
    return next(iter(hessian)).split(".")[1]

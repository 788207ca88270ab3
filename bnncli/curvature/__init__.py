"""Curvature turns a target into H, the Hessian of the summed negative log likelihood, without the prior.

A target names what makes its H in each structure (`CurvedTarget.curvature`). Each file here is one structure for a last linear
layer, of which the generalised Gauss-Newton matrix (GGN) is the Hessian itself: how it is summed over the examples, what that
takes, and where it stands among the others. What it declares as literals is read without importing anything (`registry.declared`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from bnncli.parameters.layouts import MatrixLayout
from bnncli.targets.target import Curvature, CurvedTarget, count_passes

if TYPE_CHECKING:
    from torch import Tensor


class Operations(NamedTuple):
    """What a Hessian and its covariance take.

    Args:
        products: of matrix products over the examples.
        factors: of factors in float64.
        elementwise: over the examples, one number at a time.
        products_once, factors_once: of what no theta changes, which a search makes once.
    """

    products: float = 0.0
    factors: float = 0.0
    elementwise: float = 0.0
    products_once: float = 0.0
    factors_once: float = 0.0


class StructuredCurvature(Curvature, Protocol):
    """What a file of this folder has besides: what it takes, and how it compares to the others."""

    order: ClassVar[int]
    """Its place from the one that says most of the posterior (lowest) to the least."""
    about: ClassVar[str]
    """A few words for `--help`; may be empty."""
    is_same_in_span: ClassVar[bool]
    """Whether a fit in the row space of the features is that over all of theta: no basis is special to it."""
    is_fitted_in_span: ClassVar[bool]
    """Whether it is fitted there, where that is smaller."""

    @staticmethod
    def num_elements(layout: MatrixLayout) -> int:
        """Numbers in one copy of the matrices of H, and of the covariance."""

    @staticmethod
    def operations(layout: MatrixLayout, num_examples: int) -> Operations:
        """Of H and its covariance, as in Golub and Van Loan (2013), Matrix Computations, 4.2 and 8.3."""

    @staticmethod
    def most_elements(layout: MatrixLayout, *, largest_full: int, in_span: bool) -> float:
        """Elements up to which it is quick enough to be taken unasked, over all of theta or in the span of the features."""


def ggn(
    target: CurvedTarget, theta: Tensor, structure: str, *, before: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The Hessian of -log likelihood at theta (P,), in the parts and under the names of that structure.

    Args:
        before: a Hessian of the same structure and examples, of which the parts are kept that no theta changes.

    Raises:
        UsageError: when the target has no such structure.
    """
    kind = target.curvature(structure)
    kept: dict[str, Any] = {"before": before} if kind.fixed and before is not None else {}
    count_pass(target)
    return kind.hessian(target, theta, **kept)


def count_pass(target: CurvedTarget) -> None:
    """Count what one Hessian takes: through a network a backward pass for each logit; the concave target is the head's."""
    count_passes(1.0 if target.is_concave else getattr(getattr(target, "likelihood", None), "num_outputs", 1))


def structure_of(hessian: dict[str, Tensor]) -> str:
    """The structure of a Hessian, by the names of its parts."""
    return next(iter(hessian)).split(".")[1]

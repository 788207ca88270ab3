"""Curvature turns a target into H, the Hessian of the summed negative log likelihood, without the prior.

Each file is one structure of H: how it is summed over the examples, what that takes, and where it stands among the others.
What it declares as literals is read without importing anything (`registry.declared`). For a last linear layer the
generalised Gauss-Newton matrix (GGN) is the Hessian itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from bnncli import registry
from bnncli.theta.head import HeadLayout

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.last_layer import LastLayerTarget

MAX_AUTO_FULL = 6000  # parameters; beyond, the Cholesky factors of a prior search take minutes on two cores


class Operations(NamedTuple):
    """What a Hessian and its covariance take.

    Args:
        products: of matrix products over the examples.
        factors: of factors in float64.
        elementwise: over the examples, one number at a time.
    """

    products: float = 0.0
    factors: float = 0.0
    elementwise: float = 0.0


class Curvature(Protocol):
    """One structure of H."""

    order: ClassVar[int]
    """Its place from the one that says most of the posterior (lowest) to the least."""
    about: ClassVar[str]
    """A few words for `--help`; may be empty."""
    is_exact: ClassVar[bool]
    """Whether this is all of H."""
    is_same_in_span: ClassVar[bool]
    """Whether a fit in the row space of the features is that over all of theta: no basis is special to it."""
    is_fitted_in_span: ClassVar[bool]
    """Whether it is fitted there, where that is smaller."""
    fixed: ClassVar[tuple[str, ...]]
    """Names of the parts that are the same at every theta; with any, `hessian` takes `before`, parts of the same examples."""

    @staticmethod
    def hessian(target: LastLayerTarget, theta: Tensor) -> dict[str, Tensor]:
        """H at theta (P,), float64, in parts `hessian.<structure>` or `hessian.<structure>.<part>`, as in posterior files.

        Sums over the examples, times the target's likelihood_scale.
        """

    @staticmethod
    def num_elements(layout: HeadLayout) -> int:
        """Numbers in one copy of the matrices of H, and of the covariance."""

    @staticmethod
    def operations(layout: HeadLayout, num_examples: int) -> Operations:
        """Of H and its covariance, as in Golub and Van Loan (2013), Matrix Computations, 4.2 and 8.3."""

    @staticmethod
    def most_elements(layout: HeadLayout, *, in_span: bool) -> float:
        """Elements up to which it is quick enough to be taken unasked, over all of theta or in the span of the features."""


def ggn(
    target: LastLayerTarget, theta: Tensor, structure: str, *, before: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The Hessian of -log likelihood at theta (P,), in the parts and under the names of that structure.

    Args:
        before: a Hessian of the same structure and examples, of which the parts are kept that no theta changes.

    Raises:
        UsageError: when there is no such structure.
    """
    kind = registry.load_class("curvature", structure)
    kept: dict[str, Any] = {"before": before} if kind.fixed and before is not None else {}
    hessian: dict[str, Tensor] = kind.hessian(target, theta, **kept)
    return hessian


def structure_of(hessian: dict[str, Tensor]) -> str:
    """The structure of a Hessian, by the names of its parts."""
    return next(iter(hessian)).split(".")[1]

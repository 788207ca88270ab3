"""The diagonal blocks of the Hessian, one per output: H_k = sum_n p_k (1 - p_k) x x^T."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from bnncli.curvature import Operations
from bnncli.curvature._sums import scaled, sum_over_examples
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import MatrixLayout
from bnncli.targets.grams import weighted_grams

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.last_layer import LastLayerTarget


class Block:
    """`hessian.block` (K, F, F)."""

    order: ClassVar[int] = 20
    about: ClassVar[str] = "all pairs of one output's parameters"
    is_exact: ClassVar[bool] = False
    is_same_in_span: ClassVar[bool] = True
    is_fitted_in_span: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: LastLayerTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.block`, (K, F, F) float64."""
        (total,) = sum_over_examples(target, theta, partial(_sums, target.layout.likelihood))
        return {"hessian.block": scaled(total, target)}

    @staticmethod
    def num_elements(layout: MatrixLayout) -> int:
        """Return K F^2."""
        return layout.num_params * (layout.num_features + layout.has_bias)

    @staticmethod
    def operations(layout: MatrixLayout, num_examples: int) -> Operations:
        """Count 2 N K F^2 for products, and a Cholesky factor and its inverse per output."""
        num_outputs, size = layout.num_outputs, layout.num_features + layout.has_bias
        factors = 4 / 3 * num_outputs * float(size) ** 3
        return Operations(products=2 * num_examples * num_outputs * size**2, factors=factors)

    @staticmethod
    def most_elements(layout: MatrixLayout, *, largest_full: int, in_span: bool) -> float:
        """Return the size whose sums cost as much as the largest full structure's, with a quarter of its products.

        In the span, which has few examples, compare the factorisations instead.
        """
        if in_span:
            return largest_full**3 // (3 * (layout.num_features + layout.has_bias))
        return largest_full**2 // 4


def _sums(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n p_k (1 - p_k) x x^T, (K, F, F), from features (n, F) and probabilities (K, n)."""
    weights = likelihood.hessian_diagonal(probabilities)
    return (weighted_grams(lambda rows: weights[:, rows], features, count=weights.shape[0]),)

"""The Kronecker factors of the Hessian, outputs times features: H is approximated by B kron A.

A = mean_n x x^T (with a one for the bias), B = sum_n (diag(p) - p p^T), after Martens and Grosse (2015),
arXiv:1503.05671.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from bnncli.curvature import Operations
from bnncli.curvature._sums import scaled, sum_over_examples
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import MatrixLayout

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.last_layer import LastLayerTarget


class Kron:
    """`hessian.kron.A` (F, F), the feature factor, independent of theta; `hessian.kron.B` (K, K), the output factor."""

    order: ClassVar[int] = 30
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = False
    is_same_in_span: ClassVar[bool] = True
    is_fitted_in_span: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ("hessian.kron.A",)

    @staticmethod
    def hessian(
        target: LastLayerTarget, theta: Tensor, *, before: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return `hessian.kron.A` (F, F) and `hessian.kron.B` (K, K), float64; only B carries the likelihood's scale."""
        if before is not None:
            return {"hessian.kron.A": before["hessian.kron.A"], "hessian.kron.B": _output_factor(target, theta)}
        features, outputs = sum_over_examples(target, theta, partial(_sums, target.layout.likelihood))
        return {"hessian.kron.A": features / target.num_examples, "hessian.kron.B": scaled(outputs, target)}

    @staticmethod
    def num_elements(layout: MatrixLayout) -> int:
        """Return F^2 + K^2, plus K F scales."""
        return (layout.num_features + layout.has_bias) ** 2 + layout.num_outputs**2 + layout.num_params

    @staticmethod
    def operations(layout: MatrixLayout, num_examples: int) -> Operations:
        """Count 2 N K^2 for products and the eigenvectors of B; once, 2 N F^2 for products and the eigenvectors of A."""
        size, outputs = layout.num_features + layout.has_bias, layout.num_outputs
        return Operations(
            products=2 * num_examples * outputs**2,
            factors=10 * float(outputs) ** 3,
            products_once=2 * num_examples * size**2,
            factors_once=10 * float(size) ** 3,
        )

    @staticmethod
    def most_elements(layout: MatrixLayout, *, largest_full: int, in_span: bool) -> float:
        """Return infinity for up to `largest_full` / 3 outputs, else 0, because a search decomposes B ten times."""
        return math.inf if layout.num_outputs <= largest_full / 3 else 0.0


def _sums(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n x x^T (F, F) and the output part (K, K), from features (n, F) and probabilities (K, n)."""
    return (features.T @ features).double(), likelihood.hessian_sum(probabilities)


def _output_factor(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """Return B (K, K) at theta (P,); needs no product with the features except the logits, if those are not cached."""
    probabilities = target.row_probabilities(theta)

    def work(rows: slice, block: Tensor) -> tuple[Tensor, ...]:
        return (target.layout.likelihood.hessian_sum(probabilities(rows, block)),)

    (total,) = target.blocks.sum(work, columns=target.layout.num_outputs, dtype=target.dtype)
    return scaled(total, target)

"""The diagonal of the Hessian, sum_n p_k (1 - p_k) x_d^2."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from bnncli.curvature import Operations
from bnncli.curvature._sums import scaled, sum_over_examples
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.last_layer import LastLayerTarget


class Diag:
    """`hessian.diag` (P,)."""

    order: ClassVar[int] = 40
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = False
    is_same_in_span: ClassVar[bool] = False
    is_fitted_in_span: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: LastLayerTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.diag`, (P,) float64."""
        (total,) = sum_over_examples(target, theta, partial(_sums, target.layout.likelihood))
        return {"hessian.diag": scaled(target.layout.flatten(total), target)}

    @staticmethod
    def num_elements(layout: ParamLayout) -> int:
        """Return P."""
        return layout.num_params

    @staticmethod
    def operations(layout: ParamLayout, num_examples: int) -> Operations:
        """Count 2 N P elementwise operations."""
        return Operations(elementwise=2 * num_examples * layout.num_params, factors=float(layout.num_params))

    @staticmethod
    def most_elements(layout: ParamLayout, *, largest_full: int, in_span: bool) -> float:
        """Return infinity: any size is fast enough."""
        return math.inf


def _sums(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n p_k (1 - p_k) x_d^2, (K, F), from features (n, F) and probabilities (K, n)."""
    return ((likelihood.hessian_diagonal(probabilities) @ features.square()).double(),)

"""All of the Hessian: every pair of parameters.

The Hessian of a softmax is -p_k p_l off its diagonal and its rows sum to zero, so the K (K - 1) / 2 off-diagonal blocks
sum_n p_k p_l x x^T give all of H. In logit space it is exact: for a last linear layer the generalised Gauss-Newton
matrix is the Hessian.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from bnncli.curvature import MAX_AUTO_FULL, Operations
from bnncli.curvature._sums import scaled, sum_over_examples
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.targets.grams import is_packed, packed_grams, packed_places, unpack_symmetric, weighted_grams
from bnncli.theta.head import HeadLayout

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.last_layer import LastLayerTarget


class Full:
    """`hessian.full` (P, P)."""

    order: ClassVar[int] = 10
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = True
    is_same_in_span: ClassVar[bool] = True
    is_fitted_in_span: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: LastLayerTarget, theta: Tensor) -> dict[str, Tensor]:
        """`hessian.full`, (P, P) float64."""
        (pairs,) = sum_over_examples(target, theta, partial(_sums, target.layout.likelihood))
        return {"hessian.full": scaled(whole_of_pairs(pairs, target.layout), target)}

    @staticmethod
    def num_elements(layout: HeadLayout) -> int:
        """P^2."""
        return layout.num_params**2

    @staticmethod
    def operations(layout: HeadLayout, num_examples: int) -> Operations:
        """2 N F^2 of products for each pair of outputs, and a Cholesky factor and its inverse."""
        size = layout.num_features + layout.has_bias
        factors = 4 / 3 * float(layout.num_params) ** 3
        return Operations(products=2 * num_examples * layout.likelihood.num_pairs * size**2, factors=factors)

    @staticmethod
    def most_elements(layout: HeadLayout, *, in_span: bool) -> float:
        """Those of MAX_AUTO_FULL parameters."""
        return MAX_AUTO_FULL**2


def _sums(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """sum_n w_n x x^T for the weights w of each pair of outputs: (pairs, F, F), or packed (pairs, T)."""
    count = likelihood.num_pairs

    def weights(rows: slice) -> Tensor:
        return likelihood.hessian_pairs(probabilities[:, rows])

    if is_packed(count, features):
        return (packed_grams(weights, features),)
    return (weighted_grams(weights, features, count=count),)


def whole_of_pairs(pairs: Tensor, layout: HeadLayout) -> Tensor:
    """H, (P, P) float64, of the sums of each pair of outputs; written in place, one output's rows at a time."""
    outputs = layout.num_outputs
    places = layout.places(pairs.device)
    packed = packed_places(places.shape[1], pairs.device)[0] if pairs.ndim == 2 else None
    matrix = pairs.new_empty(layout.num_params, layout.num_params)
    if not layout.likelihood.is_shift_invariant:
        matrix.zero_()
        for k in range(outputs):
            matrix[places[k, :, None], places[k]] = _symmetric(pairs[k], packed)
        return matrix
    number = _pair_numbers(outputs, pairs.device)
    for k in range(outputs):
        blocks = _symmetric(pairs[number[k]], packed).neg_()
        blocks[k] = 0
        blocks[k] = -blocks.sum(dim=0)
        matrix[places[k]] = layout.flatten(blocks.transpose(0, 1))  # all columns of theta in their order
    return matrix


def _pair_numbers(outputs: int, device: torch.device) -> Tensor:
    """The place of the pair k, l among all pairs k < l, (K, K), symmetric; 0 on the diagonal."""
    first, second = torch.triu_indices(outputs, outputs, 1, device=device)
    number = torch.zeros(outputs, outputs, dtype=torch.int64, device=device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=device)
    return number


def _symmetric(sums: Tensor, packed: Tensor | None) -> Tensor:
    """Matrices (M, F, F), exactly symmetric, of the pairs' sums: unpacked where they are packed, by packed_places."""
    return (sums + sums.mT).mul_(0.5) if packed is None else unpack_symmetric(sums, packed)

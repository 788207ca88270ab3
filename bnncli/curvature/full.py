"""The full Hessian: all pairs of parameters.

The Hessian of a softmax is -p_k p_l off the diagonal and its rows sum to zero, so the K (K - 1) / 2 off-diagonal blocks
sum_n p_k p_l x x^T determine H. For a last linear layer, the generalised Gauss-Newton matrix is exactly the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from bnncli.curvature import Operations
from bnncli.curvature._sums import scaled, sum_over_examples
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.memory import is_large
from bnncli.targets.grams import is_packed, packed_grams, packed_positions, unpack_symmetric, weighted_grams

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
        """Return `hessian.full`, (P, P) float64."""
        return {"hessian.full": whole_of_pairs(_pairs(target, theta), target.layout)}

    @staticmethod
    def rows(target: LastLayerTarget, theta: Tensor) -> Callable[[int, int], Tensor]:
        """Return a function that computes rows start..stop of `hessian.full`, from a quarter to half of its numbers."""
        return rows_of_pairs(_pairs(target, theta), target.layout)

    @staticmethod
    def num_elements(layout: HeadLayout) -> int:
        """Return P^2."""
        return layout.num_params**2

    @staticmethod
    def operations(layout: HeadLayout, num_examples: int) -> Operations:
        """Count 2 N F^2 for products per pair of outputs, and a Cholesky factor and inverse; panels halve the latter."""
        size = layout.num_features + layout.has_bias
        factors = (2 if is_large(layout.num_params) else 4) / 3 * float(layout.num_params) ** 3
        return Operations(products=2 * num_examples * layout.likelihood.num_pairs * size**2, factors=factors)

    @staticmethod
    def most_elements(layout: HeadLayout, *, largest_full: int, in_span: bool) -> float:
        """Return the size of the largest full structure that is fast enough."""
        return largest_full**2


def _pairs(target: LastLayerTarget, theta: Tensor) -> Tensor:
    """Return the sums of `_sums` over all examples, one per pair of outputs."""
    (pairs,) = sum_over_examples(target, theta, partial(_sums, target.layout.likelihood))
    return scaled(pairs, target)


def _sums(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n w_n x x^T for the weights w of each pair of outputs: (pairs, F, F), or packed (pairs, T)."""
    count = likelihood.num_pairs

    def weights(rows: slice) -> Tensor:
        return likelihood.hessian_pairs(probabilities[:, rows])

    if is_packed(count, features):
        return (packed_grams(weights, features),)
    return (weighted_grams(weights, features, count=count),)


def whole_of_pairs(pairs: Tensor, layout: HeadLayout) -> Tensor:
    """Return H, (P, P) float64, from the sums of the pairs of outputs; written in place, one output's rows at a time."""
    places = layout.places(pairs.device)
    matrix = pairs.new_empty(layout.num_params, layout.num_params)
    for k, rows in enumerate(_rows_of_outputs(pairs, layout)):
        matrix[places[k]] = rows(slice(None))
    return matrix


def rows_of_pairs(pairs: Tensor, layout: HeadLayout) -> Callable[[int, int], Tensor]:
    """Return a function that computes rows start..stop of H, (stop - start, P) float64, from the sums of the pairs."""
    num_features, num_weights = layout.num_features, layout.num_outputs * layout.num_features
    outputs = _rows_of_outputs(pairs, layout)

    def rows(start: int, stop: int) -> Tensor:
        parts = []
        for k in range(start // num_features, layout.num_outputs):
            first, last = (min(max(end - k * num_features, 0), num_features) for end in (start, stop))
            if last <= first:
                break
            parts.append(outputs[k](slice(first, last)))
        biases = range(max(start, num_weights), max(stop, num_weights))
        parts += [outputs[place - num_weights](slice(num_features, None)) for place in biases]
        return torch.cat(parts)

    return rows


def _rows_of_outputs(pairs: Tensor, layout: HeadLayout) -> list[Callable[[slice], Tensor]]:
    """Return, for each output, a function that computes rows of H, (n, P), for some of its parameters, the bias last."""
    places = layout.places(pairs.device)
    packed = packed_positions(places.shape[1], pairs.device)[0] if pairs.ndim == 2 else None
    if not layout.likelihood.is_shift_invariant:
        return [partial(_own_rows, pairs[k], packed, places[k], layout.num_params) for k in range(layout.num_outputs)]
    number = _pair_numbers(layout.num_outputs, pairs.device)
    return [partial(_softmax_rows, pairs, packed, layout, number[k], k) for k in range(layout.num_outputs)]


def _own_rows(sums: Tensor, packed: Tensor | None, places: Tensor, num_params: int, some: slice) -> Tensor:
    """Return rows of an output whose parameters couple only with each other."""
    block = _symmetric(sums, packed, some)
    rows = block.new_zeros(len(block), num_params)
    rows[:, places] = block
    return rows


def _softmax_rows(
    pairs: Tensor, packed: Tensor | None, layout: HeadLayout, numbers: Tensor, k: int, some: slice
) -> Tensor:
    """Return rows of output k, whose own block is minus the sum of all others."""
    blocks = _symmetric(pairs[numbers], packed, some).neg_()
    blocks[k] = 0
    blocks[k] = -blocks.permute(1, 2, 0).contiguous().sum(dim=2)  # fixed summation order, however many rows there are
    return layout.flatten(blocks.transpose(0, 1))  # columns in theta order


def _pair_numbers(outputs: int, device: torch.device) -> Tensor:
    """Return the index of the pair k, l among all pairs k < l, (K, K), symmetric; 0 on the diagonal."""
    first, second = torch.triu_indices(outputs, outputs, 1, device=device)
    number = torch.zeros(outputs, outputs, dtype=torch.int64, device=device)
    number[first, second] = number[second, first] = torch.arange(len(first), device=device)
    return number


def _symmetric(sums: Tensor, packed: Tensor | None, some: slice) -> Tensor:
    """Return some rows of exactly symmetric matrices (..., F, F) from the pairs' sums, unpacking them if packed."""
    if packed is not None:
        return unpack_symmetric(sums, packed[some])
    return (sums[..., some, :] + sums[..., :, some].mT).mul_(0.5)

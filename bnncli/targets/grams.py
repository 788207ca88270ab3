"""Weighted Gram matrices for many weights, and quadratic forms with many matrices, by one of two routes.

Packed: the upper triangle of x x^T is computed once per example, and one matrix product takes all weights (or
matrices), at half the work of full squares. Square: one matrix product per weight, (w X)^T X, or per matrix, row sums
of (X M) * X, without F^2 numbers per example. `is_packed` chooses by the number of operations. Sums over examples are
float64; products within a slice of examples use the features' precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from bnncli.lazy import torch
from bnncli.system import signals
from bnncli.targets.blocks import BLOCK_ELEMENTS, slices

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "Callable[[slice], Tensor]"

_BLOCK_EXAMPLES = {"cpu": 1024, "cuda": 2**13}  # per sum in the features' precision
_FEWEST_EXAMPLES = 64
_FEWEST_FEATURES = 32  # of the square route
_PACKED_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
_PANELS = 32  # launches for the packed products of a slice, for any F; 1/32 more products than a triangle has
# Cost of one packed product, of one weighted feature, and of one addition to a sum, in operations of a matrix product;
# all are memory-bound. Similar on a CPU (3 ns, 5e10 operations per second) and a GPU (2 ps, 6e13). Measured on one
# core: break-even at 20 weights of 85 features, 50 of 257, more than 100 of 513.
_PACKED_OPERATIONS, _WEIGHTED_OPERATIONS, _SUM_OPERATIONS = 150, 220, 150
# Cost of one PyTorch call, on a GPU 15 us of host time; calls per packed slice and per tile of the square route.
# Measured on an H100's host, 45 weights of 85 features and 60,000 examples: 10 ms per packed Hessian, of which the GPU
# works 1.6 ms.
_CALL_OPERATIONS = {"cpu": 0.0, "cuda": 9e8}
_PACKED_CALLS, _SQUARE_CALLS = 2 * _PANELS, 8


def is_packed(count: int, features: Tensor) -> bool:
    """Return whether the packed route is cheaper for `count` weights (or matrices) and features (n, F).

    Operations per example: F^2 / 2 packed products plus 2 F^2 / 2 with them per weight, against F weighted features
    plus 2 F^2 with those. Each weight's matrix is added to its sum once per slice, and each slice needs calls of
    PyTorch. Few features always use the packed route: products of such narrow matrices accumulate one example after the
    other, and their float32 sums lose twice the digits.
    """
    size, kind = features.shape[1], features.device.type
    square_rows, packed_rows, call = (
        _BLOCK_EXAMPLES.get(kind, 1024),
        _packed_rows(size, kind),
        _CALL_OPERATIONS.get(kind, 0.0),
    )
    packed = size**2 / 2 * (_PACKED_OPERATIONS + count * (2 + _SUM_OPERATIONS / packed_rows))
    square = count * size * (_WEIGHTED_OPERATIONS + size * (2 + _SUM_OPERATIONS / square_rows))
    packed += call * _PACKED_CALLS / packed_rows
    square += call * _SQUARE_CALLS * -(-count // _tile_weights(size, kind)) / square_rows
    return size <= _FEWEST_FEATURES or packed <= square


def weighted_grams(weights: Weights, features: Tensor, *, count: int) -> Tensor:
    """Return sum_n w_mn x_n x_n^T for `count` weights and features (n, F): (M, F, F) float64, symmetric up to rounding.

    Args:
        weights: returns those of a slice of the examples, (M, n).
        features: (n, F).
    """
    size = features.shape[1]
    total = features.new_zeros(count, size, size, dtype=torch.float64)
    for rows in example_slices(features):
        signals.raise_if_interrupted("the Hessian")
        block, here = features[rows], weights(rows)
        for some in _tiles(features, count):
            weighted = (here[some].unsqueeze(1) * block.T).flatten(0, 1)
            total[some] += (weighted @ block).view(-1, size, size)
    return total


def packed_grams(weights: Weights, features: Tensor) -> Tensor:
    """Return the same in packed form: (M, T) float64, for unpack_symmetric."""
    total: Tensor | None = None
    for rows in _packed_slices(features):
        signals.raise_if_interrupted("the Hessian")
        product = weights(rows) @ packed_products(features[rows]).T
        total = product.double() if total is None else total.add_(product)
    assert total is not None
    return total


def quadratic_forms(features: Tensor, matrices: Tensor) -> Tensor:
    """Return x^T M x for each of the matrices (M, F, F) at features (n, F), (n, M), in the matrices' precision."""
    count, size = matrices.shape[:2]
    features = features.to(matrices)
    out = features.new_empty(count, features.shape[0])
    if is_packed(count, features):
        forms = pack_quadratic_form(matrices)
        for rows in _packed_slices(features):
            torch.mm(forms, packed_products(features[rows]), out=out[:, rows])
        return out.T
    for rows in example_slices(features):
        block = features[rows].T
        for some in _tiles(features, count):
            images = (matrices[some].reshape(-1, size) @ block).view(-1, *block.shape)
            out[some, rows] = images.mul_(block).sum(dim=1)
    return out.T


def packed_products(features: Tensor) -> Tensor:
    """Return x_i x_j, (T, n), for features (n, F): for every j from the first row of i's panel on, T about F^2 / 2.

    A panel is a few rows i that are multiplied at once; with one row per panel, j >= i is the upper triangle.
    """
    rows = features.T.contiguous()
    size, num_examples = rows.shape
    out = rows.new_empty(_num_packed(size), num_examples)
    start = 0
    for panel in slices(0, size, _panel_rows(size)):
        height, width = panel.stop - panel.start, size - panel.start
        place = out[start : start + height * width].view(height, width, num_examples)
        torch.mul(rows[panel].unsqueeze(1), rows[panel.start :], out=place)
        start += height * width
    return out


def unpack_symmetric(packed: Tensor, places: Tensor) -> Tensor:
    """Unpack (..., T) to symmetric matrices (..., F, F), with the first result of packed_places (F, F)."""
    return packed[..., places]


def pack_quadratic_form(matrices: Tensor) -> Tensor:
    """Return coefficients (..., T) whose product with packed_products is x^T M x, for M (..., F, F)."""
    size = matrices.shape[-1]
    places, is_twice = packed_positions(size, matrices.device)
    out = matrices.new_empty(*matrices.shape[:-2], _num_packed(size))
    out[..., places] = torch.where(is_twice, matrices, matrices + matrices.mT)
    return out


def packed_positions(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the position of x_i x_j among the packed products, (F, F), and which are stored twice (within a panel), (F, F)."""
    height, rows = _panel_rows(size), torch.arange(size, device=device)
    panel = rows // height
    first = panel * height
    starts = height * (panel * size - height * (panel * (panel - 1) // 2)) + (rows - first) * (size - first)
    places = (starts - first).unsqueeze(1) + rows
    return torch.where(panel.unsqueeze(1) <= panel, places, places.T), panel.unsqueeze(1) == panel


def tiles(features: Tensor, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of examples and of weights whose products with the features (n, F) stay in cache."""
    for rows in example_slices(features):
        for some in _tiles(features, count):
            yield rows, some


def example_slices(features: Tensor) -> Iterator[slice]:
    """Return slices of examples short enough to sum in the features' precision."""
    return slices(0, features.shape[0], _BLOCK_EXAMPLES.get(features.device.type, 1024))


def _tiles(features: Tensor, count: int) -> Iterator[slice]:
    """Return slices of weights whose products with a slice of the features (n, F) stay in cache."""
    return slices(0, count, _tile_weights(features.shape[1], features.device.type))


def _tile_weights(size: int, kind: str) -> int:
    """Return the number of weights per tile for F features on this kind of device, for any number of examples."""
    return max(1, BLOCK_ELEMENTS.get(kind, 2**19) // (_BLOCK_EXAMPLES.get(kind, 1024) * size))


def _packed_slices(features: Tensor) -> Iterator[slice]:
    """Return slices of examples for the packed route."""
    return slices(0, features.shape[0], _packed_rows(features.shape[1], features.device.type))


def _packed_rows(size: int, kind: str) -> int:
    """Return the number of examples whose packed products fit into cache, or outweigh the cost of adding their sums."""
    most = _PACKED_ELEMENTS.get(kind, 2**22) // _num_packed(size)
    return min(max(most, _FEWEST_EXAMPLES), _BLOCK_EXAMPLES.get(kind, 1024))


def _panel_rows(size: int) -> int:
    """Return the rows per panel of the packed products; the last may have fewer."""
    return -(-size // _PANELS)


def _num_packed(size: int) -> int:
    """Return T."""
    height = _panel_rows(size)
    return sum((panel.stop - panel.start) * (size - panel.start) for panel in slices(0, size, height))

"""Blocks of logits laid out (K, S, n), outputs, draws, examples, and what is summed over them: products with the features.

What the logits say of the labels is bnncli.likelihoods.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.targets.products import Multiply
from bnncli.targets.stream import BLOCK_ELEMENTS, slices
from bnncli.theta.head import HeadLayout

if TYPE_CHECKING:
    from torch import Tensor

# Rows of a matrix product; more gain nothing.
_MAX_ROWS = {"cpu": 1024, "cuda": 2**14}


def block_logits(features: Tensor, theta: Tensor, layout: HeadLayout, *, multiply: Multiply | None = None) -> Tensor:
    """Logits (K, S, n) of features (n, D) under theta (S, P), as one matrix product; `multiply` makes it another way."""
    weight, bias = layout.split(theta)
    rows = weight.transpose(0, 1).reshape(-1, layout.num_features)
    if multiply is not None:
        flat = multiply(rows, features.T)
        flat = flat if bias is None else flat.add_(bias.T.reshape(-1, 1))
    elif bias is None:
        flat = rows @ features.T
    else:
        flat = torch.addmm(bias.T.reshape(-1, 1), rows, features.T)
    return flat.view(layout.num_outputs, theta.shape[0], features.shape[0])


def weighted_feature_sums(
    weights: Tensor, features: Tensor, layout: HeadLayout, *, multiply: Multiply | None = None
) -> Tensor:
    """sum_n weights[k, s, n] x_n in theta order, (S, P) float64, for weights (K, S, n) and features (n, D)."""
    num_draws = weights.shape[1]
    sums = (multiply or torch.matmul)(weights.flatten(0, 1), features)
    weight = sums.view(layout.num_outputs, num_draws, -1).transpose(0, 1).double()
    bias = weights.sum(dim=2, dtype=sums.dtype).T.double() if layout.has_bias else None
    return layout.join(weight, bias)


def label_sums(features: Tensor, labels: Tensor, layout: HeadLayout) -> Tensor:
    """sum_n onehot(y_n) x x_n in theta order, (P,) float64, for features (n, D) and labels (n,), or (n, C)."""
    likelihood, num_outputs = layout.likelihood, layout.num_outputs
    if (
        features.device.type != "cpu" or not likelihood.is_shift_invariant
    ):  # only a softmax has one output for each label
        indicators = likelihood.indicators(labels, features.dtype)
        return weighted_feature_sums(indicators.unsqueeze(1), features, layout)[0]
    # Each row goes to one output: no product of K rows for each (in one order, as it is on a CPU).
    weight = features.new_zeros(num_outputs, features.shape[1]).index_add_(0, labels, features)
    counts = torch.bincount(labels, minlength=num_outputs).to(features.dtype) if layout.has_bias else None
    return layout.join(weight.unsqueeze(0), None if counts is None else counts.unsqueeze(0))[0].double()


def row_blocks(num_rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices over `num_rows` examples, sized so that a block of rows times `columns` fits the cache."""
    return slices(0, num_rows, max(1, BLOCK_ELEMENTS.get(device.type, 2**19) // columns))


def draw_blocks(theta: Tensor, layout: HeadLayout) -> tuple[Tensor, ...]:
    """theta (S, P) in blocks of draws whose logits make a matrix product of efficient height."""
    rows = _MAX_ROWS.get(theta.device.type, 1024)
    return theta.split(max(1, rows // layout.num_outputs))

"""How numbers lie that are no matrix of weights, such as coordinates along directions of theta."""

from __future__ import annotations

from bnncli.theta.head import HeadLayout
from bnncli.theta.layout import MatrixLayout


def vector_layout(size: int) -> MatrixLayout:
    """The layout of so many numbers: one row, so that what couples the features of an output couples all of them."""
    return HeadLayout(1, size, has_bias=False)

"""Counts gradient passes over a target's data while somebody asks: what a search for a mode, or for a prior precision, has cost.

Steps on minibatches are not counted here, nor what a graph replays: who takes them knows how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PRODUCT_PASSES = 2.0  # of a product with the Hessian: there and back


@dataclass
class Tally:
    """What was counted.

    Args:
        passes: gradients of the log likelihood of all examples at one theta.
    """

    passes: float = 0.0


_ASKING: ContextVar[Tally | None] = ContextVar("gradient passes", default=None)


@contextmanager
def counted_passes(share: float = 1.0) -> Iterator[Tally]:
    """Within, passes are counted; a count within a count has what is within it alone, and both have that.

    Args:
        share: of the examples that are read within: so much of each pass the outer count has.
    """
    outer, own = _ASKING.get(), Tally()
    token = _ASKING.set(own)
    try:
        yield own
    finally:
        _ASKING.reset(token)
        if outer is not None:
            outer.passes += share * own.passes


def count_passes(passes: float) -> None:
    """So many more."""
    tally = _ASKING.get()
    if tally is not None:
        tally.passes += passes


def counting_products(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same product of a Hessian with vectors (M, P), counted."""

    def counted(vectors: Tensor) -> Tensor:
        count_passes(PRODUCT_PASSES * len(vectors))
        return product(vectors)

    return counted

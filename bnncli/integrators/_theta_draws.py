"""Draws of the logits by draws of theta, as its layout makes them: of a head in one product, of a network layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnncli.integrators._averages import BlockDraws
from bnncli.theta.layout import ClassifierLayout, LogitMaker

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ThetaDraws:
    """S draws of the logits.

    Args:
        layout: of theta.
        num_draws: S.
        made: by the layout.
    """

    layout: ClassifierLayout
    num_draws: int
    made: LogitMaker

    @classmethod
    def of(cls, layout: ClassifierLayout, theta: Tensor, weights: Tensor | None) -> ThetaDraws:
        """By draws theta (S, P); weights (S,) of them, None for equal ones."""
        return cls(layout, theta.shape[0], layout.logit_draws(theta, weights))

    @property
    def width(self) -> int:
        """Those of a pass."""
        return self.layout.widest

    def at(self, features: Tensor) -> BlockDraws:
        """The draws at features (n, D)."""
        return BlockDraws(*self.made(features))

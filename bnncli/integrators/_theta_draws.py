"""Draws of the logits by draws of theta: of a head, all classes and draws in one product; of a network, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bnncli.integrators._averages import BlockDraws
from bnncli.theta.head import HeadLayout


@dataclass(frozen=True)
class ThetaDraws:
    """Of a head: weights and bias of each draw, (S, K, D + 1), and their mean (K, D + 1)."""

    layout: HeadLayout
    augmented: Tensor
    center: Tensor

    @property
    def num_draws(self) -> int:
        """S."""
        return self.augmented.shape[0]

    def at(self, features: Tensor) -> BlockDraws:
        """The draws at features (n, D)."""
        columns = self.layout.augment_features(features).T

        def logits(some: slice) -> Tensor:
            chunk = self.augmented[some]
            return (chunk.flatten(0, 1) @ columns).unflatten(0, chunk.shape[:2])

        return BlockDraws(self.center @ columns, logits)


@dataclass(frozen=True)
class NetworkDraws:
    """Of a network with hidden layers: theta (S, P)."""

    layout: Any
    theta: Tensor

    @property
    def num_draws(self) -> int:
        """S."""
        return self.theta.shape[0]

    def at(self, features: Tensor) -> BlockDraws:
        """The draws at features (n, D); those of the first network stand near the middle."""

        def logits(some: slice) -> Tensor:
            return self.layout.logits(features, self.theta[some]).transpose(1, 2)

        return BlockDraws(logits(slice(0, 1))[0], logits)


def draws_of(layout: Any, theta: Tensor, weights: Tensor | None) -> ThetaDraws | NetworkDraws:
    """The draws theta (S, P) of a head or a network; weights (S,) of them, None for equal ones."""
    if not isinstance(layout, HeadLayout):
        return NetworkDraws(layout, theta)
    augmented = layout.augment(theta)
    if weights is None:
        return ThetaDraws(layout, augmented, augmented.mean(dim=0))
    return ThetaDraws(layout, augmented, torch.tensordot(weights.to(theta), augmented, dims=1))

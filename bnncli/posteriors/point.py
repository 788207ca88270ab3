"""A single theta: the network as trained, or temperature-scaled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from bnncli.logits import LogitRoot
from bnncli.shapes import check_shapes
from bnncli.theta.head import HeadLayout


@dataclass(frozen=True)
class Point:
    """All mass on theta (P,)."""

    type: ClassVar[str] = "point"
    theta: Tensor
    layout: HeadLayout

    def __post_init__(self) -> None:
        check_shapes(theta=(self.theta, str(self.layout.num_params)))

    @property
    def center(self) -> Tensor:
        """theta, (P,)."""
        return self.theta

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """theta, repeated, (S, P) float32."""
        return self.theta.float().expand(num_samples or 1, -1).clone()

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Logits (n, K) at features (n, D), minus their mean if projected, and their variance, zero, (n, K)."""
        mean = self.layout.logits(features, self.theta.to(features.dtype).unsqueeze(0))[0]
        if is_projected:
            mean = mean - mean.mean(dim=1, keepdim=True)
        return mean, torch.zeros_like(mean)

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (n, K) at features (n, D), and their covariance, zero, (n, K, K)."""
        mean = self.layout.logits(features, self.theta.to(features.dtype).unsqueeze(0))[0]
        return mean, mean.new_zeros(*mean.shape, mean.shape[1])

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        """Logits (n, K) at features (n, D), and their standard deviations, zero."""
        mean, zero = self.logit_marginals(features)
        return mean, LogitRoot(zero)

    def to(self, device: torch.device | str) -> Point:
        """A copy on another device."""
        return replace(self, theta=self.theta.to(device))

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`mean` (P,) float64, and the layout as JSON."""
        return {"mean": self.theta.double().cpu().contiguous()}, {"type": self.type, **self.layout.to_meta()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Point:
        """The inverse of to_tensors."""
        return cls(tensors["mean"], HeadLayout.from_meta(meta))

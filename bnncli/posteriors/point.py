"""A single theta: the network as trained, or temperature-scaled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork, bind_layout, recorded_layout
from bnncli.shapes import check_shapes
from bnncli.structures.logit_gaussian import logit_gaussian
from bnncli.structures.logits import LogitGaussian, LogitRoot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Point:
    """All mass on theta (P,)."""

    type: ClassVar[str] = "point"
    theta: Tensor
    layout: HeadLayout | ModuleLayout

    def __post_init__(self) -> None:
        check_shapes(theta=(self.theta, str(self.layout.num_params)))

    @property
    def center(self) -> Tensor:
        """Return theta, (P,)."""
        return self.theta

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return theta, repeated, (S, P) float32."""
        return self.theta.float().expand(num_samples or 1, -1).clone()

    @cached_property
    def logits(self) -> LogitGaussian:
        """Return the logits of features (n, D), without uncertainty."""
        return logit_gaussian(self.theta, self.layout)

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Return logits (n, K) at features (n, D), minus their mean if projected, and their variance, zero, (n, K)."""
        return self.logits.marginals(features, is_projected=is_projected)

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (n, K) at features (n, D), and their covariance, zero, (n, K, K)."""
        return self.logits.moments(features)

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        """Return logits (n, K) at features (n, D), and their standard deviations, zero."""
        return self.logits.root(features)

    def pushes(self, num_draws: int) -> bool:
        """Return False: there is nothing to draw."""
        return False

    def bound_to(self, network: ModuleNetwork) -> Point:
        """Return the point bound to a network that computes the logits."""
        return replace(self, layout=bind_layout(self.layout, network))

    def to(self, device: torch.device | str) -> Point:
        """Return a copy on another device."""
        return replace(self, theta=self.theta.to(device))

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `mean` (P,) float64, and the layout as JSON."""
        return {"mean": self.theta.double().cpu().contiguous()}, {"type": self.type, **self.layout.to_meta()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Point:
        """Invert to_tensors."""
        return cls(tensors["mean"], recorded_layout(meta))

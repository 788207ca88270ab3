"""What a fit returns, one file per kind: point, gaussian, flow, samples."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from bnncli.layout import HeadLayout


class Posterior(Protocol):
    """What every kind offers; predict and evaluate ask for more by capability (center, logit_moments, log_density)."""

    type: ClassVar[str]

    @property
    def layout(self) -> HeadLayout:
        """How weight and bias lie in theta."""

    @property
    def center(self) -> Tensor | None:
        """theta (P,) to plug in, or None where the kind has no natural one."""

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Draws (S, P), float32, on the posterior's device."""

    def to(self, device: torch.device | str) -> Self:
        """A copy on another device."""


def standard_normal(num_samples: int, dim: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """N(0, I) draws (S, P), float64: made on the generator's device, then moved."""
    noise = torch.randn(num_samples, dim, generator=generator, device=generator.device, dtype=torch.float64)
    return noise.to(device)


def layout_to_meta(layout: HeadLayout) -> dict[str, Any]:
    """The layout's sizes as JSON, for to_tensors."""
    return {
        "num_outputs": layout.num_outputs,
        "num_features": layout.num_features,
        "has_bias": layout.has_bias,
    }


def layout_from_meta(meta: dict[str, Any]) -> HeadLayout:
    """The inverse of layout_to_meta."""
    return HeadLayout(int(meta["num_outputs"]), int(meta["num_features"]), bool(meta["has_bias"]))

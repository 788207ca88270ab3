"""What a fit returns, one file per kind: point, gaussian, flow, samples.

Every kind has a `type`, a `layout`, `sample(num_samples, generator) -> (S, P)` and `to(device)`. Some have more, and
integrators ask for it by name: `center` (P,), `logit_marginals(features)`, `logit_moments(features)`,
`logit_root(features)`, `log_density(theta)`; and where theta is made from standard normals, `noise(num_samples, generator)`,
`quasi_noise(num_samples, generator)` and `from_noise(noise)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bnncli.layout import HeadLayout


def standard_normal(num_samples: int, dim: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """N(0, I) draws (S, P), float64: made on the generator's device, then moved."""
    noise = torch.randn(num_samples, dim, generator=generator, device=generator.device, dtype=torch.float64)
    return move(noise, device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on another device; from the CPU to a GPU through pinned memory, so that nothing waits for the GPU."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


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

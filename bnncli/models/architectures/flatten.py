"""No network: the features are the inputs, and there is no head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import nn


def build() -> nn.Module:
    """Return a module that flattens its input (N, ...) to (N, D)."""
    return torch.nn.Flatten()

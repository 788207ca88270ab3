"""No network: the features are the inputs, and there is no head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import nn


def build() -> nn.Module:
    """A module whose output (N, D) is its input (N, ...) with all other axes in one."""
    return torch.nn.Flatten()

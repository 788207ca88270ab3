"""How many pairs of a draw and an example a network's activations have room for at once."""

from __future__ import annotations

import torch

from bnncli.machine.memory import CPU_ACTIVATION_BYTES, budget
from bnncli.theta.module import ModuleLayout

_MOST_BYTES = {"cpu": CPU_ACTIVATION_BYTES}  # of activations at once
_SHARE = 4  # one part in so many of what is free when a target is first asked; on a CPU where that is less


def share_of(device: torch.device) -> int:
    """Bytes of a device for activations."""
    share = budget(device) // _SHARE
    return max(1, min(share, _MOST_BYTES.get(device.type, share)))


def pairs_at_once(
    layout: ModuleLayout, device: torch.device, dtype: torch.dtype = torch.float32, *, share: int | None = None
) -> int:
    """Pairs of a draw and an example whose activations have room at once, in a share of the device, by default share_of it."""
    return max(1, (share or share_of(device)) // activation_bytes_of(layout, dtype))


def activation_bytes_of(layout: ModuleLayout, dtype: torch.dtype = torch.float32) -> int:
    """Bytes that a pair takes at the peak of a backward pass, as measured in float32."""
    return layout.working_bytes * dtype.itemsize // 4

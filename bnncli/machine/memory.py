"""How much of a device's memory a command may plan with, and the error when that is too little."""

from __future__ import annotations

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.machine.devices import available_memory

SHARE = 0.7  # of what is free that a command may plan with; blocks of features and of logits take some of the rest

CPU_ACTIVATION_BYTES = 2**26  # of a network at once on a CPU: more than its caches gains nothing


def budget(device: torch.device | str) -> int:
    """Bytes that a command may plan with on the device."""
    return int(SHARE * available_memory(device))


def require(needed: int, device: torch.device | str, *, what: str, hint: str | None) -> None:
    """Pass when `needed` bytes are there. Raises DeviceError otherwise; without a hint the command line has one."""
    there = budget(device)
    if needed > there:
        raise DeviceError(
            f"{what} needs about {bytes_text(needed)} of memory; {bytes_text(there)} can be used on {device}",
            hint=hint,
            code="out_of_memory",
        )


def bytes_text(size: int) -> str:
    """A number of bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size / 1024:.0f} KiB"

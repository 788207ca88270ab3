"""How much of a device's memory a command may plan with, and the error when that is too little."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.machine.devices import available_memory
from bnncli.machine.team import team

SHARE = 0.7  # of what is free that a command may plan with; blocks of features and of logits take some of the rest

LARGE_BLOCK = 2**21  # bytes; pages for smaller ones, new each time, would cost more than their holes
_KEPT_BLOCK, _KEPT_TOP = (
    2**27,
    2**30,
)  # bytes of a block that is kept when it is freed, and of all that is free at the heap's end
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
CPU_ACTIVATION_BYTES = 2**26  # of a network at once on a CPU: more than its caches gains nothing


def budget(device: torch.device | str) -> int:
    """Bytes that a command may plan with on the device; the same for all workers that share it, of a CPU each has a part."""
    others = team()
    if others is None:
        return int(SHARE * available_memory(device))
    beside = 1 if str(device).startswith("cuda") else others.num_here
    return int(others.told_by_leader(int(SHARE * available_memory(device)) // beside))


def require(needed: int, device: torch.device | str, *, what: str, hint: str | None) -> None:
    """Pass when `needed` bytes are there. Raises DeviceError otherwise; without a hint the command line has one."""
    there = budget(device)
    if needed > there:
        raise DeviceError(
            f"{what} needs about {bytes_text(needed)} of memory; {bytes_text(there)} can be used on {device}",
            hint=hint,
            code="out_of_memory",
        )


def keep_freed_blocks() -> None:
    """From here on the C library keeps freed blocks for the next ones, where that library can: give_back_freed empties it.

    Work on features takes blocks of a few MB and frees them, a hundred times a second; pages for each, new from the system, took
    longer than the products in them (measured: a fit of a LeNet-5's head 14 s, 9 s with kept blocks; 10 % more memory at the peak).
    Who has said otherwise by the environment is heeded.
    """
    _set_malloc(
        {
            "MALLOC_MMAP_THRESHOLD_": (_MMAP_THRESHOLD, _KEPT_BLOCK),
            "MALLOC_TRIM_THRESHOLD_": (_TRIM_THRESHOLD, _KEPT_TOP),
        }
    )


def return_large_blocks() -> None:
    """From here on the C library gives each large block back to the system when it is freed, where that library can: for networks.

    Left alone it keeps blocks of up to 32 MiB, and holes between those in use, of many sizes, came to as much again as they
    held (measured: 280 MiB for 130 of a LeNet-5's factors). Who has said otherwise by the environment is heeded.
    """
    _set_malloc({"MALLOC_MMAP_THRESHOLD_": (_MMAP_THRESHOLD, LARGE_BLOCK)})


def _set_malloc(settings: dict[str, tuple[int, int]]) -> None:
    """Numbers of malloc.h and their values, each but where its variable is in the environment."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for variable, (number, value) in settings.items():
            if variable not in os.environ:
                mallopt(number, value)


def resident_bytes() -> int:
    """Bytes of memory that this process has; 0 on a system that does not tell."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as stream:  # asked between blocks that take as long
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back_freed() -> None:
    """Freed memory that the C library keeps goes back to the system, where that library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def bytes_text(size: int) -> str:
    """A number of bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size / 1024:.0f} KiB"

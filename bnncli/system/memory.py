"""Memory that a command may use on a device, malloc's settings, and the width of panels of large matrices."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.system.devices import available_memory
from bnncli.system.workers import team

SHARE = 0.7  # of free memory that a command may plan with; blocks of features and of logits take some of the rest

LARGE_BLOCK = 2**21  # bytes; new pages for smaller blocks would cost more than the holes they leave
_KEPT_BLOCK = 2**25  # bytes: the largest threshold that every version of glibc accepts
_KEPT_TOP, _USUAL_TOP = 2**30, 2**17  # bytes that stay free at the heap's end
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in malloc.h
_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD in malloc.h
CPU_ACTIVATION_BYTES = 2**26  # of a network's pass on a CPU: more than its caches hold gains nothing


def budget(device: torch.device | str) -> int:
    """Return the bytes that a command may plan with on the device, the same for all workers; workers share a CPU's memory equally."""
    if not str(device).startswith("cuda"):
        give_back_freed()  # malloc's free blocks count as used otherwise
    others = team()
    if others is None:
        return int(SHARE * available_memory(device))
    beside = 1 if str(device).startswith("cuda") else others.num_here
    return int(others.told_by_leader(int(SHARE * available_memory(device)) // beside))


def require(needed: int, device: torch.device | str, *, what: str, hint: str | None) -> None:
    """Check that `needed` bytes are available. Raises DeviceError otherwise; without a hint the command line gives one."""
    there = budget(device)
    if needed > there:
        raise DeviceError(
            f"not enough memory for {what}: needs about {bytes_text(needed)}, but only {bytes_text(there)} are available on "
            f"{device}",
            hint=hint,
            code="out_of_memory",
        )


class _Malloc:
    """malloc's settings in this process.

    Args:
        is_ours: whether the process runs nothing but bnncli, so that its settings may be changed.
    """

    def __init__(self) -> None:
        self.is_ours = False

    def set(self, largest_block: int, largest_top: int) -> None:
        """Set from how many bytes on a block, and free memory at the heap's end, go back to the system, unless set by the environment."""
        if not self.is_ours:
            return
        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ or mallopt(_MMAP_THRESHOLD, largest_block)
            # setting it alone would freeze the mmap threshold at its current value
            if is_set and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
                mallopt(_TRIM_THRESHOLD, largest_top)


_malloc = _Malloc()


def keep_freed_blocks() -> None:
    """Make malloc keep freed blocks for reuse, for a process that is all ours.

    Work on features allocates and frees blocks of a few MB a hundred times a second; new pages for each took longer
    than the products (measured: a fit of a LeNet-5's head 14 s, with kept blocks 10; a tenth more memory at the peak).
    give_back_freed releases them. malloc's environment variables take precedence.
    """
    _malloc.is_ours = True
    _malloc.set(_KEPT_BLOCK, _KEPT_TOP)


def return_large_blocks() -> None:
    """Make malloc return each large block to the system when it is freed, for networks in a process that is all ours.

    By default it keeps blocks of up to 32 MiB, and holes between blocks in use took as much memory again as the blocks
    (measured: 280 MiB for 130 of a LeNet-5's factors). malloc's environment variables take precedence.
    """
    _malloc.set(LARGE_BLOCK, _USUAL_TOP)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on a system that does not report it."""
    try:
        # reading it must be quick: it happens between blocks that take no longer
        with open("/proc/self/statm", "rb", buffering=0) as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_back_freed() -> None:
    """Return freed memory that malloc keeps to the system, with glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def bytes_text(size: int) -> str:
    """Format a number of bytes."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size / 1024:.0f} KiB"


_WIDTH = {"cpu": 256, "cuda": 1024}  # products of this many columns are nearly as fast as larger ones
_LARGE = 1024  # rows from which panels are faster than one factorisation and solve (measured on one core)


def panel_width(kind: str) -> int:
    """Return the columns of a panel on a device of this kind."""
    return _WIDTH.get(kind, _WIDTH["cpu"])


def is_large(size: int) -> bool:
    """Return whether a matrix of this many rows is worth panels."""
    return size > _LARGE

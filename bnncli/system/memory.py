"""How much memory of a device a command may use, and the width of panels of large matrices."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.system.devices import available_memory
from bnncli.system.workers import team

SHARE = 0.7  # of what is free that a command may plan with; blocks of features and of logits take some of the rest

LARGE_BLOCK = 2**21  # bytes; pages for smaller ones, new each time, would cost more than their holes
_KEPT_BLOCK = 2**25  # bytes: the largest that every version of GNU's C library takes
_KEPT_TOP, _USUAL_TOP = 2**30, 2**17  # bytes that are free at the heap's end
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_TRIM_THRESHOLD = -1  # M_TRIM_THRESHOLD
CPU_ACTIVATION_BYTES = 2**26  # of a network at once on a CPU: more than its caches gains nothing


def budget(device: torch.device | str) -> int:
    """Bytes that a command may plan with on the device; the same for all workers that share it, of a CPU each has a part."""
    if not str(device).startswith("cuda"):
        give_back_freed()  # what is kept for the next blocks counts as taken
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
            f"not enough memory for {what}: needs about {bytes_text(needed)}, but only {bytes_text(there)} are available on "
            f"{device}",
            hint=hint,
            code="out_of_memory",
        )


class _Malloc:
    """The C library's, of this process.

    Args:
        is_ours: whether nobody else works in this process, whose settings may be changed.
    """

    def __init__(self) -> None:
        self.is_ours = False

    def set(self, largest_block: int, largest_top: int) -> None:
        """From how many bytes on a block, and what is free at the heap's end, go back to the system; each but where its variable is in the environment."""
        if not self.is_ours:
            return
        with suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ or mallopt(_MMAP_THRESHOLD, largest_block)
            if is_set and "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # alone it would freeze the other where it is
                mallopt(_TRIM_THRESHOLD, largest_top)


_malloc = _Malloc()


def keep_freed_blocks() -> None:
    """From here on the C library keeps freed blocks for the next ones, where that library can: for a process that is all ours.

    Work on features takes blocks of a few MB and frees them, a hundred times a second; pages for each, new from the system, took
    longer than the products in them (measured: a fit of a LeNet-5's head 14 s, with kept blocks 10; a tenth more memory at the peak).
    give_back_freed empties it. Who has said otherwise by the environment is heeded.
    """
    _malloc.is_ours = True
    _malloc.set(_KEPT_BLOCK, _KEPT_TOP)


def return_large_blocks() -> None:
    """From here on the C library of a process that is all ours gives each large block back when it is freed: for networks.

    Left alone it keeps blocks of up to 32 MiB, and holes between those in use, of many sizes, came to as much again as they
    held (measured: 280 MiB for 130 of a LeNet-5's factors). Who has said otherwise by the environment is heeded.
    """
    _malloc.set(LARGE_BLOCK, _USUAL_TOP)


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


_WIDTH = {"cpu": 256, "cuda": 1024}  # products of so many columns have nearly the speed of larger ones
_LARGE = 1024  # rows of a matrix from which on panels are quicker than a factor and a solve (measured on one core)


def panel_width(kind: str) -> int:
    """Columns of a panel on a device of this kind."""
    return _WIDTH.get(kind, _WIDTH["cpu"])


def is_large(size: int) -> bool:
    """Whether a matrix of so many rows is worth panels."""
    return size > _LARGE

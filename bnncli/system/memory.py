"""Memory that a command may use on a device, and the width of panels of large matrices."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bnncli.errors import DeviceError
from bnncli.lazy import torch
from bnncli.system.devices import available_memory
from bnncli.system.workers import team

Result = TypeVar("Result")

SHARE = 0.7  # of free memory that a command may plan with; blocks of features and of logits take some of the rest


def budget(device: torch.device | str) -> int:
    """Return the bytes that a command may plan with on the device, the same for all workers; workers share a CPU's memory equally."""
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


def halving(work: Callable[[slice], Result], rows: slice) -> list[Result]:
    """Return what `work` returns for the rows, or, if a GPU runs out of memory, for each half of them, down to one row."""
    try:
        return [work(rows)]
    except torch.OutOfMemoryError:
        if rows.stop - rows.start < 2:
            raise
    torch.cuda.empty_cache()  # only now are the tensors of the failed work freed
    middle = (rows.start + rows.stop) // 2
    return [*halving(work, slice(rows.start, middle)), *halving(work, slice(middle, rows.stop))]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on a system that does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


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

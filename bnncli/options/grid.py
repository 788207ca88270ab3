"""Options of grid."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, option

CPU = "cpu"


@dataclass(frozen=True)
class GridOptions(Checked):
    """Options of grid."""

    jobs: int | None = option(
        None,
        "Lines that run side by side on the CPU, whose cores they share out. Without this and \0devices\0 one line runs at a time, "
        "on a GPU where there is one.",
        minimum=1,
        maximum=1024,
    )
    devices: str | None = option(
        None,
        "GPUs, as 0,1,2,3: a line at a time on each. cpu, beside them or alone, is one line on the CPU.",
        metavar="N,N",
    )
    dir: str | None = option(
        None, "Where the state and the logs lie, when it is not FILE.grid beside it.", metavar="DIR", writes=True
    )
    dry_run: bool = option(False, "Print the lines that would run, and run nothing.", short="-n")
    slurm: bool = option(False, "Print an array job of SLURM that runs them, and run nothing.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.places
        if self.jobs is not None and self.devices is not None:
            raise UsageError("\0jobs\0 and \0devices\0 exclude each other: on GPUs there is one line at a time on each")
        if self.slurm and (self.jobs is not None or self.devices is not None or self.dry_run):
            raise UsageError(
                "\0slurm\0 prints what SLURM runs: \0jobs\0, \0devices\0 and \0dry_run\0 are for what runs here"
            )

    @property
    def places(self) -> list[str]:
        """The devices, each a number or cpu; none where they were not given."""
        found = [] if self.devices is None else [one.strip() for one in self.devices.split(",")]
        for one in found:
            if one != CPU and not re.fullmatch(r"[0-9]{1,4}", one):
                raise UsageError(f"\0devices\0: expected numbers of GPUs and cpu, as 0,1,2,3; got {self.devices!r}")
            if found.count(one) > 1:
                raise UsageError(f"\0devices\0: {one} is given twice; one line at a time runs on each")
        return found

"""Options of grid."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class GridOptions(Checked):
    """Options of grid."""

    jobs: int | None = option(
        None,
        "Run this many jobs in parallel on the CPU. Default: one at a time, on a GPU if there is one.",
        minimum=1,
        maximum=1024,
    )
    devices: str | None = option(
        None,
        "GPUs to run on, such as 0,1,2,3. Each runs one job at a time; cpu adds one job on the CPU.",
        metavar="N,N",
    )
    dir: str | None = option(
        None, "Folder for state and logs. Default: FILE.grid beside FILE.", metavar="DIR", writes=True
    )
    dry_run: bool = option(False, "Print the commands that would run, without running them.", short="-n")
    slurm: bool = option(False, "Print a SLURM array job for these commands, without running them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.places
        if self.jobs is not None and self.devices is not None:
            raise UsageError("\0jobs\0 and \0devices\0 are mutually exclusive: each GPU runs one job at a time")
        if self.slurm and (self.jobs is not None or self.devices is not None or self.dry_run):
            raise UsageError("\0slurm\0 only prints a job script: drop \0jobs\0, \0devices\0 and \0dry_run\0")

    @property
    def places(self) -> list[str]:
        """The devices, each a number or cpu; none where they were not given."""
        found = [] if self.devices is None else [one.strip() for one in self.devices.split(",")]
        for one in found:
            if one != "cpu" and not re.fullmatch(r"[0-9]{1,4}", one):
                raise UsageError(f"\0devices\0: expected GPU numbers and cpu, such as 0,1,2,3; got {self.devices!r}")
            if found.count(one) > 1:
                raise UsageError(f"\0devices\0: {one} is given twice; each device runs one job at a time")
        return found

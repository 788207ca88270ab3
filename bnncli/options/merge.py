"""Options of merge."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option
from bnncli.options.shared import trust_code_option


@dataclass(frozen=True)
class MergeOptions(Checked):
    """Options of merge."""

    posterior: list[str] = option(
        [],
        "hmc posterior to merge, two or more, by name or file. A file may come from a copy of the run.",
        metavar="NAME|FILE",
        numeric=False,  # recorded by their names
    )
    max_rhat: float | None = option(
        None,
        "Exit 3 if the largest R-hat of the merged chains is above this value.",
        minimum=1.0,
        numeric=False,
    )
    trust_code: bool = trust_code_option()

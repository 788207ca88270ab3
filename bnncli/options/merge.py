"""Options of merge."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option
from bnncli.options.layers import trust_code_option


@dataclass(frozen=True)
class MergeOptions(Checked):
    """Options of merge."""

    posterior: list[str] = option(
        [],
        "Draws of hmc, two or more, in the order that their chains shall have. A file may be that of a copy of the run, made elsewhere.",
        metavar="NAME|FILE",
        numeric=False,  # recorded by their names
    )
    max_rhat: float | None = option(
        None,
        "Exit 3 when the largest R-hat of the joined chains is above this: of parameters, of other layers than the last of predictions.",
        minimum=1.0,
        numeric=False,
    )
    trust_code: bool = trust_code_option()

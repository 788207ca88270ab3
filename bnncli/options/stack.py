"""Options of stack."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class StackOptions(Checked):
    """Options of stack: how it goes on after an interruption."""

    resume: bool = option(False, "Continue the interrupted run of this very request, if there is one.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between the states that \0resume\0 continues from; 0 saves after every way of refitting.",
        minimum=0,
        numeric=False,
    )

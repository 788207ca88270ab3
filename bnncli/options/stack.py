"""Options of stack."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class StackOptions(Checked):
    """Options of stack: how it goes on after an interruption."""

    resume: bool = option(False, "Continue an interrupted run that had the same inputs and options.", numeric=False)
    save_every: float = option(
        60.0,
        "Seconds between saved states for \0resume\0. With 0, save after every refit.",
        minimum=0,
        numeric=False,
        is_rare=True,
    )

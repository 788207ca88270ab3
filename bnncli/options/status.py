"""Options of status."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class StatusOptions(Checked):
    """Options of status."""

    check: bool = option(False, "Exit 3 unless every artifact is up to date.")

"""Options of the commands that look after a run: status, convert, demo."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class StatusOptions(Checked):
    """Options of status."""

    check: bool = option(False, "Exit 3 unless every artifact is fresh.")


@dataclass(frozen=True)
class ConvertOptions(Checked):
    """Options of convert."""

    trust_pickle: bool = option(
        False, "Unpickle SOURCE although that can run any code in it. Only for files you trust."
    )


@dataclass(frozen=True)
class DemoOptions(Checked):
    """Options of demo."""

    dir: str = option("bnncli-demo", "Folder the demo is made in.", metavar="DIR")

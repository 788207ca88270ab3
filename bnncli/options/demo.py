"""Options of demo."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option


@dataclass(frozen=True)
class DemoOptions(Checked):
    """Options of demo."""

    dir: str = option("bnncli-demo", "Folder for the demo.", metavar="DIR", writes=True)
    files_only: bool = option(False, "Write the checkpoint and the data, and stop.")

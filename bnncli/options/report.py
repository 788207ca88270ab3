"""Options of report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bnncli.errors import UsageError
from bnncli.options.common import accept_poor_network_option
from bnncli.options.declaration import Checked, option
from bnncli.options.layers import trust_code_option

FIGURE_FORMATS = ("png", "pdf", "svg")  # the first is what is taken where none is named


@dataclass(frozen=True)
class ReportOptions(Checked):
    """Options of report."""

    out: str | None = option(
        None,
        "Write to exactly this file, instead of report.html (comparison.html of several checkpoints) in the run folder of the first.",
        short="-o",
        metavar="FILE",
        writes=True,
    )
    posterior: list[str] = option(
        [], "Only this posterior, by name; all of the run by default. Repeatable.", metavar="NAME"
    )
    split: str | None = option(
        None,
        "In-distribution split whose predictions are shown; test where there are any of it, else the first.",
        metavar="SPLIT",
    )
    examples: int = option(
        6,
        "Inputs shown at each end, the most and the least certain; 0 for none, so that the file holds nothing of the data.",
        minimum=0,
        maximum=24,
    )
    figures: str | None = option(
        None, "Draw the figures into this folder as well, a file each.", metavar="DIR", writes=True
    )
    figure_format: list[str] = option(
        [], "Form of these files; png by default. Repeatable.", choices=FIGURE_FORMATS, metavar="png|pdf|svg"
    )
    trust_code: bool = trust_code_option(is_recorded=False)
    accept_poor_network: bool = accept_poor_network_option(is_recorded=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.figure_format and self.figures is None:
            raise UsageError("\0figure_format\0 says how \0figures\0 are written: name a folder with that")
        if self.out is not None and Path(self.out).name in ("", ".."):
            raise UsageError(f"\0out\0: expected a file; got {self.out!r}", hint="add a file name: \0out\0 FOLDER/NAME")

    @property
    def forms(self) -> list[str]:
        """Of the files of figures, each once."""
        return list(dict.fromkeys(self.figure_format)) or [FIGURE_FORMATS[0]]

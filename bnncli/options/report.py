"""Options of report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bnncli.errors import UsageError
from bnncli.options.command import accept_poor_network_option
from bnncli.options.declaration import Checked, option
from bnncli.options.shared import trust_code_option

FIGURE_FORMATS = ("png", "pdf", "svg")  # the first is what is taken where none is named


@dataclass(frozen=True)
class ReportOptions(Checked):
    """Options of report."""

    out: str | None = option(
        None,
        "Write to this file. Default: report.html (or comparison.html) in the first run folder.",
        short="-o",
        metavar="FILE",
        writes=True,
    )
    posterior: list[str] = option([], "Report only this posterior. Default: all posteriors in the run.", metavar="NAME")
    split: str | None = option(
        None,
        "In-distribution split to report. Default: test, else the first.",
        metavar="SPLIT",
    )
    examples: int = option(
        6,
        "Show this many of the most certain inputs, and as many of the least certain. 0 keeps your data out of "
        "the file.",
        minimum=0,
        maximum=24,
    )
    figures: str | None = option(None, "Also write the figures to this folder.", metavar="DIR", writes=True)
    figure_format: list[str] = option(
        [], "Format of the figure files. Default: png.", choices=FIGURE_FORMATS, metavar="png|pdf|svg"
    )
    trust_code: bool = trust_code_option(is_recorded=False)
    accept_poor_network: bool = accept_poor_network_option(is_recorded=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.figure_format and self.figures is None:
            raise UsageError("\0figure_format\0 needs a folder for the figures: add \0figures\0 DIR")
        if self.out is not None and Path(self.out).name in ("", ".."):
            raise UsageError(f"\0out\0: expected a file; got {self.out!r}", hint="add a file name: \0out\0 FOLDER/NAME")

    @property
    def forms(self) -> list[str]:
        """Of the files of figures, each once."""
        return list(dict.fromkeys(self.figure_format)) or [FIGURE_FORMATS[0]]

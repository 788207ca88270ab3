"""Options of reproduce."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli.options.declaration import Checked, option

SCALES = ("quick", "paper")
PUBLISHED, RIGHT, BOTH = "published", "right", "both"  # definitions of what is measured


@dataclass(frozen=True)
class ReproduceOptions(Checked):
    """Options of reproduce."""

    all: bool = option(False, "Run every recipe.")
    data: str | None = option(None, "Folder with the data sets, named as in the list.", metavar="DIR")
    checkpoints: str | None = option(None, "Folder with the checkpoints.", metavar="DIR")
    scale: str = option(
        "quick",
        "Scale to run at: quick is the smallest case that shows the effect, at most two minutes on two cores; "
        "paper is the published setting.",
        choices=SCALES,
    )
    definitions: str = option(
        BOTH,
        "What to do if published code and text differ: follow the published definition, follow the right one, "
        "or report both.",
        choices=(PUBLISHED, RIGHT, BOTH),
        is_rare=True,
    )
    jobs: int | None = option(
        None,
        "Number of experiments to run in parallel. Default: one per core, at most four; one on a GPU.",
        minimum=1,
        maximum=1024,
    )
    out: str = option(
        "bnncli-reproduce", "Folder for runs, results and figures.", short="-o", metavar="DIR", writes=True
    )
    force: bool = option(
        False,
        "Repeat finished work. Otherwise unchanged results are reused.",
        short="-f",
    )
    strict: bool = option(False, "Exit 3 if a number differs from the published one, or a claim fails.")

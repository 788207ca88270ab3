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
    data: str | None = option(
        None, "Folder with the data sets that recipes need, under the names that the list has.", metavar="DIR"
    )
    checkpoints: str | None = option(None, "Folder with the checkpoints that recipes need.", metavar="DIR")
    scale: str = option(
        "quick",
        "quick: the smallest case that shows the effect, seconds to two minutes a recipe on two cores; paper: the published setting, for a machine with a GPU.",
        choices=SCALES,
    )
    definitions: str = option(
        BOTH,
        "Where published code departs from its text or from what is right: numbers by the published definition, the right one, or both in rows of their own.",
        choices=(PUBLISHED, RIGHT, BOTH),
    )
    jobs: int | None = option(
        None,
        "Studies and experiments made side by side, in processes that share out the cores: by default one for each core, four at most, and "
        "one in all on a GPU. With the same \0threads\0 any number gives the same numbers.",
        minimum=1,
        maximum=1024,
    )
    out: str = option(
        "bnncli-reproduce", "Folder for runs, results and figures.", short="-o", metavar="DIR", writes=True
    )
    force: bool = option(
        False,
        "Measure and fit anew what is there already: otherwise finished work is taken where nothing that it is of has changed.",
        short="-f",
    )
    strict: bool = option(False, "Exit 3 where a number differs from the published one, or a claim fails.")

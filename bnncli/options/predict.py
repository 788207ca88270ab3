"""Options of predict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, check_suffix, collected, option
from bnncli.options.layers import chosen_layers_option, trust_code_option
from bnncli.options.parts import Setting, declarations

QMC = Setting("Draw by scrambled Sobol points instead of pseudo-random numbers", bool, False, place=10)
STDIN = "-"  # the data whose files are named there
PROJECTION = Setting("What the logits are reduced to first", place=20)


def _samples_help() -> str:
    defaults = ", ".join(f"{part} {draws}" for part, draws in declarations("integrators", "DRAWS").items())
    return (
        f"Draws of a sampling integrator; by default {defaults}, what fit-lbbnn wrote with \0hidden\0, and all draws of a "
        "posterior that is draws (hmc)."
    )


@dataclass(frozen=True)
class PredictOptions(Checked):
    """Options of predict, `settings` being those that integrators declare."""

    posterior: list[str] = option(
        [],
        "Posterior to predict with, by name or file, or all; by default what auto recommends, all of the run where it has recommended nothing. Repeatable.",
        metavar="NAME|FILE",
        numeric=False,
    )
    layers: str | None = chosen_layers_option()
    integrator: list[str] = option(
        [],
        "How the posterior becomes probabilities. By default the one that predicted val best when a Gaussian was fitted; else plug-in for map, temperature and what prune writes, logit-mc for Gaussians over other layers than the last, mc for all others; "
        "all takes every one that fits the posterior. mc averages over draws; plug-in takes one network (the centre; of fit-lbbnn's, the "
        "weights with inclusion above 1/2), mean the one at fit-lbbnn's mean weights. Repeatable.",
        family="integrators",
        choices=("all",),
    )
    split: list[str] = option(
        [], "Split to predict; all but train by default. Repeatable.", metavar="SPLIT", numeric=False
    )
    data: list[str] = option(
        [],
        "Predict new data in one go, instead of splits of the run: the run's network reads them, predictions go to \0table\0, and no "
        "features are kept unless \0keep_features\0 asks for it. SPEC as for extract-features; - reads the names of image files from stdin, one a line. Repeatable.",
        metavar="SPLIT=SPEC",
        numeric=False,
    )
    ood: list[str] = option(
        [],
        "New data of other classes than the network's: the same as \0data\0, and whatever labels they have are left out. Repeatable.",
        metavar="SPLIT=SPEC",
        numeric=False,
    )
    keep_features: bool = option(
        False,
        "Keep the features of new data as splits of the run, as extract-features writes them, for predict, evaluate and all others to go on with.",
        numeric=False,
    )
    follow: str | None = option(
        None,
        "Predict the images in this folder and those that arrive, until stopped: each file once, its row appended to \0table\0 (.csv), "
        "which a later start goes on with.",
        metavar="DIR",
        numeric=False,
    )
    idle: float | None = option(
        None, "End \0follow\0 when nothing has arrived for so many seconds.", minimum=0, numeric=False
    )
    samples: int | None = option(
        None,
        _samples_help,
        minimum=1,
    )
    keep_samples: bool = option(
        False, "Keep the probabilities of every draw as well (float16, draws x examples x classes).", numeric=False
    )
    settings: dict[str, Any] = collected("integrators")
    top_k: str | None = option(
        None,
        "Count the most probable classes that cannot be told apart, by the overlap of their marginals: with the one before (neighbor), or with the first (best). For integrators that give a Dirichlet (bridge).",
        choices=("neighbor", "best"),
    )
    top_k_threshold: float | None = option(
        None, "Mass left outside the two quantiles that \0top_k\0 compares; 0.05 by default, less keeps more classes."
    )
    top_k_cap: int | None = option(None, "Most classes that \0top_k\0 keeps; 10 by default.", minimum=1)
    table: str | None = option(
        None,
        "Write everything that was predicted as one table, a row an example, with the names of the examples (such as image files) where the features have them: .csv or .npz. low and high are the central interval of the predicted class's probability, level what it holds: 0.95, less with fewer than 39 draws. Of several labels an example, predicted names those of at least 0.5, and each has columns of its own.",
        metavar="FILE",
        writes=True,
        numeric=False,
    )
    probabilities: bool = option(
        False,
        "Give every class a column in the table, p_CLASS, of its probability (in .npz one array, probabilities).",
        numeric=False,
    )
    raw_text: bool = option(
        False,
        "Leave names in a .csv table as they are that begin with =, +, - or @; by default a ' before them keeps spreadsheets from "
        "running them as formulas.",
        numeric=False,
    )
    merge: list[str] = option(
        [],
        "Give the union of classes columns in the table: its probability, and its interval where there is a Dirichlet. By name or index. Repeatable.",
        metavar="NAME=CLASS,CLASS",
        numeric=False,
    )

    decide: list[str] = option(
        [],
        "Rule of calibrate whose decisions are told, and columns of the table (set, set_size, accept, ood; with the rule's name before them where it has one of its own); by default all that fit, where there is a table; none takes none. Repeatable.",
        metavar="NAME",
        numeric=False,
    )
    trust_code: bool = trust_code_option(also=", or new data are given")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is not None:
            check_suffix(self.table, "\0table\0", ("csv", "npz"))
        for text in self.merge:
            if not re.fullmatch(r"[^=,\s][^=,]*=[^=]*[^=\s]", text) or not text.isprintable():
                raise UsageError(f"\0merge\0: expected NAME=CLASS,CLASS; got {text!r}")
        if self.top_k_threshold is not None and not 0 < self.top_k_threshold < 1:
            raise UsageError(f"\0top_k_threshold\0: expected a number between 0 and 1; got {self.top_k_threshold}")

    def check_together(self) -> None:
        """Raise UsageError for an option that only means something beside another one."""
        for flag, is_given in (
            ("\0merge\0", self.merge),
            ("\0probabilities\0", self.probabilities),
            ("\0raw_text\0", self.raw_text),
        ):
            if is_given and self.table is None:
                raise UsageError(f"{flag} is about the table: add \0table\0 FILE")
        if self.is_of_new_data:
            self._check_new_data()
        elif self.idle is not None:
            raise UsageError("\0idle\0 ends \0follow\0: add \0follow\0 DIR")
        elif self.keep_features:
            raise UsageError("\0keep_features\0 is of new data: add \0data\0 SPLIT=SPEC")
        if self.top_k is None and (self.top_k_threshold, self.top_k_cap) != (None, None):
            raise UsageError(
                "\0top_k_threshold\0 and \0top_k_cap\0 say how \0top_k\0 ranks: add \0top_k\0 neighbor or best"
            )

    @property
    def is_of_new_data(self) -> bool:
        """Whether what is predicted are no splits of the run."""
        return bool(self.data or self.ood) or self.follow is not None

    def _check_new_data(self) -> None:
        """Raise UsageError for what does not go with data that are no split of the run."""
        given = [flag for flag, value in (("\0data\0", self.data), ("\0ood\0", self.ood)) if value]
        flag = given[0] if given else "\0follow\0"
        if given and self.follow is not None:
            raise UsageError(f"{flag} and \0follow\0 exclude each other: give one")
        if self.split:
            raise UsageError(f"\0split\0 is a split of the run, {flag} new data: give one")
        if self.keep_samples:
            raise UsageError(f"\0keep_samples\0 is for splits of the run: {flag} writes a table alone")
        if self.table is None:
            raise UsageError(f"{flag} writes a table: add \0table\0 FILE")
        if self.keep_features:
            self._check_is_split()
        if self.follow is not None and not self.table.lower().endswith(".csv"):
            raise UsageError(f"\0follow\0 appends to a .csv table; got \0table\0 {self.table}")

    def _check_is_split(self) -> None:
        """Raise UsageError where new data cannot be a split of the run: one that can be read again, and is whole."""
        if self.follow is not None:
            raise UsageError(
                "\0keep_features\0: a split is whole, and \0follow\0 has no end: of what is in the folder, extract-features "
                f"\0data\0 SPLIT=images:{self.follow} makes one"
            )
        if any(text.partition("=")[2] == STDIN for text in (*self.data, *self.ood)):
            raise UsageError(
                "\0keep_features\0: a split is made again of its data when these have changed, and stdin cannot be read again: "
                "name the files' folder, as \0data\0 SPLIT=images:DIR"
            )

"""Options of predict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bnncli.errors import UsageError
from bnncli.options import shared
from bnncli.options.declaration import CheckedOptions, check_suffix, declarations, declare_option_group, option
from bnncli.options.shared import chosen_layers_option, trust_code_option

STDIN = "-"  # file name that means reading file names from stdin


def _samples_help() -> str:
    defaults = ", ".join(f"{part} {draws.default}" for part, draws in declarations("integrators", "DRAWS").items())
    return f"Number of draws for a sampling integrator. Default: {defaults}; all draws of a sampled posterior."


@dataclass(frozen=True)
class PredictOptions(CheckedOptions):
    """Options of predict; `settings` holds the options that integrators declare."""

    posterior: list[str] = option(
        [],
        "Posterior to predict with, by name or file, or all. Default: auto's recommendation, else all.",
        metavar="NAME|FILE",
        numeric=False,
        group="What to predict",
    )
    layers: str | None = chosen_layers_option("What to predict", is_rare=True)
    integrator: list[str] = option(
        [],
        "How to turn the posterior into probabilities; all uses every integrator that applies. Default: the "
        "best on val, else mc (logit-mc or plug-in if they fit better).",
        family="integrators",
        choices=("all",),
        group="How",
    )
    split: list[str] = option(
        [], "Split to predict. Default: all but train.", metavar="SPLIT", numeric=False, group="What to predict"
    )
    data: list[str] = option(
        [],
        "Predict on new data instead of the run's splits and write the results to \0table\0. SPEC is as for "
        "extract-features; - reads image file names from stdin.",
        metavar="SPLIT=SPEC",
        numeric=False,
        group="What to predict",
    )
    ood: list[str] = option(
        [],
        "Like \0data\0, but for out-of-distribution data. Labels are ignored.",
        metavar="SPLIT=SPEC",
        numeric=False,
        group="What to predict",
    )
    skip_unreadable: bool = shared.skip_unreadable("What to predict", is_rare=True)
    max_skipped: float | None = shared.max_skipped("What to predict")
    keep_features: bool = option(
        False, "Store the features of new data as splits of the run.", numeric=False, group="Output"
    )
    follow: str | None = option(
        None,
        "Predict on the images in this folder and on new arrivals until stopped. Appends to \0table\0 (.csv).",
        metavar="DIR",
        numeric=False,
        group="What to predict",
    )
    idle: float | None = option(
        None,
        "Stop \0follow\0 after this many seconds without a new file.",
        minimum=0,
        numeric=False,
        group="What to predict",
        is_rare=True,
    )
    samples: int | None = option(None, _samples_help, minimum=1, group="How")
    keep_samples: bool = option(
        False, "Also store the probabilities of every draw (float16).", numeric=False, group="Output", is_rare=True
    )
    settings: dict[str, Any] = declare_option_group("integrators")
    top_k: str | None = option(
        None,
        "Count the top classes whose intervals overlap with that of the previous class (neighbor) or of the "
        "first (best). Needs integrator bridge.",
        choices=("neighbor", "best"),
        group="Decisions",
        is_rare=True,
    )
    top_k_threshold: float | None = option(
        None, "Probability mass outside the intervals of \0top_k\0. Default: 0.05.", group="Decisions", is_rare=True
    )
    top_k_cap: int | None = option(
        None, "Maximum number of classes for \0top_k\0. Default: 10.", minimum=1, group="Decisions", is_rare=True
    )
    table: str | None = option(
        None,
        "Write predictions as one table, with a row per example, to a .csv or .npz file.",
        metavar="FILE",
        writes=True,
        numeric=False,
        group="Output",
    )
    probabilities: bool = option(
        False, "Add each class's probability to the table, in columns p_CLASS.", numeric=False, group="Output"
    )
    raw_text: bool = option(
        False,
        "Do not quote .csv names that a spreadsheet could run as a formula.",
        numeric=False,
        group="Output",
        is_rare=True,
    )
    merge: list[str] = option(
        [],
        "Add columns for a union of classes to the table. Give classes by name or index.",
        metavar="NAME=CLASS,CLASS",
        numeric=False,
        group="Output",
        is_rare=True,
    )

    decide: list[str] = option(
        [],
        "Calibrated rule to apply; adds columns such as set, accept and ood. Default: all rules that apply; "
        "none turns them off.",
        metavar="NAME",
        numeric=False,
        group="Decisions",
    )
    trust_code: bool = trust_code_option(also=" and for new data", group="What to predict", is_rare=False)

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
        """Raise UsageError for an option given without the option that it needs."""
        shared.check_skipped(self.skip_unreadable, self.max_skipped)
        for flag, is_given in (
            ("\0merge\0", self.merge),
            ("\0probabilities\0", self.probabilities),
            ("\0raw_text\0", self.raw_text),
        ):
            if is_given and self.table is None:
                raise UsageError(f"{flag} applies to the table: add \0table\0 FILE")
        if self.is_of_new_data:
            self._check_new_data()
        elif self.idle is not None:
            raise UsageError("\0idle\0 stops \0follow\0: add \0follow\0 DIR")
        elif self.keep_features:
            raise UsageError("\0keep_features\0 applies to new data: add \0data\0 SPLIT=SPEC")
        elif self.skip_unreadable:
            raise UsageError("\0skip_unreadable\0 applies to new data: add \0data\0 SPLIT=SPEC")
        if self.top_k is None and (self.top_k_threshold, self.top_k_cap) != (None, None):
            raise UsageError("\0top_k_threshold\0 and \0top_k_cap\0 apply to \0top_k\0: add \0top_k\0 neighbor or best")

    @property
    def is_of_new_data(self) -> bool:
        """Return whether the predictions are for new data rather than splits of the run."""
        return bool(self.data or self.ood) or self.follow is not None

    def _check_new_data(self) -> None:
        """Raise UsageError for options that do not apply to new data."""
        given = [flag for flag, value in (("\0data\0", self.data), ("\0ood\0", self.ood)) if value]
        flag = given[0] if given else "\0follow\0"
        if given and self.follow is not None:
            raise UsageError(f"{flag} and \0follow\0 are mutually exclusive: give one of them")
        if self.split:
            raise UsageError(f"\0split\0 names a split of the run, {flag} new data: give one of them")
        if self.keep_samples:
            raise UsageError(f"\0keep_samples\0 is for splits of the run: {flag} writes only a table")
        if self.table is None:
            raise UsageError(f"{flag} writes a table: add \0table\0 FILE")
        if self.keep_features:
            self._check_is_split()
        if self.follow is not None and self.skip_unreadable:
            raise UsageError("\0skip_unreadable\0 is for \0data\0: \0follow\0 leaves out unreadable files in any case")
        if self.follow is not None and not self.table.lower().endswith(".csv"):
            raise UsageError(f"\0follow\0 appends to a .csv table; got \0table\0 {self.table}")

    def _check_is_split(self) -> None:
        """Raise UsageError if the new data cannot become a split of the run, which must be complete and readable again."""
        if self.follow is not None:
            raise UsageError(
                "\0keep_features\0 needs a complete split, which \0follow\0 never has: use extract-features "
                f"\0data\0 SPLIT=images:{self.follow}"
            )
        if any(text.partition("=")[2] == STDIN for text in (*self.data, *self.ood)):
            raise UsageError(
                "\0keep_features\0 cannot read stdin again: give the files' folder, such as \0data\0 SPLIT=images:DIR"
            )

"""Options of commands that score: scores, their settings, and assertions such as `ece<=0.02`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from bnncli.errors import UsageError
from bnncli.evaluation import detectors, scores
from bnncli.evaluation.scores import ScoreOption, all_scores
from bnncli.likelihoods import TASKS
from bnncli.names import near_miss, unknown_value_error
from bnncli.options.declaration import (
    CheckedOptions,
    Declared,
    check_split_name,
    check_suffix,
    declare_option,
    declare_option_group,
    option,
)
from bnncli.options.shared import check_variant, chosen_layers_option, list_maps

GRAMMAR = "[POSTERIOR[.INTEGRATOR].]METRIC[-PART][:CHOICE...][@SPLIT], then <=, <, >=, >, == or !=, then a number or another score"
PARTS = ("excess", "floor", "low", "high")  # derived quantities of a metric
_OF_FLOORS = ("excess", "floor")  # parts of metrics for which a calibrated model scores above 0 by chance
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_NAME, _DOTTED = r"[A-Za-z0-9][A-Za-z0-9_-]*", r"[A-Za-z0-9][A-Za-z0-9._-]*"
_QUANTITY = re.compile(
    rf"(?:({_NAME})\.)?(?:({_NAME})\.)?([a-z][a-z0-9_]*)(?:-([a-z]+))?((?::{_DOTTED})*)(?:@({_DOTTED}))?", re.ASCII
)


class Quantity(NamedTuple):
    """A reference to a score; None fields are unspecified.

    `part` selects a derived quantity, one of PARTS: the value of a calibrated model (`floor`), the value above it
    (`excess`), or an end of the interval (`low`, `high`). None selects the value itself.
    """

    metric: str
    choices: tuple[str, ...] = ()
    posterior: str | None = None
    integrator: str | None = None
    split: str | None = None
    part: str | None = None

    @property
    def label(self) -> str:
        """Metric, part and choices."""
        metric = self.metric if self.part is None else f"{self.metric}-{self.part}"
        return ":".join((metric, *self.choices))

    def __str__(self) -> str:
        names = "".join(f"{name}." for name in (self.posterior, self.integrator) if name is not None)
        split = "" if self.split is None else f"@{self.split}"
        return names + self.label + split


class Assertion(NamedTuple):
    """A comparison of a score with a number or another score."""

    left: Quantity
    operator: str
    right: Quantity | float

    def holds(self, left: float, right: float) -> bool:
        """Return whether the comparison holds for these two values."""
        return _OPERATORS[self.operator](left, right)

    def __str__(self) -> str:
        right = f"{self.right!r}" if isinstance(self.right, float) else str(self.right)
        return f"{self.left}{self.operator}{right.removesuffix('.0')}"


def parse_assertion(text: str, flag: str, metrics: Sequence[str]) -> Assertion:
    """Parse an assertion.

    Args:
        flag: the option, for messages.
        metrics: valid metric names.

    Raises:
        UsageError: the text does not match the grammar, a metric or part is unknown, or a number is not finite.
    """
    match = re.fullmatch(r"([^<>=!]*)(<=|>=|==|!=|<|>)([^<>=!]*)", text)
    if match is None:
        raise _refusal(flag, text)
    left, sign, right = (part.strip() for part in match.groups())
    if _number(left) is not None:
        raise UsageError(f"{flag}: the left side of {text!r} is a number; put the score there")
    number = _number(right)
    if number is None and (share := _number(right.removesuffix("%").rstrip())) is not None:
        quantity = _quantity(left, text, flag, metrics)
        if all_scores()[quantity.metric].limits == (0, 1):
            said = f"write {quantity}{sign}{share / 100:g}"
            raise UsageError(f"{flag}: {quantity.metric} is a fraction; got {right} in {text!r}", hint=said)
    if number is None:
        return Assertion(_quantity(left, text, flag, metrics), sign, _quantity(right, text, flag, metrics))
    if not math.isfinite(number):
        raise UsageError(f"{flag}: expected a finite number; got {right!r} in {text!r}")
    quantity = _quantity(left, text, flag, metrics)
    if number > 1 and all_scores()[quantity.metric].limits == (0, 1):
        hint = f"write {quantity}{sign}{number / 100:g}" if number <= 100 else None
        raise UsageError(f"{flag}: {quantity.metric} is a fraction, from 0 to 1; got {right} in {text!r}", hint=hint)
    return Assertion(quantity, sign, number)


def parse_score(text: str, flag: str, metrics: Sequence[str]) -> Quantity:
    """Parse METRIC[:CHOICE...], without posterior or split. Raises UsageError."""
    match = _QUANTITY.fullmatch(text)
    if match is None or any(match.group(place) is not None for place in (1, 2, 4, 6)):
        raise UsageError(f"{flag}: expected METRIC[:CHOICE...], such as ece or auroc:mnist; got {text!r}")
    return _quantity(text, text, flag, metrics)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _quantity(part: str, text: str, flag: str, metrics: Sequence[str]) -> Quantity:
    match = _QUANTITY.fullmatch(part)
    if match is None:
        raise _refusal(flag, text)
    posterior, integrator, metric, part, choices, split = match.groups()
    if metric not in metrics:
        raise UsageError(
            f"{flag}: unknown metric {metric!r} in {text!r}; expected one of {', '.join(metrics)}",
            hint=near_miss(metric, metrics),
        )
    if part is not None and part not in PARTS:
        raise unknown_value_error(f"{flag} {text}: part of {metric}", part, PARTS)
    if part in _OF_FLOORS and not all_scores()[metric].has_floor:
        owners = ", ".join(name for name, score in all_scores().items() if score.has_floor and name in metrics)
        raise UsageError(
            f"{flag}: {metric} has no {part} in {text!r}; expected low or high, or a metric with {part}: {owners}"
        )
    return Quantity(metric, tuple(choices.split(":")[1:]), posterior, integrator, split, part)


def _refusal(flag: str, text: str) -> UsageError:
    return UsageError(f"{flag}: expected {GRAMMAR}, such as ece<=0.02 or nll<map.nll; got {text!r}")


@cache
def declare_score_options() -> Declared:
    """Return the options of all scores, for evaluate."""
    return _declare_options(scores.score_options())


@cache
def declare_prediction_score_options() -> Declared:
    """Return the options of scores that need only predictions, for score."""
    names = {name for score in scores.all_scores().values() if score.of_split is not None for name in score.options}
    return _declare_options({name: one for name, one in scores.score_options().items() if name in names})


@cache
def declare_detector_options() -> Declared:
    """Return the options of detectors, for evaluate."""
    return _declare_options(detectors.detector_options())


@cache
def declare_comparison_options() -> Declared:
    """Return the options of scores that compare also takes."""
    every = scores.score_options()
    return _declare_options({name: replace(one, text=one.in_compare) for name, one in every.items() if one.in_compare})


def _declare_options(options: Mapping[str, ScoreOption]) -> Declared:
    found = {}
    for name, one in options.items():
        hint = one.type | None if one.default is None else one.type
        low, high = one.minimum, one.maximum
        spec = option(
            one.default,
            one.text,
            minimum=low,
            maximum=high,
            metavar=one.metavar,
            check=one.check,
            group="Scores",
            is_rare=True,
        )
        found[name] = declare_option(name, hint, spec)
    return found


def _metrics() -> tuple[str, ...]:
    return tuple(all_scores())


def _list_evaluate_choices() -> tuple[str, ...]:
    return *detectors.prediction_detectors(), *detectors.feature_detectors(), "all"


@dataclass(frozen=True)
class ShownScores(CheckedOptions):
    """Options of commands that score: which scores to show and assert."""

    metric: list[str] = option(
        [],
        "Show only this score. Exit 65 if it is undefined for every posterior.",
        choices=_metrics,
        numeric=False,
        group="Scores",
    )
    assert_: list[str] = option(
        [],
        "Exit 3 unless this assertion holds, such as ece<=0.02 or nll<map.nll@test. The form is "
        "[POSTERIOR[.INTEGRATOR].]METRIC[-PART][:CHOICE...][@SPLIT], an operator, and a number or another score.",
        metavar="ASSERTION",
        numeric=False,
        group="Scores",
    )
    per_class: bool = option(
        False, "Show the scores of each class in a separate table and in \0json\0.", numeric=False, group="Output"
    )
    intervals: bool = option(
        False, "Show each score as value [low, high], with its bootstrap interval.", numeric=False, group="Output"
    )
    level: float = option(0.95, "Level of the bootstrap intervals.", minimum=0, maximum=1, group="Output", is_rare=True)

    def check_intervals(self, replicates: int | None) -> None:
        """Raise UsageError for an invalid assertion or level, or if intervals are requested but not computed."""
        sides = [side for one in self.assertions for side in (one.left, one.right) if isinstance(side, Quantity)]
        if self.level in (0, 1):
            raise UsageError(f"\0level\0: expected a number between 0 and 1; got {self.level}")
        if replicates == 0 and any(side.part in ("low", "high") for side in sides):
            raise UsageError("\0assert_\0: \0bootstrap\0 0 computes no intervals")
        if self.intervals and replicates == 0:
            raise UsageError("\0intervals\0: \0bootstrap\0 0 computes no intervals")

    @property
    def assertions(self) -> list[Assertion]:
        r"""Parsed \0assert_\0 options."""
        return [parse_assertion(text, "\0assert_\0", _metrics()) for text in self.assert_]


@dataclass(frozen=True)
class EvaluateOptions(ShownScores):
    """Options of evaluate; `settings` holds the options of scores, `detector_settings` those of detectors."""

    posterior: list[str] = option(
        [], "Score only this posterior's predictions.", metavar="NAME", numeric=False, group="What to score"
    )
    layers: str | None = chosen_layers_option("What to score")
    integrator: list[str] = option(
        [],
        "Score only this integrator's predictions: a name (mc), or a name with settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        numeric=False,
        group="What to score",
    )
    split: list[str] = option(
        [], "Score only this in-distribution split.", metavar="SPLIT", numeric=False, group="What to score"
    )
    plot: str | None = option(
        None,
        "Draw reliability diagrams, risk-coverage curves and ROC curves as PNG files in this folder.",
        metavar="DIR",
        writes=True,
        numeric=False,
        group="Output",
    )
    curves: bool = option(
        False,
        "Add the points of these curves to \0json\0, at most 200 per curve.",
        numeric=False,
        group="Output",
        is_rare=True,
    )
    score: list[str] = option(
        [],
        "Score that detects out-of-distribution examples, from predictions or features. Default: combined, else "
        "mutual_info or max_prob.",
        choices=_list_evaluate_choices,
        group="Scores",
    )
    detector_settings: dict[str, Any] = declare_option_group(declare_detector_options, numeric=False)
    reference: str | None = option(
        None,
        "Compare all predictions with those of this posterior (hmc, hmc.mc) or file: agreement, divergences, "
        "rank correlation. Default: hmc for distances between draws.",
        metavar="NAME|FILE[:ARRAY]",
        numeric=False,
        group="Scores",
        is_rare=True,
    )
    settings: dict[str, Any] = declare_option_group(declare_score_options)
    bootstrap: int = option(
        1000,
        "Number of bootstrap replicates over examples, or groups of them, for standard errors and intervals. 0 turns both off.",
        minimum=0,
        group="Scores",
        is_rare=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_intervals(self.bootstrap)

    @property
    def shown_scores(self) -> list[str]:
        """The detection scores to show."""
        every = [*detectors.prediction_detectors(), *detectors.feature_detectors()]
        return (
            every
            if "all" in self.score
            else [name for name in every if name in self.score] or [detectors.DEFAULT_SCORE]
        )

    @property
    def prediction_scores(self) -> list[str]:
        """The detection scores to compute from predictions: the default and those to show."""
        return [
            name for name in detectors.prediction_detectors() if name in (detectors.DEFAULT_SCORE, *self.shown_scores)
        ]

    @property
    def curve_score(self) -> str:
        """The prediction score of ROC curves: the first one to show, else the default."""
        return next(
            (name for name in detectors.prediction_detectors() if name in self.shown_scores), detectors.DEFAULT_SCORE
        )

    @property
    def needs_features(self) -> bool:
        """Return whether a feature-based score is to be shown."""
        return not set(detectors.feature_detectors()).isdisjoint(self.shown_scores)


AUTO = "auto"


def _list_map_choices() -> tuple[str, ...]:
    return (AUTO, *list_maps())


def _list_score_choices() -> tuple[str, ...]:
    return *detectors.prediction_detectors(), "all"


@dataclass(frozen=True)
class ScoreOptions(ShownScores):
    """Options of score; `settings` holds the options of scores."""

    labels: str | None = option(
        None,
        "Read the labels from another file: a column or array in the same order.",
        metavar="FILE[:COLUMN]",
        group="Predictions",
    )
    logits: bool = option(False, "Treat the predictions as logits. Default: inferred.", group="Predictions")
    probabilities: bool = option(
        False, "Treat the predictions as probabilities. Default: inferred.", group="Predictions"
    )
    task: str | None = option(
        None, "Type of the labels. Default: inferred.", choices=TASKS, group="Predictions", is_rare=True
    )
    groups: str | None = option(
        None,
        "Column of subgroups. Adds a table with one row for each; rows that depend on each other are named by FILE:group=COLUMN.",
        metavar="[FILE:]COLUMN",
        group="Predictions",
    )
    ood: list[str] = option(
        [],
        "File of out-of-distribution predictions. Its labels are ignored.",
        metavar="[NAME=]FILE",
        group="Predictions",
    )
    score: list[str] = option(
        [],
        "Score that detects the examples of \0ood\0. Default: combined, else mutual_info or max_prob.",
        choices=_list_score_choices,
        group="Scores",
    )
    reference: str | None = option(
        None,
        "Compare with the predictions in this file (same rows): agreement, divergences, rank correlation. Soft "
        "labels work too.",
        metavar="FILE[:ARRAY]",
        group="Scores",
        is_rare=True,
    )
    split: str = option(
        "test",
        "Name of the split in assertions. Files written by predict name their own split.",
        metavar="NAME",
        group="Predictions",
        is_rare=True,
    )
    settings: dict[str, Any] = declare_option_group(declare_prediction_score_options)
    bootstrap: int = option(
        1000,
        "Number of bootstrap replicates over examples, or groups of them.",
        minimum=0,
        group="Scores",
        is_rare=True,
    )
    seed: int = option(0, "Seed of the bootstrap.", minimum=0, env_common=True)

    plot: str | None = option(
        None,
        "Plot a reliability diagram, and one per group, as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
        group="Output",
    )
    fit_calibration: str | None = option(
        None,
        "Fit a calibration map to the predictions, score it out of fold, and write it to \0out\0. auto takes the one that "
        "beats temperature, if any.",
        choices=_list_map_choices,
        group="Calibration",
    )
    calibration: str | None = option(
        None, "Apply the calibration map in this file, and score the result.", metavar="FILE", group="Calibration"
    )
    out: str | None = option(
        None,
        "Write the map of \0fit_calibration\0 (.safetensors), or the calibrated predictions of \0calibration\0 (.csv or "
        ".npz).",
        metavar="FILE",
        writes=True,
        group="Calibration",
    )
    force: bool = option(False, "Let \0plot\0 and \0out\0 replace a file that bnncli did not create.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit_calibration is not None and self.calibration is not None:
            raise UsageError("\0fit_calibration\0 and \0calibration\0 are mutually exclusive: give one of them")
        if self.fit_calibration is not None and self.out is None:
            raise UsageError("\0fit_calibration\0 needs \0out\0 FILE.safetensors, which the map is written to")
        if self.out is not None:
            if self.fit_calibration is None and self.calibration is None:
                raise UsageError("\0out\0 needs \0fit_calibration\0 or \0calibration\0")
            check_suffix(self.out, "\0out\0", ("safetensors",) if self.fit_calibration else ("csv", "npz"))
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))
        self.check_intervals(self.bootstrap)
        if self.logits and self.probabilities:
            raise UsageError("\0logits\0 and \0probabilities\0 are mutually exclusive: give one of them")
        check_split_name(self.split, "\0split\0")

    @property
    def shown_scores(self) -> list[str]:
        """The detection scores to show."""
        every = detectors.prediction_detectors()
        return (
            every
            if "all" in self.score
            else [name for name in every if name in self.score] or [detectors.DEFAULT_SCORE]
        )

    @property
    def made_scores(self) -> list[str]:
        """The detection scores to compute: the default and those to show."""
        return [
            name for name in detectors.prediction_detectors() if name in (detectors.DEFAULT_SCORE, *self.shown_scores)
        ]

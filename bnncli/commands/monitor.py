"""monitor: watch a stream of predictions for a change of the inputs or the error rate, with tests that are valid at any time."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.atomic import publish_bytes, write_error
from bnncli.artifacts.headers import Header
from bnncli.artifacts.outputs import (
    check_figure_path,
    check_side_output,
    escape_formula,
    unescape_formula,
    write_figure,
)
from bnncli.artifacts.posteriors import RULE_KIND, read_posterior_header, write_decision, write_tensors
from bnncli.artifacts.predictions import list_arrays
from bnncli.artifacts.provenance import Source
from bnncli.data.prediction_files import read_columns, read_labels, read_texts, split_prediction_place
from bnncli.errors import CheckFailed, DataError, MissingInput, UsageError
from bnncli.evaluation.decisions import LAC, SETS, SetRule, SetScore
from bnncli.evaluation.detectors import DEFAULT_SCORE, default_score
from bnncli.evaluation.monitoring import (
    ConformalRanks,
    adapt_level,
    bet_on_losses,
    bet_on_p_values,
    threshold_at_level,
    upper_rate,
)
from bnncli.figures import render
from bnncli.figures.monitoring import ControlChart, draw_control_charts
from bnncli.names import percent, quote_name
from bnncli.numerics.digests import file_sha256
from bnncli.numerics.random import stream_seed
from bnncli.options.command import COMPUTE, Command, InputOptions, NameOptions
from bnncli.options.declaration import CheckedOptions, check_split_name, option
from bnncli.options.shared import check_variant
from bnncli.session import revisions as _revisions
from bnncli.session.decisions import find_calibration_predictions, maker_of, scores_of
from bnncli.session.monitoring import ERRORS, INPUTS, KIND, NUM_BETS, State, Stream, read_state
from bnncli.session.predictions import PredictionGroup
from bnncli.session.produce import ComputationOutput, Request, produce
from bnncli.session.run import Result, Run
from bnncli.session.run import Table as ShownTable
from bnncli.session.score_rows import PredictedSplit
from bnncli.session.splits import fresh_split, require_unused
from bnncli.session.states import remove_artifacts

if TYPE_CHECKING:
    from numpy.typing import NDArray

ADAPTIVE = "adaptive"  # name of the rule for adaptive sets
DEFAULT_ALPHA = 0.01
# Scores that tables of predict have: their column, and the sign that makes higher values in-distribution.
_COLUMNS = {DEFAULT_SCORE: ("combined", 1.0), "mutual_info": ("mutual_info", -1.0), "max_prob": ("probability", 1.0)}
_FIGURE_SUFFIXES = (".png", ".svg", ".pdf")


def _check_rate(value: float | None, flag: str) -> None:
    if value is not None and not 0 < value < 1:
        raise UsageError(f"{flag}: expected a number between 0 and 1; got {value:g}")


@dataclass(frozen=True)
class MonitorOptions(CheckedOptions):
    """Options of monitor."""

    table: list[str] = option(
        [],
        "Table that predict wrote, its rows in order of arrival; repeat for several. Examples that were counted before "
        "are left out.",
        metavar="FILE",
        group="Stream",
    )
    labels: str | None = option(
        None,
        "Labels of the tables' rows: with a column name, of the examples of these names; else one per row.",
        metavar="FILE[:COLUMN]",
        group="Stream",
    )
    split: str = option(
        "calib",
        "Split that the stream is compared with. Its examples must not have been used for fitting or model selection.",
        metavar="SPLIT",
        numeric=False,
        group="Stream",
    )
    posterior: str | None = option(
        None,
        "Posterior whose predictions to watch. Default: auto's recommendation, else the only one that predicted the "
        "split.",
        metavar="NAME",
        numeric=False,
        group="Stream",
    )
    integrator: str | None = option(
        None,
        "Watch this integrator's predictions: a name (mc), or a name with settings (mc-qmc).",
        metavar="NAME",
        check=check_variant,
        numeric=False,
        group="Stream",
    )
    alpha: float | None = option(
        None,
        f"Probability of ever raising a false alarm. Default: {DEFAULT_ALPHA}.",
        check=_check_rate,
        group="Tests",
    )
    score: str | None = option(
        None,
        "Score of the inputs. Default: combined, else mutual_info or max_prob.",
        choices=tuple(_COLUMNS),
        group="Tests",
    )
    max_error: float | None = option(
        None,
        "Raise an alarm when the error rate is above this. Default: the upper confidence bound on the calibration "
        "split.",
        check=_check_rate,
        group="Tests",
    )
    coverage: float | None = option(
        None,
        "Maintain adaptive prediction sets of this coverage, the rule adaptive (adaptive-NAME with \0name\0). Later tables of predict have their "
        "column, and labels adjust them.",
        check=_check_rate,
        group="Tests",
    )
    reset: bool = option(False, "Forget the stream and its alarms, and start over.", group="Stream")
    alarm_file: str | None = option(
        None,
        "Write this JSON file while there is an alarm, and remove it when there is none.",
        metavar="FILE",
        writes=True,
        group="Output",
    )
    plot: str | None = option(
        None,
        "Write a control chart (.png, .svg or .pdf).",
        metavar="FILE",
        writes=True,
        group="Output",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_split_name(self.split, "\0split\0")
        if self.labels is not None and not self.table:
            raise UsageError("\0labels\0 names the labels of tables: add \0table\0 FILE")
        if self.plot is not None and Path(self.plot).suffix.lower() not in _FIGURE_SUFFIXES:
            raise UsageError(f"\0plot\0: expected a file that ends in {', '.join(_FIGURE_SUFFIXES)}; got {self.plot!r}")


COMMAND = Command(
    "Watch a stream of predictions for a change, from one night to the next.",
    "Compares each example with the calibration split and all examples before it and, where labels are known, tests if "
    "the error rate has risen. The probability of ever raising a false alarm is at most --alpha, however often you "
    "look. Exits 3 while there is an alarm. Without --table, reports the state.",
    (MonitorOptions, NameOptions, InputOptions, *COMPUTE),
    (
        "bnncli monitor ckpt.pt --table tonight.csv",
        "bnncli monitor ckpt.pt --table tonight.csv --alarm-file ALARM.json --plot chart.png",
        "bnncli monitor ckpt.pt --table monday.csv --labels monday-labels.csv --max-error 0.05",
        "bnncli monitor ckpt.pt --reset --coverage 0.9",
    ),
    section="Use",
    place=25,
)


@dataclass(frozen=True)
class Rows:
    """Rows of tables, in order.

    Attributes:
        keys: (T, 16) uint8, digests that identify the examples.
        scores: (T,) float64, higher for in-distribution examples.
        is_wrong: (T,) int8, 1 for wrong predictions, 0 for right ones, -1 without a label.
        is_missed: (T,) int8, 1 where the adaptive set lacks the label, 0 where it has it, -1 without label or set.
    """

    keys: NDArray
    scores: NDArray
    is_wrong: NDArray
    is_missed: NDArray


@dataclass(frozen=True)
class Calibration:
    """The predictions that a stream is compared with."""

    group: PredictionGroup
    header: Header
    split: PredictedSplit

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes."""
        return self.split.file.classes

    def scores(self, name: str) -> NDArray:
        """Return the scores (N,), rounded as in a table."""
        return scores_of(self.split, name).astype(np.float32).astype(np.float64)

    def find_reference(self, settings: Mapping[str, Any]) -> dict[str, float] | None:
        """Return the error rate to test losses against, with the level of the test; None if nothing says one.

        Raises:
            DataError: every prediction of the split is wrong.
        """
        half, is_right = settings["alpha"] / 2, self.split.examples.is_right
        if settings["max_error"] is not None:
            return {"rate": settings["max_error"], "level": half}
        if is_right is None or not self.split.file.is_exclusive:
            return None
        rate = upper_rate(int((~is_right).sum()), len(is_right), half / 2)  # wrong with probability half / 2
        if rate >= 1:
            message = f"every prediction of split {self.split.name!r} is wrong, so the error rate cannot rise"
            raise DataError(message, code="all_wrong", hint="give \0max_error\0 RATE", path=self.header.path)
        return {"rate": rate, "level": half / 2}


def execute(run: Run, options: MonitorOptions) -> Result:
    """Add the tables to the state and publish it. The result's metrics are by test.

    Raises:
        UsageError, DataError: a table, the labels or the options do not fit the state or the calibration split.
    """
    calibration = _open_calibration(run, options)
    group, header = calibration.group, calibration.header
    target = Path(run.naming.out) if run.naming.out else run.folder.monitor(run.naming.name or group.name)
    for path, kind in ((options.alarm_file, "list of this monitor's alarms"), (options.plot, "figure")):
        _check_output(run, options, target, path, kind)
    state = _open_state(run, options, calibration, target)
    tables = [Path(name).expanduser() for name in options.table]
    if not tables and not options.reset:
        if not target.exists():
            hint = "give the first tables with \0table\0 FILE, or begin with \0reset\0"
            raise MissingInput(f"no monitor {target}", hint=hint, path=target)
        result = Result(metrics=_describe(state, {}))
        if state.sets is not None:
            result.add(_publish_sets(run, calibration, state))
        return _finish(run, options, result, state, target)
    digests = [file_sha256(path) for path in tables] if all(path.is_file() for path in tables) else []
    labels = None if options.labels is None else split_prediction_place(options.labels)[0]
    params = {
        **state.settings,
        "split": options.split,
        "tables": digests,
        "labels": file_sha256(labels) if labels is not None and labels.is_file() else None,
        "before": None if options.reset or not target.exists() else read_posterior_header(target).content_digest,
    }
    made: list[State] = []

    def compute() -> ComputationOutput:
        before = _open_state(run, options, calibration, target)
        after, new = before, dict.fromkeys(before.streams, 0)
        if tables:
            after, new = _extend(
                run, before, _read_rows(run, options, calibration, tables, before.settings), calibration
            )
        made.append(after)

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return _write_state(target, after, calibration, provenance=provenance, may_replace=may_replace)

        return ComputationOutput(publish, _describe(after, new))

    def when_fresh(found: Header) -> ComputationOutput:
        made.append(read_state(found.path))
        return ComputationOutput(
            lambda provenance, may_replace: found.content_digest, _describe(made[-1], dict.fromkeys(state.streams, 0))
        )

    request = Request(
        target,
        KIND,
        f"{KIND}.{target.stem}",
        params,
        _revisions.MONITOR,
        [Source(f"predictions.{options.split}", header.path, header.content_digest)],
        header.provenance.get("checkpoint"),
        lambda: 1 << 16,
        why_anew=lambda recorded: "\0reset\0" if options.reset else "the stream goes on",
        accumulates=not options.reset,
    )
    result = produce(run, request, compute, when_fresh=when_fresh)
    if not made:  # a dry run
        return result
    if made[-1].sets is not None:
        result.add(_publish_sets(run, calibration, made[-1]))
    elif options.reset and (rule := run.folder.decision(group.name, _rule_name(run))).is_file():
        run.console.info(f"{rule}: removed, because the monitor no longer maintains sets")
        remove_artifacts(run, [rule])
    result.metrics = _describe(made[-1], {name: one["new"] for name, one in result.metrics["tests"].items()})
    return _finish(run, options, result, made[-1], target)


def _open_calibration(run: Run, options: MonitorOptions) -> Calibration:
    """Open the calibration predictions.

    Raises:
        MissingInput, DataError: there are none, the split was used before, or for the chosen score's ranks.
        UsageError: there are several.
    """
    run.require_device()
    found = find_calibration_predictions(run, options.split, options.posterior, options.integrator)
    if len(found) > 1:
        names = ", ".join(group.name for group, _ in found)
        first = found[0][0]
        raise UsageError(
            f"split {options.split!r} has several predictions: {names}",
            hint=f"choose one: \0posterior\0 {first.posterior} \0integrator\0 {first.variant}",
        )
    group, header = found[0]
    require_unused(run, group, header)
    return Calibration(group, header, PredictedSplit(header))


def _check_output(run: Run, options: MonitorOptions, target: Path, text: str | None, kind: str) -> None:
    if text is None:
        return
    path, flag = Path(text), "\0alarm_file\0" if kind != "figure" else "\0plot\0"
    others = [run.checkpoint_path, target, *(Path(name) for name in options.table)]
    if options.labels is not None:
        others.append(split_prediction_place(options.labels)[0])
    if kind == "figure":
        check_figure_path(path, flag, force=run.write.force, others=others)
    else:
        own = _monitor_name(target)
        check_side_output(
            path, flag, kind, is_ours=lambda file: _is_alarm_file(file, own), force=run.write.force, others=others
        )


_ALARM_SCHEMA = "bnncli.alarm/1"


def _is_alarm_file(path: Path, monitor: str) -> bool:
    try:
        found = json.loads(path.read_bytes()[: 1 << 14])
    except ValueError:
        return False
    return isinstance(found, dict) and (found.get("schema"), found.get("monitor")) == (_ALARM_SCHEMA, monitor)


def _monitor_name(target: Path) -> str:
    """Return what identifies a monitor in an alarm file: its file, within the folder of the run's folder."""
    return "/".join(target.absolute().parts[-3:])


def _rule_name(run: Run) -> str:
    """Return the name of the rule for a monitor's adaptive sets, one for each monitor."""
    own = run.naming.name if run.naming.out is None else Path(run.naming.out).stem
    return ADAPTIVE if own is None else f"{ADAPTIVE}-{own}"


def _open_state(run: Run, options: MonitorOptions, calibration: Calibration, target: Path) -> State:
    """Return the state to continue, or a new one.

    Raises:
        UsageError: an option differs from that of the state.
        DataError: the state is damaged, or belongs to other predictions.
    """
    asked = {name: getattr(options, name) for name in ("score", "alpha", "max_error", "coverage")}
    asked["seed"] = run.compute.seed or None
    if options.reset or not target.exists():
        return _begin(run, options, calibration, asked)
    header = read_posterior_header(target)
    state = read_state(target)
    start_over = "add \0reset\0 to start over, or \0name\0 NAME to watch beside it"
    if header.meta["calibration"] != calibration.header.content_digest:
        was = f"{header.meta['posterior']}.{header.meta['variant']} on split {header.meta['split']!r}"
        message = f"{target} compares with predictions that have changed since ({was})"
        raise DataError(message, code="stale_input", hint=start_over, path=target)
    for name, value in asked.items():
        if value is not None and value != state.settings[name]:
            was = state.settings[name]
            shown = "none" if was is None else was if isinstance(was, str) else f"{was:g}"
            raise UsageError(f"{target} began with \0{name}\0 {shown}; got {value}", hint=start_over)
    return state


def _begin(run: Run, options: MonitorOptions, calibration: Calibration, asked: dict[str, Any]) -> State:
    header = calibration.header
    settings = {**asked, "alpha": asked["alpha"] or DEFAULT_ALPHA, "seed": run.compute.seed}
    if settings["score"] is None:
        settings["score"] = default_score([list_arrays(header.path)])
        if settings["score"] != DEFAULT_SCORE:
            run.console.info(f"using the {settings['score']} score, because the predictions lack {DEFAULT_SCORE}")
    if settings["score"] == DEFAULT_SCORE and options.split == "val":
        message = f"split 'val' cannot calibrate the {DEFAULT_SCORE} score, which uses ranks within val"
        raise DataError(message, code="split_was_used", hint=fresh_split(run, options.split), path=header.path)
    if calibration.split.groups is not None:
        message = f"split {options.split!r} has rows in groups, but the bets need independent rows"
        hint = "calibrate and watch with one row per group, such as its first or a summary"
        raise DataError(message, code="dependent_rows", hint=hint, path=header.path)
    if len(calibration.split.file.sample_id) == 0:
        raise DataError(f"split {options.split!r} is empty", code="too_few", path=header.path)
    needing = [name for name in ("max_error", "coverage") if settings[name] is not None]
    if needing and not calibration.split.file.is_exclusive:
        message = f"this run is multilabel; \0{needing[0]}\0 needs mutually exclusive classes"
        raise DataError(message, code="several_labels", path=header.path)
    sets = None
    if settings["coverage"] is not None:
        if not header.meta.get("is_labeled"):
            message = f"split {options.split!r} has no labels; \0coverage\0 needs them"
            raise DataError(message, code="no_labels", path=header.path)
        sets = {"level": 1 - settings["coverage"], "labelled": 0, "missed": 0}
    reference = calibration.find_reference(settings)
    return State(settings, {name: Stream.start(size) for name, size in NUM_BETS.items()}, reference, sets)


def _write_state(
    target: Path, state: State, calibration: Calibration, *, provenance: Mapping[str, Any], may_replace: bool
) -> str:
    names = ("posterior", "integrator", "split", "num_examples")
    meta = {name: calibration.header.meta[name] for name in names} | {
        "variant": calibration.group.variant,
        "calibration": calibration.header.content_digest,
        "settings": state.settings,
        "reference": state.reference,
        "sets": state.sets,
        "metrics": _describe(state, {}),
    }
    tensors = {name: one for kind, stream in state.streams.items() for name, one in stream.to_tensors(kind).items()}
    return write_tensors(target, tensors, kind=KIND, meta=meta, provenance=provenance, may_replace=may_replace)


def _read_rows(
    run: Run, options: MonitorOptions, calibration: Calibration, tables: Sequence[Path], settings: Mapping[str, Any]
) -> Rows:
    """Read the watched posterior's rows of all tables.

    Raises:
        MissingInput, DataError, UsageError: a file is missing, damaged, not a table of predict, or does not fit.
    """
    parts, names = [], []
    for path in tables:
        rows, own_names = _read_table(path, calibration, settings["score"], options.split, _rule_name(run))
        run.console.poll(f"reading {path.name}")
        parts.append(rows)
        names += own_names
    joined = _Read(*(np.concatenate(column) for column in zip(*(part.columns for part in parts), strict=True)))
    if options.labels is not None:
        given = _read_given_labels(run, options.labels, names, calibration.classes)
        joined = replace(joined, label=np.where(given >= 0, given, joined.label))
    is_labelled = (joined.label >= 0) & (joined.predicted >= 0) & calibration.split.file.is_exclusive
    is_wrong = np.where(is_labelled, joined.predicted != joined.label, -1).astype(np.int8)
    own = np.take_along_axis(joined.sets, np.maximum(joined.label, 0)[:, None], axis=1)[:, 0]
    is_missed = np.where(is_labelled & (own >= 0), own == 0, -1).astype(np.int8)
    return Rows(joined.keys, joined.scores, is_wrong, is_missed)


@dataclass(frozen=True)
class _Read:
    """Columns of a table: keys (T, 16), scores, predicted, label (T,), -1 for no label, and sets (T, K), -1 for none."""

    keys: NDArray
    scores: NDArray
    predicted: NDArray
    label: NDArray
    sets: NDArray

    @property
    def columns(self) -> tuple[NDArray, ...]:
        return self.keys, self.scores, self.predicted, self.label, self.sets


_TITLES = ("split", "posterior", "variant")


def _read_table(path: Path, calibration: Calibration, score: str, split: str, rule: str) -> tuple[_Read, list[str]]:
    """Read the watched posterior's rows of a table, and their names, empty without."""
    column, sign = _COLUMNS[score]
    set_column = f"{rule}_set"
    wanted = (*_TITLES, "sample_id", "name", "predicted", "label", column, "classes", set_column)
    found = read_columns(path, wanted)
    shown, classes = quote_name(path, limit=300), calibration.classes
    for title in (*_TITLES, "sample_id", "predicted", column):
        if title not in found:
            raise DataError(
                f"{shown} has no column {title!r}, which tables of predict have", code="no_column", path=path,
                hint="write it with predict \0table\0 FILE",
            )  # fmt: skip
    if "classes" in found and list(found["classes"]) != classes:
        raise DataError(f"{shown} has other classes than the calibration split", code="other_classes", path=path)
    origins = list(zip(*(map(str, found[title]) for title in _TITLES), strict=True))
    watched = (calibration.group.posterior, calibration.group.variant)
    rows = [row for row, origin in enumerate(origins) if origin[1:] == watched]
    if origins and not rows:
        there = ", ".join(dict.fromkeys(".".join(origin[1:]) for origin in origins))
        message = f"{shown} has no predictions of {calibration.group.name} (has: {there})"
        raise DataError(message, code="other_predictions", path=path)
    used = {origins[row][0] for row in rows} & {split, "train", "val"}
    if used:
        message = f"{shown} has rows of split {min(used)!r}, which are not new examples"
        raise DataError(message, code="split_was_used", hint="predict new data: \0data\0 NAME=SPEC", path=path)

    def take(name: str) -> list[Any]:
        return [found[name][row] for row in rows]

    scores = sign * np.array([_to_number(value) for value in take(column)]).astype(np.float32).astype(np.float64)
    if not np.isfinite(scores).all():
        message = f"{shown}: row {rows[int(np.argmin(np.isfinite(scores)))]} has no number in column {column!r}"
        raise DataError(message, code="not_finite", path=path)
    names = [str(name) for name in take("name")] if "name" in found else [""] * len(rows)
    content = file_sha256(path)
    keys = [
        _key(f"name\0{name}\0{value!r}" if name else f"row\0{content}\0{row}")
        for name, value, row in zip(names, scores.tolist(), rows, strict=True)
    ]
    numbers = {text: k for k, name in enumerate(classes) for text in (name, escape_formula(name))}
    is_exclusive = calibration.split.file.is_exclusive
    absent = [None] * len(rows)
    predicted = _to_classes(
        take("predicted") if is_exclusive else absent, numbers, f"{shown}: column 'predicted'", path
    )
    label = _to_classes(
        take("label") if is_exclusive and "label" in found else absent, numbers, f"{shown}: column 'label'", path
    )
    sets = _to_sets(take(set_column) if set_column in found else absent, classes)
    return _Read(np.array(keys, dtype=np.uint8).reshape(-1, 16), scores, predicted, label, sets), names


def _to_number(value: Any) -> float:
    """Return a cell as a number, NaN for any other."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _key(text: str) -> list[int]:
    return list(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16])


def _to_classes(values: Sequence[Any], numbers: Mapping[str, int], where: str, path: Path) -> NDArray:
    """Return class numbers (n,), -1 for none; values are numbers in npz files and names in csv files."""
    is_npz = path.suffix.lower() == ".npz"
    found = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        if value is None or value == "":
            found[row] = -1
        elif is_npz:
            found[row] = int(value)
        elif str(value) in numbers:
            found[row] = numbers[str(value)]
        else:
            raise DataError(f"{where}: {quote_name(value)} is not a class", code="other_classes", path=path)
    return found


def _to_sets(values: Sequence[Any], classes: Sequence[str]) -> NDArray:
    """Return sets (n, K) of zeros and ones, -1 for none; values are rows of those, or names joined by semicolons."""
    found = np.full((len(values), len(classes)), -1, dtype=np.int8)
    for row, value in enumerate(values):
        if isinstance(value, list):
            found[row] = value
        elif value is not None:
            parts = re.split(r"(?<!\\);", unescape_formula(str(value)))
            names = {re.sub(r"\\(.)", r"\1", part) for part in parts}
            found[row] = [name in names for name in classes]
    return found


def _read_given_labels(run: Run, place: str, names: Sequence[str], classes: Sequence[str]) -> NDArray:
    """Return the labels (T,) of --labels, -1 for rows without.

    Raises:
        DataError: the number of labels differs from that of the rows, or a name occurs twice with different labels.
    """
    path, _ = split_prediction_place(place)
    labels = read_labels(place, tuple(classes))
    shown = quote_name(path, limit=300)
    if labels.ndim != 1:
        raise DataError(f"{shown} has several labels per row", code="several_labels", path=path)
    if len(labels) and labels.max() >= len(classes):
        raise DataError(
            f"{shown} has label {labels.max()}; expected at most {len(classes) - 1}", code="bad_labels", path=path
        )
    try:
        keys = read_texts(path, "name") if any(names) else []
    except DataError:  # no such column
        keys = []
    if keys:
        by_name: dict[str, int] = {}
        for name, label in zip(keys, labels.tolist(), strict=True):
            if by_name.setdefault(name, label) != label:
                raise DataError(f"{shown} has two labels for {quote_name(name)}", code="bad_labels", path=path)
        found = np.array([by_name.get(name, -1) for name in names], dtype=np.int64)
        unknown = len(by_name.keys() - set(names))
        if unknown:
            run.console.warn(f"{shown}: {unknown} of {len(by_name)} names are not in the tables")
        return found
    if len(labels) != len(names):
        message = f"{shown} has {len(labels)} labels, but the tables have {len(names)} rows"
        raise DataError(message, code="bad_labels", hint="give one label per row, or a column name", path=path)
    return labels.astype(np.int64)


def _extend(run: Run, state: State, rows: Rows, calibration: Calibration) -> tuple[State, dict[str, int]]:
    """Return the state after these rows, and the number of new examples of each test."""
    inputs, errors = state.streams[INPUTS], state.streams[ERRORS]
    new = inputs.find_new(rows.keys)
    labelled = np.flatnonzero(rows.is_wrong >= 0)
    labelled = labelled[errors.find_new(rows.keys[labelled])]
    if len(labelled) and state.reference is None:
        hint = "give the error rate to test against when the monitor begins: \0reset\0 \0max_error\0 RATE"
        message = f"the rows have labels, but split {calibration.split.name!r} has none to compare with"
        run.console.warn(f"{message}; {hint}")
        labelled = labelled[:0]
    known = np.concatenate([calibration.scores(state.settings["score"]), inputs.values])
    draws = np.random.default_rng(stream_seed(state.settings["seed"], "monitor/ties")).random(
        len(inputs.path) + len(new)
    )
    values = rows.scores[new]
    task = run.console.task("monitor", len(new) + len(labelled))
    ranks = ConformalRanks(known)
    for start in range(0, len(new), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        uniform = draws[len(inputs.path) :][: len(values[part])]
        p_values = ranks.extend(values[part], uniform)
        inputs = inputs.extend(rows.keys[new[part]], values[part], bet_on_p_values(p_values))
        task.advance(len(p_values))
        run.console.poll("monitoring")
    if len(labelled):
        assert state.reference is not None
        losses = rows.is_wrong[labelled].astype(np.float64)
        errors = errors.extend(rows.keys[labelled], losses, bet_on_losses(losses, state.reference["rate"]))
        task.advance(len(labelled))
    sets = state.sets
    decided = labelled[rows.is_missed[labelled] >= 0]
    if sets is not None and len(decided):
        is_missed = rows.is_missed[decided] == 1
        level, _ = adapt_level(sets["level"], 1 - state.settings["coverage"], is_missed)
        missed = sets["missed"] + int(is_missed.sum())
        sets = {"level": level, "labelled": sets["labelled"] + len(decided), "missed": missed}
    streams = {INPUTS: inputs, ERRORS: errors}
    return replace(state, streams=streams, sets=sets), {INPUTS: len(new), ERRORS: len(labelled)}


_AT_ONCE = 1 << 14


def _publish_sets(run: Run, calibration: Calibration, state: State) -> Result:
    """Publish the rule of the adaptive sets at their present level."""
    assert state.sets is not None
    header, group = calibration.header, calibration.group
    target, level = run.folder.decision(group.name, _rule_name(run)), state.sets["level"]
    settings = {
        "sets": LAC,
        "coverage": state.settings["coverage"],
        "class_conditional": False,
        "nonempty": False,
        "randomized": False,
        "confidence": None,
        "seed": None,
    }

    def compute() -> ComputationOutput:
        labels = calibration.split.examples.labels
        assert labels is not None
        score = SetScore(LAC)
        own = score.of_labels(calibration.split.file.probs, labels)
        threshold = threshold_at_level(own, level)
        names = ("posterior", "integrator", "split", "num_examples")
        meta = {name: header.meta[name] for name in names} | {
            "variant": group.variant,
            "rule": SETS,
            "classes": calibration.classes,
            "settings": settings,
            "maker": maker_of(header),
            "metrics": {"num_examples": len(own), "thresholds": [threshold], "level": level},
        }

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            rule = SetRule(score, np.array([threshold]))
            return write_decision(target, rule, meta=meta, provenance=provenance, may_replace=may_replace)

        return ComputationOutput(publish)

    request = Request(
        target,
        RULE_KIND,
        f"{RULE_KIND}.{group.name}.{target.stem}",
        {"rule": SETS, **settings, "level": level},
        _revisions.CALIBRATE,
        [Source(f"predictions.{calibration.split.name}", header.path, header.content_digest)],
        header.provenance.get("checkpoint"),
        lambda: 1 << 12,
        why_anew=lambda recorded: "the level has changed" if "level" in recorded else None,
        accumulates=True,
    )
    return produce(run, request, compute)


def _describe(state: State, new: Mapping[str, int]) -> dict[str, Any]:
    """Return the numbers of the monitor, by test."""
    alarms = state.alarms()
    tests: dict[str, Any] = {}
    for name, stream in state.streams.items():
        alarm, size = alarms.get(name), len(stream.path)
        tests[name] = {
            "examples": size,
            "new": new.get(name, 0),
            "log10_e": float(stream.path[-1] / math.log(10)) if size else 0.0,
            "max_log10_e": float(max(0.0, stream.path.max()) / math.log(10)) if size else 0.0,
            "threshold_log10_e": -math.log10(state.levels[name]),
            "is_alarm": alarm is not None,
            "alarm_at": None if alarm is None else alarm.step,
            "change_after": None if alarm is None else alarm.change,
        }
    errors = state.streams[ERRORS].values
    tests[ERRORS] |= {
        "error_rate": float(errors.mean()) if len(errors) else None,
        "reference": None if state.reference is None else state.reference["rate"],
    }
    found: dict[str, Any] = {"is_alarm": bool(alarms), "alpha": state.settings["alpha"], "tests": tests}
    if state.sets is not None:
        count, missed = state.sets["labelled"], state.sets["missed"]
        covered = None if count == 0 else 1 - missed / count
        found["sets"] = {**state.sets, "coverage": covered, "target": state.settings["coverage"]}
    return found


_DESCRIBED = {INPUTS: "the inputs have changed", ERRORS: "the error rate has risen"}


def _finish(run: Run, options: MonitorOptions, result: Result, state: State, target: Path) -> Result:
    """Write the figure and the alarm file, and complete the result."""
    tests = result.metrics["tests"]
    result.tables.append(
        ShownTable(
            ["test", "examples", "new", "log10 e-value", "alarm at", "state"],
            [
                [
                    name,
                    f"{one['examples']:,}",
                    f"{one['new']:,}",
                    f"{one['log10_e']:.2f}",
                    f"{one['threshold_log10_e']:.2f}",
                    f"ALARM at {one['alarm_at']:,}"
                    if one["is_alarm"]
                    else "no alarm"
                    if one["examples"]
                    else "no examples",
                ]
                for name, one in tests.items()
            ],
        )
    )
    errors, lines = tests[ERRORS], result.tables[-1].notes
    if errors["error_rate"] is not None:
        lines.append(f"error rate {percent(errors['error_rate'])}, tested against {percent(errors['reference'])}")
    if state.sets is not None:
        sets = result.metrics["sets"]
        covered = (
            "no labels yet"
            if sets["coverage"] is None
            else f"{percent(sets['coverage'])} of {sets['labelled']:,} covered"
        )
        lines.append(
            f"adaptive sets: {covered} (target {percent(sets['target'], 'g')}), error level now {sets['level']:.4f}"
        )
    alarms = {name: one for name, one in tests.items() if one["is_alarm"]}
    if options.plot is not None:
        charts = [
            ControlChart(name, stream.path / math.log(10), -math.log10(state.levels[name]), alarm)
            for name, stream in state.streams.items()
            if len(stream.path) or name == INPUTS
            for alarm in (state.alarms().get(name),)
        ]
        path = Path(options.plot)
        digest = write_figure(path, render(draw_control_charts(charts), path.suffix[1:].lower()))
        result.outputs.append({"role": "monitor.plot", "path": str(path), "content_digest": digest})
    if options.alarm_file is not None:
        _write_alarm_file(Path(options.alarm_file), alarms, result, _monitor_name(target))
    if alarms:
        parts = [
            f"{_DESCRIBED[name]}: alarm at example {one['alarm_at']:,}, change after about example {one['change_after']:,}"
            for name, one in alarms.items()
        ]
        result.failure = CheckFailed(
            "; ".join(parts), code="alarm", hint="look at the examples since then; \0reset\0 starts over"
        )
    return result


def _write_alarm_file(path: Path, alarms: Mapping[str, Any], result: Result, monitor: str) -> None:
    """Write the alarms, or remove the file if there are none."""
    if alarms:
        document = {"schema": _ALARM_SCHEMA, "monitor": monitor, "alpha": result.metrics["alpha"], "alarms": alarms}
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        publish_bytes(path, text.encode(), may_replace=True)
        digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        result.outputs.append({"role": "monitor.alarm", "path": str(path), "content_digest": digest})
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, path) from None

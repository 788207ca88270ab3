"""score: compute every score of evaluate for predictions from any source, and calibrate them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.data.columns import LOGITS, PROBS
from bnncli.data.prediction_files import read_texts, split_prediction_place
from bnncli.errors import CheckFailed, DataError, UsageError, WriteError
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.calibration_maps import choose_map
from bnncli.evaluation.curves import reliability_curve_of_predictions
from bnncli.evaluation.detectors import default_score
from bnncli.evaluation.recommendation import score_predictive
from bnncli.evaluation.statistics import NO_LABELS, Row
from bnncli.figures import render
from bnncli.figures.predictions import draw_reliability
from bnncli.likelihoods import name_to_record
from bnncli.names import percent, quote_name
from bnncli.numerics.random import stream
from bnncli.options.command import Argument, Command, CommonOptions, TrackOptions
from bnncli.options.declaration import check_split_name, spell_options
from bnncli.options.scoring import AUTO, Quantity, ScoreOptions
from bnncli.session.prediction_files import (
    GivenPredictions,
    PredictionClaims,
    artifact_names,
    check_together,
    open_given,
    rows_against,
)
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import (
    check_assertions,
    check_names,
    describe_rare_classes,
    detection_rows,
    failure_text,
    find_metric,
    split_rows,
)
from bnncli.session.score_tables import class_facts, class_table, drop_class_values, legend, score_table, select_metrics

if TYPE_CHECKING:
    from bnncli.evaluation.bootstrap import Bootstrap


COMMAND = Command(
    "Score a file of your own predictions, without a checkpoint.",
    "FILE is npz, npy, csv, Parquet, or a prediction file written by predict. Finds probabilities or logits (N, "
    "C) and labels by name, unless you name them with FILE:probs=COLUMN,label=COLUMN or FILE:ARRAY. Scores and "
    "assertions are those of evaluate. With --fit-calibration, also fits a calibration map and writes it to --out.",
    (ScoreOptions, TrackOptions, CommonOptions),
    (
        "bnncli score predictions.npz",
        "bnncli score logits.npy --labels test.csv:label --ood far=far.npy --logits",
        "bnncli score predictions.csv --groups hospital --assert 'accuracy@north>=0.8' --assert 'ece<=0.02'",
        "bnncli score predictions.csv --plot reliability.png",
        "bnncli score val.npz --fit-calibration auto --out map.safetensors",
        "bnncli score new.npz --calibration map.safetensors --out calibrated.csv",
    ),
    (Argument("file", "Predictions: FILE, FILE:ARRAY, or FILE:probs=COLUMN,label=COLUMN,group=COLUMN."),),
    section="Judge",
    place=50,
)


@dataclass(frozen=True)
class Calibrated:
    """Predictions after a calibration map.

    Attributes:
        given: out of fold, where the map is fitted to them.
        apply: the map, for other predictions.
        metrics: of the map.
        publish: writes what was asked for, and returns its output entry; None for nothing.
    """

    given: GivenPredictions
    apply: Callable[[GivenPredictions], GivenPredictions]
    metrics: Mapping[str, Any]
    summary: list[str]
    publish: Callable[[], Row] | None


def calibrate(run: Run, options: ScoreOptions, given: GivenPredictions, place: str) -> Calibrated:
    """Fit a calibration map to the predictions, or apply one from a file.

    Raises:
        DataError, UsageError, OutputExists: the predictions, the map or the output cannot be used.
    """
    from bnncli.artifacts.outputs import check_side_output, is_table, write_table
    from bnncli.session import calibration

    texts = [text for text in (place, options.labels, options.groups, options.reference, *options.ood) if text]
    inputs = [split_prediction_place(text.partition("=")[2] or text)[0] for text in texts]
    out = None if options.out is None else Path(options.out)
    if options.calibration is not None:
        path = Path(options.calibration)
        if out is not None:
            others = [*inputs, path]
            check_side_output(out, "--out", "table", is_ours=is_table, force=options.force, others=others)
        fitted, header = calibration.read_map(path)
        found = calibration.apply_map(given, header, fitted)

        def publish_table() -> Row:
            assert out is not None
            digest = write_table(out, [calibration.table_of(found, fitted.name)], found.classes)
            return {"role": "predictions.calibrated", "path": str(out), "content_digest": digest}

        return Calibrated(
            found,
            lambda other: calibration.apply_map(other, header, fitted),
            header.meta["metrics"],
            [f"map {fitted.name} of {path}"],
            None if out is None else publish_table,
        )
    assert out is not None
    check_side_output(out, "--out", "calibration map", is_ours=calibration.is_map, force=options.force, others=inputs)
    name = None if options.fit_calibration == AUTO else options.fit_calibration
    data, floor = calibration.calibration_data(given, name)
    tried = calibration.fit_maps(data, name, stream(options.seed, "fit-calibration/folds"), progress=run.console)
    chosen, why = (tried.named(name), None) if name is not None else choose_map(tried.fitted, groups=data.groups)
    metrics = calibration.describe_maps(tried, chosen, why, data)
    before = score_predictive("given", given.probs, data.labels, groups=data.groups)

    def publish_map() -> Row:
        digest = calibration.write_map(run, out, given, chosen, metrics, floor=floor, seed=options.seed)
        return {"role": "calibration", "path": str(out), "content_digest": digest}

    return Calibrated(
        calibration.with_logits(given, chosen.logits),
        lambda other: calibration.map_given(other, chosen.whole, floor),
        {**metrics, "before": before.to_json()},
        [
            *calibration.summarize_maps(metrics, "examples"),
            f"before: NLL {before.nll:.4f}, ECE {percent(before.ece or 0.0)}; the table has the scores out of fold",
        ],
        publish_map,
    )


_FIRST = ("split", "predictions", "examples")
_OF_GROUPS = ("split", "group", "examples")


def execute(run: Run, options: ScoreOptions) -> Result:
    """Read predictions, score them and print the table."""
    said = PredictionClaims(LOGITS if options.logits else PROBS if options.probabilities else None, options.task)
    place = str(run.arguments["file"])
    check_plot(options, place)
    given = _open_predictions(place, said, options)
    check_labelled(options, given)
    outside = _open_outside(given, said, options)
    calibrated = None
    if options.fit_calibration is not None or options.calibration is not None:
        calibrated = calibrate(run, options, given, place)
        given, outside = calibrated.given, [calibrated.apply(other) for other in outside]
    if outside and not options.score:
        options = replace(options, score=[default_score([*one.arrays] for one in (given, *outside))])
    groups = _groups(given, place, options)
    names = [_describe_predictions(given), *({**_describe_predictions(given), "split": name} for name in groups)]
    check_names(options.assertions, names)
    bootstrap = _bootstrap(options, given, *outside)
    for text in (one.doubt for one in (given, *outside) if one.doubt is not None):
        run.console.warn(text)
    for text in describe_rare_classes(given.name, given.labels, given.classes, is_exclusive=given.is_exclusive):
        run.console.warn(text)
    metrics = split_rows(given, options.settings, bootstrap, poll=run.console.poll)
    for other in outside:
        metrics += detection_rows(given, other, options.made_scores, bootstrap)
        run.console.poll(f"detection of {other.name}")
    metrics += _fidelity(run, given, said, options.reference, bootstrap)
    _warn_of_no_labels(run, given, [m for m in metrics if not options.metric or m["name"] in options.metric])
    rows = spell_options([{**_describe_predictions(given), "metrics": metrics}])
    of_groups = [_group_row(run, options, given, name, members) for name, members in groups.items()]
    checks = check_assertions(options.assertions, [*rows, *({**row, "split": row["group"]} for row in of_groups)])
    drawn = _publish_plot(options, given, groups, (rows[0], of_groups))
    rows, of_groups = (_select_rows(options, given, some) for some in (rows, of_groups))
    result = Result(extra={"rows": rows, **({"groups": of_groups} if of_groups else {}), "checks": checks})
    notes = [
        "; ".join(legend(rows, options, options.shown_scores, 0 if bootstrap is None else bootstrap.num_replicates))
    ]
    shown: Row = {"chosen": options.metric, "scores": options.shown_scores, "intervals": options.intervals}
    result.tables.append(score_table(rows, [] if of_groups else notes, **shown, first=_FIRST, head=_head))
    if of_groups:
        result.tables.append(score_table(of_groups, notes, **shown, first=_OF_GROUPS, head=_group_head))
    of_classes = class_table(rows, first=_FIRST[:2], head=lambda row: _head(row)[:2]) if options.per_class else None
    result.tables += [] if of_classes is None else [of_classes]
    if drawn is not None:
        result.outputs, result.action = [drawn[0]], "computed"
        result.lines.append(drawn[1])
    if calibrated is not None:
        result.extra["calibration"] = calibrated.metrics
        result.summary += calibrated.summary
        if calibrated.publish is not None:
            result.outputs, result.action = [*result.outputs, calibrated.publish()], "computed"
    failed = failure_text(checks)
    result.failure = CheckFailed(failed, code="assertion_failed") if failed else None
    return result


def check_plot(options: ScoreOptions, place: str) -> None:
    """Check that the figure may be written. Raises UsageError or OutputExists as check_figure_path does."""
    if options.plot is None:
        return
    ood = [part for text in options.ood for part in (text, text.partition("=")[2]) if part]
    texts = [place, *ood, *(one for one in (options.labels, options.groups, options.reference) if one is not None)]
    files = [split_prediction_place(text)[0] for text in texts]
    check_figure_path(Path(options.plot), "--plot", force=options.force, others=files)


def _open_predictions(place: str, said: PredictionClaims, options: ScoreOptions) -> GivenPredictions:
    given = open_given(place, said, labels=options.labels)
    return given if given.header is not None else given.named(options.split)


def check_labelled(options: ScoreOptions, given: GivenPredictions) -> None:
    """Raise DataError where a figure is requested without labels."""
    if options.plot is not None and given.labels is None:
        raise DataError(
            f"--plot: {quote_name(given.path, limit=300)} has no labels, which reliability needs", code="no_labels",
            hint="add \0labels\0 FILE[:COLUMN]",
        )  # fmt: skip


def _open_outside(given: GivenPredictions, said: PredictionClaims, options: ScoreOptions) -> list[GivenPredictions]:
    """Open the out-of-distribution predictions. Raises UsageError for two of one name, DataError for the same file again."""
    found: list[GivenPredictions] = []
    for text in options.ood:
        name, equals, place = text.partition("=")
        is_named = bool(equals) and not Path(text).expanduser().exists() and "/" not in name and ":" not in name
        if is_named:
            check_split_name(name, "--ood")
        # The columns of the other file have the first one's names unless named otherwise.
        one = open_given(place if is_named else text, said._replace(task=_task(given, said)), is_labeled=False)
        one = one.named(name) if is_named else one
        if one.name in (given.name, *(other.name for other in found)):
            raise UsageError(f"--ood: two splits are called {one.name!r}", hint=f"rename it: --ood NAME={text}")
        check_together(given, one)
        if one.probs.shape == given.probs.shape and np.array_equal(one.probs, given.probs):
            raise DataError(
                f"{quote_name(one.path, limit=300)} has the same predictions as {given.path}", code="same_split"
            )
        found.append(one)
    return found


_MOST_GROUPS = 1000


def _groups(given: GivenPredictions, place: str, options: ScoreOptions) -> dict[str, Any]:
    """Return the rows of each group, by its name, in order.

    Raises:
        DataError: the number of rows differs, or a row has no group. UsageError: a group has the split's name.
    """
    if options.groups is None:
        return {}
    path, named = split_prediction_place(options.groups)
    if not named:
        path, named = split_prediction_place(place)[0], {"": options.groups}
    where = f"{quote_name(path, limit=300)}: column {quote_name(named[''])}" if "" in named else ""
    if not where:
        raise UsageError(f"--groups: expected COLUMN or FILE:COLUMN; got {options.groups!r}")
    if given.header is not None and path == given.path:
        raise UsageError(
            "--groups: a prediction file of bnncli has no such column", hint="give a file: --groups FILE:COLUMN"
        )
    values = read_texts(path, named[""])
    if len(values) != len(given.probs):
        raise DataError(
            f"{where} has {len(values)} rows, but there are {len(given.probs)} predictions", code="bad_groups"
        )
    if "" in values:
        raise DataError(f"{where}: row {values.index('')} has no group", code="bad_groups")
    names, place_of = np.unique(np.array(values), return_inverse=True)
    if len(names) > _MOST_GROUPS:
        raise DataError(f"{where} has {len(names)} groups; expected at most {_MOST_GROUPS}", code="bad_groups")
    if given.name in names:
        raise UsageError(
            f"--groups: a group and the split are both called {given.name!r}", hint="rename the split: --split NAME"
        )
    return {str(name): np.flatnonzero(place_of == k) for k, name in enumerate(names)}


def _fidelity(
    run: Run, given: GivenPredictions, said: PredictionClaims, place: str | None, bootstrap: Bootstrap | None
) -> list[Row]:
    """Return rows that compare the predictions with the reference's."""
    if place is None:
        return []
    reference = open_given(place, PredictionClaims(task=_task(given, said)))
    check_together(given, reference)
    if reference.doubt is not None:
        run.console.warn(reference.doubt)
    column = split_prediction_place(place)[1].get("")
    name = reference.path.name + ("" if column is None else f".{column}")
    return rows_against(given, reference, name=name, bootstrap=bootstrap, tell=run.console.info)


def _task(given: GivenPredictions, said: PredictionClaims) -> str | None:
    return said.task if given.is_exclusive else "multilabel"


def _warn_of_no_labels(run: Run, given: GivenPredictions, shown: list[Row]) -> None:
    """Warn where requested scores need labels and there are none."""
    if given.labels is None and any(metric.get("undefined") == NO_LABELS for metric in shown):
        run.console.warn(f"{quote_name(given.path, limit=300)}: no labels found; add \0labels\0 FILE[:COLUMN]")


def _group_row(run: Run, options: ScoreOptions, given: GivenPredictions, name: str, members: Any) -> Row:
    """Return the row of one group, with all scores of its examples except detection."""
    own = given.of_rows(members, f"{given.name}/{name}")
    bootstrap = _bootstrap(options, own)
    metrics = split_rows(own, options.settings, bootstrap, poll=run.console.poll)
    described: Row = {**_describe_predictions(given), "group": name, "num_examples": len(members), "metrics": metrics}
    found: Row = spell_options(described)
    return found


def _bootstrap(options: ScoreOptions, *splits: GivenPredictions) -> Bootstrap | None:
    """Return the bootstrap of these splits; None with `--bootstrap 0`."""
    if options.bootstrap == 0:
        return None
    return Bootstrap(options.bootstrap, options.level, options.seed).of_splits(*splits)


def _describe_predictions(given: GivenPredictions) -> Row:
    """Return a row's description of the predictions."""
    return {**artifact_names(given), "split": given.name, **name_to_record(given.likelihood)}


class Panel(NamedTuple):
    """Predictions with their name and scores."""

    title: str
    predictions: GivenPredictions
    metrics: list[dict[str, Any]]


def _publish_plot(
    options: ScoreOptions, given: GivenPredictions, groups: Mapping[str, Any], rows: tuple[Row, list[Row]]
) -> tuple[Row, str] | None:
    """Draw and publish the figure. Return its output entry and description; None without --plot."""
    if options.plot is None:
        return None
    row, of_groups = rows
    panels = [
        Panel(name, given.of_rows(groups[name], f"{given.name}/{name}"), own["metrics"])
        for name, own in zip(groups, of_groups, strict=True)
    ]
    whole = Panel(given.name if groups else _head(row)[1], given, row["metrics"])  # as no group is called
    return draw_plot(Path(options.plot), whole, panels, num_bins=options.settings["bins"])


_MOST_DRAWN = 11  # with all of them together three rows of panels


def draw_plot(path: Path, whole: Panel, groups: Iterable[Panel], *, num_bins: int) -> tuple[dict[str, Any], str]:
    """Draw and publish the figure. Return its output entry and what it shows.

    Of more than eleven groups, only the largest are shown, in the order given.

    Raises:
        WriteError: the figure could not be written.
    """

    every = list(groups)
    largest = sorted(every, key=lambda panel: -len(panel.predictions.probs))[:_MOST_DRAWN]
    panels = [whole, *(panel for panel in every if any(panel is one for one in largest))]
    curves, errors = {}, {}
    for title, own, metrics in panels:
        curve = reliability_curve_of_predictions(own.probs, own.examples, num_bins=num_bins)
        assert curve is not None  # there are labels, and rows
        curves[title], errors[title] = curve, float(find_metric(metrics, Quantity("ece"))[0]["value"])
    figure = draw_reliability(curves, split=whole.predictions.name, errors=errors)
    try:
        digest = write_figure(path, render(figure, path.suffix[1:].lower()))
    except WriteError as error:
        raise WriteError(f"--plot: cannot write {path}", hint=error.hint, path=path) from None
    shown = f" (the {len(largest)} largest of {len(every)} groups)" if len(largest) < len(every) else ""
    return {"role": "score.plot", "path": str(path), "content_digest": digest}, f"figure: {path}{shown}"


def _select_rows(options: ScoreOptions, given: GivenPredictions, rows: list[Row]) -> list[Row]:
    """Return the rows with the requested scores, with or without those of each class."""
    if options.per_class:
        rows = [{**row, **class_facts(given.labels, given.classes)} for row in rows]
    else:
        rows = [drop_class_values(row) for row in rows]
    return select_metrics(rows, options.metric, options.shown_scores) if options.metric else rows


def _head(row: Mapping[str, Any]) -> list[str]:
    name = row["posterior"] if row["integrator"] == "none" else row["name"]
    return [row["split"], name, str(_size(row))]


def _size(row: Mapping[str, Any]) -> int | str:
    """Return the number of examples of a row."""
    return next((metric["n"] for metric in row["metrics"] if isinstance(metric.get("n"), int)), "-")


def _group_head(row: Mapping[str, Any]) -> list[str]:
    return [row["split"], row["group"], str(row["num_examples"])]

"""Score groups of predictions: read, check, score and resample every split, and evaluate assertions on the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.predictions import PredictionFile, read_predictions
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.evaluation.class_scores import one_sided_labels, rare_classes
from bnncli.evaluation.detectors import example_scores, feature_detectors, usual_score
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.scores import ScoredPredictions, all_scores, detection_forms, other_split_rows, split_scores
from bnncli.evaluation.statistics import (
    ExampleStatistics,
    Row,
    check_label_sets,
    check_labels,
    compute_example_statistics,
    row_blocks,
)
from bnncli.integrators import load_integrator
from bnncli.likelihoods import name_to_record, read_recorded_name
from bnncli.names import FEATURES_NAME, posterior_title, quote_name
from bnncli.options.scoring import Assertion, EvaluateOptions, Quantity
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import Run

if TYPE_CHECKING:
    from bnncli.evaluation.bootstrap import Bootstrap, GroupedSplit
    from bnncli.evaluation.detection import ExampleScores


@dataclass(frozen=True)
class PredictedSplit:
    """Predictions of a split, read and checked on first use.

    Args:
        header: of their file.
    """

    header: Header

    @property
    def name(self) -> str:
        """Return the split's name."""
        return str(self.header.meta["split"])

    @cached_property
    def file(self) -> PredictionFile:
        """Return the content of the file, with (N, C) arrays memory-mapped."""
        return read_predictions(self.header.path)

    @cached_property
    def groups(self) -> RowGroups | None:
        """Return the groups of dependent rows, or None."""
        return RowGroups.of(self.file.groups)

    @cached_property
    def examples(self) -> ExampleStatistics:
        """Return the statistics of each example."""
        try:
            size, is_exclusive = len(self.file.classes), self.file.is_exclusive
            return compute_example_statistics(
                self.file.probs, self.file.labels, num_classes=size, is_exclusive=is_exclusive
            )
        except DataError as error:
            path = self.header.path
            raise DataError(f"{path}: {error.message}", hint=error.hint, path=path) from None

    def scored(self, settings: Mapping[str, Any]) -> ScoredPredictions:
        """Return the inputs of scores, with the options that scores define."""
        file, ranking = self.file, self.header.meta.get("top_k")
        return ScoredPredictions(
            file.probs,
            self.examples,
            file.mutual_info,
            lengths=file.top_k,
            ranking=ranking,
            settings=settings,
            classes=file.classes,
            groups=self.groups,
            sample_id=file.sample_id,
        )

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """Return the named scores of each example, or the reason there are none."""
        return example_scores(names, self.examples, lambda name: getattr(self.file, name))


def bootstrap_of(run: Run, options: EvaluateOptions, *splits: GroupedSplit) -> Bootstrap | None:
    """Return the bootstrap of these splits; None with `--bootstrap 0`."""
    from bnncli.evaluation.bootstrap import Bootstrap

    if options.bootstrap == 0:
        return None
    return Bootstrap(options.bootstrap, options.level, run.compute.seed).of_splits(*splits)


class Scorable(Protocol):
    """Predictions of a split that can be scored, whatever their file."""

    @property
    def name(self) -> str:
        """Return the split's name."""

    @property
    def groups(self) -> RowGroups | None:
        """Return the groups of dependent rows, or None."""

    @property
    def examples(self) -> ExampleStatistics:
        """Return the statistics of each example."""

    def scored(self, settings: Mapping[str, Any]) -> ScoredPredictions:
        """Return the inputs of scores, with the options that scores define."""

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """Return the named scores of each example, or the reason there are none."""


def group_rows(
    run: Run,
    options: EvaluateOptions,
    group: PredictionGroup,
    further: Sequence[Callable[[PredictedSplit], list[Row]]] = (),
) -> list[dict[str, Any]]:
    """Return a row per in-distribution split, test first, with detection against every out-of-distribution split.

    Args:
        further: functions that add other metrics of a split's predictions.
    """
    outside = [PredictedSplit(header) for header in group.splits(is_ood=True).values()]
    inside = [PredictedSplit(header) for header in group.splits(is_ood=False).values()]
    rows = []
    for split in sorted(inside, key=lambda split: (split.name != "test", split.name)):
        bootstrap = bootstrap_of(run, options, split, *outside)
        metrics = split_rows(split, options.settings, bootstrap, poll=run.console.poll)
        for other in outside:
            _check_differs(split, other)
            metrics += detection_rows(split, other, options.prediction_scores, bootstrap)
            run.console.poll()
        for give in further:
            metrics += give(split)
        rows.append({**_describe_predictions(group, split.header), "metrics": metrics})
    return rows


def warn_of_rare_classes(run: Run, options: EvaluateOptions, groups: Sequence[PredictionGroup]) -> None:
    """Warn of splits with missing or rare classes, once for all groups."""
    splits = {name: header for group in groups for name, header in group.splits(is_ood=False).items()}
    for name, header in splits.items():
        if not header.meta.get("is_labeled") or (options.split and name not in options.split):
            continue
        file = PredictedSplit(header).file
        for text in describe_rare_classes(name, file.labels, file.classes, is_exclusive=file.is_exclusive):
            run.console.warn(text)


def describe_rare_classes(
    split: str, labels: NDArray | None, classes: Sequence[str], *, is_exclusive: bool
) -> Iterator[str]:
    """Yield warnings for missing or rare classes of a split, or labels that no or every example has."""
    if labels is None or len(labels) == 0:
        return
    if not is_exclusive:
        yield from _describe_one_sided_labels(split, labels, classes)
        return
    check_labels(labels, (len(labels), len(classes)))
    absent, few = rare_classes(labels, list(classes))
    if absent:
        yield f"split {split} has no examples of {_join_names(absent)}: means over classes omit them"
    if few:
        yield f"split {split} has few examples of {_join_names(few)}: their scores are imprecise"


def _describe_one_sided_labels(split: str, labels: NDArray, classes: Sequence[str]) -> Iterator[str]:
    """Yield warnings for labels that none or all of a split's examples have."""
    check_label_sets(labels, (len(labels), len(classes)))
    for names, who in zip(one_sided_labels(labels, list(classes)), ("no example", "every example"), strict=True):
        if names:
            text = _join_names(names).replace("class", "label", 1).replace("labeles", "labels", 1)
            yield f"split {split}: {who} has {text}: means over labels omit their undefined scores"


def _join_names(names: Sequence[str], most: int = 8) -> str:
    """Join names by commas; beyond `most`, count the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ("class " if len(names) == 1 else "classes ") + ", ".join(names[:most]) + more


def _describe_predictions(group: PredictionGroup, header: Header) -> dict[str, Any]:
    """Return a row's description of the scored predictions; `samples` is None without draws."""
    return {
        "name": group.name,
        "posterior": group.posterior,
        "integrator": group.integrator,
        "variant": group.variant,
        "settings": dict(header.meta.get("settings", {})),
        "samples": num_draws(group, header),
        "split": header.meta["split"],
        **name_to_record(read_recorded_name(header.meta)),
    }


def num_draws(group: PredictionGroup, header: Header) -> int | None:
    """Return the draws of a prediction: the requested number, at most the stored draws."""
    asked: int | None = header.meta["samples"]
    path = group.posterior_path
    if path is None or not load_integrator(group.integrator).is_sampling:
        return asked
    made = read_header(path).meta.get("metrics", {})
    if not {"chains", "draws"} <= set(made):
        return asked
    stored = int(made["chains"] * made["draws"])
    return stored if asked is None else min(asked, stored)


def split_rows(
    split: Scorable, settings: Mapping[str, Any], bootstrap: Bootstrap | None, *, poll: Callable[[], None]
) -> list[Row]:
    """Return the rows of one split's own scores, with the options that these define."""
    from bnncli.evaluation.statistics import score_rows

    scored = split.scored(settings)
    scores = split_scores(scored)
    poll()
    return score_rows(
        scores,
        (split.name, len(split.examples)),
        bootstrap,
        groups=split.groups,
        take=lambda rows: split_scores(scored.take(rows)),
    )


def detection_rows(split: Scorable, other: Scorable, names: Sequence[str], bootstrap: Bootstrap | None) -> list[Row]:
    """Return the rows for detecting one split among another by these scores, and for the confidence on the other split."""
    from bnncli.evaluation import detection

    inside, outside = (side.detection_scores(names) for side in (split, other))
    rows = detection.detection_rows(
        inside, outside, detection_forms(), split=split.name, ood=other.name, bootstrap=bootstrap
    )
    return [*rows, *other_split_rows(other.examples, other.name, bootstrap)]


def _check_differs(split: PredictedSplit, other: PredictedSplit) -> None:
    """Check that two splits are not the same examples.

    Raises:
        DataError: they are.
    """
    meta, others = split.header.meta, other.header.meta
    if meta.get("order_digest") != others.get("order_digest") or split.file.probs.shape != other.file.probs.shape:
        return
    ours, theirs = split.file.probs, other.file.probs
    if all(np.array_equal(ours[rows], theirs[rows]) for rows in row_blocks(*ours.shape)):
        raise DataError(f"splits {split.name!r} and {other.name!r} hold the same examples", code="same_split")


# Row fields that describe the value of a score, not its form.
_NO_CHOICES = {
    "name",
    "value",
    "n",
    "undefined",
    "higher_is_better",
    "standard_error",
    "interval",
    "p_value",
    "unit",
    "note",
}


class AbsentPosterior(NamedTuple):
    """A posterior without usable predictions: its name, that of stale predictions, the reason, and whether it has any."""

    posterior: str
    name: str
    reason: str
    is_predicted: bool = True


def bind_assertions(assertions: Sequence[Assertion], posterior: str, integrator: str) -> list[Assertion]:
    """Apply assertions without a posterior to this one, except comparisons with it and those about the features."""
    return [
        one._replace(left=one.left._replace(posterior=posterior, integrator=one.left.integrator or integrator))
        if is_of_every(one) and not (isinstance(one.right, Quantity) and one.right.posterior == posterior)
        else one
        for one in assertions
    ]


def is_of_every(assertion: Assertion) -> bool:
    """Return whether an assertion names no posterior and is not about the features."""
    return assertion.left.posterior is None and set(feature_detectors()).isdisjoint(assertion.left.choices)


def check_names(assertions: Sequence[Assertion], rows: Sequence[Row], absent: Sequence[AbsentPosterior] = ()) -> None:
    """Check before the work that every named posterior, integrator and split exists.

    Args:
        rows: posterior, integrator, variant and split of each future row, without metrics.

    Raises:
        MissingInput: a name does not exist.
        UsageError: the split or integrator is ambiguous.
    """
    for assertion in assertions:
        if _fail_for_named_absent(assertion, rows, absent):
            continue
        for left in _left_rows(assertion, rows):
            if isinstance(assertion.right, Quantity):
                _right_row(assertion.right, rows, left)


def check_assertions(
    assertions: Sequence[Assertion],
    rows: Sequence[Row],
    absent: Sequence[AbsentPosterior] = (),
    *,
    references: Sequence[str] = (),
) -> list[Row]:
    """Return a row for every score that an assertion is about.

    Its keys are expr, holds, name, posterior, integrator, split, left and right.

    A score fails if it is undefined, or missing for one posterior while others have it: left or right is None, and
    `reason` says why. So does a score of an absent posterior; its integrator and split are None unless named.

    Args:
        absent: posteriors of the run without rows.
        references: names of the posteriors that distances are measured to; they need no distance of their own.

    Raises:
        MissingInput, UsageError: see check_names; or no posterior has the score, or its form is ambiguous.
    """
    checks = []
    for assertion in assertions:
        named = _fail_for_named_absent(assertion, rows, absent)
        checks += [] if named else _checks(assertion, rows)
        checks += named or _fail_for_every_absent(assertion, rows, absent, references)
    return checks


def failure_text(checks: Sequence[Row]) -> str | None:
    """Return one line that names each failed number; None if all checks hold."""
    return "; ".join(_sentence(check) for check in checks if not check["holds"]) or None


def find_metric(metrics: Sequence[Row], wanted: Quantity) -> list[Row]:
    """Return the metric rows with the wanted name and choices, in their usual form by default."""
    found = [row for row in metrics if row["name"] == wanted.metric]
    found = [row for row in found if set(wanted.choices) <= {text for _, text in _choices(row)}]
    scores = {row.get("score") for row in found if row.get("value", 0.0) is not None}
    for key, usual in {"score": usual_score(scores), **all_scores()[wanted.metric].usual}.items():
        is_said = any(key == other and text in wanted.choices for row in found for other, text in _choices(row))
        if not is_said and any(row.get(key) == usual for row in found):
            found = [row for row in found if row.get(key, usual) == usual]
    return found


def spell_metrics(metrics: Sequence[Row]) -> list[str]:
    """Return how to write each of these forms of one metric: its name and the choices that distinguish it."""
    every = [dict(_choices(row)) for row in metrics]
    keys = dict.fromkeys(key for choices in every for key in choices)
    telling = [key for key in keys if len({choices.get(key) for choices in every}) > 1]
    names = []
    for row, choices in zip(metrics, every, strict=True):
        names.append(":".join([row["name"], *(choices[key] for key in telling if key in choices)]))
    return names


def _fail_for_named_absent(assertion: Assertion, rows: Sequence[Row], absent: Sequence[AbsentPosterior]) -> list[Row]:
    """Return failed checks of an assertion on an absent posterior that has no rows of another integrator."""
    for side in (assertion.left, assertion.right):
        if isinstance(side, Quantity) and side.posterior is not None:
            there = [row for row in rows if side.posterior in (row["posterior"], _name(row))]
            known = [row for row in there if side.integrator in (None, row["integrator"], row.get("variant"))]
            missing = [one for one in absent if side.posterior in (one.posterior, one.name)]
            if missing and not known:
                return [_absent_check(assertion, one) for one in missing]
    return []


def _fail_for_every_absent(
    assertion: Assertion, rows: Sequence[Row], absent: Sequence[AbsentPosterior], references: Sequence[str]
) -> list[Row]:
    """Return failed checks of an assertion on every posterior: those with stale predictions or only other splits."""
    left, right = assertion.left, assertion.right
    if left.posterior is not None:
        known = {row["posterior"] for row in rows if left.posterior == row["posterior"]}
        return [_absent_check(assertion, one) for one in absent if one.posterior in known and _is_meant(left, one)]
    if not is_of_every(assertion):
        return []
    others = {right.posterior} if isinstance(right, Quantity) else set()
    score = all_scores()[left.metric]
    others |= (
        {*references} if score.of_draws is not None or score.of_reference is not None else set()
    )  # a reference has no distance to itself
    chosen = _select_named(left, rows)
    kept = {_name(row) for row in _select_split(left, chosen, None)}
    split = _select_split(left, chosen, None)[0]["split"]
    elsewhere = {_name(row): row["posterior"] for row in chosen if _name(row) not in kept}
    found = [one for one in absent if one.is_predicted and _is_meant(left, one)]
    found += [
        AbsentPosterior(posterior, name, f"no predictions of split {split!r}") for name, posterior in elsewhere.items()
    ]
    return [_absent_check(assertion, one) for one in found if others.isdisjoint((one.posterior, one.name))]


def _is_meant(wanted: Quantity, one: AbsentPosterior) -> bool:
    """Return whether a named integrator could be that of the absent predictions."""
    return wanted.integrator is None or one.name in (one.posterior, f"{one.posterior}.{wanted.integrator}")


def _absent_check(assertion: Assertion, one: AbsentPosterior) -> Row:
    left = assertion.left
    found = {"expr": str(assertion), "holds": False, "left": None, "right": None, "reason": one.reason}
    found |= {"name": one.name, "posterior": one.posterior, "integrator": left.integrator, "split": left.split}
    return {**found, "metric": left.label}


def _checks(assertion: Assertion, rows: Sequence[Row]) -> list[Row]:
    found = []
    for left in _left_rows(assertion, rows):
        one, why = _value(assertion.left, left, rows)
        if one is None and why is None:  # an unnamed row without this score
            continue
        other, where = _right_value(assertion.right, rows, left)
        check = {"expr": str(assertion), "holds": False, "left": one, "right": other}
        check |= {"name": _name(left), "posterior": left["posterior"], "integrator": _integrator(left)}
        check["split"] = left["split"]
        check["metric"] = assertion.left.label
        if one is None or other is None:
            check["reason"] = why if one is None else where
        else:
            check["holds"] = assertion.holds(one, other)
        found.append(check)
    if not found:
        raise UsageError(f"\0assert_\0 {assertion}: the reference is the only posterior")
    return found


def _right_value(right: Quantity | float, rows: Sequence[Row], left: Row) -> tuple[float | None, str | None]:
    """Return the right side's value for a row of the left side, or the reason there is none."""
    if not isinstance(right, Quantity):
        return right, None
    row = _right_row(right, rows, left)
    value, why = _value(right, row, [row])
    return value, f"{right}: {why}" if why else None


def _value(wanted: Quantity, row: Row, rows: Sequence[Row]) -> tuple[float | None, str | None]:
    """Return the value or the reason there is none; neither if the row has no such metric and is one of many."""
    named = [metric for metric in row["metrics"] if metric["name"] == wanted.metric]
    found = find_metric(named, wanted)
    label = wanted.label
    if not found:
        if wanted.posterior is None and any(
            find_metric(other["metrics"], wanted) for other in rows if other is not row
        ):
            return (None, f"it has no {label}") if named else (None, None)
        choices = (
            ", ".join(dict.fromkeys(spell_metrics(named) or [metric["name"] for metric in row["metrics"]])) or "none"
        )
        raise UsageError(f"\0assert_\0: {_label(row)} has no score {label} (have: {choices})")
    if len(found) > 1:
        raise UsageError(
            f"\0assert_\0: {label} of {_label(row)} is ambiguous; name one of {', '.join(spell_metrics(found))}"
        )
    if wanted.posterior is None and found[0].get("reference") in (row["posterior"], _name(row)):
        return None, None  # a distance to itself
    return _part(found[0], wanted.part)


def _part(metric: Row, part: str | None) -> tuple[float | None, str | None]:
    """Return the value of a metric row or the wanted part of it, or the reason there is none."""
    value = metric["value"]
    if value is None:
        return None, str(metric.get("undefined", "undefined"))
    if part in ("low", "high"):
        value = (metric.get("interval") or {}).get(part)
    elif part is not None:
        value = metric.get(part)
    return (None, f"it has no {'interval' if part in ('low', 'high') else part}") if value is None else (value, None)


def _left_rows(assertion: Assertion, rows: Sequence[Row]) -> list[Row]:
    """Return the rows for the left side."""
    left, right = assertion.left, assertion.right
    found = _select_split(left, _select_named(left, rows), None)
    if left.posterior is None and isinstance(right, Quantity) and right.posterior is not None:
        others = _select_named(right, rows)
        found = [row for row in found if row not in others]
        if not found:
            raise MissingInput(
                f"\0assert_\0 {assertion}: there is no other posterior to compare {right.posterior} with"
            )
    return found


def _right_row(right: Quantity, rows: Sequence[Row], left: Row) -> Row:
    """Return the single row for the right side, given a row of the left side."""
    if right.posterior is None:
        right = right._replace(posterior=left["posterior"], integrator=left.get("variant", left["integrator"]))
    found = _select_split(right, _select_named(right, rows), left["split"])
    usual = f"{right.posterior}.{right.integrator or _integrator(left)}"
    for rule in (
        lambda row: _integrator(row) == _integrator(left),
        lambda row: row["posterior"] == left["posterior"] and _name(row) == _name(left),
        lambda row: _name(row) == usual,
    ):
        if len(found) > 1:
            found = [row for row in found if rule(row)] or found
    if len(found) > 1:
        choices = ", ".join(f"{_name(row)}.{right.metric}" for row in found)
        raise UsageError(f"\0assert_\0: {right} is ambiguous; name one of {choices}")
    return found[0]


def _select_named(wanted: Quantity, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the named posterior and integrator.

    Raises:
        MissingInput: there are none.
    """
    found = [row for row in rows if wanted.posterior in (row["posterior"], _name(row))]
    if wanted.posterior is None:
        # Scores of the features have their own row, which has no other scores.
        is_of_features = not set(feature_detectors()).isdisjoint(wanted.choices)
        found = [row for row in rows if (row["posterior"] == FEATURES_NAME) == is_of_features]
        if is_of_features and not found:
            raise MissingInput(f"\0assert_\0 {wanted}: feature scores are not computed here; add \0score\0")
    if wanted.integrator is not None:
        found = [row for row in found if wanted.integrator in (row["integrator"], row.get("variant"))]
    if found:
        return found
    there = ", ".join(dict.fromkeys(map(_name, rows))) or "none"
    name = ".".join(part for part in (wanted.posterior, wanted.integrator) if part is not None)
    raise MissingInput(f"\0assert_\0 {wanted}: {quote_name(name)} is not evaluated here (have: {there})")


def _select_split(wanted: Quantity, rows: list[Row], other: str | None) -> list[Row]:
    """Return the rows of the requested split.

    Raises:
        MissingInput: it does not exist.
        UsageError: it is ambiguous.
    """
    there = list(dict.fromkeys(str(row["split"]) for row in rows))
    split = wanted.split or (other if other in there else "test" if "test" in there else there[0])
    if split not in there:
        raise MissingInput(f"\0assert_\0 {wanted}: no predictions for split {split!r} (have: {', '.join(there)})")
    if wanted.split is None and split not in ("test", other) and len(there) > 1:
        raise UsageError(f"\0assert_\0 {wanted}: name the split with @SPLIT, one of {', '.join(there)}")
    return [row for row in rows if row["split"] == split]


def _choices(metric: Row) -> list[tuple[str, str]]:
    """Return the choices that distinguish forms of a metric, as text."""
    facts = all_scores()[metric["name"]].facts
    return [
        (key, str(value))
        for key, value in metric.items()
        if key not in _NO_CHOICES and key not in facts and isinstance(value, str | int) and not isinstance(value, bool)
    ]


def _integrator(row: Row) -> str:
    return str(row.get("variant", row["integrator"]))


def _name(row: Row) -> str:
    """Return the name of a row's predictions: <posterior>.<integrator>, or the given name."""
    return str(row.get("name") or f"{row['posterior']}.{_integrator(row)}")


def _label(row: Row) -> str:
    title = posterior_title(row["posterior"], _integrator(row), row.get("name"))
    return f"{title} ({_integrator(row)}, {row['split']})"


def _sentence(check: Row) -> str:
    if check["integrator"] is None or check["split"] is None:
        way = f"predict {check['posterior']}, or name another: POSTERIOR.{check['metric']}"
        return f"{check['metric']} of {check['name']} is unknown ({check['reason']}), expected {check['expr']}; {way}"
    title = posterior_title(check["posterior"], check["integrator"], check["name"])
    where = f"{check['metric']} of {title} ({check['integrator']}, {check['split']})"
    if "reason" in check:
        return f"{where} is undefined ({check['reason']}), expected {check['expr']}"
    left, right = (f"{check[side]:.6g}" for side in ("left", "right"))
    if left == right:  # they differ in later digits
        left, right = repr(check["left"]), repr(check["right"])
    known = check["expr"].endswith(f"{check['right']!r}".removesuffix(".0"))
    return f"{where} is {left}, expected {check['expr']}" + ("" if known else f" ({right})")

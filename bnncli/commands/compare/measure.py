"""Measure compare's scores for every posterior and checkpoint, with their integration errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.headers import Header
from bnncli.evaluation.bootstrap import Bootstrap, DrawGroups, IntegrationError, integration_errors
from bnncli.evaluation.comparison import Sample, integration
from bnncli.evaluation.detectors import example_scores, prediction_detectors, probability_detectors
from bnncli.evaluation.scores import ScoredPredictions, all_scores, split_scores
from bnncli.evaluation.statistics import ExampleStatistics, compute_example_statistics
from bnncli.integrators import load_integrator
from bnncli.numerics.random import stream_seed
from bnncli.options.scoring import Quantity
from bnncli.session.predictions import PredictionGroup
from bnncli.session.recommendation import ScoreMeasurement, measure_detection, measure_split, select_needed_scores
from bnncli.session.run import Run
from bnncli.session.score_rows import PredictedSplit, find_metric, spell_metrics

if TYPE_CHECKING:
    from bnncli.commands.compare import CompareOptions


_IN_THE_SPREAD = "included in the spread over checkpoints"


@dataclass(frozen=True)
class Entry:
    """A score of one posterior.

    Args:
        samples: None where the score is undefined for a checkpoint. undefined: the reason.
        integration_unknown: why its integration error is unknown.
    """

    samples: Sample | None
    undefined: str | None = None
    integration_unknown: str | None = None


@dataclass(frozen=True)
class Column:
    """One score of all posteriors.

    Args:
        row: name, the choices that define it, higher_is_better.
        form: how it is written among the other columns, such as ece:equal-mass.
        entries: one for each posterior.
    """

    row: dict[str, Any]
    form: str
    entries: list[Entry]

    def answers(self, wanted: Quantity) -> bool:
        """True where the column is the requested one."""
        return bool(find_metric([self.row], wanted))


Key = tuple[tuple[str, str], ...]
# Of each score: its error, or the reason why it is not known.
Known = dict[Key, IntegrationError | str]


def measure(run: Run, options: CompareOptions, groups: dict[str, list[PredictionGroup]]) -> list[Column]:
    """Measure the requested scores of every posterior, in order. `groups` has one group per checkpoint."""
    num_checkpoints = len(next(iter(groups.values())))
    bootstrap = Bootstrap(options.bootstrap, 1 - options.alpha, options.seed) if num_checkpoints == 1 else None
    measured: list[list[list[ScoreMeasurement]]] = []  # of each checkpoint, of each posterior
    errors: list[Known] = []  # of each posterior, for one checkpoint
    for place in range(num_checkpoints):
        run.console.poll("compare")
        measured.append(_measure_checkpoint(run, options, [own[place] for own in groups.values()], bootstrap))
    if num_checkpoints == 1:
        for (own,), found in zip(groups.values(), measured[0], strict=True):
            run.console.poll(f"integration error of {own.name}")
            errors.append(_estimate_integration_errors(options, own, found))
    rows = {one.key: one.row for checkpoint in measured for own in checkpoint for one in own}
    names: dict[tuple[tuple[str, str], ...], str] = {}
    for wanted in options.scores:
        usual = find_metric(list(rows.values()), _resolve_default_score(wanted))
        picked = {key: row for key, row in rows.items() if any(row is one for one in usual)}
        for key, form in zip(picked, _format_columns(list(picked.values()), wanted), strict=True):
            names.setdefault(key, form)
    columns = []
    for key, form in names.items():
        row = rows[key]
        entries = []
        for label, name in enumerate(groups):
            ones = [next((one for one in checkpoint[label] if one.key == key), None) for checkpoint in measured]
            known = errors[label].get(key, "") if errors else _IN_THE_SPREAD
            entries.append(_combine_scores(ones, known, seed=stream_seed(options.seed, f"integration/{name}/{form}")))
        columns.append(Column(row, form, entries))
    return columns


OF_TWO_SPLITS = tuple(name for name, score in all_scores().items() if score.of_two_splits is not None)


def _measure_checkpoint(
    run: Run, options: CompareOptions, groups: Sequence[PredictionGroup], bootstrap: Bootstrap | None
) -> list[list[ScoreMeasurement]]:
    """Measure the requested scores of each posterior of one checkpoint."""
    own_wanted = [wanted for wanted in options.scores if wanted.metric not in OF_TWO_SPLITS]
    other_wanted = [_resolve_default_score(wanted) for wanted in options.scores if wanted.metric in OF_TWO_SPLITS]
    inside = [PredictedSplit(group.splits(is_ood=False)[options.split]) for group in groups]
    split = (options.split, len(inside[0].examples))
    bootstrap = None if bootstrap is None else bootstrap.of_splits(inside[0])
    measured: list[list[ScoreMeasurement]] = [[] for _ in groups]
    if own_wanted:
        names = [wanted.metric for wanted in own_wanted]
        scored = [prediction.scored(options.settings) for prediction in inside]
        measured = measure_split(
            [split_scores(one, names) for one in scored],
            own_wanted,
            split=split,
            bootstrap=bootstrap,
            take=lambda rows: [split_scores(one.take(rows), names) for one in scored],
        )
    others = dict.fromkeys(name for group in groups for name in group.splits(is_ood=True)) if other_wanted else {}
    for ood in others:
        run.console.poll(f"compare {ood}")
        places = [place for place, group in enumerate(groups) if ood in group.splits(is_ood=True)]
        outside = [PredictedSplit(groups[place].splits(is_ood=True)[ood]) for place in places]
        names = select_needed_scores(prediction_detectors(), other_wanted, ood)
        vectors = [
            (inside[place].detection_scores(names), far.detection_scores(names))
            for place, far in zip(places, outside, strict=True)
        ]
        size = (ood, len(outside[0].examples))
        of_both = None if bootstrap is None else bootstrap.of_splits(inside[0], outside[0])
        found = measure_detection(vectors, other_wanted, split=split, ood=size, bootstrap=of_both)
        for place, own in zip(places, found, strict=True):
            measured[place] += own
    return measured


def _estimate_integration_errors(
    options: CompareOptions, group: PredictionGroup, measured: Sequence[ScoreMeasurement]
) -> Known:
    """Return the integration errors of all scores of one posterior."""
    inside = PredictedSplit(group.splits(is_ood=False)[options.split])
    own_wanted = [wanted for wanted in options.scores if wanted.metric not in OF_TWO_SPLITS]
    other_wanted = [_resolve_default_score(wanted) for wanted in options.scores if wanted.metric in OF_TWO_SPLITS]
    own = [one for one in measured if "ood" not in one.row]
    found = estimate_split_errors(inside, own_wanted, own, options.settings) if own else {}
    for name, header in group.splits(is_ood=True).items():
        others = [one for one in measured if one.row.get("ood") == name]
        found |= estimate_detection_errors(inside, PredictedSplit(header), other_wanted, others) if others else {}
    return found


def estimate_split_errors(
    prediction: PredictedSplit,
    wanted: Sequence[Quantity],
    measured: Sequence[ScoreMeasurement],
    settings: Mapping[str, Any],
) -> Known:
    """Return the integration errors of scores of one split.

    Args:
        measured: the requested scores, as measured.
        settings: values of the options that scores declare.
    """

    names = [one.metric for one in wanted]

    def measure(examples: list[ExampleStatistics], probs: list[np.ndarray]) -> list[ScoreMeasurement]:
        scores = split_scores(ScoredPredictions(probs[0], examples[0], settings=settings), names)
        return measure_split([scores], wanted, split=("", len(examples[0])))[0]

    return _estimate_errors([prediction], measure, measured)


def estimate_detection_errors(
    inside: PredictedSplit, outside: PredictedSplit, wanted: Sequence[Quantity], measured: Sequence[ScoreMeasurement]
) -> Known:
    """Return the integration errors of detection scores that use class probabilities."""

    def measure(examples: list[ExampleStatistics], probs: list[np.ndarray]) -> list[ScoreMeasurement]:
        vectors = [example_scores(probability_detectors(), one, _no_array) for one in examples]
        ood = (outside.name, len(examples[1]))
        return measure_detection([(vectors[0], vectors[1])], wanted, split=("", len(examples[0])), ood=ood)[0]

    return _estimate_errors([inside, outside], measure, measured)


def _no_array(name: str) -> None:
    """Return None: groups of draws keep class probabilities only, and no other array."""


Measure = Callable[[list[ExampleStatistics], list[np.ndarray]], list[ScoreMeasurement]]
_NO_DRAWS = IntegrationError(0.0, 1.0)
_NO_GROUPS = (
    "the predictions store no groups of draws: they have one draw, are an ensemble's, or are from an earlier version"
)
_OTHER_DRAWS = "the two splits were predicted with different seeds or numbers of draws"
_NOT_OF_PROBABILITIES = "this score does not depend only on the class probabilities, which groups of draws store"


def _estimate_errors(splits: Sequence[PredictedSplit], measure: Measure, measured: Sequence[ScoreMeasurement]) -> Known:
    """Return the errors of a measure, from its values on halves of the draws."""
    keys = [one.key for one in measured]
    if not load_integrator(str(splits[0].header.meta["integrator"])).is_sampling:
        return dict.fromkeys(keys, _NO_DRAWS)
    if len({_read_draws(split.header) for split in splits}) > 1:
        return dict.fromkeys(keys, _OTHER_DRAWS)
    files = [split.file for split in splits]
    groups = [
        DrawGroups(file.group_probs, np.asarray(file.group_weights)) for file in files if file.group_probs is not None
    ]
    if len(groups) < len(files):
        return dict.fromkeys(keys, _NO_GROUPS)
    labels = [None if file.labels is None else np.asarray(file.labels)[file.group_rows] for file in files]

    def values(*probs: np.ndarray) -> dict[Key, float]:
        examples = [
            compute_example_statistics(own, known, num_classes=own.shape[1], is_exclusive=files[0].is_exclusive)
            for own, known in zip(probs, labels, strict=True)
        ]
        return {one.key: np.nan if one.value is None else one.value for one in measure(examples, list(probs))}

    there = list(values(*(own.mean() for own in groups)))
    errors = dict(zip(there, integration_errors(lambda *probs: list(values(*probs).values()), *groups), strict=True))
    return {key: errors[key] if _is_told(errors.get(key)) else _NOT_OF_PROBABILITIES for key in keys}


def _read_draws(header: Header) -> tuple[object, object]:
    """Return the seed and the number of a prediction's draws."""
    params = header.provenance["params"]
    return params.get("seed"), params.get("samples")


def _is_told(error: IntegrationError | None) -> bool:
    return error is not None and bool(np.isfinite(error.variance))


def _resolve_default_score(wanted: Quantity) -> Quantity:
    """Resolve detection without a named score to the largest probability. The default score is the same for all posteriors."""
    if wanted.metric not in OF_TWO_SPLITS or not {*prediction_detectors()}.isdisjoint(wanted.choices):
        return wanted
    return wanted._replace(choices=(*wanted.choices, "max_prob"))


def _format_columns(rows: Sequence[dict[str, Any]], wanted: Quantity) -> list[str]:
    """Return how each column of one requested score is written: as requested, with what tells the columns apart."""
    names = []
    for row, form in zip(rows, spell_metrics(rows), strict=True):
        parts = [wanted.metric, *wanted.choices]
        telling = [*form.split(":")[1:], *([row["ood"]] if "ood" in row else [])]
        names.append(":".join([*parts, *dict.fromkeys(choice for choice in telling if choice not in parts)]))
    return names


def _combine_scores(found: Sequence[ScoreMeasurement | None], known: IntegrationError | str, *, seed: int) -> Entry:
    """Combine a score over the checkpoints.

    Args:
        known: its integration error, or why it is unknown.
        seed: seed of the noise that represents this error in the replicates.
    """
    values = []
    for one in found:
        if one is None:
            return Entry(None, "these predictions have no such score")
        if one.value is None:
            return Entry(None, one.undefined)
        values.append(one.value)
    replicates = found[0].replicates if len(found) == 1 and found[0] is not None else None
    if isinstance(known, str) or replicates is None:
        unknown = known if isinstance(known, str) else "there are no bootstrap replicates to add it to"
        return Entry(Sample(np.array(values), replicates), integration_unknown=unknown)
    noise = integration(known.standard_error, known.degrees_of_freedom, size=len(replicates), seed=seed)
    return Entry(Sample(np.array(values), replicates, noise))

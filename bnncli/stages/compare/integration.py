"""The integration errors of the scores that compare shows: what other draws of the same posterior would change in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bnncli.artifacts.headers import Header
from bnncli.evaluation.detectors import example_scores, of_probabilities
from bnncli.evaluation.example_statistics import ExampleStatistics, examples_of
from bnncli.evaluation.integration_error import DrawGroups, IntegrationError, integration_errors
from bnncli.evaluation.scores import ScoredPredictions, split_scores
from bnncli.integrators import load_integrator
from bnncli.options.scoring import Quantity
from bnncli.session.recommendation import Measured, measure_detection, measure_split
from bnncli.session.score_rows import PredictedSplit

Key = tuple[tuple[str, str], ...]
# Of each score: its error, or the reason why it is not known.
Known = dict[Key, IntegrationError | str]
Measure = Callable[[list[ExampleStatistics], list[np.ndarray]], list[Measured]]

_NO_DRAWS = IntegrationError(0.0, 1.0)
_NO_GROUPS = (
    "the predictions store no groups of draws: they have one draw, are an ensemble's, or are from an earlier version"
)
_OTHER_DRAWS = "the two splits were predicted with different seeds or numbers of draws"
_NOT_OF_PROBABILITIES = "this score does not depend only on the class probabilities, which groups of draws store"


def split_errors(
    prediction: PredictedSplit, wanted: Sequence[Quantity], measured: Sequence[Measured], settings: Mapping[str, Any]
) -> Known:
    """The integration errors of scores of one split.

    Args:
        measured: the scores wanted, as they were measured.
        settings: values of the options that scores bring.
    """

    names = [one.metric for one in wanted]

    def measure(examples: list[ExampleStatistics], probs: list[np.ndarray]) -> list[Measured]:
        scores = split_scores(ScoredPredictions(probs[0], examples[0], settings=settings), names)
        return measure_split([scores], wanted, split=("", len(examples[0])))[0]

    return _errors([prediction], measure, measured)


def detection_errors(
    inside: PredictedSplit, outside: PredictedSplit, wanted: Sequence[Quantity], measured: Sequence[Measured]
) -> Known:
    """The integration errors of scores of telling one split from another, by scores of the class probabilities."""

    def measure(examples: list[ExampleStatistics], probs: list[np.ndarray]) -> list[Measured]:
        vectors = [example_scores(of_probabilities(), one, _no_array) for one in examples]
        ood = (outside.name, len(examples[1]))
        return measure_detection([(vectors[0], vectors[1])], wanted, split=("", len(examples[0])), ood=ood)[0]

    return _errors([inside, outside], measure, measured)


def _errors(splits: Sequence[PredictedSplit], measure: Measure, measured: Sequence[Measured]) -> Known:
    """The errors of what a measure finds in the predictions of halves of the draws."""
    keys = [one.key for one in measured]
    if not load_integrator(str(splits[0].header.meta["integrator"])).is_sampling:
        return dict.fromkeys(keys, _NO_DRAWS)
    if len({_draws_of(split.header) for split in splits}) > 1:
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
            examples_of(own, known, num_classes=own.shape[1], is_exclusive=files[0].is_exclusive)
            for own, known in zip(probs, labels, strict=True)
        ]
        return {one.key: np.nan if one.value is None else one.value for one in measure(examples, list(probs))}

    there = list(values(*(own.mean() for own in groups)))
    errors = dict(zip(there, integration_errors(lambda *probs: list(values(*probs).values()), *groups), strict=True))
    return {key: errors[key] if _is_told(errors.get(key)) else _NOT_OF_PROBABILITIES for key in keys}


def _no_array(name: str) -> None:
    """Groups of draws keep class probabilities alone."""


def _is_told(error: IntegrationError | None) -> bool:
    return error is not None and bool(np.isfinite(error.variance))


def _draws_of(header: Header) -> tuple[object, object]:
    """What draws a prediction is made of: the seed, and their number."""
    params = header.provenance["params"]
    return params.get("seed"), params.get("samples")

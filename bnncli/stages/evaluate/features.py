"""The group of evaluate that needs no posterior: out-of-distribution detection by the features alone.

It is computed once for all posteriors, from the features of the training split, and has a metrics file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from bnncli.artifacts.files import write_metrics
from bnncli.artifacts.headers import Header
from bnncli.errors import DataError
from bnncli.evaluation.detection import detection_rows
from bnncli.evaluation.detectors import Detector, FittedDetector, TrainingFeatures, declared, of_features
from bnncli.evaluation.scores import detection_forms, further_names
from bnncli.lazy import torch
from bnncli.names import FEATURES_NAME
from bnncli.options.scoring import EvaluateOptions
from bnncli.session import revisions as _revisions
from bnncli.session.inputs import Split, load_split
from bnncli.session.predictions import PredictionGroup
from bnncli.session.produce import Computed, Request, produce
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import bootstrap_of

_INTEGRATOR = "none"
_GROUP = f"{FEATURES_NAME}.{_INTEGRATOR}"  # what its metrics file is called
Scores = dict[str, NDArray | str]


def evaluate_features(run: Run, options: EvaluateOptions, groups: Sequence[PredictionGroup]) -> Result:
    """Detection by every feature score between the splits that the groups have predictions of.

    Raises:
        MissingInput: the features of the training split, or of one of those, are not there.
    """
    inside, outside = (
        list(dict.fromkeys(name for group in groups for name in group.splits(is_ood=is_ood)))
        for is_ood in (False, True)
    )
    if not outside:
        run.console.warn("--score: no out-of-distribution split to detect with features")
        return Result()
    train = load_split(run, "train")
    splits = {name: load_split(run, name) for name in [*inside, *outside]}
    sources = list(dict.fromkeys([train.source, *(split.source for split in splits.values())]))
    params: dict[str, Any] = {"score": of_features(), **options.detector_settings}
    params |= {"bootstrap": options.bootstrap, "level": options.level, "seed": run.compute.seed}
    params |= {"further_scores": further} if (further := further_names()) else {}
    target = run.folder.metrics(_GROUP)
    request = Request(
        target,
        "metrics",
        f"metrics.{FEATURES_NAME}",
        params,
        _revisions.EVALUATE_FEATURES,
        sources,
        train.checkpoint,
        lambda: 1 << 18,
    )

    def compute() -> Computed:
        scores, choices = _scores(run, options, train, splits)
        rows = [_row(run, options, scores, name, outside) for name in sorted(inside, key=lambda n: (n != "test", n))]
        for metric in (metric for row in rows for metric in row["metrics"]):
            metric |= choices[metric["score"]]

        def publish(provenance: dict[str, Any], may_replace: bool) -> str:
            return write_metrics(target, rows=rows, predictions=[], provenance=provenance, may_replace=may_replace)

        return Computed(publish, {"rows": rows})

    return produce(run, request, compute, when_fresh=_when_fresh)


def row_name(split: str) -> dict[str, Any]:
    """What the row of a split is called."""
    own = {"name": _GROUP, "posterior": FEATURES_NAME, "integrator": _INTEGRATOR, "variant": _INTEGRATOR}
    return {**own, "split": split}


def _when_fresh(header: Header) -> Computed:
    return Computed(lambda provenance, may_replace: header.content_digest, {"rows": header.meta.get("rows") or []})


def _row(
    run: Run, options: EvaluateOptions, scores: dict[str, Scores], name: str, outside: Sequence[str]
) -> dict[str, Any]:
    """The row of one in-distribution split: detection of every other split by every score."""
    metrics = []
    for other in outside:
        bootstrap = bootstrap_of(run, options)
        metrics += detection_rows(
            scores[name], scores[other], detection_forms(), split=name, ood=other, bootstrap=bootstrap
        )
        run.console.poll()
    return {**row_name(name), "settings": {}, "samples": None, "metrics": metrics}


def _scores(
    run: Run, options: EvaluateOptions, train: Split, splits: dict[str, Split]
) -> tuple[dict[str, Scores], dict[str, Mapping[str, int]]]:
    """Every score of the examples of each split, (N,), or the reason why there is none; and what defines each score."""
    labels = train.content.labels
    several = (
        {"no_classes": "multilabel examples have no single class"} if labels is not None and labels.ndim == 2 else {}
    )
    given = TrainingFeatures(
        torch.from_numpy(train.content.features),
        None if labels is None or several else torch.from_numpy(labels),
        run.device,
        run.stream,
        options.detector_settings,
        **several,
    )
    fitted = {name: _fit(detector, given) for name, detector in declared().items() if detector.of_features is not None}
    for note in (note for one in fitted.values() if isinstance(one, FittedDetector) for note in one.notes):
        run.console.warn(note)
    makers = {name: fitted[declared()[name].computed_by or name] for name in of_features()}
    found: dict[str, Scores] = {}
    task = run.console.task("feature scores", len(splits))
    for name, split in splits.items():
        rows = torch.from_numpy(split.content.features)
        values = {maker: one if isinstance(one, str) else one.scores(rows) for maker, one in fitted.items()}
        own = {score: values[declared()[score].computed_by or score] for score in of_features()}
        found[name] = {score: one if isinstance(one, str) else one[score].numpy() for score, one in own.items()}
        task.advance()
    return found, {score: {} if isinstance(one, str) else one.choices for score, one in makers.items()}


def _fit(detector: Detector, train: TrainingFeatures) -> FittedDetector | str:
    """The detector, or the reason why there is none."""
    assert detector.of_features is not None
    try:
        return detector.of_features(train)
    except DataError as error:
        return error.message

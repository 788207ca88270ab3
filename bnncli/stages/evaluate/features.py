"""The group of evaluate that needs no posterior: out-of-distribution detection by the features alone.

It is computed once for all posteriors, from the features of the training split, and has a metrics file of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.feature_scores import Mahalanobis, Neighbors
from bnncli.evaluation.split_detection import detection_rows
from bnncli.options import EvaluateOptions
from bnncli.options.evaluate import FEATURE_SCORES, FEATURES_NAME
from bnncli.run import revisions as _revisions
from bnncli.run.inputs import Split, load_split
from bnncli.run.prediction_groups import Group
from bnncli.run.produce import Computed, Request, produce
from bnncli.run.score_rows import bootstrap_of
from bnncli.run.session import Result, Run
from bnncli.scores import detection_forms, further_names
from bnncli.storage.headers import Header
from bnncli.storage.metrics import write_metrics

_INTEGRATOR = "none"
_GROUP = f"{FEATURES_NAME}.{_INTEGRATOR}"  # what its metrics file is called
Scores = dict[str, NDArray | str]


def evaluate_features(run: Run, options: EvaluateOptions, groups: Sequence[Group]) -> Result:
    """Detection by every feature score between the splits that the groups have predictions of.

    Raises:
        MissingInput: the features of the training split, or of one of those, are not there.
    """
    inside, outside = (
        list(dict.fromkeys(name for group in groups for name in group.splits(is_ood=is_ood)))
        for is_ood in (False, True)
    )
    if not outside:
        run.console.warn("--score: there is no out-of-distribution split to detect by features")
        return Result()
    train = load_split(run, "train")
    splits = {name: load_split(run, name) for name in [*inside, *outside]}
    sources = list(dict.fromkeys([train.source, *(split.source for split in splits.values())]))
    params: dict[str, Any] = {"score": list(FEATURE_SCORES), "neighbors": options.neighbors}
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
        1 << 18,
    )

    def compute() -> Computed:
        scores, num_neighbors = _scores(run, options, train, splits)
        if num_neighbors < options.neighbors:
            run.console.warn(f"--neighbors {options.neighbors}: there are {num_neighbors} training examples; k is that")
        rows = [_row(run, options, scores, name, outside) for name in sorted(inside, key=lambda n: (n != "test", n))]
        for metric in (metric for row in rows for metric in row["metrics"] if metric["score"] == "knn"):
            metric["neighbors"] = num_neighbors

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
) -> tuple[dict[str, Scores], int]:
    """Every score of the examples of each split, (N,), or the reason why there is none; and the k of knn."""
    features = torch.from_numpy(train.content.features)
    neighbors = Neighbors.fit(
        features, device=run.device, generator=run.stream("evaluate/neighbors"), num_neighbors=options.neighbors
    )
    gaussians = _gaussians(run, train)
    found: dict[str, Scores] = {}
    task = run.console.task("feature scores", len(splits))
    for name, split in splits.items():
        rows = torch.from_numpy(split.content.features)
        own: Scores = dict.fromkeys(FEATURE_SCORES, gaussians) if isinstance(gaussians, str) else {}
        if not isinstance(gaussians, str):
            own |= {score: values.numpy() for score, values in gaussians.scores(rows).items()}
        found[name] = own | {"knn": neighbors.scores(rows).numpy()}
        task.advance()
    return found, neighbors.num_neighbors


def _gaussians(run: Run, train: Split) -> Mahalanobis | str:
    """The Gaussians of the training features, or the reason why there are none."""
    if train.content.labels is None:
        return "the training split has no labels"
    labels = torch.from_numpy(train.content.labels)
    try:
        return Mahalanobis.fit(torch.from_numpy(train.content.features), labels, device=run.device)
    except DataError as error:
        return error.message

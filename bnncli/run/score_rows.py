"""The rows that evaluate makes for one group of predictions: read, check, score and resample every split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header
from bnncli.artifacts.predictions import PredictionFile, read_predictions
from bnncli.errors import DataError
from bnncli.evaluation.detectors import example_scores
from bnncli.evaluation.example_statistics import ExampleStatistics, check_labels, examples_of
from bnncli.evaluation.label_scores import one_sided_labels
from bnncli.evaluation.label_statistics import check_label_sets
from bnncli.evaluation.per_class import rare_classes
from bnncli.evaluation.probabilities import row_blocks
from bnncli.evaluation.scores import ScoredPredictions, detection_forms, other_split_rows, split_scores
from bnncli.integrators import load_integrator
from bnncli.likelihoods import name_to_record, recorded_name
from bnncli.options.evaluate import EvaluateOptions
from bnncli.run.prediction_groups import PredictionGroup
from bnncli.run.session import Run

if TYPE_CHECKING:
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.detection import ExampleScores
    from bnncli.evaluation.metric_rows import Row


@dataclass(frozen=True)
class PredictedSplit:
    """The predictions of a split, read and checked when first looked at.

    Args:
        header: of their file.
    """

    header: Header

    @property
    def name(self) -> str:
        """The split's name."""
        return str(self.header.meta["split"])

    @cached_property
    def file(self) -> PredictionFile:
        """What the file holds; (N, C) arrays are mapped."""
        return read_predictions(self.header.path)

    @cached_property
    def examples(self) -> ExampleStatistics:
        """The numbers of each example."""
        try:
            size, is_exclusive = len(self.file.classes), self.file.is_exclusive
            return examples_of(self.file.probs, self.file.labels, num_classes=size, is_exclusive=is_exclusive)
        except DataError as error:
            path = self.header.path
            raise DataError(f"{path}: {error.message}", hint=error.hint, path=path) from None

    def scored(self, settings: Mapping[str, Any]) -> ScoredPredictions:
        """What scores of the split are made of, set by the options that they bring."""
        file, ranking = self.file, self.header.meta.get("top_k")
        return ScoredPredictions(
            file.probs, self.examples, file.mutual_info, lengths=file.top_k, ranking=ranking, settings=settings
        )

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """The scores of these names of each example, or why there are none."""
        return example_scores(names, self.examples, lambda name: getattr(self.file, name))


def bootstrap_of(run: Run, options: EvaluateOptions) -> Bootstrap | None:
    """How scores are resampled; None with `--bootstrap 0`."""
    from bnncli.evaluation.bootstrap import Bootstrap

    if options.bootstrap == 0:
        return None
    return Bootstrap(options.bootstrap, options.level, run.compute.seed)


class Scorable(Protocol):
    """Predictions of a split that scores are made of, whatever file they lie in."""

    @property
    def name(self) -> str:
        """The split's name."""

    @property
    def examples(self) -> ExampleStatistics:
        """The numbers of each example."""

    def scored(self, settings: Mapping[str, Any]) -> ScoredPredictions:
        """What scores of the split are made of, set by the options that they bring."""

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """The scores of these names of each example, or why there are none."""


def group_rows(
    run: Run,
    options: EvaluateOptions,
    group: PredictionGroup,
    further: Sequence[Callable[[PredictedSplit], list[Row]]] = (),
) -> list[dict[str, Any]]:
    """A row for each in-distribution split, test first, with detection against every out-of-distribution split.

    Args:
        further: give other metrics of a split's predictions.
    """
    outside = [PredictedSplit(header) for header in group.splits(is_ood=True).values()]
    inside = [PredictedSplit(header) for header in group.splits(is_ood=False).values()]
    rows = []
    for split in sorted(inside, key=lambda split: (split.name != "test", split.name)):
        bootstrap = bootstrap_of(run, options)
        metrics = split_rows(split, options.settings, bootstrap, poll=run.console.poll)
        for other in outside:
            _check_differs(split, other)
            metrics += detection_rows(split, other, options.prediction_scores, bootstrap)
            run.console.poll()
        for give in further:
            metrics += give(split)
        rows.append({**_described(group, split.header), "metrics": metrics})
    return rows


def warn_of_rare_classes(run: Run, options: EvaluateOptions, groups: Sequence[PredictionGroup]) -> None:
    """Warn of splits in which classes are missing or rare, once for all groups."""
    splits = {name: header for group in groups for name, header in group.splits(is_ood=False).items()}
    for name, header in splits.items():
        if not header.meta.get("is_labeled") or (options.split and name not in options.split):
            continue
        file = PredictedSplit(header).file
        for text in rare_class_warnings(name, file.labels, file.classes, is_exclusive=file.is_exclusive):
            run.console.warn(text)


def rare_class_warnings(
    split: str, labels: NDArray | None, classes: Sequence[str], *, is_exclusive: bool
) -> Iterator[str]:
    """What is to be warned of in a split of which classes are missing or rare, or that none or all have a label."""
    if labels is None or len(labels) == 0:
        return
    if not is_exclusive:
        yield from _one_sided_warnings(split, labels, classes)
        return
    check_labels(labels, (len(labels), len(classes)))
    absent, few = rare_classes(labels, list(classes))
    if absent:
        yield f"split {split} has no examples of {_listed(absent)}: means over classes omit them"
    if few:
        yield f"split {split} has few examples of {_listed(few)}: their scores are imprecise"


def _one_sided_warnings(split: str, labels: NDArray, classes: Sequence[str]) -> Iterator[str]:
    """What is to be warned of where none, or all, of a split's examples have a label."""
    check_label_sets(labels, (len(labels), len(classes)))
    for names, who in zip(one_sided_labels(labels, list(classes)), ("no example", "every example"), strict=True):
        if names:
            text = _listed(names).replace("class", "label", 1).replace("labeles", "labels", 1)
            yield f"split {split}: {who} has {text}: means over labels omit their undefined scores"


def _listed(names: Sequence[str], most: int = 8) -> str:
    """Names joined by commas; how many more there are than `most`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ("class " if len(names) == 1 else "classes ") + ", ".join(names[:most]) + more


def _described(group: PredictionGroup, header: Header) -> dict[str, Any]:
    """What a row says of the predictions that it scores; `samples` is None where there are no draws."""
    return {
        "name": group.name,
        "posterior": group.posterior,
        "integrator": group.integrator,
        "variant": group.variant,
        "settings": dict(header.meta.get("settings", {})),
        "samples": num_draws(group, header),
        "split": header.meta["split"],
        **name_to_record(recorded_name(header.meta)),
    }


def num_draws(group: PredictionGroup, header: Header) -> int | None:
    """Draws of a prediction: those that were asked for, but no more than a posterior that is draws has."""
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
    """The rows of one split's own scores, set by the options that these bring."""
    from bnncli.evaluation.metric_rows import score_rows

    scores = split_scores(split.scored(settings))
    poll()
    return score_rows(scores, (split.name, len(split.examples)), bootstrap)


def detection_rows(split: Scorable, other: Scorable, names: Sequence[str], bootstrap: Bootstrap | None) -> list[Row]:
    """The rows of telling one split from another by these scores, and of how sure the predictions of the other are."""
    from bnncli.evaluation import detection

    inside, outside = (side.detection_scores(names) for side in (split, other))
    rows = detection.detection_rows(
        inside, outside, detection_forms(), split=split.name, ood=other.name, bootstrap=bootstrap
    )
    return [*rows, *other_split_rows(other.examples, other.name, bootstrap)]


def _check_differs(split: PredictedSplit, other: PredictedSplit) -> None:
    """Raise DataError when two splits are the same examples."""
    meta, others = split.header.meta, other.header.meta
    if meta.get("order_digest") != others.get("order_digest") or split.file.probs.shape != other.file.probs.shape:
        return
    ours, theirs = split.file.probs, other.file.probs
    if all(np.array_equal(ours[rows], theirs[rows]) for rows in row_blocks(*ours.shape)):
        raise DataError(f"splits {split.name!r} and {other.name!r} hold the same examples", code="same_split")

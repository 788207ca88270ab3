"""The splits a user named on extract-features, whatever they come from: data through a network, or ready features."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from bnncli import data
from bnncli.artifacts.features import FeatureFile
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import SHARED_PARAMS
from bnncli.errors import NOT_OF_CONTENT, BnnError, DataError, UsageError
from bnncli.likelihoods import BINARY, MULTILABEL, recorded_name
from bnncli.models import Published, SavedModel
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.options.shared import NO_NETWORK
from bnncli.session.run import Run, opened_model
from bnncli.stages.extract_features.no_model import no_model

_OF_SAVED_MODELS = ("base_model", "feature_node")
# Options that change numbers, recorded where they are given.
_WHERE_GIVEN = (*_OF_SAVED_MODELS, "output", "state", "autocast", "no_exif", "background")


def saved_model(run: Run, options: ExtractFeaturesOptions) -> SavedModel | None:
    """The model of KIND:PLACE, opened; None for any other. Raises what open_model raises."""
    if options.model is None and options.from_npz is None:
        raise no_model(run, options)
    asked = {name: getattr(options, name) for name in _OF_SAVED_MODELS}
    return opened_model(options.model, options.model_arg, **asked, allow_download=options.allow_download)


def class_names(
    splits: list[data.InputSplit], num_classes: int, saved: SavedModel | None, given: tuple[str, ...] | None
) -> list[str]:
    """Names of the classes: those given, else the model's, else the data's, else those of published weights, else 0, 1, 2, ...

    Raises:
        UsageError: another number of names was given than the network has classes.
        DataError: the model or the data name another number of classes than the network has.
    """
    if given is not None:
        if len(given) != num_classes:
            raise UsageError(
                f"\0classes\0: expected {num_classes} names, one per output of the network; got {len(given)}"
            )
        return list(given)
    if saved is not None and saved.classes is not None:
        if len(saved.classes) != num_classes:
            message = f"the model names {len(saved.classes)} classes, but its last layer has {num_classes}"
            raise DataError(message, code="class_mismatch")
        return list(saved.classes)
    named = {split.name: list(split.classes) for split in splits if split.classes and not split.is_ood}
    for name, names in named.items():
        if len(names) != num_classes:
            raise DataError(
                f"split {name!r} has {len(names)} classes, but the network has {num_classes} outputs", code="class_mismatch",
                hint="name all of them in the order of the network's outputs: \0classes\0 FILE or a,b,c",
            )  # fmt: skip
    if named:
        return next(iter(named.values()))
    published = saved.published_classes(num_classes) if isinstance(saved, Published) else None
    return [str(index) for index in range(num_classes)] if published is None else list(published)


def data_notes(split: data.InputSplit) -> list[str]:
    """Return notes on a split's data: files left out, rows without labels, how names were numbered if the network names no classes, and columns that look like labels."""
    note = getattr(split.dataset, "note", "")
    return [*([f"{split.name}: {note}"] if note else []), *_label_notes(split)]


def _label_notes(split: data.InputSplit) -> list[str]:
    if (order := data.numbered_by_name(split)) is not None:
        return [f"{order}; set another order with \0classes\0 FILE or a,b,c"]
    columns = "+".join(data.columns_of_classes(split))
    told = (
        "no label columns were named, but some columns have the model's class names; to use them as labels, add "
        f"label={columns}"
    )
    return [f"{split.name}: {told}"] if columns else []


def input_notes(split: data.InputSplit, content: FeatureFile) -> list[str]:
    """What the model's own preprocessing did not do to a split, a line each: texts and clips that it cut, arrays that it does not take."""
    transform = split.preprocess.transform
    if transform is None:
        return []
    if getattr(getattr(split.dataset, "inputs", None), "dtype", np.dtype(np.uint8)).kind == "f":
        return [
            f"{content.name}: the inputs are floats and are used unchanged: the model's preprocessing expects "
            f"{transform.takes}"
        ]
    if not content.num_truncated:
        return []
    what, own = "clips" if split.items == "audio" else "texts", transform.to_json()
    limit = own.get("max_length")
    longer = "than the model takes" if limit is None else f"than {limit} tokens"
    if limit is not None and "sampling_rate" in own:
        longer = f"than {limit / own['sampling_rate']:.3g} s"
    return [
        f"{content.name}: {content.num_truncated:,} of {len(split):,} {what} were longer {longer} and were truncated"
    ]


def transform_json(saved: SavedModel | None) -> dict[str, Any]:
    """What the model's own preprocessing does, for params and provenance; empty without one."""
    return {} if saved is None or saved.transform is None else {"transform": saved.transform.to_json()}


def model_identity(options: ExtractFeaturesOptions, saved: SavedModel | None) -> dict[str, Any]:
    """What of the network's definition changes numbers: its name, arguments, layer and preprocessing."""
    return {
        "model": options.model,
        "model_arg": sorted(options.model_arg),
        "last_layer": options.last_layer,
        **{name: getattr(options, name) for name in _WHERE_GIVEN if getattr(options, name) not in (None, False)},
        **({} if options.classes is None else {"classes": "\n".join(options.class_names or ())}),
        **transform_json(saved),
    }


def likelihood_of_splits(
    run: Run,
    options: ExtractFeaturesOptions,
    saved: SavedModel | None,
    splits: list[data.InputSplit],
) -> str | None:
    """The likelihood by name that the splits ask for; else what the model says, or the run's other splits.

    Raises:
        DataError: labels that are not what was said, or that may be several things.
    """
    labels = {split.spec: split.shown_labels for split in splits if split.is_labeled}
    told = None if saved is None or options.task is not None else saved.task
    task = options.task or (MULTILABEL if told == MULTILABEL else None)
    if told is not None:
        _check_model_is_for(told, labels)
    found = data.common_task(labels, task)
    if task == BINARY and options.model == NO_NETWORK:
        return BINARY
    return found if task is not None else likelihood_beside(run, found, [split.name for split in splits], labels)


def _check_model_is_for(told: str, labels: Mapping[str, np.ndarray | None]) -> None:
    """Raise DataError where what a model says that it was made for is not what the labels are, and nobody said a task."""
    for where, array in labels.items():
        if told == MULTILABEL and array is not None and array.ndim == 1:
            raise DataError(
                f"{where}: examples have one class, but the model was trained for several labels",
                hint="name one column per label (label=A+B), or add \0task\0 multiclass",
                code="bad_labels",
            )
        if told == "multiclass" and data.shows_several(array):
            raise DataError(
                f"{where}: examples have several labels, but the model was trained for one class",
                hint=f"add \0task\0 {MULTILABEL} to treat each output as its own label",
                code="bad_labels",
            )


def likelihood_beside(run: Run, found: str | None, names: Collection[str], labels: Collection[object]) -> str | None:
    """What splits of these names are of by their labels, if they have any, and by what the run's others are: nobody said a task."""
    of_run = likelihood_of_run(run, names)
    return found if labels and of_run != BINARY else of_run


def likelihood_of_run(run: Run, without: Collection[str]) -> str | None:
    """The likelihood by name of a run's other splits; None where the number of outputs says it, or there are none."""
    for name in run.folder.splits():
        if name not in without:
            try:
                found = recorded_name(read_header(run.folder.features(name)).meta)
            except NOT_OF_CONTENT:
                raise
            except BnnError:  # said where that split is asked for
                continue
            if found is not None:
                return found
    return None


def check_two_classes(likelihood: str | None, num_classes: int) -> None:
    """Raise UsageError where one logit is to tell apart other than two classes."""
    if likelihood == BINARY and num_classes != 2:
        raise UsageError(f"\0task\0 binary: expected labels 0 and 1; got {num_classes} classes")


def shared_params(options: ExtractFeaturesOptions, saved: SavedModel | None, likelihood: str | None) -> dict[str, Any]:
    """The options that all splits of a run must share."""
    own = {**model_identity(options, saved), "task": likelihood}
    return {name: own[name] if name in own else getattr(options, name, None) or None for name in SHARED_PARAMS}

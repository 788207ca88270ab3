"""The most and the least certain inputs, as they were stored, where their data are still where they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bnncli import data
from bnncli.artifacts.features import read_sample_ids
from bnncli.artifacts.files import read_header
from bnncli.artifacts.headers import Header, interpreting
from bnncli.artifacts.predictions import read_predictions
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import InputSplit
from bnncli.errors import DataError
from bnncli.evaluation.binned_confidence import PredictedRow
from bnncli.figures.pages import Block, Gallery, Missing, ShownInput, paragraph
from bnncli.names import quoted
from bnncli.session.predictions import PredictionGroup
from bnncli.stages.report.parameters import class_name
from bnncli.stages.report.subject import Subject, tried
from bnncli.stages.report.thumbnails import png_of, text_of

_CODE = "py:"  # data that are read by the user's code
_MODES = ("L", "RGB")
_MOST_OUTSIDE = 2  # splits out of distribution
_MOST_GALLERIES = 3 + _MOST_OUTSIDE
_IMAGE_BYTES = 150_000  # of all pictures together, of a page that has at most a megabyte


def inputs(subject: Subject) -> list[Block]:
    """The section."""
    group = subject.focus
    if group is None:
        assert isinstance(subject.groups, Missing)
        return [subject.groups]
    if subject.options.examples == 0:
        return [Missing("No inputs are shown (--examples 0).")]
    inside, found = subject.binned(group, subject.split), _Look(subject, group, subject.split)
    looks = {ood: _Look(subject, group, ood) for ood in list(group.splits(is_ood=True))[:_MOST_OUTSIDE]}
    blocks: list[Block] = [
        paragraph(
            f"Each input is shown with the class that {subject.titles[group.name]} predicts, and its probability."
        )
    ]
    blocks += dict.fromkeys(look.stored for look in (found, *looks.values()) if isinstance(look.stored, Missing))
    blocks += [
        paragraph(
            f"Inputs of {split} are what its code returns now. They may differ from those that were predicted.",
            kind="note",
        )
        for split, look in {subject.split: found, **looks}.items()
        if isinstance(look.stored, _Stored) and look.stored.split.spec.startswith(_CODE)
    ]
    blocks += found.gallery(f"Least certain of {subject.split}", inside.least_certain)
    blocks += found.gallery(f"Most certain of {subject.split}", inside.most_certain)
    blocks += found.gallery(f"Most confident errors on {subject.split}", inside.most_certain_errors)
    for ood, look in looks.items():
        blocks += look.gallery(f"Most certain of {ood}, out of distribution", subject.binned(group, ood).most_certain)
    return blocks


class _Look:
    """Examples of one split, as stored, and what is said of them."""

    def __init__(self, subject: Subject, group: PredictionGroup, split: str) -> None:
        header = next(header for header in group.headers if header.meta["split"] == split)
        self.classes = read_predictions(header.path).classes
        self.most_bytes = _IMAGE_BYTES // (_MOST_GALLERIES * subject.options.examples)
        self.stored = tried(partial(_open, subject, split))

    def gallery(self, title: str, rows: Sequence[PredictedRow]) -> list[Block]:
        """The examples with a title; nothing where there are none."""
        return [Gallery(title, [self._example(one) for one in rows])] if rows else []

    def _example(self, one: PredictedRow) -> ShownInput:
        predicted = class_name(list(self.classes), one.predicted)
        label = None if one.label is None else class_name(list(self.classes), one.label)
        what = "right" if one.label == one.predicted else f"in truth {label}" if label is not None else "no label"
        item, name = (None, None) if isinstance(self.stored, Missing) else self.stored.item(one.row)
        place = f"row {one.row}" + (f", {quoted(name, limit=60)}" if name else "")
        said = f"{predicted}, {one.confidence:.4f} ({what}); {place}"
        png, text = png_of(item, most_bytes=self.most_bytes), text_of(item)
        kind = "Image" if png is not None else "Text" if text is not None else "Input"
        truth = f" of {label}" if label is not None else ""
        return ShownInput(
            said, f"{kind}{truth}, predicted {predicted} with probability {one.confidence:.4f}", png, text
        )


class _Stored:
    """A split's data, opened again and known to be those that were predicted."""

    def __init__(self, split: InputSplit) -> None:
        self.split = split

    def item(self, row: int) -> tuple[Any, str | None]:
        """An example by its place in the split, as stored, and its name."""
        one = self.split.take(np.array([row]))
        stored: Any = one.dataset.read(one.rows)[0]
        names = one.names
        return (None if isinstance(stored, dict) else stored[0]), (None if names is None else names[0])


def _open(subject: Subject, split: str) -> _Stored:
    """The data of a split.

    Raises:
        DataError: it cannot be opened by what its features record, or has changed since.
        MissingInput: it is no longer where it was.
    """
    path = subject.run.folder.features(split)
    header = read_header(path)
    with interpreting(path):
        spec = header.provenance.get("source")
    if not isinstance(spec, str) or "model" not in header.provenance["params"]:
        raise DataError(f"the inputs of {split} are unknown: its features were given as arrays")
    if spec.startswith(_CODE) and not subject.options.trust_code:
        raise DataError(
            f"the inputs of {split} are read by code, which is not executed",
            hint="add \0trust_code\0 if the code is yours",
        )
    dataset, rows = data.open_stored(spec), read_sample_ids(path)
    return _Stored(_as_predicted(header, spec, dataset, rows))


def _as_predicted(header: Header, spec: str, dataset: Any, rows: np.ndarray) -> InputSplit:
    """The split of these rows. Raises DataError unless its content is what the features were made of."""
    if len(rows) and int(rows.max()) >= len(dataset):
        raise DataError(f"{spec} has changed since the features were extracted: it has {len(dataset)} rows now")
    others = [replace(dataset, mode=mode) for mode in _MODES] if hasattr(dataset, "mode") else []
    for one in (dataset, *others):
        split = InputSplit(spec, one, rows, Preprocess(), one.is_labeled and not header.meta.get("is_ood"))
        if split.order_digest == header.meta.get("order_digest"):
            return split
    raise DataError(f"{spec} has changed since the features were extracted, and is not shown")

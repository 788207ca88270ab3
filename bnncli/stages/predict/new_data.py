"""Data that are no split of the run, predicted in one go: the network and the posteriors take them block by block.

Features that are kept come first, as a split of the run has them, and are read again block by block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli import data
from bnncli.artifacts.features import FeatureFile
from bnncli.artifacts.outputs import TableBlock, csv_header
from bnncli.artifacts.predictions import PredictionFile
from bnncli.data.kinds.images import image_dataset
from bnncli.errors import BnnError, DataError, UsageError
from bnncli.lazy import torch
from bnncli.likelihoods import has_exclusive_classes
from bnncli.models.features import Extracted, InputSums, padding_warning
from bnncli.names import in_table
from bnncli.options.extract_features import ExtractFeaturesOptions
from bnncli.options.predict import STDIN, PredictOptions
from bnncli.session.network_fit import difference, reference_of
from bnncli.session.predictor import IntegratorChoice, Predictor
from bnncli.session.run import Run
from bnncli.stages.predict.new_data_rules import NewDataRules
from bnncli.stages.predict.stored import predictions_of
from bnncli.stages.predict.table import Origin, ShownColumns

BATCH_SIZE = ExtractFeaturesOptions.batch_size  # that of extract-features by default: sums depend on it
_OF_THE_RUN = {spec.name for spec in fields(ExtractFeaturesOptions)} - {spec.name for spec in fields(PredictOptions)}
BLOCK = 16 * BATCH_SIZE  # examples predicted at once


@dataclass(frozen=True)
class Maker:
    """A posterior and the integrator that it predicts by."""

    predictor: Predictor
    choice: IntegratorChoice
    digest: str
    """Of the posterior."""

    @property
    def origin(self) -> tuple[str, str]:
        """Posterior and integrator, as tables have them."""
        return self.predictor.path.stem, self.choice.variant

    @property
    def is_last_layer(self) -> bool:
        """Whether it takes features, and not the network's inputs."""
        return self.predictor.header.meta.get("layers") is None


@dataclass(frozen=True)
class NewData:
    """What predicts new data.

    Attributes:
        classes: of the posteriors, index = output.
        rules: of calibrate, of each maker.
        shown: the columns of the table.
        kept: features that are there already, by the name of their split.
        levels: of each maker that gave intervals, by its name: the posterior, and their lowest level.
    """

    run: Run
    makers: Sequence[Maker]
    classes: list[str]
    shown: ShownColumns
    rules: Sequence[NewDataRules]
    kept: Mapping[str, FeatureFile] = field(default_factory=dict)
    levels: dict[str, tuple[str, float]] = field(default_factory=dict)
    _inputs: dict[str, InputSums] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    @property
    def titles(self) -> bytes:
        """The line of titles of the table, as a CSV file has it."""
        exclusive = has_exclusive_classes(self.makers[0].predictor.posterior.layout.likelihood_name)
        return csv_header(self.shown.columns(self.classes, is_exclusive=exclusive), self.classes)

    @property
    def reader(self) -> Any:
        """The network that the run's features were made by."""
        return self.makers[0].predictor.train.reader

    @property
    def preprocess(self) -> data.Preprocess:
        """What was done to the inputs that the run's features were made of."""
        found: data.Preprocess = self.reader.recorded.preprocess
        return found

    def check_trusted(self, text: str, flag: str) -> None:
        """Raise UsageError where what SPLIT=SPEC names is read by code that nobody trusts."""
        _, spec = data.parse_split(text, option=flag)
        if spec.partition(":")[0] == "py" and not self.reader.trusts_code:
            raise UsageError(f"{flag}: {spec!r} is code; if it is yours or you have read it, add \0trust_code\0")

    def split(self, text: str, flag: str) -> data.InputSplit:
        """The data that SPLIT=SPEC names, with labels as outputs of the network; without, where the option is for other classes.

        Raises:
            UsageError, MissingInput, DataError, Untrusted: as the data's readers say; labels of classes that there are not.
        """
        self.check_trusted(text, flag)
        name, spec = data.parse_split(text, option=flag)
        if spec == STDIN:
            return self.images(name, spec, Path(), _named_on_stdin())
        with about_given_data():
            opened = data.load_split(spec, name=name, preprocess=self.preprocess, takes_any_labels=True)
        if flag == "\0ood\0":
            return opened.as_ood()
        are_names = self.classes != [str(index) for index in range(len(self.classes))]
        split = data.matched_to(opened, tuple(self.classes) if are_names else None)
        if (order := data.numbered_by_name(split)) is not None:
            self.run.console.info(order)
        return split

    def images(self, name: str, spec: str, folder: Path, files: Sequence[str]) -> data.InputSplit:
        """Image files without labels."""
        transform = self.preprocess.transform
        if transform is not None and transform.takes != "images":
            raise DataError(f"the run's network takes {transform.takes}, not image files", code="wrong_inputs")
        dataset = image_dataset(folder, files, None, None, self.preprocess)
        return data.InputSplit(spec, dataset, np.arange(len(files)), self.preprocess, is_labeled=False, name=name)

    def blocks(self, split: data.InputSplit, *, first_id: int = 0) -> Iterator[TableBlock]:
        """The rows of the table for a split, as they are predicted; sample ids are its rows, counted from first_id."""
        names = split.names
        task = self.run.console.task(f"predict {split.name}", len(split))
        start = 0
        for extracted in self._extracted(split):
            stop = start + len(extracted.features)
            rows = slice(start, stop)
            named = None if names is None else np.array([in_table(name).encode() for name in names[rows]])
            combined = self._combined(extracted)
            for maker, rules in zip(self.makers, self.rules, strict=True):
                content, origin = self._predicted(maker, split, rows, extracted, first_id, combined)
                said = rules.of_block(split.name, content, first_id + start, self.shown.rules)
                yield self.shown.block(content, slice(None), origin, named, said)
            task.advance(stop - start)
            start = stop

    def _extracted(self, split: data.InputSplit) -> Iterator[Extracted]:
        """Features, or nothing but labels where no posterior takes them, of BLOCK examples at a time."""
        if split.name in self.kept:
            yield from _stored(self.kept[split.name])
            return
        recorded = self.reader.recorded
        with recorded.visible(), about_given_data():
            head = recorded.network.head(split)
            recorded.check_head(head)
            batches = recorded.network.batches(
                split, head, batch_size=BATCH_SIZE, dtype=recorded.dtype, num_workers=0, first_row=0, num_logits=0
            )
            held: list[Extracted] = []
            images = data.ImageCounts()
            for batch in batches:
                self._compare(split, batch)
                if (warning := padding_warning(split.name, batch.padding)) is not None:
                    self.run.console.warn(warning)
                images = images.plus(batch.images)
                held.append(batch)
                if sum(len(one.features) for one in held) >= BLOCK:
                    yield _joined(held)
                    held = []
            for note in images.notes(split.name, len(split), self.preprocess):
                self.run.console.info(note)
            if held:
                yield _joined(held)

    def _compare(self, split: data.InputSplit, batch: Extracted) -> None:
        """Warn once where the inputs of a split, as far as they are known, are unlike those of the run."""
        if batch.inputs is None or split.name in self._warned:
            return
        self._inputs[split.name] = sums = batch.inputs.plus(self._inputs.get(split.name))
        if self._reference is not None:
            warning = difference(split.name, sums.statistics(), *self._reference, is_scale_alone=split.is_ood)
            if warning is not None:
                self._warned.add(split.name)
                self.run.console.warn(warning)

    @cached_property
    def _reference(self) -> tuple[str, Mapping[str, Any]] | None:
        return reference_of(self.run)

    def _combined(self, extracted: Extracted) -> NDArray | None:
        """The combined score of some rows (n,); None where the run has none."""
        detector = self.makers[0].predictor.train.detector
        return None if detector is None else detector.scores(extracted.features).float().numpy()

    def _predicted(
        self,
        maker: Maker,
        split: data.InputSplit,
        rows: slice,
        extracted: Extracted,
        first_id: int,
        combined: NDArray | None,
    ) -> tuple[PredictionFile, Origin]:
        predictor, layout = maker.predictor, maker.predictor.posterior.layout
        if maker.is_last_layer:
            inputs = extracted.features
            if inputs.shape[1] != layout.num_features:
                raise DataError(
                    f"the network gives {inputs.shape[1]} features, but {predictor.path.stem} takes "
                    f"{layout.num_features}",
                    code="wrong_layout",
                )
        else:
            with about_given_data():
                inputs = predictor.train.reader.given_inputs(split.take(np.arange(rows.start, rows.stop)), layout)
        predicted = predictor.predict(maker.choice, inputs)
        content = predictions_of(
            predicted, labels=None if extracted.labels is None else extracted.labels.numpy(), sample_id=split.rows[rows] + first_id,
            classes=self.classes, choice=maker.choice, combined=combined,
        )  # fmt: skip
        level = None if content.interval is None else predicted.integrator.interval_level
        if level is not None:
            name = ".".join(maker.origin)
            self.levels[name] = maker.origin[0], min(level, self.levels.get(name, ("", level))[1])
        exclusive = has_exclusive_classes(layout.likelihood_name)
        return content, Origin(split.name, *maker.origin, level, exclusive)


@contextmanager
def about_given_data() -> Iterator[None]:
    """What is wrong with data names no option that the run was made with, and that cannot be given here."""
    try:
        yield
    except BnnError as error:
        if any(f"\0{name}\0" in (error.hint or "") for name in _OF_THE_RUN):
            error.hint = "new data use the run's network, preprocessing and task: give data like those of its features"
        raise


def _stored(content: FeatureFile) -> Iterator[Extracted]:
    """The same of features in a file."""
    for start in range(0, len(content.features), BLOCK):
        rows = slice(start, start + BLOCK)
        labels = None if content.labels is None else torch.from_numpy(np.array(content.labels[rows]))
        yield Extracted(torch.from_numpy(np.array(content.features[rows])), None, labels)


def _joined(held: Sequence[Extracted]) -> Extracted:
    labels = [one.labels for one in held if one.labels is not None]
    features = torch.cat([one.features for one in held])
    return Extracted(features, None, torch.cat(labels) if labels else None)


def _named_on_stdin() -> list[str]:
    """Files that stdin names, one a line, in that order. Raises UsageError where it names none."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("\0data\0: `-` reads file names from stdin, but stdin is a terminal; pipe the names in")
    names = [line.rstrip("\r\n") for line in sys.stdin]
    names = [name for name in names if name]
    if not names:
        raise UsageError("\0data\0: `-` reads file names from stdin, one per line; got none")
    return names

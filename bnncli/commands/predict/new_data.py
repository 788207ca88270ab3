"""Predict data that are not a split of the run: features and predictions in one go, or files as they arrive in a folder."""

from __future__ import annotations

import csv
import io
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.atomic import check_writable, publish_bytes, write_error
from bnncli.artifacts.features import FeatureFile, read_features
from bnncli.artifacts.headers import convert_lookup_errors
from bnncli.artifacts.outputs import (
    NAME,
    TableBlock,
    check_side_output,
    csv_bytes,
    csv_header,
    is_table,
    unescape_formula,
    write_table,
)
from bnncli.artifacts.posteriors import DecisionFile
from bnncli.artifacts.predictions import PredictionFile
from bnncli.artifacts.run_folder import artifact_lock
from bnncli.commands.extract_features import ExtractFeaturesOptions
from bnncli.commands.extract_features.network import NetworkExtraction
from bnncli.commands.extract_features.splits import is_of_other_data
from bnncli.commands.predict.stored import build_params, build_prediction_file
from bnncli.commands.predict.table import (
    NONE,
    Merge,
    Origin,
    RuleColumns,
    ShownColumns,
    SplitDecisions,
    check_table_path,
    describe_shift,
    few_draws_lines,
    list_columns,
)
from bnncli.data.kinds.images import image_dataset
from bnncli.data.labels import alphabetical_numbering, match_classes
from bnncli.data.pixels import SUFFIXES, ImageCounts, Preprocess
from bnncli.data.splits import InputSplit, load_split, parse_split
from bnncli.errors import BnnError, DataError, MissingInput, OutputExists, ReadError, UsageError, WriteError
from bnncli.evaluation.decisions import ShiftRule
from bnncli.evaluation.detection import ExampleScores
from bnncli.evaluation.detectors import example_scores
from bnncli.evaluation.statistics import ExampleStatistics, compute_example_statistics
from bnncli.lazy import torch
from bnncli.likelihoods import has_exclusive_classes
from bnncli.models.features import ExtractedFeatures, InputSums, describe_padding_effect
from bnncli.names import escape_for_table, quote_name
from bnncli.options.command import CommandLine
from bnncli.options.predict import STDIN, PredictOptions
from bnncli.session.decisions import explain_unfit_rule_for, maker_as, open_decisions, scores_of
from bnncli.session.inputs import posterior_classes
from bnncli.session.network import RecordedNetwork
from bnncli.session.network_fit import difference, reference_of
from bnncli.session.predictor import IntegratorChoice, Predictor
from bnncli.session.run import Result, Run
from bnncli.session.unreadable import SkippedExamples, is_list
from bnncli.system.input_files import convert_read_errors
from bnncli.system.workers import team


@dataclass(frozen=True)
class Maker:
    """A posterior and the integrator that it predicts by. `digest` is the posterior's."""

    predictor: Predictor
    choice: IntegratorChoice
    digest: str

    @property
    def origin(self) -> tuple[str, str]:
        """Return posterior and integrator, as in tables."""
        return self.predictor.path.stem, self.choice.variant

    @property
    def is_last_layer(self) -> bool:
        """True where the posterior takes features, False where it takes the network's inputs."""
        return self.predictor.header.meta.get("layers") is None


def predict_new(run: Run, options: PredictOptions, makers: Sequence[Maker], merges: Sequence[Merge]) -> Result:
    """Predict new data, or files that arrive in a folder, into the table.

    Raises:
        UsageError: the command runs in several processes.
    """
    if team() is not None:
        raise UsageError("\0data\0 and \0follow\0 work in a single process: start the command without torchrun")
    assert options.table is not None
    target, first = Path(options.table), makers[0].predictor
    has_top_k = any(maker.choice.top_k for maker in makers)
    classes = list(posterior_classes(run.folder, first.header))
    has_names = options.follow is not None
    rules = [_rules(run, options, maker, classes) for maker in makers]
    shown = ShownColumns(
        merges, has_top_k, has_names, options.probabilities, list_rule_columns(rules), options.raw_text
    )
    new = NewData(run, makers, classes, shown, rules)
    if options.follow is not None:
        done = FollowedFolder(new, Arrivals(Path(options.follow)), target).until(options.idle)
        for line in few_draws_lines(run, new.levels):
            run.console.warn(line)
        return done
    check_table_path(run, target, [maker.predictor.path for maker in makers])
    added = _open_as_splits(run, options, new) if options.keep_features else None
    skipped = SkippedExamples.asked(run.console, options)
    names = [parse_split(text, option=flag)[0] for text, flag in _parse_named_data(options)]
    lists = {name: target.with_suffix(".skipped.csv" if len(names) == 1 else f".{name}.skipped.csv") for name in names}
    for path in lists.values() if skipped is not None and added is None else ():
        kind, force = "list of unreadable examples", run.write.force
        check_side_output(path, "--table", kind, is_ours=is_list, force=force, others=[run.checkpoint_path])
    if added is not None:
        splits = added.splits
    else:
        splits = [new.split(*named) for named in _parse_named_data(options)]
        splits = splits if skipped is None else [skipped.leave_out(split) for split in splits]
    if any(split.names is not None for split in splits):
        new = replace(new, shown=replace(shown, has_names=True))
    counts = ", ".join(f"{len(split):,} of {split.name}" for split in splits)
    begun = time.monotonic()
    with replace_hints():
        total = Result() if added is None else added.result()
    if run.write.dry_run:
        total.add(Result("planned", [_output(target)], lines=[f"write: {target} ({counts})"]))
        return total
    if added is not None:
        new = replace(new, kept={split.name: read_features(run.folder.features(split.name)) for split in splits})

    def blocks() -> Iterator[TableBlock]:
        for split in splits:
            yield from new.blocks(split)

    digest = write_table(target, blocks(), classes)
    for line in few_draws_lines(run, new.levels):
        run.console.warn(line)
    alarms = [{"posterior": one.origin[0], "variant": one.origin[1], **row} for one in rules for row in one.alarms()]
    alarm_lines = [f"{row['name']} {row['split']}: {describe_shift(row)}" for row in alarms]
    num_rows, seconds = sum(map(len, splits)), time.monotonic() - begun
    kept = "features not kept" if added is None else "features kept"
    total.add(
        Result(
            "computed",
            [_output(target) | {"content_digest": digest}],
            summary=[f"predicted {counts} in {seconds:.1f} s; {kept}", *alarm_lines],
        )
    )
    if skipped is not None and added is None:
        skipped.list_in(total, lists.__getitem__)
    total.metrics = {"examples": num_rows, "posteriors": len(makers), "seconds": seconds}
    total.extra = {"decisions": alarms}
    return total


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PredictedBlock:
    """Predictions of some rows of a split, in memory only."""

    name: str
    file: PredictionFile

    @cached_property
    def examples(self) -> ExampleStatistics:
        """Return the statistics of each example."""
        probs, labels = self.file.probs, self.file.labels
        return compute_example_statistics(probs, labels, num_classes=len(self.file.classes), is_exclusive=True)

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """Return the named scores of each example, or the reason there are none."""
        return example_scores(names, self.examples, lambda name: getattr(self.file, name))


@dataclass(frozen=True)
class NewDataRules:
    """The rules that fit one posterior and integrator.

    Args:
        name: name of its predictions in the run.
    """

    name: str
    origin: tuple[str, str]
    decisions: list[DecisionFile]
    _scores: dict[tuple[str, str], list[Array]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, run: Run, origin: tuple[str, str], params: Mapping[str, Any], posterior: str, classes: Sequence[str], *,
        only: Sequence[str],
    ) -> NewDataRules:  # fmt: skip
        """Open the run's rules that fit, and note why others do not.

        Args:
            params: parameters of predict.
            posterior: digest of the posterior.
            only: names of rules; none for all.

        Raises:
            MissingInput, DataError: a named rule does not exist or cannot be used.
        """
        name = ".".join(origin)
        found = [] if list(only) == [NONE] else open_decisions(run, name, only=[one for one in only if one != NONE])
        reasons = {one.name: explain_unfit_rule_for(one, maker_as(params, posterior), classes) for one in found}
        for rule, why in reasons.items():
            if why is not None:
                run.console.info(f"{name}: skipping rule {rule}: {why}")
        return cls(name, origin, [one for one in found if reasons[one.name] is None])

    def of_block(self, split: str, content: PredictionFile, first: int, columns: RuleColumns) -> dict[str, Array]:
        """Return the rules' columns for rows of a split that start at row `first`."""
        decided = SplitDecisions(self.name, PredictedBlock(split, content), self.decisions, self.origin, first)
        for one in self.decisions:
            if isinstance(one.rule, ShiftRule):
                scores = scores_of(decided.split, one.header.meta["settings"]["score"])
                self._scores.setdefault((split, one.name), []).append(scores)
        return columns.of_rows(decided, content.probs, slice(None)) if columns.names else {}

    def alarms(self) -> Iterator[dict[str, Any]]:
        """Yield the result of each shift rule on each split as a batch."""
        rules = {one.name: one.rule for one in self.decisions}
        for (split, name), parts in self._scores.items():
            rule = rules[name]
            assert isinstance(rule, ShiftRule)
            p_value = rule.p_value(np.concatenate(parts))
            row = {"name": self.name, "split": split, "rule": name, "kind": "shift", "p_value": p_value}
            yield {**row, "is_alarm": p_value is not None and p_value <= rule.level}


BATCH_SIZE = ExtractFeaturesOptions.batch_size  # as in extract-features by default, since float sums depend on it
BLOCK = 16 * BATCH_SIZE  # examples predicted at once


@dataclass(frozen=True)
class NewData:
    """Predicts new data.

    Attributes:
        makers: posteriors and integrators to predict with.
        classes: classes of the posteriors, by output.
        shown: columns of the table.
        rules: calibrate's rules of each maker.
        kept: split name to features that are stored already.
        levels: name of predictions with intervals to their posterior and lowest interval level.
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
        """Return the header line of the CSV table."""
        exclusive = has_exclusive_classes(self.makers[0].predictor.posterior.layout.likelihood_name)
        return csv_header(self.shown.columns(self.classes, is_exclusive=exclusive), self.classes)

    @property
    def reader(self) -> Any:
        """Return the reader of the network that computed the run's features."""
        return self.makers[0].predictor.train.reader

    @property
    def preprocess(self) -> Preprocess:
        """Return the preprocessing of the run's inputs."""
        found: Preprocess = self.reader.recorded.preprocess
        return found

    def check_trusted(self, text: str, flag: str) -> None:
        """Raise UsageError where SPLIT=SPEC names code and --trust-code is not given."""
        _, spec = parse_split(text, option=flag)
        if spec.partition(":")[0] == "py" and not self.reader.trusts_code:
            raise UsageError(f"{flag}: {spec!r} is code; if it is yours or you have read it, add \0trust_code\0")

    def split(self, text: str, flag: str) -> InputSplit:
        """Open the data of SPLIT=SPEC, with labels as outputs of the network; without labels for --ood.

        Raises:
            UsageError, MissingInput, DataError, Untrusted: the data cannot be read, or labels name unknown classes.
        """
        self.check_trusted(text, flag)
        name, spec = parse_split(text, option=flag)
        if spec == STDIN:
            return self.images(name, spec, Path(), _read_names_from_stdin())
        with replace_hints():
            opened = load_split(spec, name=name, preprocess=self.preprocess, takes_any_labels=True)
        if flag == "\0ood\0":
            return opened.as_ood()
        are_names = self.classes != [str(index) for index in range(len(self.classes))]
        split = match_classes(opened, tuple(self.classes) if are_names else None)
        if (order := alphabetical_numbering(split)) is not None:
            self.run.console.info(order)
        return split

    def images(self, name: str, spec: str, folder: Path, files: Sequence[str]) -> InputSplit:
        """Open image files without labels."""
        transform = self.preprocess.transform
        if transform is not None and transform.takes != "images":
            raise DataError(f"the run's network takes {transform.takes}, not image files", code="wrong_inputs")
        dataset = image_dataset(folder, files, None, None, self.preprocess)
        return InputSplit(spec, dataset, np.arange(len(files)), self.preprocess, is_labeled=False, name=name)

    def blocks(self, split: InputSplit, *, first_id: int = 0) -> Iterator[TableBlock]:
        """Yield the table's rows for a split as they are predicted. Sample ids count from first_id."""
        names = split.names
        task = self.run.console.task(f"predict {split.name}", len(split))
        start = 0
        for extracted in self._extract(split):
            stop = start + len(extracted.features)
            rows = slice(start, stop)
            named = None if names is None else np.array([escape_for_table(name).encode() for name in names[rows]])
            combined = self._combined(extracted)
            for maker, rules in zip(self.makers, self.rules, strict=True):
                content, origin = self._predict(maker, split, rows, extracted, first_id, combined)
                decisions = rules.of_block(split.name, content, first_id + start, self.shown.rules)
                yield self.shown.block(content, slice(None), origin, named, decisions)
            task.advance(stop - start)
            start = stop

    def _extract(self, split: InputSplit) -> Iterator[ExtractedFeatures]:
        """Yield features and labels of BLOCK examples at a time."""
        if split.name in self.kept:
            yield from _read_blocks(self.kept[split.name])
            return
        recorded = self.reader.recorded
        with recorded.visible(), replace_hints():
            head = recorded.network.head(split)
            recorded.check_head(head)
            batches = recorded.network.batches(
                split, head, batch_size=BATCH_SIZE, dtype=recorded.dtype, num_workers=0, first_row=0, num_logits=0
            )
            held: list[ExtractedFeatures] = []
            images = ImageCounts()
            for batch in batches:
                self._compare(split, batch)
                if (warning := describe_padding_effect(split.name, batch.padding)) is not None:
                    self.run.console.warn(warning)
                images = images.plus(batch.images)
                held.append(batch)
                if sum(len(one.features) for one in held) >= BLOCK:
                    yield _concatenate(held)
                    held = []
            for note in images.notes(split.name, len(split), self.preprocess):
                self.run.console.info(note)
            if held:
                yield _concatenate(held)

    def _compare(self, split: InputSplit, batch: ExtractedFeatures) -> None:
        """Warn once where the inputs of a split, as far as read, differ from those of the run."""
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

    def _combined(self, extracted: ExtractedFeatures) -> NDArray | None:
        """Return the combined out-of-distribution score of some rows (n,); None where the run has none."""
        detector = self.makers[0].predictor.train.detector
        return None if detector is None else detector.scores(extracted.features).float().numpy()

    def _predict(
        self,
        maker: Maker,
        split: InputSplit,
        rows: slice,
        extracted: ExtractedFeatures,
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
            with replace_hints():
                inputs = predictor.train.reader.given_inputs(split.take(np.arange(rows.start, rows.stop)), layout)
        predicted = predictor.predict(maker.choice, inputs)
        content = build_prediction_file(
            predicted, labels=None if extracted.labels is None else extracted.labels.numpy(), sample_id=split.rows[rows] + first_id,
            classes=self.classes, choice=maker.choice, combined=combined,
        )  # fmt: skip
        level = None if content.interval is None else predicted.integrator.interval_level
        if level is not None:
            name = ".".join(maker.origin)
            self.levels[name] = maker.origin[0], min(level, self.levels.get(name, ("", level))[1])
        exclusive = has_exclusive_classes(layout.likelihood_name)
        return content, Origin(split.name, *maker.origin, level, exclusive)


_ENDINGS = tuple(SUFFIXES)
POLL_SECONDS = 0.5


@dataclass
class Arrivals:
    """Finds new, complete images in a folder.

    A file counts as complete when two polls in a row find it unchanged, or when it was last modified more than two polls ago. Hidden
    files and files with other suffixes are ignored.

    Attributes:
        num_waiting: files that were still being written at the last poll.
    """

    folder: Path
    num_waiting: int = 0
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    _left_out: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_left_out(self) -> int:
        """Return the number of files that could not be read."""
        return len(self._left_out)

    def leave_out(self, name: str) -> None:
        """Ignore a file until it changes."""
        if name in self._seen:
            self._left_out[name] = self._seen[name]

    def ready(self, done: set[str]) -> list[str]:
        """Return the sorted names of the complete files that are not done.

        Raises:
            MissingInput: the folder does not exist.
        """
        if not self.folder.is_dir():
            raise MissingInput(f"no folder {quote_name(self.folder, limit=300)}", path=self.folder)
        found: list[str] = []
        now: dict[str, tuple[int, int]] = {}
        num_waiting = 0
        with convert_read_errors(self.folder), os.scandir(self.folder) as entries:
            for entry in entries:
                if (
                    escape_for_table(entry.name) in done
                    or entry.name.startswith(".")
                    or not entry.name.lower().endswith(_ENDINGS)
                ):
                    continue
                try:
                    status = entry.stat()
                except OSError:
                    continue  # removed meanwhile, or a loop of links
                if not stat.S_ISREG(status.st_mode):
                    continue  # a folder with an image's suffix
                now[entry.name] = state = (status.st_size, status.st_mtime_ns)
                is_old = time.time_ns() - status.st_mtime_ns > 2e9 * POLL_SECONDS
                is_whole = status.st_size > 0 and (is_old or self._seen.get(entry.name) == state)
                if self._left_out.get(entry.name) == state:
                    continue
                self._left_out.pop(entry.name, None)
                if is_whole:
                    found.append(entry.name)
                else:
                    num_waiting += status.st_size > 0
        self._seen, self.num_waiting = now, num_waiting
        return sorted(found)


SPLIT = "followed"  # split name in the table
_HELD = ("another bnncli process is following into this table", "give \0table\0 another name, or stop that process")


@dataclass
class FollowedFolder:
    """A folder whose images are predicted into a table as they arrive."""

    new: NewData
    arrivals: Arrivals
    target: Path
    _done: set[str] = field(default_factory=set)
    _table: tuple[int, int] = (0, 0)  # device and inode of the table

    def until(self, idle: float | None) -> Result:
        """Predict existing and arriving files until the command is stopped or nothing has arrived for `idle` seconds.

        Raises:
            Interrupted: the command was stopped.
            Locked: another process follows into the table.
            OutputExists: the file is not such a table, or has other columns or posteriors.
            MissingInput: the folder does not exist.
        """
        run = self.new.run
        self.arrivals.ready(set())
        check_writable(self.target.parent, hint="choose another place with \0table\0")
        if run.write.dry_run:
            return Result("planned", [self._output()], lines=[f"append to: {self.target}"])
        with artifact_lock(run.folder.lock(self.target), wait=run.lock.wait, poll=run.console.poll, held=_HELD):
            self._done = continue_table(
                self.target, self.new.titles, self._origins(), force=run.write.force, is_raw=self.new.shown.is_raw
            )
            self._table = _identity(os.stat(self.target))
            before, last = len(self._done), time.monotonic()
            run.console.info(f"following {self.arrivals.folder} into {self.target}: {before:,} files done")
            while True:
                run.console.poll(f"{len(self._done):,} files done, all in {self.target}")
                if names := self.arrivals.ready(self._done):
                    self._predict(names[:BLOCK])
                    last = time.monotonic()
                elif idle is not None and not self.arrivals.num_waiting and time.monotonic() - last >= idle:
                    break
                else:
                    time.sleep(POLL_SECONDS)
            return Result(
                "computed",
                [self._output()],
                metrics={
                    "examples": len(self._done),
                    "new": len(self._done) - before,
                    "unreadable": self.arrivals.num_left_out,
                },
                summary=[
                    f"new files: {len(self._done) - before:,} ({len(self._done):,} in total); unreadable: "
                    f"{self.arrivals.num_left_out}"
                ],
            )

    def _predict(self, names: Sequence[str]) -> None:
        """Append the rows of these files. Skip files that cannot be read with a warning."""
        try:
            split = self.new.images(SPLIT, f"images:{self.arrivals.folder}", self.arrivals.folder, names)
            text = b"".join(
                csv_bytes(block, self.new.classes) for block in self.new.blocks(split, first_id=len(self._done))
            )
        except (DataError, MissingInput, ReadError) as error:
            if len(names) > 1:
                middle = len(names) // 2
                self._predict(names[:middle])
                self._predict(names[middle:])
                return
            if (self.arrivals.folder / names[0]).exists():
                self.new.run.console.warn(f"skipping {quote_name(names[0])}: {error.message}")
                self.arrivals.leave_out(names[0])
            return
        _append(self.target, text, self._table)
        self._done.update(map(escape_for_table, names))
        self.new.run.console.info(f"{len(names):,} new, {len(self._done):,} in total; last: {quote_name(names[-1])}")

    def _origins(self) -> set[tuple[str, str]]:
        return {(maker.predictor.path.stem, maker.choice.variant) for maker in self.new.makers}

    def _output(self) -> dict[str, object]:
        return {"role": "table", "path": str(self.target)}


def _rules(run: Run, options: PredictOptions, maker: Maker, classes: list[str]) -> NewDataRules:
    params = build_params(run, maker.choice, maker.origin[0], keep_samples=False)
    return NewDataRules.of(run, maker.origin, params, maker.digest, classes, only=options.decide)


def list_rule_columns(rules: Sequence[NewDataRules]) -> RuleColumns:
    """Return the table's columns of all these rules."""
    empty = PredictedBlock("", PredictionFile(np.empty((0, 1)), np.empty(0), None, None, np.empty(0), []))
    return list_columns([SplitDecisions(one.name, empty, one.decisions, one.origin) for one in rules])


def _read_names_from_stdin() -> list[str]:
    """Read file names from stdin, one per line. Raises UsageError where there are none."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("\0data\0: `-` reads file names from stdin, but stdin is a terminal; pipe the names in")
    names = [name for line in sys.stdin if (name := line.rstrip("\r\n"))]
    if not names:
        raise UsageError("\0data\0: `-` reads file names from stdin, one per line; got none")
    return names


def _read_blocks(content: FeatureFile) -> Iterator[ExtractedFeatures]:
    """Yield stored features and labels of BLOCK examples at a time."""
    for start in range(0, len(content.features), BLOCK):
        rows = slice(start, start + BLOCK)
        labels = None if content.labels is None else torch.from_numpy(np.array(content.labels[rows]))
        yield ExtractedFeatures(torch.from_numpy(np.array(content.features[rows])), None, labels)


def _concatenate(held: Sequence[ExtractedFeatures]) -> ExtractedFeatures:
    labels = [one.labels for one in held if one.labels is not None]
    features = torch.cat([one.features for one in held])
    return ExtractedFeatures(features, None, torch.cat(labels) if labels else None)


def continue_table(
    target: Path, header: bytes, origins: set[tuple[str, str]], *, force: bool, is_raw: bool
) -> set[str]:
    """Start a table, or prepare an existing one for more rows, and return the names of the files it covers.

    An interrupted command may have left part of a row, or a file's rows for some of the posteriors only. Both are removed.

    Args:
        header: header line.
        origins: posteriors and integrators of the rows.
        is_raw: True where the table holds names unchanged, as in ShownColumns.

    Raises:
        OutputExists: the file is not a table, or has other columns or posteriors.
    """
    if force or not target.exists() or target.stat().st_size == 0:
        _replace(target, header)
        return set()
    if not target.is_file() or not is_table(target):
        raise OutputExists(
            f"{target} exists and is not a table of bnncli", hint="give \0table\0 another name", path=target
        )
    content = target.read_bytes()
    whole = content[: _find_end_of_rows(content)]
    if not whole.startswith(header):
        hint = "give \0table\0 another name, or add \0force\0 to start over"
        raise OutputExists(f"the columns of {target} differ from those this command writes", hint=hint, path=target)
    rows = list(csv.DictReader(io.StringIO(whole.decode(), newline="")))
    others = {(row["posterior"], row["variant"]) for row in rows} - origins
    if others:
        posterior, variant = sorted(others)[0]
        hint = "name the same posteriors again, give \0table\0 another name, or add \0force\0 to start over"
        raise OutputExists(f"{target} has rows of {posterior} ({variant})", hint=hint, path=target)
    counts: dict[str, int] = {}
    for row in rows:
        name = row[NAME] if is_raw else unescape_formula(row[NAME])
        counts[name] = counts.get(name, 0) + 1
    done = {name for name, count in counts.items() if count == len(origins)}
    if len(done) < len(counts):
        kept = [row for row in rows if (row[NAME] if is_raw else unescape_formula(row[NAME])) in done]
        text = io.StringIO(newline="")
        csv.DictWriter(text, list(rows[0]), lineterminator="\r\n").writerows(kept)
        _replace(target, header + text.getvalue().encode())
    elif len(whole) < len(content):
        os.truncate(target, len(whole))
    return done


def _replace(target: Path, content: bytes) -> None:
    publish_bytes(target, content, may_replace=True)


def _find_end_of_rows(content: bytes) -> int:
    """Return where the last complete row ends, at a line end outside quotes."""
    end = len(content)
    while (end := content.rfind(b"\r\n", 0, end)) >= 0:
        if content.count(b'"', 0, end) % 2 == 0:
            return end + 2
    return 0


def _append(target: Path, text: bytes, table: tuple[int, int]) -> None:
    """Append rows to the table and wait until they are on disk.

    Args:
        table: device and inode of the table. Another file that took its place is not written to.

    Raises:
        WriteError: the disk is full (then none of the rows are written), or the table was removed or replaced.
    """
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise write_error(error, target) from None
    try:
        if _identity(os.fstat(descriptor)) != table:
            hint = "run the command again with a table that no other program replaces"
            raise WriteError(f"{target} was replaced while bnncli wrote to it", hint=hint, path=target)
        size = os.fstat(descriptor).st_size
        try:
            left = memoryview(text)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, size)
            raise write_error(error, target) from None
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


class AddedSplits:
    """New splits of a run, written as extract-features would with the options of the run's other splits.

    Args:
        recorded: network that computed the run's features.
        given: names the splits.
    """

    def __init__(self, run: Run, recorded: RecordedNetwork, given: PredictOptions) -> None:
        own = {name: getattr(given, name) for name in ("data", "ood", "skip_unreadable", "max_skipped")}
        options = replace(_recorded_options(recorded), **own)
        line = CommandLine.of("extract-features", str(run.arguments["ckpt"]), options)
        maker = replace(run, command=line.command, line=line)
        self._recorded, network = recorded, recorded.network
        self._extraction = NetworkExtraction(maker, options, network.saved, opened=network)
        self.splits = self._extraction.splits

    def check_replaces_none(self) -> None:
        """Raise OutputExists where the run has a split of this name with other data, whose artifacts would become stale."""
        for request in self._extraction.requests:
            if is_of_other_data(request):
                message = f"the run already has a split {request.target.stem!r} with other data: {request.target}"
                hint = "give the new data another name; only extract-features replaces splits"
                raise OutputExists(message, hint=hint, path=request.target)

    def result(self) -> Result:
        """Extract and publish the features of all splits together. Raises what extract-features raises."""
        with self._recorded.visible():
            return self._extraction.result(also=lambda first, record: [])


def _open_as_splits(run: Run, options: PredictOptions, new: NewData) -> AddedSplits:
    """Open the new data as splits of the run. Raises OutputExists where the run has other splits of these names."""
    for text, flag in _parse_named_data(options):
        new.check_trusted(text, flag)
    with replace_hints():
        added = AddedSplits(run, new.reader.recorded, options)
    added.check_replaces_none()
    return added


_OF_A_SPLIT = {"hold_out", "rotate", "corrupt"}  # options that apply to one split only


def _recorded_options(recorded: RecordedNetwork) -> ExtractFeaturesOptions:
    """Return the options of extract-features that the run records, without the data."""
    with convert_lookup_errors(recorded.header.path):
        params: Mapping[str, Any] = recorded.header.provenance["params"]
        names = {spec.name for spec in fields(ExtractFeaturesOptions)} & {*params} - _OF_A_SPLIT
        asked = {name: params[name] for name in names if params[name] is not None}
        placeholder = {"data": ["\0"]}  # the options require data
        return ExtractFeaturesOptions(**asked | placeholder | {"model": recorded.network.spec})


def _parse_named_data(options: PredictOptions) -> list[tuple[str, str]]:
    """Return each SPLIT=SPEC of new data with its option. Raises UsageError where two have the same name."""
    found = [*((text, "\0data\0") for text in options.data), *((text, "\0ood\0") for text in options.ood)]
    names = [parse_split(text, option=flag)[0] for text, flag in found]
    twice = [flag for place, (_, flag) in enumerate(found) if names[place] in names[:place]]
    if twice:
        raise UsageError(f"{twice[0]}: two splits have the same name")
    return found


# Options of extract-features that predict does not have.
_OF_THE_RUN = {spec.name for spec in fields(ExtractFeaturesOptions)} - {spec.name for spec in fields(PredictOptions)}


@contextmanager
def replace_hints() -> Iterator[None]:
    """Replace hints that name options of extract-features, which cannot be given here."""
    try:
        yield
    except BnnError as error:
        if any(f"\0{name}\0" in (error.hint or "") for name in _OF_THE_RUN):
            error.hint = "new data use the run's network, preprocessing and task: give data like those of its features"
        raise


def _output(target: Path) -> dict[str, object]:
    return {"role": "table", "path": str(target)}

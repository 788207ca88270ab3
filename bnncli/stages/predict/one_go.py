"""predict with data given: features and predictions in one go, into a table; and where they are kept, features as splits of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnncli import data
from bnncli.artifacts.features import read_features
from bnncli.artifacts.outputs import TableBlock, write_table
from bnncli.errors import UsageError
from bnncli.options.predict import PredictOptions
from bnncli.session.inputs import posterior_classes
from bnncli.session.run import Result, Run
from bnncli.stages.extract_features.added import AddedSplits
from bnncli.stages.predict.follow import Arrivals, Followed
from bnncli.stages.predict.new_data import Maker, NewData, about_given_data
from bnncli.stages.predict.new_data_rules import NewDataRules, columns_of_rules
from bnncli.stages.predict.stored import params_of
from bnncli.stages.predict.table import Merge, ShownColumns, check_table_path, few_draws_lines
from bnncli.system.workers import team


def predict_new(run: Run, options: PredictOptions, makers: Sequence[Maker], merges: Sequence[Merge]) -> Result:
    """Predict data that are no split of the run, or what arrives in a folder, into the table.

    Raises:
        UsageError: several processes share the command.
    """
    if team() is not None:
        raise UsageError("\0data\0 and \0follow\0 work in a single process: start the command without torchrun")
    assert options.table is not None
    target, first = Path(options.table), makers[0].predictor
    has_top_k = any(maker.choice.top_k for maker in makers)
    classes = list(posterior_classes(run.folder, first.header))
    has_names = options.follow is not None
    rules = [_rules(run, options, maker, classes) for maker in makers]
    shown = ShownColumns(merges, has_top_k, has_names, options.probabilities, columns_of_rules(rules), options.raw_text)
    new = NewData(run, makers, classes, shown, rules)
    if options.follow is not None:
        done = Followed(new, Arrivals(Path(options.follow)), target).until(options.idle)
        for line in few_draws_lines(run, new.levels):
            run.console.warn(line)
        return done
    check_table_path(run, target, [maker.predictor.path for maker in makers])
    added = _added(run, options, new) if options.keep_features else None
    splits = [new.split(*named) for named in _named(options)] if added is None else added.splits
    if any(split.names is not None for split in splits):
        new = replace(new, shown=replace(shown, has_names=True))
    counts = ", ".join(f"{len(split):,} of {split.name}" for split in splits)
    begun = time.monotonic()
    with about_given_data():
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
    num_rows, seconds = sum(map(len, splits)), time.monotonic() - begun
    what_of_features = "features not kept" if added is None else "features kept"
    total.add(
        Result(
            "computed",
            [_output(target) | {"content_digest": digest}],
            summary=[f"predicted {counts} in {seconds:.1f} s; {what_of_features}", *map(_alarm_line, alarms)],
        )
    )
    total.metrics = {"examples": num_rows, "posteriors": len(makers), "seconds": seconds}
    total.extra = {"decisions": alarms}
    return total


def _named(options: PredictOptions) -> list[tuple[str, str]]:
    """The new data, each as SPLIT=SPEC, and the option that names them. Raises UsageError for a name twice."""
    found = [*((text, "\0data\0") for text in options.data), *((text, "\0ood\0") for text in options.ood)]
    names = [data.parse_split(text, option=flag)[0] for text, flag in found]
    twice = [flag for place, (_, flag) in enumerate(found) if names[place] in names[:place]]
    if twice:
        raise UsageError(f"{twice[0]}: two splits have the same name")
    return found


def _added(run: Run, options: PredictOptions, new: NewData) -> AddedSplits:
    """The new data as splits of the run. Raises OutputExists where the run has others of these names."""
    for text, flag in _named(options):
        new.check_trusted(text, flag)
    with about_given_data():
        added = AddedSplits(run, new.reader.recorded, data=options.data, ood=options.ood)
    added.check_replaces_none()
    return added


def _output(target: Path) -> dict[str, object]:
    return {"role": "table", "path": str(target)}


def _rules(run: Run, options: PredictOptions, maker: Maker, classes: list[str]) -> NewDataRules:
    params = params_of(run, maker.choice, maker.origin[0], keep_samples=False)
    return NewDataRules.of(run, maker.origin, params, maker.digest, classes, only=options.decide)


def _alarm_line(row: dict[str, Any]) -> str:
    shown = "-" if row["p_value"] is None else f"{row['p_value']:.3g}"
    return f"{row['name']} {row['split']}: shift p {shown}{': ALARM' if row['is_alarm'] else ''}"

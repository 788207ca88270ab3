"""predict with data given: features and predictions in one go, into a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bnncli.errors import UsageError
from bnncli.machine.team import team
from bnncli.options import PredictOptions
from bnncli.run.classes import posterior_classes
from bnncli.run.session import Result, Run
from bnncli.stages.predict.follow import Arrivals, Followed
from bnncli.stages.predict.new_data import Maker, NewData
from bnncli.stages.predict.table import Merge, ShownColumns, check_table_path
from bnncli.storage.tables import TableBlock, write_table


def predict_new(run: Run, options: PredictOptions, makers: Sequence[Maker], merges: Sequence[Merge]) -> Result:
    """Predict data that are no split of the run, or what arrives in a folder, into the table.

    Raises:
        UsageError: several processes share the command.
    """
    if team() is not None:
        raise UsageError("\0data\0 and \0follow\0 are of one process: start the command without torchrun")
    assert options.table is not None
    target, first = Path(options.table), makers[0].predictor
    has_top_k = any(maker.choice.top_k for maker in makers)
    classes = list(posterior_classes(run.folder, first.header))
    if options.follow is not None:
        new = NewData(run, makers, classes, ShownColumns(merges, has_top_k, True, options.probabilities))
        return Followed(new, Arrivals(Path(options.follow)), target).until(options.idle)
    check_table_path(run, target, [maker.predictor.path for maker in makers])
    new = NewData(run, makers, classes, ShownColumns(merges, has_top_k, False, options.probabilities))
    splits = [new.split(text) for text in options.data]
    if len({split.name for split in splits}) < len(splits):
        raise UsageError("\0data\0: a split is named twice")
    if any(split.names is not None for split in splits):
        new = NewData(run, makers, classes, ShownColumns(merges, has_top_k, True, options.probabilities))
    counts = ", ".join(f"{len(split):,} of {split.name}" for split in splits)
    if run.write.dry_run:
        return Result("planned", [_output(target)], lines=[f"write: {target} ({counts})"])
    begun = time.monotonic()

    def blocks() -> Iterator[TableBlock]:
        for split in splits:
            yield from new.blocks(split)

    digest = write_table(target, blocks(), classes)
    num_rows, seconds = sum(map(len, splits)), time.monotonic() - begun
    return Result(
        "computed",
        [_output(target) | {"content_digest": digest}],
        metrics={"examples": num_rows, "posteriors": len(makers), "seconds": seconds},
        summary=[f"predicted {counts} in {seconds:.1f} s; no features are kept"],
    )


def _output(target: Path) -> dict[str, object]:
    return {"role": "table", "path": str(target)}

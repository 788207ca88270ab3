"""The table of predict: a row for each example of every prediction file of the command, read from the files in blocks."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bnncli.artifacts.files import read_header
from bnncli.artifacts.outputs import (
    FIRST_COLUMNS,
    NAME,
    PROBABILITIES,
    TOP_K,
    TableBlock,
    check_side_output,
    is_table,
    probability_columns,
    write_table,
)
from bnncli.artifacts.predictions import PredictionFile, read_predictions
from bnncli.errors import UsageError
from bnncli.evaluation.label_statistics import THRESHOLD
from bnncli.integrators._partitions import LEVEL
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.numerics import dirichlet
from bnncli.options.declaration import spelled
from bnncli.session.run import Result, Run
from bnncli.stages.predict.decided import RuleColumns, SplitDecisions, columns_of

BLOCK_PROBABILITIES = 1 << 22  # held at once
_COLUMNS = (
    *FIRST_COLUMNS,
    NAME,
    PROBABILITIES,
    "entropy",
    "mutual_info",
    "low",
    "high",
    "level",
    "label",
    TOP_K,
    "classes",
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Merge:
    """Classes whose union gets a column of its own."""

    name: str
    members: tuple[int, ...]


def few_draws_lines(run: Run, levels: Mapping[str, tuple[str, float]]) -> list[str]:
    """Say which intervals hold less than 95%, and what has better ones.

    Args:
        levels: of each set of predictions, by its name: the posterior, and the lowest level.
    """
    known = {path.stem for path in run.folder.posteriors()}
    lines = []
    for name, (posterior, level) in levels.items():
        if level < LEVEL:
            more = "; use more \0samples\0" if posterior == "laplace" else ""
            if {posterior, "laplace"} <= known and posterior != "laplace":
                more = "; \0posterior\0 laplace has them"
            lines.append(
                spelled(f"{name}: too few draws for 95% intervals; using {percent(level, '.0f')} intervals{more}")
            )
    return lines


class Origin(NamedTuple):
    """What predictions are of, and what reading them as rows needs: the level of their intervals, whether classes exclude each other."""

    split: str
    posterior: str
    variant: str
    level: float | None
    is_exclusive: bool


@dataclass(frozen=True)
class ShownColumns:
    """Columns that a table has beside those that every table has.

    Attributes:
        merges: classes whose union has some.
        has_top_k: whether examples have the classes that a ranking keeps.
        has_names: whether they have names.
        probabilities: whether every class has one.
        rules: those of the rules of calibrate.
        is_raw: whether texts of a CSV file may be formulas of a spreadsheet.
    """

    merges: Sequence[Merge]
    has_top_k: bool
    has_names: bool
    probabilities: bool
    rules: RuleColumns
    is_raw: bool = False

    def columns(self, classes: Sequence[str], *, is_exclusive: bool) -> TableBlock:
        """No rows, with all the columns."""
        count = len(classes)
        nothing = PredictionFile(
            probs=np.empty((0, count), np.float32), entropy=np.empty(0), mutual_info=None, labels=None,
            sample_id=np.empty(0, np.int64), classes=list(classes),
        )  # fmt: skip
        said = {name: np.empty((0, count) if name in self.rules.sets else 0, np.int8) for name in self.rules.names}
        return self.block(nothing, slice(None), Origin("", "", "", None, is_exclusive), np.empty(0, "S1"), said)

    def block(
        self, content: PredictionFile, rows: slice, origin: Origin, names: Array | None, said: Mapping[str, Array]
    ) -> TableBlock:
        """These rows of predictions as rows of the table.

        Args:
            names: (n,) of the rows, UTF-8 bytes; empty ones where there are none.
            said: what rules say of the rows, by column.
        """
        columns = (
            _of_classes(content, rows, self.merges, level=origin.level, has_top_k=self.has_top_k)
            if origin.is_exclusive
            else _of_labels(content, rows, level=origin.level)
        )
        ids = {"sample_id": content.sample_id[rows]}
        block = TableBlock(origin[:3], {**ids, **columns, **said}, sets=self.rules.sets, is_raw=self.is_raw)
        if self.has_names:
            block.columns[NAME] = np.full(len(block.columns["sample_id"]), b"") if names is None else names
        if self.probabilities or not origin.is_exclusive:
            block.columns[PROBABILITIES] = np.asarray(content.probs[rows])
        return block


def parse_merges(
    texts: Sequence[str], classes: Sequence[str], *, probabilities: bool = False, taken: Sequence[str] = ()
) -> list[Merge]:
    """The unions that --merge NAME=CLASS,CLASS asks for, by class name or index.

    Args:
        probabilities: whether every class has a column too.
        taken: further names of columns.

    Raises:
        UsageError: no such class, a class twice, all classes, or a name that is taken.
    """
    merges: list[Merge] = []
    names = {*_COLUMNS, *taken, *(probability_columns(classes) if probabilities else [])}
    for text in texts:
        name, _, listed = text.partition("=")
        members = tuple(_class_index(text, part.strip(), classes) for part in listed.split(","))
        if len(set(members)) < len(members):
            raise UsageError(f"--merge {text}: a class is named twice")
        if len(members) == len(classes):
            raise UsageError(f"--merge {text}: the union of all classes has probability 1")
        own = {name, f"{name}_low", f"{name}_high"}
        if own & names:
            raise UsageError(
                f"--merge {text}: the table already has a column {min(own & names)!r}; choose another name"
            )
        names |= own
        merges.append(Merge(name, members))
    return merges


def _class_index(text: str, member: str, classes: Sequence[str]) -> int:
    if member in classes:
        return list(classes).index(member)
    if member.isdecimal() and int(member) < len(classes):
        return int(member)
    near = difflib.get_close_matches(member, classes, n=1)
    known = (
        f"did you mean {near[0]!r}?" if near else f"classes: {', '.join(classes[:20])}" + " ..." * (len(classes) > 20)
    )
    raise UsageError(f"--merge {text}: no class {member!r}; {known}")


def check_table_path(run: Run, target: Path, inputs: Sequence[Path]) -> None:
    """Raise before any work when the table may not be written there."""
    own = [Path(run.naming.out)] if run.naming.out else []
    others = [run.checkpoint_path, *inputs, *own]
    check_side_output(target, "--table", "table", is_ours=is_table, force=run.write.force, others=others)


def make_table(
    run: Run,
    target: Path,
    files: Sequence[Path],
    *,
    merges: Sequence[Merge],
    classes: Sequence[str],
    names: Mapping[str, Array | None],
    probabilities: bool,
    decided: Sequence[SplitDecisions] = (),
    is_raw: bool = False,
) -> Result:
    """Write the table of these prediction files.

    Args:
        names: of the examples (N,) of each split, as its features have them.
        probabilities: whether every class gets a column.
        decided: what rules say of the files, in their order.
        is_raw: as of ShownColumns.
    """
    if run.write.dry_run:
        output: dict[str, Any] = {"role": "table", "path": str(target), "planned": "compute", "estimated_bytes": 0}
        return Result("planned", [output], lines=[f"write: {target}"])
    metas = [read_header(path).meta for path in files]
    has_top_k = any(meta.get("top_k") for meta in metas)
    has_names = any(names.get(str(meta["split"])) is not None for meta in metas)
    task = run.console.task("table", sum(int(meta["num_examples"]) for meta in metas))

    rules = columns_of(decided)
    shown = ShownColumns(merges, has_top_k, has_names, probabilities, rules, is_raw)

    def blocks() -> Iterator[TableBlock]:
        for place, path in enumerate(files):
            content = read_predictions(path)
            origin, size = _origin(content), max(1, BLOCK_PROBABILITIES // len(content.classes))
            named = names.get(origin.split)
            for start in range(0, max(1, len(content.probs)), size):
                rows = slice(start, start + size)
                said = rules.of_rows(decided[place], np.asarray(content.probs[rows]), rows) if rules.names else {}
                block = shown.block(content, rows, origin, None if named is None else named[rows], said)
                task.advance(len(block.columns["sample_id"]))
                yield block

    digest = write_table(target, blocks(), classes)
    return Result("", [{"role": "table", "path": str(target), "content_digest": digest}])


def _origin(content: PredictionFile) -> Origin:
    assert content.header is not None
    meta = content.header.meta
    level = meta.get("interval_level", LEVEL)  # files that do not say hold 95 %, or all of few draws
    return Origin(str(meta["split"]), str(meta["posterior"]), str(meta["variant"]), level, content.is_exclusive)


def _of_classes(
    content: PredictionFile, rows: slice, merges: Sequence[Merge], *, level: float | None, has_top_k: bool
) -> dict[str, Array]:
    """Columns of examples with one class each."""
    probs = np.asarray(content.probs[rows])
    predicted = probs.argmax(axis=1)
    columns: dict[str, Array] = {
        "predicted": predicted,
        "probability": np.take_along_axis(probs, predicted[:, None], axis=1)[:, 0],
        **_of_examples(content, rows),
        **_intervals(content, rows, level, is_exclusive=True),
        "label": np.full(len(probs), -1, dtype=np.int64) if content.labels is None else content.labels[rows],
    }
    if has_top_k:
        columns[TOP_K] = _ranked(probs, None if content.top_k is None else content.top_k[rows])
    for merge in merges:
        columns |= _merged(
            merge, probs, np.empty(0) if content.log_concentration is None else content.log_concentration[rows]
        )
    return columns


def _of_labels(content: PredictionFile, rows: slice, *, level: float | None) -> dict[str, Array]:
    """Columns of examples with several labels each: which are said to be there, and (n, L) of what each label has."""
    probs = np.asarray(content.probs[rows])
    absent = np.full(probs.shape, -1, dtype=np.int64)
    return {
        "predicted": (probs >= THRESHOLD).astype(np.int64),
        **_of_examples(content, rows),
        **_intervals(content, rows, level, is_exclusive=False),
        "label": absent if content.labels is None else content.labels[rows].astype(np.int64),
    }


def _of_examples(content: PredictionFile, rows: slice) -> dict[str, Array]:
    """Numbers (n,) of each example; NaN where there are none."""
    values = {name: getattr(content, name) for name in ("entropy", "mutual_info", "energy", "max_logit")}
    missing = np.full(len(content.sample_id[rows]), np.nan, dtype=np.float32)
    return {name: missing if value is None else value[rows] for name, value in values.items()}


def _intervals(content: PredictionFile, rows: slice, level: float | None, *, is_exclusive: bool) -> dict[str, Array]:
    """Ends of the intervals, (n,) or of labels (n, L), and the level (n,) that they hold; NaN where there are none."""
    shape = content.probs[rows].shape[: 1 if is_exclusive else 2]
    if content.interval is None:
        missing = np.full(shape, np.nan, dtype=np.float32)
        return {"low": missing, "high": missing, "level": np.full(shape[0], np.nan, dtype=np.float32)}
    ends = content.interval[rows]
    return {"low": ends[..., 0], "high": ends[..., 1], "level": np.full(shape[0], np.nan if level is None else level)}


def _ranked(probs: Array, lengths: Array | None) -> Array:
    """The classes that the ranking keeps, most probable first, (n, k); -1 behind the last."""
    if lengths is None or len(lengths) == 0:
        return np.full((len(probs), 1), -1, dtype=np.int64)
    order = np.argsort(-probs, axis=1, kind="stable")[:, : lengths.max()]
    return np.where(np.arange(order.shape[1]) < lengths[:, None], order, -1)


def _merged(merge: Merge, probs: Array, log_concentration: Array) -> dict[str, Array]:
    """Probability of the union, and the central 95 % of its Beta where there is a Dirichlet."""
    members = list(merge.members)
    columns = {merge.name: probs[:, members].sum(axis=1, dtype=np.float64)}
    low = high = np.full(len(probs), np.nan)
    if log_concentration.ndim == 2:
        merged = dirichlet.merge(torch.from_numpy(np.ascontiguousarray(log_concentration)), [members])
        interval = dirichlet.central_interval(merged[:, 0], merged[:, 1:].logsumexp(dim=1))
        low, high = interval[:, 0].numpy(), interval[:, 1].numpy()
    return columns | {f"{merge.name}_low": low, f"{merge.name}_high": high}

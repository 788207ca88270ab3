"""The table of predict: one row per example, with what decision rules say of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from bnncli.artifacts.posteriors import DecisionFile
from bnncli.artifacts.predictions import PredictionFile, read_predictions
from bnncli.errors import MissingInput, UsageError
from bnncli.evaluation.decisions import KINDS, OOD, RISK, SETS, SHIFT, AcceptanceRule, OutlierRule, SetRule, ShiftRule
from bnncli.evaluation.statistics import THRESHOLD
from bnncli.integrators._partitions import LEVEL
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.numerics import dirichlet
from bnncli.options.declaration import spelled
from bnncli.session.decisions import Decidable, open_decisions, scores_of, why_unfit
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import PredictedSplit

NONE = "none"  # of the rules
_TITLES = {SETS: ("set", "set_size"), RISK: ("accept",), OOD: ("ood",), SHIFT: ()}
_MISSING = -1

Array = np.ndarray[Any, Any]


def rule_columns(run: Run) -> list[str]:
    """What columns of rules may be called in this run's tables."""
    names = {*KINDS, *(path.stem for path in run.folder.decision_files())}
    return [title for name in names for kind in KINDS for title in _titles(name, kind)]


def _titles(name: str, kind: str) -> tuple[str, ...]:
    """The columns of a rule: its name stands before them, but where it is that of its kind."""
    return _TITLES[kind] if name == kind else tuple(f"{name}_{title}" for title in _TITLES[kind])


@dataclass(frozen=True)
class SplitDecisions:
    """Predictions of a split with the rules that fit them.

    Args:
        origin: posterior and integrator.
        first: row of the split that the first of them is.
    """

    name: str
    split: Decidable
    decisions: list[DecisionFile]
    origin: tuple[str, str]
    first: int = 0

    @cached_property
    def vectors(self) -> dict[str, Array]:
        """Decisions (N,) of whole examples by rule: zeros and ones, and of sets their sizes."""
        found: dict[str, Array] = {}
        for decision in self.decisions:
            rule = decision.rule
            if isinstance(rule, SetRule):
                blocks = [sets.sum(axis=1) for _, sets in rule.set_blocks(self.split.file.probs, self._uniform(rule))]
                found[decision.name] = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)
            elif isinstance(rule, AcceptanceRule):
                found[decision.name] = rule.accepts(self.split.examples.confidence).astype(np.int64)
            elif isinstance(rule, OutlierRule):
                found[decision.name] = rule.is_outlier(self._scores(decision)).astype(np.int64)
        return found

    def columns(self, probs: Array, rows: slice) -> dict[str, Array]:
        """Columns of some rows, whose probabilities are (n, K)."""
        found: dict[str, Array] = {}
        for decision in self.decisions:
            rule, titles = decision.rule, _titles(decision.name, decision.kind)
            if isinstance(rule, SetRule):
                uniform = self._uniform(rule)
                sets = rule.sets(probs, None if uniform is None else uniform[rows])
                found[titles[0]] = sets.astype(np.int8)
            if titles:
                found[titles[-1]] = self.vectors[decision.name][rows]
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """A row a rule: what it comes to on the split."""
        posterior, variant = self.origin
        origin = {"name": self.name, "split": self.split.name, "posterior": posterior, "variant": variant}
        return [{**origin, "rule": one.name, "kind": one.kind, **self._said(one)} for one in self.decisions]

    def lines(self) -> list[str]:
        """One line of all rules; none without."""
        parts = []
        for decision in self.decisions:
            said = self._said(decision)
            own = "" if decision.name == decision.kind else f" ({decision.name})"
            if "p_value" in said:
                shown = "-" if said["p_value"] is None else f"{said['p_value']:.3g}"
                parts.append(f"shift p {shown}{': ALARM' if said['is_alarm'] else ''}{own}")
            elif "mean_size" in said:
                parts.append(f"mean set size {said['mean_size']:.3g}{own}")
            else:
                word = "accepted" if "accepted" in said else "out-of-distribution"
                parts.append(f"{word} {percent(next(iter(said.values())))}{own}")
        return [f"{self.name} {self.split.name}: {', '.join(parts)}"] if parts else []

    def _said(self, decision: DecisionFile) -> dict[str, Any]:
        rule, size = decision.rule, max(1, len(self.split.examples))
        if isinstance(rule, ShiftRule):
            p_value = rule.p_value(self._scores(decision))
            return {"p_value": p_value, "is_alarm": p_value is not None and p_value <= rule.level}
        share = float(self.vectors[decision.name].sum() / size)
        name = {SETS: "mean_size", RISK: "accepted", OOD: "outliers"}[decision.kind]
        return {name: share}

    def _scores(self, decision: DecisionFile) -> Array:
        return scores_of(self.split, decision.header.meta["settings"]["score"])

    def _uniform(self, rule: SetRule) -> Array | None:
        found = rule.score.uniform(self.split.name, self.first + len(self.split.file.probs))
        return None if found is None else found[self.first :]


@dataclass(frozen=True)
class RuleColumns:
    """The columns that a table has of rules, whichever of them its files have.

    Args:
        names: of all. sets: of those that are sets.
    """

    names: tuple[str, ...]
    sets: frozenset[str]

    def of_rows(self, decided: SplitDecisions, probs: Array, rows: slice) -> dict[str, Array]:
        """All columns of some rows of a file, -1 where it has no such rule."""
        found = decided.columns(probs, rows)
        missing = {
            name: np.full(probs.shape if name in self.sets else len(probs), _MISSING, dtype=np.int64)
            for name in self.names
            if name not in found
        }
        return {name: (found | missing)[name] for name in self.names}


def columns_of(decided: Sequence[SplitDecisions]) -> RuleColumns:
    """The columns of these files."""
    titled = [(_titles(one.name, one.kind), one.kind) for own in decided for one in own.decisions]
    names = tuple(dict.fromkeys(title for titles, _ in titled for title in titles))
    return RuleColumns(names, frozenset(titles[0] for titles, kind in titled if kind == SETS))


def decide(run: Run, files: Sequence[Path], *, only: Sequence[str]) -> list[SplitDecisions]:
    """What rules say of prediction files, in their order.

    Args:
        only: names of rules; all that fit where none is named.

    Raises:
        MissingInput: one that is named is there for none of them.
    """
    if NONE in only:
        only, files = (), [] if only == [NONE] else files
    there = {
        name: {path.stem for path in run.folder.decision_files(name)} for name in {_name(run, path) for path in files}
    }
    for rule in only:
        if not any(rule in names for names in there.values()):
            known = ", ".join(sorted(set().union(*there.values()))) or "none"
            hint = run.suggest("calibrate", sets="lac")
            raise MissingInput(
                f"--decide: no rule {rule!r} of calibrate for these predictions (have: {known})", hint=hint
            )
    opened: dict[str, list[DecisionFile]] = {}
    found = []
    for path in files:
        name, split = _name(run, path), PredictedSplit(read_header(path))
        if name not in opened:
            wanted = [rule for rule in only if rule in there[name]]
            opened[name] = open_decisions(run, name, only=wanted) if wanted or not only else []
        reasons = {one.name: why_unfit(one, split.header, split.file.classes) for one in opened[name]}
        for why in dict.fromkeys(reason for reason in reasons.values() if reason is not None):
            silent = ", ".join(rule for rule, reason in reasons.items() if reason == why)
            run.console.info(f"{name} {split.name}: skipping rule {silent}: {why}")
        meta = split.header.meta
        fit = [one for one in opened[name] if reasons[one.name] is None]
        found.append(SplitDecisions(name, split, fit, (meta["posterior"], meta["variant"])))
    return found


def _name(run: Run, path: Path) -> str:
    """What predictions are called in the run, wherever their file lies."""
    meta = read_header(path).meta
    is_inside = path.resolve().parent.parent == (run.folder.root / "predictions").resolve()
    return path.parent.name if is_inside else f"{meta['posterior']}.{meta.get('variant', meta['integrator'])}"


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

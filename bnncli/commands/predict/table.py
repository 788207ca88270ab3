"""Write predict's table: one row per example, with the decisions of calibrate's rules."""

from __future__ import annotations

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
from bnncli.data.columns import GROUP
from bnncli.errors import MissingInput, UsageError
from bnncli.evaluation.decisions import (
    COSTS,
    KINDS,
    OOD,
    PRECISION,
    RECALL,
    RISK,
    SETS,
    SHIFT,
    AcceptanceRule,
    ClassRule,
    CostRule,
    OutlierRule,
    SetRule,
    ShiftRule,
)
from bnncli.evaluation.statistics import THRESHOLD
from bnncli.integrators._partitions import LEVEL
from bnncli.lazy import torch
from bnncli.names import percent
from bnncli.numerics import dirichlet
from bnncli.options.declaration import spell_options
from bnncli.options.shared import find_class
from bnncli.session.decisions import Decidable, explain_unfit_rule, open_decisions, scores_of
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import PredictedSplit


def rule_columns(run: Run) -> list[str]:
    """Return every name that a column of a rule may have in this run's tables."""
    names = {*KINDS, *(path.stem for path in run.folder.decision_files())}
    return [title for name in names for kind in KINDS for title in _titles(name, kind)]


NONE = "none"  # value of --decide that applies no rule
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SplitDecisions:
    """Predictions of a split with the rules that fit them.

    Args:
        name: name of the predictions in the run.
        origin: posterior and integrator.
        first: row of the split at which the predictions start.
    """

    name: str
    split: Decidable
    decisions: list[DecisionFile]
    origin: tuple[str, str]
    first: int = 0

    @cached_property
    def vectors(self) -> dict[str, Array]:
        """Return the decisions (N,) of each rule: zeros and ones, sizes of sets, or indices of decisions."""
        found: dict[str, Array] = {}
        for decision in self.decisions:
            rule = decision.rule
            if isinstance(rule, SetRule):
                blocks = [sets.sum(axis=1) for _, sets in rule.set_blocks(self.split.file.probs, self._uniform(rule))]
                found[decision.name] = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)
            elif isinstance(rule, AcceptanceRule):
                found[decision.name] = rule.accepts(self.split.examples.confidence).astype(np.int64)
            elif isinstance(rule, ClassRule):
                found[decision.name] = rule.flags(self.split.file.probs).astype(np.int64)
            elif isinstance(rule, CostRule):
                found[decision.name] = rule.decide(self.split.file.probs)[0]
            elif isinstance(rule, OutlierRule):
                found[decision.name] = rule.is_outlier(self._scores(decision)).astype(np.int64)
        return found

    def columns(self, probs: Array, rows: slice) -> dict[str, Array]:
        """Return the rules' columns for some rows with probabilities (n, K)."""
        found: dict[str, Array] = {}
        for decision in self.decisions:
            rule, titles = decision.rule, _titles(decision.name, decision.kind)
            if isinstance(rule, SetRule):
                uniform = self._uniform(rule)
                sets = rule.sets(probs, None if uniform is None else uniform[rows])
                found[titles[0]] = sets.astype(np.int8)
            if titles:
                own = self.vectors[decision.name][rows]
                if isinstance(rule, CostRule):
                    own = np.array([name.encode() for name in rule.names])[own]
                found[titles[-1]] = own
        return found

    def to_json(self) -> list[dict[str, Any]]:
        """Return one row per rule with its result on the split."""
        posterior, variant = self.origin
        origin = {"name": self.name, "split": self.split.name, "posterior": posterior, "variant": variant}
        return [{**origin, "rule": one.name, "kind": one.kind, **self._result(one)} for one in self.decisions]

    def lines(self) -> list[str]:
        """Return one line with the results of all rules; none without rules."""
        parts = []
        for decision in self.decisions:
            result = self._result(decision)
            own = "" if decision.name == decision.kind else f" ({decision.name})"
            if "p_value" in result:
                parts.append(f"{describe_shift(result)}{own}")
            elif "mean_size" in result:
                parts.append(f"mean set size {result['mean_size']:.3g}{own}")
            elif "decided" in result:
                shares = (f"{name} {percent(share)}" for name, share in result["decided"].items())
                parts.append(f"decided {', '.join(shares)}{own}")
            else:
                ((key, share),) = result.items()
                word = f"{decision.kind} flags" if key == "flagged" else _WORDS[key]
                parts.append(f"{word} {percent(share)}{own}")
        return [f"{self.name} {self.split.name}: {', '.join(parts)}"] if parts else []

    def _result(self, decision: DecisionFile) -> dict[str, Any]:
        rule, size = decision.rule, max(1, len(self.split.examples))
        if isinstance(rule, ShiftRule):
            p_value = rule.p_value(self._scores(decision))
            return {"p_value": p_value, "is_alarm": p_value is not None and p_value <= rule.level}
        if isinstance(rule, CostRule):
            counts = np.bincount(self.vectors[decision.name], minlength=len(rule.names))
            return {
                "decided": {name: int(count) / size for name, count in zip(rule.names, counts, strict=True) if count}
            }
        mean = float(self.vectors[decision.name].sum() / size)
        return {_RESULTS[decision.kind]: mean}

    def _scores(self, decision: DecisionFile) -> Array:
        return scores_of(self.split, decision.header.meta["settings"]["score"])

    def _uniform(self, rule: SetRule) -> Array | None:
        found = rule.score.uniform(self.split.name, self.first + len(self.split.file.probs))
        return None if found is None else found[self.first :]


_RESULTS = {SETS: "mean_size", RISK: "accepted", PRECISION: "flagged", RECALL: "flagged", OOD: "outliers"}
_WORDS = {"accepted": "accepted", "outliers": "out-of-distribution"}


def describe_shift(result: Mapping[str, Any]) -> str:
    """Describe the result of a shift rule."""
    p_value = "-" if result["p_value"] is None else f"{result['p_value']:.3g}"
    return f"shift p {p_value}{': ALARM' if result['is_alarm'] else ''}"


def decide(run: Run, files: Sequence[Path], *, only: Sequence[str]) -> list[SplitDecisions]:
    """Apply rules to prediction files, in their order.

    Args:
        only: names of rules; none for all rules that fit.

    Raises:
        MissingInput: a named rule exists for none of the files.
    """
    if NONE in only:
        only, files = (), [] if only == [NONE] else files
    existing = {
        name: {path.stem for path in run.folder.decision_files(name)} for name in {_name(run, path) for path in files}
    }
    for rule in only:
        if not any(rule in names for names in existing.values()):
            known = ", ".join(sorted(set().union(*existing.values()))) or "none"
            hint = run.suggest("calibrate", sets="lac")
            raise MissingInput(
                f"--decide: no rule {rule!r} of calibrate for these predictions (have: {known})", hint=hint
            )
    opened: dict[str, list[DecisionFile]] = {}
    found = []
    for path in files:
        name, split = _name(run, path), PredictedSplit(read_header(path))
        if name not in opened:
            wanted = [rule for rule in only if rule in existing[name]]
            opened[name] = open_decisions(run, name, only=wanted) if wanted or not only else []
        reasons = {one.name: explain_unfit_rule(one, split.header, split.file.classes) for one in opened[name]}
        for why in dict.fromkeys(reason for reason in reasons.values() if reason is not None):
            skipped = ", ".join(rule for rule, reason in reasons.items() if reason == why)
            run.console.info(f"{name} {split.name}: skipping rule {skipped}: {why}")
        meta = split.header.meta
        fit = [one for one in opened[name] if reasons[one.name] is None]
        found.append(SplitDecisions(name, split, fit, (meta["posterior"], meta["variant"])))
    return found


def _name(run: Run, path: Path) -> str:
    """Return the name of predictions in the run, also where --out put their file elsewhere."""
    meta = read_header(path).meta
    is_inside = path.resolve().parent.parent == (run.folder.root / "predictions").resolve()
    return path.parent.name if is_inside else f"{meta['posterior']}.{meta.get('variant', meta['integrator'])}"


def few_draws_lines(run: Run, levels: Mapping[str, tuple[str, float]]) -> list[str]:
    """Return lines on predictions whose intervals hold less than 95%, with advice.

    Args:
        levels: name of the predictions to their posterior and lowest interval level.
    """
    known = {path.stem for path in run.folder.posteriors()}
    lines = []
    for name, (posterior, level) in levels.items():
        if level < LEVEL:
            more = "; use more \0samples\0" if posterior == "laplace" else ""
            if {posterior, "laplace"} <= known and posterior != "laplace":
                more = "; \0posterior\0 laplace has them"
            lines.append(
                spell_options(f"{name}: too few draws for 95% intervals; using {percent(level, '.0f')} intervals{more}")
            )
    return lines


_SCORES = ("entropy", "mutual_info", "low", "high", "level", "label")
_COLUMNS = (*FIRST_COLUMNS, NAME, GROUP, PROBABILITIES, *_SCORES, TOP_K, "classes")


@dataclass(frozen=True)
class Merge:
    """Classes whose union has its own columns."""

    name: str
    members: tuple[int, ...]


def parse_merges(
    texts: Sequence[str], classes: Sequence[str], *, probabilities: bool = False, taken: Sequence[str] = ()
) -> list[Merge]:
    """Parse --merge NAME=CLASS,CLASS, with classes by name or index.

    Args:
        probabilities: True where every class has its own column.
        taken: further names of columns.

    Raises:
        UsageError: an unknown class, a class twice, all classes, or a name that is taken.
    """
    merges: list[Merge] = []
    names = {*_COLUMNS, *taken, *(probability_columns(classes) if probabilities else [])}
    for text in texts:
        name, _, listed = text.partition("=")
        members = tuple(find_class(part.strip(), classes, f"--merge {text}") for part in listed.split(","))
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


def check_table_path(run: Run, target: Path, inputs: Sequence[Path]) -> None:
    """Raise, before any work, where the table may not be written."""
    own = [Path(run.naming.out)] if run.naming.out else []
    others = [run.checkpoint_path, *inputs, *own]
    check_side_output(target, "--table", "table", is_ours=is_table, force=run.write.force, others=others)


BLOCK_PROBABILITIES = 1 << 22  # in memory at once
_MISSING = -1


@dataclass(frozen=True)
class RuleColumns:
    """Columns of all rules in a table. Not every file in the table need have every rule.

    Args:
        names: all columns.
        sets: those that hold prediction sets.
        texts: those that hold names of decisions.
    """

    names: tuple[str, ...]
    sets: frozenset[str]
    texts: frozenset[str]

    def of_rows(self, decided: SplitDecisions, probs: Array, rows: slice) -> dict[str, Array]:
        """Return all columns for some rows of a file, with -1, or no text, for rules that it lacks."""
        found = decided.columns(probs, rows)
        missing = {
            name: np.full(len(probs), b"")
            if name in self.texts
            else np.full(probs.shape if name in self.sets else len(probs), _MISSING, dtype=np.int64)
            for name in self.names
            if name not in found
        }
        return {name: (found | missing)[name] for name in self.names}


class Origin(NamedTuple):
    """Split, posterior and integrator of predictions, the level of their intervals, and whether classes are exclusive."""

    split: str
    posterior: str
    variant: str
    level: float | None
    is_exclusive: bool


@dataclass(frozen=True)
class ShownColumns:
    """Columns of a table beyond those that every table has.

    Attributes:
        merges: unions of classes with their own columns.
        has_top_k: True where examples list the classes that a ranking keeps.
        has_names: True where examples have names.
        probabilities: True where every class has its own column.
        rules: columns of calibrate's rules.
        is_raw: True to write texts that a spreadsheet might read as formulas unchanged.
        has_groups: True where examples have groups.
    """

    merges: Sequence[Merge]
    has_top_k: bool
    has_names: bool
    probabilities: bool
    rules: RuleColumns
    is_raw: bool = False
    has_groups: bool = False

    def columns(self, classes: Sequence[str], *, is_exclusive: bool) -> TableBlock:
        """Return a block without rows that has all columns."""
        count = len(classes)
        empty = PredictionFile(
            probs=np.empty((0, count), np.float32), entropy=np.empty(0), mutual_info=None, labels=None,
            sample_id=np.empty(0, np.int64), classes=list(classes),
        )  # fmt: skip
        rules = {name: np.empty((0, count) if name in self.rules.sets else 0, np.int8) for name in self.rules.names}
        return self.block(empty, slice(None), Origin("", "", "", None, is_exclusive), np.empty(0, "S1"), rules)

    def block(
        self, content: PredictionFile, rows: slice, origin: Origin, names: Array | None, decisions: Mapping[str, Array]
    ) -> TableBlock:
        """Return rows of predictions as rows of the table.

        Args:
            names: (n,), names of the rows as UTF-8 bytes; None where they have none.
            decisions: columns of the rules.
        """
        columns = (
            _build_class_columns(content, rows, self.merges, level=origin.level, has_top_k=self.has_top_k)
            if origin.is_exclusive
            else _build_label_columns(content, rows, level=origin.level)
        )
        ids = {"sample_id": content.sample_id[rows]}
        block = TableBlock(origin[:3], {**ids, **columns, **decisions}, sets=self.rules.sets, is_raw=self.is_raw)
        if self.has_names:
            block.columns[NAME] = np.full(len(block.columns["sample_id"]), b"") if names is None else names
        if self.has_groups:
            count = len(block.columns["sample_id"])
            block.columns[GROUP] = np.full(count, -1) if content.groups is None else np.asarray(content.groups[rows])
        if self.probabilities or not origin.is_exclusive:
            block.columns[PROBABILITIES] = np.asarray(content.probs[rows])
        return block


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
        names: split name to the names (N,) of its examples, or None.
        probabilities: True to give every class its own column.
        decided: decisions for the files, in their order.
        is_raw: as in ShownColumns.
    """
    if run.write.dry_run:
        output: dict[str, Any] = {"role": "table", "path": str(target), "planned": "compute", "estimated_bytes": 0}
        return Result("planned", [output], lines=[f"write: {target}"])
    metas = [read_header(path).meta for path in files]
    has_top_k = any(meta.get("top_k") for meta in metas)
    has_names = any(names.get(str(meta["split"])) is not None for meta in metas)
    task = run.console.task("table", sum(int(meta["num_examples"]) for meta in metas))

    rules = list_columns(decided)
    has_groups = any(read_predictions(path).groups is not None for path in files)
    shown = ShownColumns(merges, has_top_k, has_names, probabilities, rules, is_raw, has_groups)

    def blocks() -> Iterator[TableBlock]:
        for place, path in enumerate(files):
            content = read_predictions(path)
            origin, size = _origin(content), max(1, BLOCK_PROBABILITIES // len(content.classes))
            named = names.get(origin.split)
            for start in range(0, max(1, len(content.probs)), size):
                rows = slice(start, start + size)
                probs = np.asarray(content.probs[rows])
                decisions = rules.of_rows(decided[place], probs, rows) if rules.names else {}
                block = shown.block(content, rows, origin, None if named is None else named[rows], decisions)
                task.advance(len(block.columns["sample_id"]))
                yield block

    digest = write_table(target, blocks(), classes)
    return Result("", [{"role": "table", "path": str(target), "content_digest": digest}])


def list_columns(decided: Sequence[SplitDecisions]) -> RuleColumns:
    """Return the columns of all rules of these files."""
    titled = [(_titles(one.name, one.kind), one.kind) for own in decided for one in own.decisions]
    names = tuple(dict.fromkeys(title for titles, _ in titled for title in titles))
    sets, texts = (frozenset(titles[0] for titles, kind in titled if kind == of) for of in (SETS, COSTS))
    return RuleColumns(names, sets, texts)


_TITLES = {
    SETS: ("set", "set_size"), RISK: ("accept",), PRECISION: ("precision_flag",), RECALL: ("recall_flag",), COSTS: ("decision",),
    OOD: ("ood",), SHIFT: (),
}  # fmt: skip


def _titles(name: str, kind: str) -> tuple[str, ...]:
    """Return the columns of a rule, prefixed by its name unless that is the name of its kind."""
    return _TITLES[kind] if name == kind else tuple(f"{name}_{title}" for title in _TITLES[kind])


def _build_class_columns(
    content: PredictionFile, rows: slice, merges: Sequence[Merge], *, level: float | None, has_top_k: bool
) -> dict[str, Array]:
    """Return the columns of examples with one class each."""
    probs = np.asarray(content.probs[rows])
    predicted = probs.argmax(axis=1)
    columns: dict[str, Array] = {
        "predicted": predicted,
        "probability": np.take_along_axis(probs, predicted[:, None], axis=1)[:, 0],
        **_build_example_columns(content, rows),
        **_build_interval_columns(content, rows, level, is_exclusive=True),
        "label": np.full(len(probs), -1, dtype=np.int64) if content.labels is None else content.labels[rows],
    }
    if has_top_k:
        columns[TOP_K] = _list_ranked_classes(probs, None if content.top_k is None else content.top_k[rows])
    for merge in merges:
        columns |= _merge_columns(
            merge, probs, np.empty(0) if content.log_concentration is None else content.log_concentration[rows]
        )
    return columns


def _list_ranked_classes(probs: Array, lengths: Array | None) -> Array:
    """Return the classes that the ranking keeps, most probable first, (n, k), padded with -1."""
    if lengths is None or len(lengths) == 0:
        return np.full((len(probs), 1), -1, dtype=np.int64)
    order = np.argsort(-probs, axis=1, kind="stable")[:, : lengths.max()]
    return np.where(np.arange(order.shape[1]) < lengths[:, None], order, -1)


def _merge_columns(merge: Merge, probs: Array, log_concentration: Array) -> dict[str, Array]:
    """Return the probability of the union and, given a Dirichlet, the central 95 % interval of its Beta."""
    members = list(merge.members)
    columns = {merge.name: probs[:, members].sum(axis=1, dtype=np.float64)}
    low = high = np.full(len(probs), np.nan)
    if log_concentration.ndim == 2:
        merged = dirichlet.merge(torch.from_numpy(np.ascontiguousarray(log_concentration)), [members])
        interval = dirichlet.central_interval(merged[:, 0], merged[:, 1:].logsumexp(dim=1))
        low, high = interval[:, 0].numpy(), interval[:, 1].numpy()
    return columns | {f"{merge.name}_low": low, f"{merge.name}_high": high}


def _build_label_columns(content: PredictionFile, rows: slice, *, level: float | None) -> dict[str, Array]:
    """Return the columns of examples with several labels each; those of labels are (n, L)."""
    probs = np.asarray(content.probs[rows])
    absent = np.full(probs.shape, -1, dtype=np.int64)
    return {
        "predicted": (probs >= THRESHOLD).astype(np.int64),
        **_build_example_columns(content, rows),
        **_build_interval_columns(content, rows, level, is_exclusive=False),
        "label": absent if content.labels is None else content.labels[rows].astype(np.int64),
    }


def _build_example_columns(content: PredictionFile, rows: slice) -> dict[str, Array]:
    """Return the scores (n,) of each example; NaN for scores that the file lacks."""
    values = {name: getattr(content, name) for name in ("entropy", "mutual_info", "energy", "max_logit", "combined")}
    missing = np.full(len(content.sample_id[rows]), np.nan, dtype=np.float32)
    return {name: missing if value is None else value[rows] for name, value in values.items()}


def _build_interval_columns(
    content: PredictionFile, rows: slice, level: float | None, *, is_exclusive: bool
) -> dict[str, Array]:
    """Return the ends of the intervals, (n,) or (n, L), and their level (n,); NaN without intervals."""
    shape = content.probs[rows].shape[: 1 if is_exclusive else 2]
    if content.interval is None:
        missing = np.full(shape, np.nan, dtype=np.float32)
        return {"low": missing, "high": missing, "level": np.full(shape[0], np.nan, dtype=np.float32)}
    ends = content.interval[rows]
    return {"low": ends[..., 0], "high": ends[..., 1], "level": np.full(shape[0], np.nan if level is None else level)}


def _origin(content: PredictionFile) -> Origin:
    assert content.header is not None
    meta = content.header.meta
    level = meta.get("interval_level", LEVEL)  # older files do not record it
    return Origin(str(meta["split"]), str(meta["posterior"]), str(meta["variant"]), level, content.is_exclusive)

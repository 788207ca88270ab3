"""What the rules of calibrate say of predictions: columns of the table, a line for people, numbers for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import DecisionFile
from bnncli.decisions import KINDS, OOD, RISK, SETS, SHIFT
from bnncli.decisions.acceptance import AcceptanceRule
from bnncli.decisions.outliers import OutlierRule
from bnncli.decisions.prediction_sets import SetRule
from bnncli.decisions.shift import ShiftRule
from bnncli.errors import MissingInput
from bnncli.names import percent
from bnncli.session.decisions import Decidable, open_decisions, scores_of, why_unfit
from bnncli.session.run import Run
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

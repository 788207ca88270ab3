"""The rules that calibrate wrote, found beside the predictions they decide on, and what they decide of a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import DecisionFile, read_decision
from bnncli.artifacts.provenance import Source
from bnncli.errors import BnnError, DataError, MissingInput
from bnncli.evaluation.decisions import OOD, RISK, SETS, SHIFT
from bnncli.evaluation.statistics import ScoreGroup
from bnncli.session.run import Run
from bnncli.session.score_rows import PredictedSplit, bootstrap_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.artifacts.predictions import PredictionFile
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.detection import ExampleScores
    from bnncli.evaluation.statistics import ExampleStatistics, Row
    from bnncli.options.scoring import EvaluateOptions
    from bnncli.session.predictions import PredictionGroup

_NAMES: dict[str, tuple[str, ...]] = {
    SETS: ("set_coverage", "worst_class_coverage", "set_size", "empty_sets", "singleton_sets"),
    RISK: ("acceptance", "selective_risk"),
    OOD: ("false_alarm_rate",),
    SHIFT: ("shift_p",),
}
_ASKED_BY: dict[str, dict[str, object]] = {
    SETS: {"sets": "lac"},
    RISK: {"risk": 0.02},
    OOD: {"false_alarm": 0.05},
    SHIFT: {"shift_level": 0.05},
}
_OF_BOTH = ("keep_samples", "top_k")  # parameters of predict that leave the probabilities what they are


class Decidable(Protocol):
    """Predictions that rules decide on, whatever they lie in."""

    @property
    def name(self) -> str:
        """Of the split."""

    @property
    def file(self) -> PredictionFile:
        """The predictions."""

    @property
    def examples(self) -> ExampleStatistics:
        """Numbers of each."""

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """Scores of each, or why there are none."""


def maker_of(header: Header) -> dict[str, Any]:
    """What makes predictions what they are, beside the examples: a rule holds for others that have the same."""
    posterior = next((one["content_digest"] for one in header.inputs if one["role"] == "posterior"), None)
    return maker_as(header.provenance["params"], posterior)


def maker_as(params: Mapping[str, Any], posterior: str | None) -> dict[str, Any]:
    """The same of the parameters of predict, and the posterior's digest."""
    return {"params": {name: value for name, value in params.items() if name not in _OF_BOTH}, "posterior": posterior}


def open_decisions(run: Run, name: str, *, only: Sequence[str] = ()) -> list[DecisionFile]:
    """The rules for the predictions of this name, <posterior>.<integrator>: those named, or all; what is stale or damaged is skipped.

    Raises:
        DataError, MissingInput: one that was named cannot be used.
    """
    found = []
    there = run.folder.decision_files(name)
    paths = [run.folder.decision(name, rule) for rule in only] if only else there
    for path in paths:
        if not path.exists():
            raise _missing_rule(run, name, path, [one.stem for one in there])
    for path in paths:
        try:
            decision = read_decision(path)
            run.use(decision.header)
        except BnnError as error:
            if only:
                raise
            run.console.warn(f"skipping rule {path.stem} of {name}: {error.message}{error.advice}")
            continue
        found.append(decision)
    return found


def _missing_rule(run: Run, name: str, path: Path, there: Sequence[str]) -> MissingInput:
    posterior, _, integrator = name.partition(".")
    asked = _ASKED_BY.get(path.stem, _ASKED_BY[SETS])
    return MissingInput(
        f"{name} has no rule {path.stem!r} (have: {', '.join(there) or 'none'})",
        hint=run.suggest("calibrate", posterior=posterior, integrator=integrator, **asked),
        path=path,
    )


def why_unfit(decision: DecisionFile, header: Header, classes: Sequence[str]) -> str | None:
    """Why a rule says nothing of these predictions; None where it does."""
    if header.meta["split"] == decision.header.meta["split"]:
        return "the rule was calibrated on this split"
    return why_unfit_for(decision, maker_of(header), classes)


def why_unfit_for(decision: DecisionFile, maker: Mapping[str, Any], classes: Sequence[str]) -> str | None:
    """Why a rule says nothing of new data that are predicted so; None where it does."""
    if maker != decision.header.meta["maker"]:
        return (
            f"the rule was calibrated on split {decision.header.meta['split']}, which was predicted with other settings"
        )
    if list(classes) != decision.header.meta["classes"]:
        return "the rule was calibrated with other classes"
    return None


def scores_of(split: Decidable, name: str) -> NDArray:
    """The score (N,) by which a rule goes. Raises DataError where the predictions have none."""
    found = split.detection_scores([name])[name]
    if isinstance(found, str):
        raise DataError(f"\0score\0 {name}: {found}, in split {split.name!r}", code="no_score")
    return found


def described(decision: DecisionFile) -> dict[str, Any]:
    """What rows say of the rule that they score."""
    meta, settings = decision.header.meta, decision.header.meta["settings"]
    kind = meta["rule"]
    found: dict[str, Any] = {"rule": decision.name, "target": settings[_TARGET[kind]]}
    if kind == SETS:
        found |= {"scheme": settings["sets"], "by_class": settings["class_conditional"]}
    if kind in (OOD, SHIFT):
        found["by"] = settings["score"]
    return found if kind == SHIFT else {**found, "confidence": settings["confidence"]}


_TARGET = {SETS: "coverage", RISK: "risk", OOD: "false_alarm", SHIFT: "shift_level"}


class ScoredDecisions:
    """The rules of one group of predictions, as scores of its splits.

    Args:
        run, options: of evaluate.
    """

    def __init__(self, run: Run, options: EvaluateOptions, group: PredictionGroup) -> None:
        self._run, self._options = run, options
        self._decisions = open_decisions(run, group.name)
        self._outside = [PredictedSplit(header) for header in group.splits(is_ood=True).values()]

    @property
    def sources(self) -> list[Source]:
        """The rules as inputs of the scores."""
        headers = [one.header for one in self._decisions]
        return [Source(f"decision.{one.path.stem}", one.path, one.content_digest) for one in headers]

    def rows(self, split: PredictedSplit) -> list[Row]:
        """The rows of every rule on an in-distribution split, and what it says of the out-of-distribution ones."""
        bootstrap = bootstrap_of(self._run, self._options)
        found: list[Row] = []
        for decision in self._decisions:
            found += decision_rows(decision, split, bootstrap)
            if decision.kind in (OOD, SHIFT):
                for other in self._outside:
                    found += decision_rows(decision, other, bootstrap, ood=other.name)
            self._run.console.poll()
        return found


def decision_rows(
    decision: DecisionFile, split: PredictedSplit, bootstrap: Bootstrap | None, *, ood: str | None = None
) -> list[Row]:
    """The rows of one rule on one split; undefined ones say why.

    Args:
        ood: the name of the split, where it is out-of-distribution.
    """
    from bnncli.evaluation.statistics import score_rows

    kind, choices = decision.kind, described(decision)
    other = {} if ood is None else {"ood": ood}
    why = why_unfit(decision, split.header, split.file.classes)
    if why is not None:
        names = ("detection_rate",) if kind == OOD and ood is not None else _NAMES[kind]
        size = len(split.file.sample_id)
        empty: Row = {"value": None, "n": size, **choices, "higher_is_better": None, **other, "undefined": why}
        return [{"name": name, **empty} for name in names]
    if kind == SHIFT:
        return [{**_shift_row(decision, split, choices), **other}]
    groups = _groups(decision, split, choices, is_ood=ood is not None)
    return [{**row, **other} for row in score_rows(groups, (split.name, len(split.examples)), bootstrap)]


def _groups(
    decision: DecisionFile, split: PredictedSplit, choices: dict[str, Any], *, is_ood: bool
) -> list[ScoreGroup]:
    """The scores of a rule but the shift alarm."""
    from bnncli.evaluation import decisions
    from bnncli.evaluation.decisions import AcceptanceRule, OutlierRule, SetRule

    rule, file = decision.rule, split.file
    if isinstance(rule, SetRule):
        uniform = rule.score.uniform(split.name, len(file.probs))
        return decisions.set_scores(rule, file.probs, split.examples.labels, uniform, choices)
    if isinstance(rule, AcceptanceRule):
        return decisions.acceptance_scores(rule.accepts(split.examples.confidence), split.examples.is_right, choices)
    assert isinstance(rule, OutlierRule)
    is_outlier = rule.is_outlier(scores_of(split, choices["by"]))
    return decisions.alarm_scores(is_outlier, choices, is_ood=is_ood)


def _shift_row(decision: DecisionFile, split: PredictedSplit, choices: dict[str, Any]) -> Row:
    """The p-value of a split as a batch; it has no interval of its own."""
    from bnncli.evaluation.decisions import ShiftRule

    assert isinstance(decision.rule, ShiftRule)
    p_value = decision.rule.p_value(scores_of(split, choices["by"]))
    row: Row = {"name": "shift_p", "value": p_value, "n": len(split.examples), **choices, "higher_is_better": None}
    if p_value is None:
        return {**row, "undefined": "empty split"}
    return {**row, "is_alarm": p_value <= decision.rule.level, "standard_error": None, "interval": None}

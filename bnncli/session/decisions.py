"""Find the rules written by calibrate and score their decisions on a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.artifacts.headers import Header
from bnncli.artifacts.posteriors import DecisionFile, read_decision
from bnncli.artifacts.provenance import Source
from bnncli.errors import BnnError, DataError, MissingInput
from bnncli.evaluation.decisions import COSTS, OOD, PRECISION, RECALL, RISK, SETS, SHIFT
from bnncli.evaluation.statistics import ScoreGroup
from bnncli.session.predictions import PredictionGroup, open_groups
from bnncli.session.recommendation import open_recommendation
from bnncli.session.run import Run
from bnncli.session.score_rows import PredictedSplit, bootstrap_of
from bnncli.session.splits import fresh_split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.artifacts.predictions import PredictionFile
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.detection import ExampleScores
    from bnncli.evaluation.statistics import ExampleStatistics, Row
    from bnncli.options.scoring import EvaluateOptions

_NAMES: dict[str, tuple[str, ...]] = {
    SETS: ("set_coverage", "worst_class_coverage", "set_size", "empty_sets", "singleton_sets"),
    RISK: ("acceptance", "selective_risk"),
    **dict.fromkeys((PRECISION, RECALL), ("flagged", "flag_precision", "flag_recall")),
    COSTS: ("decision_cost", "expected_cost", "argmax_cost"),
    OOD: ("false_alarm_rate",),
    SHIFT: ("shift_p",),
}
_ASKED_BY: dict[str, dict[str, object]] = {
    SETS: {"sets": "lac"},
    RISK: {"risk": 0.02},
    PRECISION: {"precision": 0.9},
    RECALL: {"recall": 0.9},
    COSTS: {"costs": "costs.csv"},
    OOD: {"false_alarm": 0.05},
    SHIFT: {"shift_level": 0.05},
}
_OF_BOTH = ("keep_samples", "top_k")  # predict parameters that do not change the probabilities


class Decidable(Protocol):
    """Predictions that rules can decide on, whatever their source."""

    @property
    def name(self) -> str:
        """Name of the split."""

    @property
    def file(self) -> PredictionFile:
        """Contents of the prediction file."""

    @property
    def examples(self) -> ExampleStatistics:
        """Statistics of each example."""

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """Return the named scores of each example, or the reason there are none."""


def maker_of(header: Header) -> dict[str, Any]:
    """Return what determines the predictions apart from the examples; a rule applies if these match."""
    posterior = next((one["content_digest"] for one in header.inputs if one["role"] == "posterior"), None)
    return maker_as(header.provenance["params"], posterior)


def maker_as(params: Mapping[str, Any], posterior: str | None) -> dict[str, Any]:
    """Return `maker_of` from the parameters of predict and the posterior's digest."""
    return {"params": {name: value for name, value in params.items() if name not in _OF_BOTH}, "posterior": posterior}


def open_decisions(run: Run, name: str, *, only: Sequence[str] = ()) -> list[DecisionFile]:
    """Open the rules for the predictions called <posterior>.<integrator>.

    Without `only`, stale and damaged rules are skipped.

    Raises:
        DataError, MissingInput: a named rule cannot be used.
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


def explain_unfit_rule(decision: DecisionFile, header: Header, classes: Sequence[str]) -> str | None:
    """Return why a rule does not apply to these predictions, or None if it does."""
    if header.meta["split"] == decision.header.meta["split"]:
        return "the rule was calibrated on this split"
    return explain_unfit_rule_for(decision, maker_of(header), classes)


def explain_unfit_rule_for(decision: DecisionFile, maker: Mapping[str, Any], classes: Sequence[str]) -> str | None:
    """Return why a rule does not apply to new data predicted this way, or None if it does."""
    if maker != decision.header.meta["maker"]:
        return (
            f"the rule was calibrated on split {decision.header.meta['split']}, which was predicted with other settings"
        )
    if list(classes) != decision.header.meta["classes"]:
        return "the rule was calibrated with other classes"
    return None


def scores_of(split: Decidable, name: str) -> NDArray:
    """Return the score (N,) a rule decides by.

    Raises:
        DataError: the predictions do not have this score.
    """
    found = split.detection_scores([name])[name]
    if isinstance(found, str):
        raise DataError(f"\0score\0 {name}: {found}, in split {split.name!r}", code="no_score")
    return found


def identify_rule(decision: DecisionFile) -> dict[str, Any]:
    """Return the fields that identify the rule in its score rows."""
    meta, settings = decision.header.meta, decision.header.meta["settings"]
    kind = meta["rule"]
    found: dict[str, Any] = {"rule": decision.name}
    if kind in _TARGET:
        found["target"] = settings[_TARGET[kind]]
    if kind == SETS:
        found |= {"scheme": settings["sets"], "by_class": settings["class_conditional"]}
    if kind in (PRECISION, RECALL):
        found["class"] = settings["class"]
    if kind in (OOD, SHIFT):
        found["by"] = settings["score"]
    return found if kind == SHIFT else {**found, "confidence": settings["confidence"]}


_TARGET = {
    SETS: "coverage",
    RISK: "risk",
    PRECISION: "precision",
    RECALL: "recall",
    OOD: "false_alarm",
    SHIFT: "shift_level",
}


class ScoredDecisions:
    """Rules of one prediction group, scored on its splits.

    Args:
        run, options: of evaluate.
    """

    def __init__(self, run: Run, options: EvaluateOptions, group: PredictionGroup) -> None:
        self._run, self._options = run, options
        self._decisions = open_decisions(run, group.name)
        self._outside = [PredictedSplit(header) for header in group.splits(is_ood=True).values()]

    @property
    def sources(self) -> list[Source]:
        """Return the rules as sources of the scores."""
        headers = [one.header for one in self._decisions]
        return [Source(f"decision.{one.path.stem}", one.path, one.content_digest) for one in headers]

    def rows(self, split: PredictedSplit) -> list[Row]:
        """Return the rows of every rule on an in-distribution split and on the out-of-distribution splits."""
        bootstrap = bootstrap_of(self._run, self._options, split, *self._outside)
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
    """Return the rows of one rule on one split; undefined scores have a reason.

    Args:
        ood: the split's name if it is out-of-distribution.
    """
    from bnncli.evaluation.statistics import score_rows

    kind, choices = decision.kind, identify_rule(decision)
    other = {} if ood is None else {"ood": ood}
    why = explain_unfit_rule(decision, split.header, split.file.classes)
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
    """Return the scores of a rule, except the shift alarm."""
    from bnncli.evaluation import decisions
    from bnncli.evaluation.decisions import AcceptanceRule, ClassRule, CostRule, OutlierRule, SetRule

    rule, file = decision.rule, split.file
    if isinstance(rule, SetRule):
        uniform = rule.score.uniform(split.name, len(file.probs))
        return decisions.set_scores(rule, file.probs, split.examples.labels, uniform, choices)
    if isinstance(rule, AcceptanceRule):
        return decisions.acceptance_scores(rule.accepts(split.examples.confidence), split.examples.is_right, choices)
    if isinstance(rule, ClassRule):
        labels = split.examples.labels
        is_positive = None if labels is None else labels == rule.of_class
        return decisions.class_scores(rule.flags(file.probs), is_positive, choices)
    if isinstance(rule, CostRule):
        return decisions.cost_scores(rule, file.probs, split.examples.labels, file.classes, choices)
    assert isinstance(rule, OutlierRule)
    is_outlier = rule.is_outlier(scores_of(split, choices["by"]))
    return decisions.alarm_scores(is_outlier, choices, is_ood=is_ood)


def _shift_row(decision: DecisionFile, split: PredictedSplit, choices: dict[str, Any]) -> Row:
    """Return the p-value of a split as one batch; it has no interval."""
    from bnncli.evaluation.decisions import ShiftRule

    assert isinstance(decision.rule, ShiftRule)
    row: Row = {"name": "shift_p", "value": None, "n": len(split.examples), **choices, "higher_is_better": None}
    if split.groups is not None:
        return {**row, "undefined": "the test needs independent rows, but these are in groups"}
    row["value"] = p_value = decision.rule.p_value(scores_of(split, choices["by"]))
    if p_value is None:
        return {**row, "undefined": "empty split"}
    return {**row, "is_alarm": p_value <= decision.rule.level, "standard_error": None, "interval": None}


def find_calibration_predictions(
    run: Run, split: str, posterior: str | None, integrator: str | None
) -> list[tuple[PredictionGroup, Header]]:
    """Return the predictions to calibrate, each with the header of its predictions of the split.

    Args:
        posterior, integrator: as named; None for both takes auto's recommendation, else all predictions of the split.

    Raises:
        MissingInput: there are no predictions of the split. The hint has the command that makes them.
        DataError: the split is out-of-distribution.
    """
    if posterior is None and integrator is None and (found := open_recommendation(run)) is not None:
        posterior, integrator = found.posterior, found.integrator
        run.console.info(
            f"using {posterior} ({integrator}), which auto recommends; choose another with \0posterior\0 NAME"
        )
    if not run.folder.features(split).is_file() and run.folder.splits():
        raise MissingInput(
            f"{run.checkpoint_path} has no split {split!r} (have: {', '.join(run.folder.splits())})",
            hint=fresh_split(run, split),
            path=run.folder.features(split),
        )
    posteriors, integrators = ([name] if name else [] for name in (posterior, integrator))
    groups = open_groups(run, posteriors=posteriors, integrators=integrators)
    chosen = []
    for group in groups:
        if split in group.splits(is_ood=True):
            message = (
                f"split {split!r} is out-of-distribution, but the guarantees hold only for examples like "
                "the calibration split"
            )
            raise DataError(message, code="ood_split", hint=fresh_split(run, split))
        header = group.splits(is_ood=False).get(split)
        if header is not None:
            chosen.append((group, header))
        elif posterior is None:
            run.console.warn(f"skipping {group.name}: it has no predictions for split {split!r}")
    if not chosen:
        hint = run.suggest("predict", posterior=posterior, integrator=integrator, split=split)
        raise MissingInput(f"no predictions of split {split!r}", hint=hint)
    return chosen

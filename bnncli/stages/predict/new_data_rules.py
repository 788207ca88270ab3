"""What the rules of calibrate say of new data, block by block as they are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bnncli.artifacts.posteriors import DecisionFile
from bnncli.artifacts.predictions import PredictionFile
from bnncli.decisions.shift import ShiftRule
from bnncli.evaluation.detection import ExampleScores
from bnncli.evaluation.detectors import example_scores
from bnncli.evaluation.example_statistics import ExampleStatistics, examples_of
from bnncli.session.decisions import maker_as, open_decisions, scores_of, why_unfit_for
from bnncli.session.run import Run
from bnncli.stages.predict.decided import NONE, RuleColumns, SplitDecisions, columns_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PredictedBlock:
    """Some rows of a split, predicted; in no file."""

    name: str
    file: PredictionFile

    @cached_property
    def examples(self) -> ExampleStatistics:
        """The numbers of each example."""
        probs, labels = self.file.probs, self.file.labels
        return examples_of(probs, labels, num_classes=len(self.file.classes), is_exclusive=True)

    def detection_scores(self, names: Sequence[str]) -> ExampleScores:
        """The scores of these names of each example, or why there are none."""
        return example_scores(names, self.examples, lambda name: getattr(self.file, name))


@dataclass(frozen=True)
class NewDataRules:
    """The rules that fit one posterior and integrator.

    Args:
        name: of its predictions in the run.
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
        """Those of the run that hold for what is predicted so; why others do not is said.

        Args:
            params: of predict. posterior: its digest. only: names of rules; all where none is named.

        Raises:
            MissingInput, DataError: one that is named is not there, or cannot be used.
        """
        name = ".".join(origin)
        found = [] if list(only) == [NONE] else open_decisions(run, name, only=[one for one in only if one != NONE])
        reasons = {one.name: why_unfit_for(one, maker_as(params, posterior), classes) for one in found}
        for rule, why in reasons.items():
            if why is not None:
                run.console.info(f"{name}: skipping rule {rule}: {why}")
        return cls(name, origin, [one for one in found if reasons[one.name] is None])

    def of_block(self, split: str, content: PredictionFile, first: int, columns: RuleColumns) -> dict[str, Array]:
        """Columns of some rows of a split, the first of which is its row `first`."""
        decided = SplitDecisions(self.name, PredictedBlock(split, content), self.decisions, self.origin, first)
        for one in self.decisions:
            if isinstance(one.rule, ShiftRule):
                scores = scores_of(decided.split, one.header.meta["settings"]["score"])
                self._scores.setdefault((split, one.name), []).append(scores)
        return columns.of_rows(decided, content.probs, slice(None)) if columns.names else {}

    def alarms(self) -> Iterator[dict[str, Any]]:
        """What the shift alarms say of each split as a batch."""
        rules = {one.name: one.rule for one in self.decisions}
        for (split, name), parts in self._scores.items():
            rule = rules[name]
            assert isinstance(rule, ShiftRule)
            p_value = rule.p_value(np.concatenate(parts))
            row = {"name": self.name, "split": split, "rule": name, "kind": "shift", "p_value": p_value}
            yield {**row, "is_alarm": p_value is not None and p_value <= rule.level}


def columns_of_rules(rules: Sequence[NewDataRules]) -> RuleColumns:
    """The columns that a table has of all of them."""
    nothing = PredictionFile(np.empty((0, 1)), np.empty(0), None, None, np.empty(0), [])
    return columns_of(
        [SplitDecisions(one.name, PredictedBlock("", nothing), one.decisions, one.origin) for one in rules]
    )

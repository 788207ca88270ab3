"""The scores that evaluate and compare know, a file each: `scores/brier.py` is what makes `--metric brier` exist.

A file declares its score and how it is computed, and imports what computes it only then: options and help read the declarations.
Options, tables, JSON, assertions and compare have nothing else to go by.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING

from bnncli import registry
from bnncli.evaluation.score_options import ScoreOption, merged

if TYPE_CHECKING:
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.detection import DetectionForm
    from bnncli.evaluation.example_statistics import ExampleStatistics
    from bnncli.evaluation.fidelity import PredictionPair
    from bnncli.evaluation.metric_rows import Row
    from bnncli.evaluation.reference_distances import Distance
    from bnncli.evaluation.scored_predictions import ScoredPredictions
    from bnncli.evaluation.weighted_scores import ScoreGroup

LAST = 1000


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one score declares; one of `of_split`, `of_two_splits`, `of_other_split`, `of_draws`, `of_reference` and
    `computed_by` makes it.

    None of them: the score tells of a posterior's network, or of a rule, and rows of it come from where those are made.

    Args:
        title: heads its column; {k} stands for the `k` of its row.
        place: its place among the others in tables, help and JSON. Those that have none stand last, by name; metrics
            files say which of them there were.
        digits: decimals in tables.
        is_shown: evaluate shows it, in its usual form, when no --metric is named, and compare where it can.
        usual: choices that are meant where a form is not named.
        told_by: choices in which its forms differ, in the order in which a title names them.
        limits: the least and the largest value that it can have in its usual forms: no interval reaches beyond.
        facts: further fields of its rows that tell of the number, and no form from another.
        has_floor: a calibrated model scores above 0 by chance: its rows have `floor` and `excess`. So have those of
            `of_reference`, of which the floor is another.
        note: a line below the table that has it among the usual ones.
        options: those that set it, by their names; their values are in the `settings` of a scored split.
        of_split: the score of one split's predictions.
        of_labels: the same where an example has several labels; None where it means nothing there.
        shown_of_labels: choices of the form that evaluate shows there; None: as of classes.
        of_two_splits: its forms, of how well a score of each example tells two splits apart.
        of_other_split: the row of what predictions of an out-of-distribution split (named) say by themselves.
        of_draws: the distance between draws of theta and those of a reference.
        of_reference: how near predictions come to those of a reference; its `floor` is what halves of its draws have.
        computed_by: the score whose file computes this one as well.
        is_of_rule: it tells what a rule of calibrate decides; its rows come with the rules of the predictions.
    """

    title: str
    place: float = LAST
    digits: int = 4
    is_shown: bool = False
    usual: Mapping[str, str] = field(default_factory=dict)
    told_by: tuple[str, ...] = ()
    limits: tuple[float, float] = (-inf, inf)
    facts: tuple[str, ...] = ()
    has_floor: bool = False
    note: str | None = None
    options: Mapping[str, ScoreOption] = field(default_factory=dict)
    of_split: Callable[[ScoredPredictions], Sequence[ScoreGroup]] | None = None
    of_labels: Callable[[ScoredPredictions], Sequence[ScoreGroup]] | None = None
    shown_of_labels: Mapping[str, str] | None = None
    of_two_splits: Callable[[], Sequence[DetectionForm]] | None = None
    of_other_split: Callable[[ExampleStatistics, str, Bootstrap | None], Row] | None = None
    of_draws: Callable[[], Distance] | None = None
    of_reference: Callable[[PredictionPair], ScoreGroup] | None = None
    computed_by: str | None = None
    is_of_rule: bool = False

    @property
    def is_paired(self) -> bool:
        """Whether two posteriors can be paired in it, example by example; other scores tell of one posterior as a whole."""
        return self.of_split is not None or self.of_two_splits is not None or self.computed_by is not None


@cache
def declared() -> dict[str, Score]:
    """Every score by its name, in the order of tables."""
    found: dict[str, Score] = {
        name.replace("-", "_"): registry.load_module("scores", name).SCORE for name in registry.names("scores")
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


@cache
def options() -> dict[str, ScoreOption]:
    """The options that set scores, by their names, in order."""
    return merged("scores", {name: score.options for name, score in declared().items()})


def further_names() -> list[str]:
    """The scores that have no place of their own: a metrics file without them is not up to date."""
    return [name for name, score in declared().items() if score.place == LAST]


def split_scores(split: ScoredPredictions, names: Collection[str] | None = None) -> list[ScoreGroup]:
    """Every score of one split's predictions, or those of these names and what is computed with them.

    Where an example has several labels, those that mean something there.
    """
    scores = declared()
    split = replace(split, settings={name: one.default for name, one in options().items()} | dict(split.settings))
    wanted = scores if names is None else {scores[name].computed_by or name for name in names}
    has_labels = split.examples.of_labels is not None
    makers = {name: score.of_labels if has_labels else score.of_split for name, score in scores.items()}
    return [group for name, make in makers.items() if make is not None and name in wanted for group in make(split)]


def detection_forms() -> dict[str, Sequence[DetectionForm]]:
    """The forms of every score of telling two splits apart, by its name."""
    return {name: score.of_two_splits() for name, score in declared().items() if score.of_two_splits is not None}


def other_split_rows(examples: ExampleStatistics, ood: str, bootstrap: Bootstrap | None) -> list[Row]:
    """The rows of what predictions of an out-of-distribution split say by themselves."""
    makers = [score.of_other_split for score in declared().values()]
    return [make(examples, ood, bootstrap) for make in makers if make is not None]


def distances() -> dict[str, Distance]:
    """Every distance between draws, by its name."""
    return {name: score.of_draws() for name, score in declared().items() if score.of_draws is not None}


def fidelities() -> list[Callable[[PredictionPair], ScoreGroup]]:
    """Every score of how near predictions come to a reference's."""
    return [score.of_reference for score in declared().values() if score.of_reference is not None]

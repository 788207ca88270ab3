"""The scores of single examples by which splits are told apart, a file each: `detectors/energy.py` is what makes `--score energy` exist.

All are higher for what looks in-distribution. A file declares its score and how it is computed, and imports what computes it only then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.evaluation.score_options import ScoreOption, merged

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from bnncli.evaluation.example_statistics import ExampleStatistics

LAST = 1000
# The score by which every command tells splits apart where none is named, and what stands in where predictions lack it, the best first:
# docs/explanation/outliers.md has the measurements. Of errors, not outliers, the largest probability tells (selective prediction).
DEFAULT_SCORE = "combined"
FALLBACK_SCORES = ("mutual_info", "max_prob")


@dataclass(frozen=True)
class TrainingFeatures:
    """What detectors by features are fitted to.

    Args:
        features: (N, D) of the training split; may be mapped from a file.
        labels: (N,) classes, or None.
        generator: makes a stream of random numbers for a purpose.
        settings: values of the options that detectors bring.
        no_classes: why there are no labels, where there are none.
    """

    features: Tensor
    labels: Tensor | None
    device: torch.device
    generator: Callable[[str], torch.Generator]
    settings: Mapping[str, Any]
    no_classes: str = "the training split has no labels"


@dataclass(frozen=True)
class FittedDetector:
    """A detector by features, fitted.

    Args:
        scores: features (n, D) to the scores (n,), by name.
        choices: what defines the number, in rows of each score.
        notes: what a user should know of the fit, said as warnings.
    """

    scores: Callable[[Tensor], Mapping[str, Tensor]]
    choices: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Detector:
    """What one score of an example declares; one of `of_predictions`, `of_features` and `computed_by` makes it.

    Args:
        place: its place among the others in tables, help and JSON. Those that have none stand last, by name.
        of_predictions: (N,) from the numbers of each example, and from the array that it `needs`.
        needs: array of the prediction file that it is made of; None: the class probabilities alone.
        without: why there is no such score where predictions lack that array.
        of_features: fits it to the training split. Raises DataError, with the reason, where there is none.
        computed_by: the score of features whose file computes this one as well.
        options: those that set it, by their names.
    """

    place: int = LAST
    of_predictions: Callable[[ExampleStatistics, NDArray | None], NDArray] | None = None
    needs: str | None = None
    without: str = ""
    of_features: Callable[[TrainingFeatures], FittedDetector] | None = None
    computed_by: str | None = None
    options: Mapping[str, ScoreOption] = field(default_factory=dict)


@cache
def declared() -> dict[str, Detector]:
    """Every detector by its name, in the order of tables."""
    found: dict[str, Detector] = {
        name.replace("-", "_"): registry.load_module("detectors", name).DETECTOR for name in registry.names("detectors")
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


@cache
def options() -> dict[str, ScoreOption]:
    """The options that set detectors, by their names, in order."""
    return merged("detectors", {name: detector.options for name, detector in declared().items()})


def of_predictions() -> list[str]:
    """The names of the scores of predictions."""
    return [name for name, detector in declared().items() if detector.of_predictions is not None]


def of_features() -> list[str]:
    """The names of the scores of features, the same for all posteriors."""
    return [name for name, detector in declared().items() if detector.of_predictions is None]


def of_probabilities() -> list[str]:
    """The names of the scores that are made of the class probabilities alone."""
    return [name for name in of_predictions() if declared()[name].needs is None]


def default_score(arrays: Iterable[Collection[str]]) -> str:
    """The default score, or the first that stands in for it that all predictions have.

    Args:
        arrays: names of the arrays that each prediction file has.
    """
    shared = set.intersection(*map(set, arrays)) if (arrays := list(arrays)) else set()
    return usual_score([name for name in of_predictions() if declared()[name].needs in (None, *shared)])


def usual_score(there: Collection[str | None]) -> str:
    """The default score, or the first that stands in for it, of those that are there; the default where none is."""
    return next((name for name in (DEFAULT_SCORE, *FALLBACK_SCORES) if name in there), DEFAULT_SCORE)


def example_scores(
    names: Sequence[str], examples: ExampleStatistics, arrays: Callable[[str], NDArray | None]
) -> dict[str, NDArray | str]:
    """Scores of predictions (N,) by their names, or the reason why these predictions do not give one.

    Args:
        arrays: those of the prediction file by name, None where it has none; (N, C) ones are read in blocks of rows.
    """
    return {name: _example_score(declared()[name], examples, arrays) for name in names}


def _example_score(
    detector: Detector, examples: ExampleStatistics, arrays: Callable[[str], NDArray | None]
) -> NDArray | str:
    assert detector.of_predictions is not None
    if detector.needs is None:
        return detector.of_predictions(examples, None)
    values = arrays(detector.needs)
    return detector.without if values is None else detector.of_predictions(examples, values)

"""Detectors: one table of the scores of single examples that tell splits apart, with the computation and options of each.

`--score NAME` reads this table. All detectors are higher for what looks in-distribution. Those of predictions are vectors of
the prediction file or of the class probabilities; those of features are fitted to the training split (feature_scores.py).
Installed distributions add detectors through the entry point group `bnncli.detectors`; the module that it names defines
`DETECTOR`.
"""

# Options and help read this module: functions import numpy and whatever computes a detector.
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.evaluation.scores import LAST, ScoreOption, merge_options

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from bnncli.evaluation.statistics import ExampleStatistics

# The default detector of every command, and its replacements for predictions without it, best first: see
# docs/explanation/outliers.md for measurements. The largest probability detects errors, not outliers (selective
# prediction).
DEFAULT_SCORE = "combined"
FALLBACK_SCORES = ("mutual_info", "max_prob")
FEWEST_ROWS = 20  # of val: the combined score ranks against them


@dataclass(frozen=True)
class TrainingFeatures:
    """The training split, to which detectors of features are fitted.

    Args:
        features: (N, D); may be memory-mapped.
        labels: (N,) classes, or None.
        device: device of the fit.
        generator: returns the random stream of a purpose.
        settings: values of the detectors' options.
        no_classes: reason for missing labels.
    """

    features: Tensor
    labels: Tensor | None
    device: torch.device
    generator: Callable[[str], torch.Generator]
    settings: Mapping[str, Any]
    no_classes: str = "the training split has no labels"


@dataclass(frozen=True)
class FittedDetector:
    """A fitted detector of features.

    Args:
        scores: maps features (n, D) to scores (n,), by name.
        choices: what defines the numbers; part of each row.
        notes: warnings about the fit.
    """

    scores: Callable[[Tensor], Mapping[str, Tensor]]
    choices: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Detector:
    """A score of single examples; exactly one of `of_predictions`, `of_features` and `computed_by` is set.

    Args:
        definition: one sentence for the reference documentation.
        place: position in tables, help and JSON; detectors without one come last, by name.
        of_predictions: computes (N,) from the statistics of the examples and the array that the detector `needs`.
        needs: array of the prediction file; None: class probabilities suffice.
        without: reason for a missing score where predictions lack that array.
        of_features: fits the detector to the training split. Raises DataError, with the reason, if it cannot be fitted.
        computed_by: name of the detector of features whose fit computes this one, too.
        options: options of the detector, by name.
    """

    definition: str = ""
    place: int = LAST
    of_predictions: Callable[[ExampleStatistics, NDArray | None], NDArray] | None = None
    needs: str | None = None
    without: str = ""
    of_features: Callable[[TrainingFeatures], FittedDetector] | None = None
    computed_by: str | None = None
    options: Mapping[str, ScoreOption] = field(default_factory=dict)


def _float64(values: NDArray | None) -> NDArray:
    import numpy as np

    return np.asarray(values, dtype=np.float64)


def _negative_variance(examples: ExampleStatistics, values: NDArray | None) -> NDArray:
    """Return (N,) from log concentrations (N, C), or (N, C, 2) of each label's Beta, read in blocks of rows."""
    import numpy as np
    import torch

    from bnncli.evaluation.statistics import row_blocks
    from bnncli.numerics.dirichlet import total_variance

    assert values is not None
    found = [np.empty(0)]
    for rows in row_blocks(len(values), prod(values.shape[1:])):
        block = torch.from_numpy(np.asarray(values[rows]))
        if block.ndim == 3:  # a label and its absence have the same variance
            found.append(-total_variance(block.flatten(0, 1)).view(block.shape[:2]).sum(dim=1).numpy() / 2)
        else:
            found.append(-total_variance(block).numpy())
    return np.concatenate(found)


def _fit_gaussians(train: TrainingFeatures) -> FittedDetector:
    """Fit the Gaussians of both Mahalanobis distances."""
    from bnncli.errors import DataError
    from bnncli.evaluation.feature_scores import Mahalanobis

    if train.labels is None:
        raise DataError(train.no_classes)
    return FittedDetector(Mahalanobis.fit(train.features, train.labels, device=train.device).scores)


def _fit_neighbors(train: TrainingFeatures) -> FittedDetector:
    """Keep the training features, scaled to unit length."""
    from bnncli.evaluation.feature_scores import Neighbors

    asked = train.settings["neighbors"]
    generator = train.generator("evaluate/neighbors")
    neighbors = Neighbors.fit(train.features, device=train.device, generator=generator, num_neighbors=asked)
    found = neighbors.num_neighbors
    note = f"\0neighbors\0 {asked}: using k = {found}, because there are only {found} training examples"
    notes = [note] if found < asked else []
    return FittedDetector(lambda features: {"knn": neighbors.scores(features)}, {"neighbors": found}, notes)


_NEIGHBORS = ScoreOption(
    text="k of \0score\0 knn: the distance to the k-th nearest training features.",
    default=50,  # published for 50,000 training examples
    minimum=1,
    place=2,
)

DETECTORS = {
    # Haroush, Frostig, Heller and Soudry (2022), arXiv 2102.12967; Fisher (1932). predict computes it, from the run's features.
    "combined": Detector(
        definition="Energy, Mahalanobis distance and nearest neighbours as one score, by Fisher's method: see evaluation/feature_scores.py.",
        place=1,
        of_predictions=lambda examples, values: _float64(values),
        needs="combined",
        without="the predictions have no combined score; predict computes it from the features of train and val",
    ),
    "max_prob": Detector(
        definition="The largest class probability: Hendrycks and Gimpel (2017), arXiv 1610.02136.",
        place=2,
        of_predictions=lambda examples, values: examples.confidence,
    ),
    "entropy": Detector(
        definition="The entropy of the class probabilities, its sign turned.",
        place=3,
        of_predictions=lambda examples, values: -examples.entropy,
    ),
    "mutual_info": Detector(
        definition="The mutual information of class and parameters, its sign turned: Houlsby et al. (2011), arXiv 1112.5745.",
        place=4,
        of_predictions=lambda examples, values: -_float64(values),
        needs="mutual_info",
        without="this integrator provides no mutual information",
    ),
    "dirichlet_variance": Detector(
        definition="The variance of the class probabilities, or of each label's, summed and its sign turned, where the prediction is a Dirichlet.",
        place=5,
        of_predictions=_negative_variance,
        needs="log_concentration",
        without="this integrator provides no Dirichlet distribution",
    ),
    "energy": Detector(
        definition="The free energy of the logits, its sign turned: Liu, Wang, Owens and Li (2020), arXiv 2010.03759.",
        place=6,
        of_predictions=lambda examples, values: -_float64(values),
        needs="energy",
        without="the predictions have no energies",
    ),
    "max_logit": Detector(
        definition="The largest logit: Hendrycks et al. (2022), arXiv 1911.11132.",
        place=7,
        of_predictions=lambda examples, values: _float64(values),
        needs="max_logit",
        without="the predictions have no logits",
    ),
    "mahalanobis": Detector(
        definition="The Mahalanobis distance of features to the nearest class: Lee, Lee, Lee and Shin (2018), arXiv 1807.03888.",
        place=8,
        of_features=_fit_gaussians,
    ),
    "relative_mahalanobis": Detector(
        definition="That distance less the one to all examples: Ren et al. (2021), arXiv 2106.09022.",
        place=9,
        computed_by="mahalanobis",
    ),
    "knn": Detector(
        definition="The distance of features to their k-th nearest neighbour: Sun, Ming, Zhu and Li (2022), arXiv 2204.06507.",
        place=10,
        of_features=_fit_neighbors,
        options={"neighbors": _NEIGHBORS},
    ),
}


@cache
def all_detectors() -> dict[str, Detector]:
    """Return every detector by name, in the order of tables; installed distributions may add some.

    Raises:
        UsageError: an installed detector has the name of another one, or cannot be used.
    """
    return registry.with_installed("detectors", DETECTORS)


@cache
def detector_options() -> dict[str, ScoreOption]:
    """Return the options that set detectors, by name, in order."""
    return merge_options("detectors", {name: detector.options for name, detector in all_detectors().items()})


def prediction_detectors() -> list[str]:
    """Return the names of the detectors of predictions."""
    return [name for name, detector in all_detectors().items() if detector.of_predictions is not None]


def feature_detectors() -> list[str]:
    """Return the names of the detectors of features, which are the same for all posteriors."""
    return [name for name, detector in all_detectors().items() if detector.of_predictions is None]


def probability_detectors() -> list[str]:
    """Return the names of the detectors that need class probabilities alone."""
    return [name for name in prediction_detectors() if all_detectors()[name].needs is None]


def default_score(arrays: Iterable[Collection[str]]) -> str:
    """Return the default detector, or its first replacement that all predictions have.

    Args:
        arrays: names of the arrays of each prediction file.
    """
    shared = set.intersection(*map(set, arrays)) if (arrays := list(arrays)) else set()
    return usual_score([name for name in prediction_detectors() if all_detectors()[name].needs in (None, *shared)])


def usual_score(there: Collection[str | None]) -> str:
    """Return the default detector, or its first replacement, among those that are there; the default if none is."""
    return next((name for name in (DEFAULT_SCORE, *FALLBACK_SCORES) if name in there), DEFAULT_SCORE)


def example_scores(
    names: Sequence[str], examples: ExampleStatistics, arrays: Callable[[str], NDArray | None]
) -> dict[str, NDArray | str]:
    """Return the scores (N,) of predictions by name, or the reason for a missing one.

    Args:
        arrays: returns an array of the prediction file by name, or None; (N, C) arrays are read in blocks of rows.
    """
    return {name: _example_score(all_detectors()[name], examples, arrays) for name in names}


def _example_score(
    detector: Detector, examples: ExampleStatistics, arrays: Callable[[str], NDArray | None]
) -> NDArray | str:
    assert detector.of_predictions is not None
    if detector.needs is None:
        return detector.of_predictions(examples, None)
    values = arrays(detector.needs)
    return detector.without if values is None else detector.of_predictions(examples, values)

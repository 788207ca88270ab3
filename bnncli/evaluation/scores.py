"""Scores of predictions and posteriors: one table with the name, direction, definition, computation and options of each.

`evaluate --metric NAME`, assertions, `compare`, tables and JSON read this table. Scores with few lines are computed here, the
others in the module that their function imports. A score is a function of how often each example counts, so the bootstrap
resamples all of them alike: see statistics.py. Installed distributions add scores through the entry point group
`bnncli.scores`; the module that it names defines `SCORE`.
"""

# Options and help read this module: functions import numpy and whatever computes a score.
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

from bnncli import registry
from bnncli.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.detection import DetectionForm
    from bnncli.evaluation.distances import Distance
    from bnncli.evaluation.fidelity import PredictionPair
    from bnncli.evaluation.groups import RowGroups
    from bnncli.evaluation.statistics import ExampleStatistics, Row, ScoreGroup

LAST = 1000


@dataclass(frozen=True, kw_only=True)
class ScoreOption:
    """An option that sets a score or a detector.

    Args:
        text: help text; options are named by their field, as in messages.
        default: default value; stored with the metrics.
        in_compare: help text in `compare`; empty if `compare` does not have the option.
        type: type of the value.
        minimum, maximum: inclusive bounds of a number.
        metavar: placeholder of the value in the help.
        check: raises UsageError for an invalid value, given the value and the option's name.
        place: position among the options of scores, ascending; options without one come last.
    """

    text: str
    default: Any
    in_compare: str = ""
    type: type = int
    minimum: float | None = None
    maximum: float | None = None
    metavar: str = ""
    check: Callable[[Any, str], object] | None = None
    place: int = LAST


@dataclass(frozen=True)
class ScoredPredictions:
    """Predictions of one split, as scores read them.

    Args:
        probs: (N, C), which `examples` was computed from; may be mapped from a file.
        examples: statistics of each example.
        mutual_info: (N,) nats, or None.
        lengths: (N,) number of classes that the uncertainty-aware ranking keeps, or None.
        ranking: rule, threshold and cap of that ranking.
        settings: values of the scores' options; missing options have their defaults.
        classes: names of the C classes; None if unknown.
        groups: groups of dependent rows, such as texts, or None.
        sample_id: (N,), the row of each example in its source; None for examples in order.
    """

    probs: NDArray
    examples: ExampleStatistics
    mutual_info: NDArray | None = None
    lengths: NDArray | None = None
    ranking: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    classes: Sequence[str] | None = None
    groups: RowGroups | None = None
    sample_id: NDArray | None = None

    def take(self, rows: NDArray) -> ScoredPredictions:
        """Return the predictions of some examples (n,), without groups."""
        vectors = {name: getattr(self, name) for name in ("mutual_info", "lengths", "sample_id")}
        own: dict[str, Any] = {name: None if value is None else value[rows] for name, value in vectors.items()}
        return replace(self, probs=self.probs[rows], examples=self.examples.take(rows), groups=None, **own)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score: how it is shown, and how it is computed.

    At most one of `of_split`, `of_two_splits`, `of_other_split`, `of_draws`, `of_reference` and `computed_by` is set. None is
    set for scores of a latent binary network (`commands/evaluate`) and of a rule of `calibrate` (`decisions.py`).

    Args:
        title: column heading; `{k}` stands for the `k` of the row.
        definition: one sentence for the reference documentation.
        higher_is_better: direction; None if neither direction is better.
        place: position in tables, help and JSON. Scores without one come last, sorted by name, and metrics files list them.
        digits: decimals in tables.
        is_shown: whether `evaluate` shows the usual form by default, and `compare` if it can.
        usual: choices of the form that is meant if the user names no form.
        told_by: choices that distinguish the forms, in the order of the title.
        limits: smallest and largest value of the usual forms; intervals are clipped to them.
        facts: other fields of a row that describe the value and do not distinguish forms.
        has_floor: whether rows have `floor` and `excess`: a calibrated model scores above 0 by chance, and so do halves of a
            reference's draws (`of_reference`).
        note: line below a table that shows the score by default.
        needs: what predictions without the score lack, if it is computed only for some.
        options: options of the score by name; `ScoredPredictions.settings` has their values.
        of_split: computes the score from the predictions of one split.
        of_labels: the same for multi-label predictions; None if the score is undefined for them.
        shown_of_labels: choices of the form shown by default for multi-label predictions; None: as for classes.
        of_two_splits: returns the forms of a score that measures how well a detector separates two splits.
        of_other_split: computes the row of an out-of-distribution split, given by name.
        of_draws: returns the distance between draws of theta and those of a reference.
        of_reference: computes how close predictions are to those of a reference; also applied to halves of its draws.
        computed_by: name of the score whose function computes this one, too.
        is_of_rule: whether the score describes the decisions of a rule of `calibrate`.
    """

    title: str
    definition: str = ""
    higher_is_better: bool | None = None
    place: float = LAST
    digits: int = 4
    is_shown: bool = False
    usual: Mapping[str, str] = field(default_factory=dict)
    told_by: tuple[str, ...] = ()
    limits: tuple[float, float] = (-inf, inf)
    facts: tuple[str, ...] = ()
    has_floor: bool = False
    note: str | None = None
    needs: str | None = None
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
        """Return whether two posteriors can be compared in the score example by example."""
        return self.of_split is not None or self.of_two_splits is not None or self.computed_by is not None


# Scores of one split


def accuracy_nll_brier(examples: ExampleStatistics) -> list[ScoreGroup]:
    """Return accuracy, NLL and Brier score of labelled examples.

    NLL: mean of -log p(label), nats per example; probabilities below SMALLEST_PROBABILITY are clamped and counted.
    Brier (1950): mean squared distance of the probabilities to the one-hot label, summed over classes.
    """
    import numpy as np

    from bnncli.evaluation.statistics import (
        NO_LABELS,
        SMALLEST_PROBABILITY,
        ScoreForm,
        ScoreGroup,
        brier_losses,
        log_losses,
        means,
    )

    rank, probability = examples.label_rank, examples.label_probability
    is_clamped = np.zeros(0) if probability is None else probability < SMALLEST_PROBABILITY
    members = [
        ScoreForm("accuracy", {}, True, bounds=(0.0, 1.0)),
        ScoreForm("nll", {"reduction": "mean"}, facts={"num_clamped": int(is_clamped.sum())}),
        ScoreForm("brier", {"reduction": "mean", "classes": "sum"}, bounds=(0.0, 2.0)),
    ]
    if probability is None or rank is None:
        return [ScoreGroup(members, None, NO_LABELS)]
    return [means(members, [rank == 0, log_losses(probability), brier_losses(examples)])]


def _scores_of_decisions(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return accuracy of whole examples, and Hamming loss, NLL and Brier score of all decisions."""
    from bnncli.evaluation.class_scores import decision_scores

    return decision_scores(split.probs, split.examples)


def _top_k(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the accuracy of the k most probable classes."""
    from bnncli.evaluation.statistics import NO_LABELS, ScoreForm, ScoreGroup, means

    examples, k = split.examples, split.settings["top_k"]
    members = [ScoreForm("top_k", {"k": k}, True, bounds=(0.0, 1.0))]
    if examples.label_rank is None:
        return [ScoreGroup(members, None, NO_LABELS)]
    if examples.num_classes <= k:
        return [ScoreGroup(members, None, f"only {examples.num_classes} classes")]
    return [means(members, [examples.label_rank < k])]


def _calibration(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return ECE and MCE of the largest probability, and the class-wise ECE."""
    from bnncli.evaluation.calibration import calibration_scores, class_wise_scores

    num_bins = split.settings["bins"]
    groups = calibration_scores(split.examples, num_bins=num_bins)
    return [*groups, class_wise_scores(split.probs, split.examples.labels, num_bins=num_bins)]


def _calibration_of_labels(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the ECE of all decisions pooled, and the mean over the labels of the ECE of each."""
    from bnncli.evaluation.calibration import class_wise_scores, pooled_calibration

    assert split.examples.of_labels is not None
    labels, num_bins = split.examples.of_labels.labels, split.settings["bins"]
    pooled = pooled_calibration(split.probs, labels, num_bins=num_bins)
    return [pooled, class_wise_scores(split.probs, labels, num_bins=num_bins)]


def _means_over_classes(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the scores that are means over classes."""
    from bnncli.evaluation.class_scores import per_class_scores

    return per_class_scores(split.probs, split.examples)


def _means_over_labels(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the scores that are means over labels, and the rankings of all decisions pooled."""
    from bnncli.evaluation.class_scores import label_by_label_scores

    return label_by_label_scores(split.probs, split.examples)


def _entities(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the scores of entities if classes are tags and rows are grouped by text; else none."""
    from bnncli.evaluation.entities import are_tags, entity_scores

    if split.groups is None or split.classes is None or not are_tags(split.classes):
        return []
    return entity_scores(split.examples, split.classes, split.groups, split.sample_id)


def _selective(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return AURC and E-AURC."""
    from bnncli.evaluation.class_scores import selective_scores

    return [selective_scores(split.examples)]


def _decomposition(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the three parts of the Brier score and of the NLL."""
    from bnncli.evaluation.class_scores import decomposition_scores

    return [decomposition_scores(split.examples)]


def _confidence_and_entropy(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return mean confidence and mean entropy (nats), which need no labels."""
    from bnncli.evaluation.statistics import ScoreForm, means

    confidence = ScoreForm("mean_confidence", {}, None, bounds=(0.0, 1.0))
    vectors = [split.examples.confidence, split.examples.entropy]
    return [means([confidence, ScoreForm("mean_entropy", {}, None)], vectors)]


def _entropy_of_labels(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the mean over examples of the sum of the labels' entropies (nats)."""
    from bnncli.evaluation.statistics import ScoreForm, means

    return [means([ScoreForm("mean_entropy", {}, None)], [split.examples.entropy])]


def _mutual_info(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return the mean mutual information (nats) of predictions that have it."""
    from bnncli.evaluation.statistics import ScoreForm, ScoreGroup, means

    members = [ScoreForm("mean_mutual_info", {}, None)]
    if split.mutual_info is None:
        return [ScoreGroup(members, None, "the integrator uses no draws")]
    return [means(members, [split.mutual_info])]


def _ranking(split: ScoredPredictions) -> list[ScoreGroup]:
    """Return all scores of the uncertainty-aware ranking."""
    from bnncli.evaluation.class_scores import ranking_scores

    return ranking_scores(split.probs, split.examples, split.lengths, split.ranking)


# Scores of out-of-distribution detection


def _auroc() -> list[DetectionForm]:
    """Return the one form: the area does not depend on which side is positive."""
    from bnncli.evaluation.detection import DetectionForm, auroc

    return [DetectionForm({"positive": "in"}, auroc, higher_is_better=True)]


def _aupr() -> list[DetectionForm]:
    """Return a form for either side as the positive one."""
    from bnncli.evaluation.detection import DetectionForm, aupr_in, aupr_out

    sides = (("in", aupr_in), ("out", aupr_out))
    return [
        DetectionForm({"positive": side, "estimator": "average precision"}, statistic, higher_is_better=True)
        for side, statistic in sides
    ]


def _fpr95() -> list[DetectionForm]:
    """Return a form for either side as the positive one."""
    from bnncli.evaluation.detection import DetectionForm, fpr95_in, fpr95_out

    inside = "5th percentile of in-distribution scores, linear"
    outside = "95th percentile of out-of-distribution scores, linear"
    return [
        DetectionForm({"positive": "in", "threshold": inside}, fpr95_in, higher_is_better=False),
        DetectionForm({"positive": "out", "threshold": outside}, fpr95_out, higher_is_better=False),
    ]


def _mmc(examples: ExampleStatistics, ood: str, bootstrap: Bootstrap | None) -> Row:
    """Return the row of the mean maximum confidence of an out-of-distribution split."""
    import numpy as np

    from bnncli.evaluation.statistics import total_weights

    size = len(examples)
    row: Row = {"name": "mmc", "ood": ood, "n": size, "higher_is_better": False}
    if size == 0:
        return row | {"value": None, "undefined": f"split {ood} is empty"}
    row["value"] = float(np.mean(examples.confidence, dtype=np.float64))
    if bootstrap is not None:
        values = np.asarray(examples.confidence, dtype=np.float32)

        def mean_of(values: NDArray) -> Callable[[NDArray], NDArray]:
            return lambda weights: (weights @ values) / total_weights(weights).astype(values.dtype)

        found = bootstrap.replicates(mean_of(values), (ood, size), take=lambda rows: mean_of(values[rows]))
        row |= bootstrap.describe(row["value"], found, splits=((ood, size),), bounds=(0.0, 1.0))
    return row


# Distances to a reference: of draws of theta, and of predictions


def _mmd2() -> Distance:
    """Return the unbiased estimate with its test, the biased and the published estimate."""
    from bnncli.evaluation.distances import MMD2

    return MMD2


def _wasserstein() -> Distance:
    """Return the mean and the largest distance over the parameters."""
    from bnncli.evaluation.distances import WASSERSTEIN

    return WASSERSTEIN


def _mean_error() -> Distance:
    """Return the root mean square error over the parameters."""
    from bnncli.evaluation.distances import MEAN_ERROR

    return MEAN_ERROR


def _covariance_error() -> Distance:
    """Return the relative error in the Frobenius norm."""
    from bnncli.evaluation.distances import COVARIANCE_ERROR

    return COVARIANCE_ERROR


def _agreement(pair: PredictionPair) -> ScoreGroup:
    """Return the share of examples with the same predicted class; with several labels, with the same labels."""
    from bnncli.evaluation.statistics import ScoreForm

    return pair.mean(ScoreForm("agreement", {}, True, bounds=(0.0, 1.0)), 0)


def _total_variation(pair: PredictionPair) -> ScoreGroup:
    """Return the mean of half the L1 distance; with several labels, of the distance of each label's probability."""
    from bnncli.evaluation.statistics import ScoreForm

    return pair.mean(ScoreForm("total_variation", {"reduction": "mean"}, False, bounds=(0.0, 1.0)), 1)


def _jensen_shannon(pair: PredictionPair) -> ScoreGroup:
    """Return the mean Jensen-Shannon divergence, nats, at most log 2; with several labels, of each label's."""
    from math import log

    from bnncli.evaluation.statistics import ScoreForm

    return pair.mean(ScoreForm("jensen_shannon", {"reduction": "mean"}, False, bounds=(0.0, log(2))), 2)


def _mutual_info_correlation(pair: PredictionPair) -> ScoreGroup:
    """Return Spearman's correlation of the mutual information of both predictions."""
    from bnncli.evaluation.fidelity import mutual_info_correlation

    return mutual_info_correlation(pair)


# Options


def input_numbers(text: str | None, option: str = "\0true_inputs\0") -> tuple[int, ...]:
    """Return the input numbers, counted from 1, of a comma-separated list; none if there is no text.

    Raises:
        UsageError: `text` is not a list of distinct numbers from 1; the message names `option`.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    numbers = tuple(int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < 10)
    if len(numbers) < len(parts) or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise UsageError(f"{option}: expected distinct comma-separated numbers from 1, such as 1,3,7; got {text!r}")
    return numbers


_TRUE_INPUTS = ScoreOption(
    text="True inputs, numbered from 1, such as 1,3,7; adds the rates of true and false inclusions. For fit-lbbnn with "
    "one layer and one logit.",
    default=None,
    type=str,
    metavar="N,...",
    check=input_numbers,
    place=1,
)
_BINS = ScoreOption(
    text="Number of bins for ECE and MCE.",
    in_compare="Number of bins for calibration errors.",
    default=15,  # the usual choice since Guo et al. (2017)
    minimum=1,
    maximum=100_000,
    place=2,
)
_TOP_K = ScoreOption(
    text="k of the top-k accuracy. Undefined for k classes or fewer.",
    default=5,
    minimum=1,
    place=3,
)

# The table

_OF_TEXTS = "classes such as B-PER, I-PER and O, and rows grouped by text"
_OF_SETS = ("target", "scheme", "by_class", "confidence")
_OF_OUTLIERS = ("target", "by", "confidence")
_OF_ACCEPTANCE = ("target", "confidence")
_OF_CLASS = ("target", "class", "confidence")
_OF_COSTS = ("confidence",)
_OF_HALVES = ("floor_undefined", "floor_n")

# fmt: off
SCORES = {
    # Of labelled predictions
    "accuracy": Score(
        title="accuracy", place=1, higher_is_better=True, is_shown=True, limits=(0, 1),
        definition="The share of examples whose label is the most probable class; with several labels, the share with every label right.",
        of_split=lambda split: accuracy_nll_brier(split.examples), of_labels=_scores_of_decisions,
    ),
    "hamming_loss": Score(
        title="Hamming loss", place=1.5, higher_is_better=False, limits=(0, 1),
        definition="The share of wrong labels, if an example has several.",
        shown_of_labels={}, computed_by="accuracy",
    ),
    "top_k": Score(
        title="top-{k}", place=2, higher_is_better=True, limits=(0, 1),
        definition="The share of examples whose label is among the k most probable classes; undefined for k classes or fewer.",
        options={"top_k": _TOP_K}, of_split=_top_k,
    ),
    "nll": Score(
        title="NLL", place=3, higher_is_better=False, is_shown=True, limits=(0, inf),
        definition="The mean negative log probability of the label, nats.",
        facts=("num_clamped",), computed_by="accuracy",
    ),
    "brier": Score(
        title="Brier", place=4, higher_is_better=False, is_shown=True, limits=(0, 2),
        definition="The mean squared distance between the probabilities and the one-hot label, summed over classes.",
        computed_by="accuracy",
    ),
    "ece": Score(
        title="ECE", place=5, higher_is_better=False, is_shown=True, limits=(0, 1),
        definition="The expected calibration error: binned by confidence, in three ways, and class by class.",
        usual={"strategy": "equal-width", "norm": "l1"}, told_by=("strategy", "norm", "estimator"), facts=("num_used", "floor_undefined"),
        has_floor=True, options={"bins": _BINS}, of_split=_calibration, of_labels=_calibration_of_labels,
    ),
    "mce": Score(
        title="MCE", place=6, higher_is_better=False, limits=(0, 1),
        definition="The largest gap between confidence and accuracy over the bins.",
        usual={"strategy": "equal-width"}, told_by=("strategy",), facts=("floor_undefined",), has_floor=True, computed_by="ece",
    ),
    "balanced_accuracy": Score(
        title="balanced accuracy", place=7, higher_is_better=True, limits=(0, 1),
        definition="The mean over classes of the recall of a class.",
        facts=("num_left_out",), of_split=_means_over_classes, of_labels=_means_over_labels,
    ),
    "macro_f1": Score(
        title="macro F1", place=8, higher_is_better=True, limits=(0, 1),
        definition="The mean over classes of the F1 score.",
        facts=("num_left_out",), computed_by="balanced_accuracy",
    ),
    "macro_precision": Score(
        title="macro precision", place=9, higher_is_better=True, limits=(0, 1),
        definition="The mean over classes of the precision.",
        facts=("num_left_out",), computed_by="balanced_accuracy",
    ),
    "class_auroc": Score(
        title="class AUROC", place=10, higher_is_better=True, limits=(0, 1),
        definition="The mean over classes of the AUROC of a class against the rest.",
        usual={"average": "macro"}, told_by=("average",), facts=("num_left_out",), shown_of_labels={"average": "macro"},
        computed_by="balanced_accuracy",
    ),
    "class_average_precision": Score(
        title="class average precision", place=11, higher_is_better=True, limits=(0, 1),
        definition="The mean over classes of the average precision of a class against the rest.",
        usual={"average": "macro"}, told_by=("average",), facts=("num_left_out",), shown_of_labels={"average": "macro"},
        computed_by="balanced_accuracy",
    ),
    "entity_f1": Score(
        title="entity F1", place=11.2, higher_is_better=True, is_shown=True, limits=(0, 1), needs=_OF_TEXTS,
        definition="The F1 score of the entities of all types, for classes such as B-PER, I-PER and O and rows grouped by text.",
        of_split=_entities,
    ),
    "entity_precision": Score(
        title="entity precision", place=11.4, higher_is_better=True, limits=(0, 1), needs=_OF_TEXTS,
        definition="The share of predicted entities whose begin, end and type are right.",
        computed_by="entity_f1",
    ),
    "entity_recall": Score(
        title="entity recall", place=11.6, higher_is_better=True, limits=(0, 1), needs=_OF_TEXTS,
        definition="The share of true entities that are predicted with begin, end and type.",
        computed_by="entity_f1",
    ),
    "aurc": Score(
        title="AURC", place=12, higher_is_better=False, limits=(0, 1),
        definition="The area under the risk-coverage curve.",
        of_split=_selective,
    ),
    "e_aurc": Score(
        title="E-AURC", place=13, higher_is_better=False,
        definition="The area under the risk-coverage curve minus that of a perfect ranking.",
        computed_by="aurc",
    ),
    "miscalibration": Score(
        title="miscalibration", place=14, higher_is_better=False,
        definition="The part of the Brier score or NLL of two classes that recalibration would remove.",
        told_by=("of",), of_split=_decomposition,
    ),
    "discrimination": Score(
        title="discrimination", place=15, higher_is_better=True,
        definition="The gain of recalibrated forecasts over always forecasting the share of class 1, in Brier score or NLL.",
        told_by=("of",), computed_by="miscalibration",
    ),
    "uncertainty": Score(
        title="uncertainty", place=16,
        definition="The Brier score or NLL of always forecasting the share of class 1.",
        told_by=("of",), computed_by="miscalibration",
    ),
    # Of predictions alone
    "mean_confidence": Score(
        title="confidence", place=17, limits=(0, 1),
        definition="The mean of the largest probability.",
        of_split=_confidence_and_entropy, of_labels=_entropy_of_labels,
    ),
    "mean_entropy": Score(
        title="entropy", place=18, limits=(0, inf),
        definition="The mean entropy of the class probabilities, nats.",
        computed_by="mean_confidence",
    ),
    "mean_mutual_info": Score(
        title="mutual information", place=19, limits=(0, inf),
        definition="The mean mutual information of class and parameters, nats; needs draws.",
        of_split=_mutual_info, of_labels=_mutual_info,
    ),
    # Of the uncertainty-aware ranking
    "ranked_length": Score(
        title="classes kept", place=20, digits=3,
        definition="The mean number of classes that the uncertainty-aware ranking keeps.",
        told_by=("rule",), facts=("threshold",), of_split=_ranking,
    ),
    "ranked_accuracy": Score(
        title="ranked accuracy", place=21, higher_is_better=True, limits=(0, 1),
        definition="The share of examples whose label is among the classes that the ranking keeps.",
        told_by=("rule",), facts=("threshold",), computed_by="ranked_length",
    ),
    "cumulative_accuracy": Score(
        title="cumulative accuracy", place=22, higher_is_better=True, limits=(0, 1),
        definition="The same share for a plain rule whose sets have the same mean size.",
        told_by=("rule",), facts=("threshold",), computed_by="ranked_length",
    ),
    "ranked_gain": Score(
        title="ranked gain", place=23, higher_is_better=True,
        definition="How much more often the ranking's sets contain the label than the plain rule's.",
        told_by=("rule",), facts=("threshold",), computed_by="ranked_length",
    ),
    # Of out-of-distribution detection
    "auroc": Score(
        title="AUROC", place=24, digits=3, higher_is_better=True, is_shown=True, limits=(0, 1),
        definition="The area under the ROC curve of a score that separates two splits.",
        usual={"positive": "in"}, told_by=("score", "positive"), of_two_splits=_auroc,
    ),
    "aupr": Score(
        title="AUPR", place=25, digits=3, higher_is_better=True, limits=(0, 1),
        definition="The area under the precision-recall curve of a score that separates two splits, as average precision.",
        usual={"positive": "in"}, told_by=("score", "positive"), of_two_splits=_aupr,
    ),
    "fpr95": Score(
        title="FPR95", place=26, digits=3, higher_is_better=False, is_shown=True, limits=(0, 1),
        definition="The false positive rate at 95% true positives.",
        usual={"positive": "in"}, told_by=("score", "positive"), facts=("threshold",), of_two_splits=_fpr95,
    ),
    "mmc": Score(
        title="MMC", place=27, digits=3, higher_is_better=False, limits=(0, 1),
        definition="The mean largest probability on an out-of-distribution split.",
        of_other_split=_mmc,
    ),
    # Of draws of theta, against those of a reference
    "mmd2": Score(
        title="MMD^2", place=28, higher_is_better=False, is_shown=True,
        definition="The squared maximum mean discrepancy between draws and those of the reference.",
        usual={"estimator": "unbiased"}, told_by=("estimator",),
        facts=("bandwidth_rule", "p_value_undefined", "permutations", "blocks"), of_draws=_mmd2,
    ),
    "wasserstein": Score(
        title="Wasserstein", place=29, digits=3, higher_is_better=False, limits=(0, inf),
        definition="The 1-Wasserstein distance between the marginals of draws and those of the reference.",
        usual={"over": "mean"}, told_by=("over",), of_draws=_wasserstein,
    ),
    "mean_error": Score(
        title="mean error", place=30, digits=3, higher_is_better=False,
        definition="The error of the posterior mean, in standard deviations of the reference's draws.",
        of_draws=_mean_error,
    ),
    "covariance_error": Score(
        title="covariance error", place=31, digits=3, higher_is_better=False,
        definition="The relative error of the posterior covariance.",
        of_draws=_covariance_error,
    ),
    # Of a latent binary network: latent_networks.py
    "density": Score(
        title="density", place=32, higher_is_better=False, is_shown=True,
        definition="The share of a latent binary network's weights that are included.",
        note="density: share of the weights included in the networks that predict (mc: on average)",
        usual={"kind": "used", "layer": "all"}, told_by=("kind", "layer"), facts=("draws", "sd"),
    ),
    "true_positive_rate": Score(
        title="TPR", place=33, digits=3, higher_is_better=True, is_shown=True, limits=(0, 1),
        definition="The share of the true inputs that a latent binary network selects.",
        facts=("threshold",), options={"true_inputs": _TRUE_INPUTS},
    ),
    "false_positive_rate": Score(
        title="FPR", place=34, digits=3, higher_is_better=False, is_shown=True, limits=(0, 1),
        definition="The share of the other inputs that a latent binary network selects.",
        facts=("threshold",),
    ),
    # Of predictions, against those of a reference
    "agreement": Score(
        title="agreement", place=35, higher_is_better=True, is_shown=True, limits=(0, 1),
        definition="The share of examples for which a reference predicts the same class.",
        note="agreement: predicts the same class as the reference; TV: half the L1 distance; JSD in "
             "nats; floor: the value between halves of its draws",
        told_by=("reference",), facts=_OF_HALVES, has_floor=True, of_reference=_agreement,
    ),
    "total_variation": Score(
        title="TV", place=36, higher_is_better=False, is_shown=True, limits=(0, 1),
        definition="The mean total variation distance to a reference's probabilities.",
        told_by=("reference",), facts=_OF_HALVES, has_floor=True, of_reference=_total_variation,
    ),
    "jensen_shannon": Score(
        title="JSD", place=37, higher_is_better=False, is_shown=True, limits=(0, inf),
        definition="The mean Jensen-Shannon divergence from a reference's probabilities, nats.",
        told_by=("reference",), facts=_OF_HALVES, has_floor=True, of_reference=_jensen_shannon,
    ),
    "mutual_info_correlation": Score(
        title="MI rank correlation", place=38, digits=3, higher_is_better=True, is_shown=True,
        definition="The rank correlation of mutual information with a reference's.",
        told_by=("reference",), facts=_OF_HALVES, has_floor=True, of_reference=_mutual_info_correlation,
    ),
    # Of the rules of calibrate: decisions.py
    "set_coverage": Score(
        title="coverage", place=39, digits=3, is_shown=True,
        definition="The share of examples whose class is in their prediction set, by a rule of calibrate.",
        told_by=("rule",), facts=_OF_SETS, is_of_rule=True,
    ),
    "worst_class_coverage": Score(
        title="worst class", place=40, digits=3, higher_is_better=True,
        definition="The lowest coverage of a class by the prediction sets of a rule of calibrate.",
        told_by=("rule",), facts=_OF_SETS, is_of_rule=True,
    ),
    "set_size": Score(
        title="set size", place=41, digits=2, higher_is_better=False, is_shown=True,
        definition="The mean number of classes in the prediction sets of a rule of calibrate.",
        told_by=("rule",), facts=_OF_SETS, is_of_rule=True,
    ),
    "empty_sets": Score(
        title="empty sets", place=42, digits=3,
        definition="The share of empty prediction sets of a rule of calibrate.",
        told_by=("rule",), facts=_OF_SETS, is_of_rule=True,
    ),
    "singleton_sets": Score(
        title="one class", place=43, digits=3, higher_is_better=True,
        definition="The share of prediction sets of a rule of calibrate with one class.",
        told_by=("rule",), facts=_OF_SETS, is_of_rule=True,
    ),
    "acceptance": Score(
        title="accepted", place=44, digits=3, higher_is_better=True, is_shown=True,
        definition="The share of predictions that a rule of calibrate accepts.",
        told_by=("rule",), facts=_OF_ACCEPTANCE, is_of_rule=True,
    ),
    "selective_risk": Score(
        title="risk", place=45, higher_is_better=False, is_shown=True,
        definition="The share of wrong predictions among those a rule of calibrate accepts.",
        told_by=("rule",), facts=_OF_ACCEPTANCE, is_of_rule=True,
    ),
    "false_alarm_rate": Score(
        title="false alarms", place=46, digits=3, higher_is_better=False, is_shown=True,
        definition="The share of in-distribution examples that a rule of calibrate calls outliers.",
        told_by=("rule",), facts=_OF_OUTLIERS, is_of_rule=True,
    ),
    "detection_rate": Score(
        title="detected", place=47, digits=3, higher_is_better=True, is_shown=True,
        definition="The share of an out-of-distribution split that a rule of calibrate calls outliers.",
        told_by=("rule",), facts=_OF_OUTLIERS, is_of_rule=True,
    ),
    "shift_p": Score(
        title="shift p", place=48, is_shown=True,
        definition="The p-value of a split against the calibration split of a rule of calibrate; small if the split has shifted.",
        told_by=("rule",), facts=("target", "by"), is_of_rule=True,
    ),
    "flagged": Score(
        title="flagged", place=49, digits=3, is_shown=True,
        definition="The share of examples that a precision or recall rule of calibrate flags as its class.",
        told_by=("rule",), facts=_OF_CLASS, is_of_rule=True,
    ),
    "flag_precision": Score(
        title="precision", place=50, digits=3, higher_is_better=True, is_shown=True,
        definition="The share of examples of the class among those a rule of calibrate flags.",
        told_by=("rule",), facts=_OF_CLASS, is_of_rule=True,
    ),
    "flag_recall": Score(
        title="recall", place=51, digits=3, higher_is_better=True, is_shown=True,
        definition="The share of the examples of a class that a rule of calibrate flags.",
        told_by=("rule",), facts=_OF_CLASS, is_of_rule=True,
    ),
    "decision_cost": Score(
        title="cost", place=52, higher_is_better=False, is_shown=True,
        definition="The mean cost of the decisions of a rule of calibrate.",
        told_by=("rule",), facts=_OF_COSTS, is_of_rule=True,
    ),
    "expected_cost": Score(
        title="expected cost", place=53, higher_is_better=False,
        definition="The mean cost of the decisions of a rule of calibrate that the probabilities expect.",
        told_by=("rule",), facts=_OF_COSTS, is_of_rule=True,
    ),
    "argmax_cost": Score(
        title="argmax cost", place=54, higher_is_better=False,
        definition="The mean cost, by a rule of calibrate, of always deciding for the most probable class.",
        told_by=("rule",), facts=_OF_COSTS, is_of_rule=True,
    ),
}
# fmt: on


@cache
def all_scores() -> dict[str, Score]:
    """Return every score by name, in the order of tables; installed distributions may add some.

    Raises:
        UsageError: an installed score has the name of another one, or cannot be used.
    """
    return registry.with_installed("scores", SCORES)


@cache
def score_options() -> dict[str, ScoreOption]:
    """Return the options that set scores, by name, in order."""
    return merge_options("scores", {name: score.options for name, score in all_scores().items()})


def unplaced_scores() -> list[str]:
    """Return the names of the scores without a place; a metrics file that lacks one of them is out of date."""
    return [name for name, score in all_scores().items() if score.place == LAST]


def split_scores(split: ScoredPredictions, names: Collection[str] | None = None) -> list[ScoreGroup]:
    """Return the scores of one split, or only those with these names and the scores computed with them.

    For multi-label predictions, only scores that are defined for them.
    """
    scores = all_scores()
    split = replace(split, settings={name: one.default for name, one in score_options().items()} | dict(split.settings))
    wanted = scores if names is None else {scores[name].computed_by or name for name in names}
    has_labels = split.examples.of_labels is not None
    makers = {name: score.of_labels if has_labels else score.of_split for name, score in scores.items()}
    return [group for name, make in makers.items() if make is not None and name in wanted for group in make(split)]


def detection_forms() -> dict[str, Sequence[DetectionForm]]:
    """Return the forms of every score of out-of-distribution detection, by name."""
    return {name: score.of_two_splits() for name, score in all_scores().items() if score.of_two_splits is not None}


def other_split_rows(examples: ExampleStatistics, ood: str, bootstrap: Bootstrap | None) -> list[Row]:
    """Return the rows of the predictions of an out-of-distribution split alone."""
    makers = [score.of_other_split for score in all_scores().values()]
    return [make(examples, ood, bootstrap) for make in makers if make is not None]


def distances() -> dict[str, Distance]:
    """Return every distance between draws, by name."""
    return {name: score.of_draws() for name, score in all_scores().items() if score.of_draws is not None}


def fidelities() -> list[Callable[[PredictionPair], ScoreGroup]]:
    """Return the functions that compare predictions with those of a reference."""
    return [score.of_reference for score in all_scores().values() if score.of_reference is not None]


def merge_options(family: str, declared: Mapping[str, Mapping[str, ScoreOption]]) -> dict[str, ScoreOption]:
    """Return every option by name, in order.

    Args:
        family: `scores` or `detectors`.
        declared: options of each score or detector.

    Raises:
        UsageError: an installed score has another option with the name of an existing one.
    """
    installed = registry.names(family)
    found: dict[str, ScoreOption] = {}
    for score in sorted(declared, key=lambda name: name.replace("_", "-") in installed):  # blame installed scores
        for name, one in declared[score].items():
            if found.setdefault(name, one) != one:
                why = f"its option {name} differs from another score's option of the same name"
                raise registry.broken(family, score.replace("_", "-"), why)
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))

"""The statistics that scores share: a few numbers per example from one pass over blocks of class probabilities.

A score is a function of these and of how often each example counts, so that the bootstrap resamples weights, not rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from bnncli.errors import DataError
from bnncli.evaluation.bootstrap import Bootstrap, RandomPart
from bnncli.evaluation.groups import RowGroups
from bnncli.lazy import np, special
from bnncli.numerics.random import stream_seed
from bnncli.system.workers import Parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW_SUM_TOLERANCE = 1e-4  # float32 rows of 1,000 classes stay within 1e-5
BLOCK_VALUES = 1 << 20  # probabilities held at once
_HINT_LOG = "these look like log-probabilities; exponentiate them first"


def row_blocks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Return consecutive slices of range(num_rows) with at most BLOCK_VALUES values each, for rows of `row_size`."""
    size = max(1, BLOCK_VALUES // max(1, row_size))
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def check_probabilities(probs: NDArray, num_classes: int, *, is_exclusive: bool = True) -> None:
    """Raise DataError unless probs (N, C) are probabilities of `num_classes` classes.

    Args:
        is_exclusive: whether classes are mutually exclusive; if not, each is a label of its own.

    Raises:
        DataError: wrong shape, values not finite or outside [0, 1], or, for exclusive classes, rows that do not sum to
            1 within 1e-4; the hint names the likely cause.
    """
    for _ in check_blocks(probs, num_classes, is_exclusive=is_exclusive):
        pass


def check_blocks(probs: NDArray, num_classes: int, *, is_exclusive: bool = True) -> Iterator[tuple[slice, NDArray]]:
    """Yield the rows and values of blocks of probs (N, C), checked as in check_probabilities."""
    if probs.ndim != 2 or probs.shape[1] != num_classes:
        raise DataError(f"probs: expected shape (N, {num_classes}), got {probs.shape}")
    for rows in row_blocks(*probs.shape):
        block = np.asarray(probs[rows])
        _check_values(block, is_exclusive=is_exclusive)
        yield rows, block


def _check_values(probs: NDArray, *, is_exclusive: bool) -> None:
    if probs.size == 0:
        return
    if not np.isfinite(probs).all():
        known = probs[~np.isnan(probs)]
        if known.size and known.max() <= 0:
            raise DataError("probs: expected finite values in [0, 1], got log-probabilities", hint=_HINT_LOG)
        raise DataError("probs: expected finite values, got NaN or infinity", hint="the fit or the checkpoint diverged")
    smallest, largest = float(probs.min()), float(probs.max())
    worst = float(np.abs(probs.sum(axis=1, dtype=np.float64) - 1).max())
    if largest <= 0 and smallest < 0:
        raise DataError(f"probs: expected values in [0, 1], got log-probabilities down to {smallest:g}", hint=_HINT_LOG)
    if smallest < -ROW_SUM_TOLERANCE or largest > 1 + ROW_SUM_TOLERANCE:
        hint = "these look like logits; apply the softmax first"
        if smallest >= 0 and largest <= 100:
            are_percentages = np.abs(probs.sum(axis=1, dtype=np.float64) - 100).max() < 2
            hint = (
                "these look like percentages; divide by 100"
                if are_percentages
                else "rows of probabilities must sum to 1"
            )
        raise DataError(f"probs: expected values in [0, 1], got {smallest:g} to {largest:g}", hint=hint)
    if is_exclusive and worst > ROW_SUM_TOLERANCE:
        hint = "rows of per-class sigmoid outputs, or rows with a missing class, do not sum to 1"
        raise DataError(
            f"probs: expected rows that sum to 1 within 1e-4, got a row that is off by {worst:g}", hint=hint
        )


Row = dict[str, Any]

MOST_OPERATIONS = 4e8  # for the replicates of one expensive group: below a second
FEWEST_REPLICATES = 100  # fewer give no useful standard error


def score_rows(
    scores: Sequence[ScoreGroup],
    split: tuple[str, int],
    bootstrap: Bootstrap | None = None,
    *,
    groups: RowGroups | None = None,
    take: Callable[[NDArray], Sequence[ScoreGroup]] | None = None,
) -> list[Row]:
    """Return a row per score of a split, given by name and number of examples; with intervals if there is a bootstrap.

    Args:
        groups: groups of dependent rows, which tests of calibration take into account; as in the bootstrap.
        take: returns the same scores of some rows (n,), to resample a part of a large split; None to resample all.
    """
    size = split[1]
    values = [_estimate(group, size) for group in scores]
    replicates = None
    if bootstrap is not None and take is not None and (part := bootstrap.part(split)) is not None:
        replicates = _replicates_of_part(take(part.rows[0]), values, split[0], bootstrap, part)
    replicates = replicates or _replicates(scores, values, split, bootstrap)
    rows = []
    for group, found, drawn in zip(scores, values, replicates, strict=True):
        chances = _against_chance(group, found, split, bootstrap, groups)
        classes = None if group.per_class is None or found is None else group.per_class()
        for i, score in enumerate(group.members):
            reason = (group.undefined if group.statistic is None else "empty split") if found is None else None
            value = None if found is None or math.isnan(found[i]) else float(found[i])
            choices = {**score.choices, **score.facts, "higher_is_better": score.higher_is_better}
            row = {"name": score.name, "value": value, "n": size, **choices}
            if value is None:
                row["undefined"] = reason or score.when_nan
            elif bootstrap is not None:
                row |= _uncertainty(bootstrap, score, value, None if drawn is None else drawn[:, i], split)
            if value is not None and chances is not None:
                row |= _note_chance(value, chances[i], {} if bootstrap is None else bootstrap.resampled(split[0]))
            if classes is not None:
                row["per_class"] = classes[i]
            rows.append(row)
    return rows


def _against_chance(
    group: ScoreGroup,
    found: NDArray | None,
    split: tuple[str, int],
    bootstrap: Bootstrap | None,
    groups: RowGroups | None,
) -> list[Row] | None:
    """Return floors, tests and intervals of calibration errors; None for other scores, or if all are undefined."""
    if group.against_chance is None or found is None or np.isnan(found).all():
        return None
    seed, level = (0, None) if bootstrap is None else (bootstrap.seed, bootstrap.level if split[1] > 1 else None)
    purpose = f"calibration/{group.members[0].choices['strategy']}/{split[0]}/{split[1]}"
    return group.against_chance(np.random.default_rng(stream_seed(seed, purpose)), level, groups)


def _note_chance(value: float, chance: Row, resampled: Mapping[str, Any]) -> Row:
    """Return the extra fields of a calibration error's row, with a note if its interval excludes the value."""
    if chance["floor"] is None:
        return chance
    row = {**chance, "excess": value - chance["floor"]}
    ends = chance.get("interval")
    if ends is not None:
        row["interval"] = ends = {**ends, **resampled}
    if ends is not None and value > ends["high"]:
        row["note"] = (
            "the value is above its interval because it contains the noise floor, the score of a calibrated "
            "model on data of this size"
        )
    return row


def _estimate(group: ScoreGroup, size: int) -> NDArray | None:
    """Return the scores (m,), float64; None if undefined."""
    return None if group.statistic is None or size == 0 else group.statistic(np.ones((1, size)))[0]


def _replicates(
    scores: Sequence[ScoreGroup], values: Sequence[NDArray | None], split: tuple[str, int], bootstrap: Bootstrap | None
) -> list[NDArray | None]:
    """Return the replicates (R, m) of each group. Groups share the weights; expensive groups use only the first ones.

    Worker processes of one command share the blocks of weights.
    """
    if bootstrap is None or bootstrap.num_units(split) <= 1:
        return [None for _ in scores]
    wanted = [
        _affordable(group, split[1], bootstrap) if v is not None else 0 for group, v in zip(scores, values, strict=True)
    ]
    drawn = replace(bootstrap, num_replicates=max([1, *wanted]))
    blocks = drawn.blocks(split)
    # number of replicates that each group takes from each block
    taken = [[max(0, min(len(block), count - block.start)) for block in blocks] for count in wanted]
    found = [[np.empty((0, 0 if v is None else len(v)))] for v in values]
    parts = Parts(len(blocks))
    for place, (weights,) in zip(parts.own, drawn.weights(split, only=parts.own), strict=True):
        for group, own, counts in zip(scores, found, taken, strict=True):
            if group.statistic is not None and counts[place]:
                own.append(group.statistic(weights[: counts[place]]))
    return [
        parts.of_all(np.concatenate(own), counts) if any(counts) else None
        for own, counts in zip(found, taken, strict=True)
    ]


def _replicates_of_part(
    scores: Sequence[ScoreGroup],
    values: Sequence[NDArray | None],
    name: str,
    bootstrap: Bootstrap,
    part: RandomPart,
) -> list[NDArray | None]:
    """Return the replicates (R, m) of each group of scores of all examples, given the same groups of a part."""
    size = len(part.rows[0])
    own = [_estimate(group, size) for group in scores]
    drawn = _replicates(scores, own, (name, size), bootstrap)
    return [
        None if value is None or found is None or of_part is None else part.of_all(value, of_part, found)
        for value, of_part, found in zip(values, own, drawn, strict=True)
    ]


def _affordable(group: ScoreGroup, size: int, bootstrap: Bootstrap) -> int:
    """Return the number of replicates for a group: all, as many as its cost allows, or none if that is too few."""
    most = int(MOST_OPERATIONS / (group.cost * size)) if group.cost > 1 else bootstrap.num_replicates
    return bootstrap.num_replicates if most >= bootstrap.num_replicates else most if most >= FEWEST_REPLICATES else 0


def _uncertainty(
    bootstrap: Bootstrap, score: ScoreForm, value: float, replicates: NDArray | None, split: tuple[str, int]
) -> Row:
    if replicates is None:
        return {"standard_error": None, "interval": None}
    return bootstrap.describe(value, replicates, splits=(split,), method=score.method, bounds=score.bounds)


THRESHOLD = 0.5  # predict a label as present from here on
SMALLEST = 2.0**-126  # clamp for the log probability of a present label
SMALLEST_REST = 2.0**-25  # clamp for its absence: half the distance from 1 to the next lower float32


@dataclass(frozen=True)
class LabelStatistics:
    """Statistics of N examples with L labels each; None if the labels are unknown.

    Args:
        labels: (N, L) zeros and ones.
        num_wrong: (N,) number of wrong decisions.
        log_loss: (N,) negative log probability of the truth, mean over labels, nats.
        squared_error: (N,) squared distance of the probability to 0 or 1, mean over labels.
        num_clamped: number of the N L decisions whose log probability is clamped.
    """

    labels: NDArray | None = None
    num_wrong: NDArray[np.int64] | None = None
    log_loss: NDArray[np.float64] | None = None
    squared_error: NDArray[np.float64] | None = None
    num_clamped: int = 0

    def take(self, rows: NDArray) -> LabelStatistics:
        """Return the statistics of some examples (n,); num_clamped stays that of all."""
        vectors = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "num_clamped"}
        own: dict[str, Any] = {name: None if value is None else value[rows] for name, value in vectors.items()}
        return replace(self, **own)


def label_statistics(probs: NDArray, labels: NDArray | None) -> LabelStatistics:
    """Compute the statistics of checked probs (N, L) in blocks of rows.

    Raises:
        DataError: labels are not (N, L) zeros and ones.
    """
    if labels is None:
        return LabelStatistics()
    check_label_sets(labels, probs.shape)
    sums = np.zeros((3, len(probs)))
    num_clamped = 0
    for rows in row_blocks(*probs.shape):
        block, own = np.asarray(probs[rows], dtype=np.float64), np.asarray(labels[rows]) != 0
        losses, is_clamped = decision_losses(block, own)
        num_clamped += int(is_clamped.sum())
        sums[:, rows] = (
            ((block >= THRESHOLD) != own).sum(axis=1),
            losses.mean(axis=1),
            ((block - own) ** 2).mean(axis=1),
        )
    return LabelStatistics(labels, sums[0].astype(np.int64), sums[1], sums[2], num_clamped)


def decision_losses(probs: NDArray, labels: NDArray) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the negative log probability of the truth (n, L), nats, and where it was clamped."""
    wide = np.asarray(probs, dtype=np.float64)
    likely = np.where(labels, wide, 1 - wide)
    smallest = np.where(labels, SMALLEST, SMALLEST_REST)
    return -np.log(np.maximum(likely, smallest)), likely < smallest


def check_label_sets(labels: NDArray, shape: tuple[int, ...]) -> None:
    """Raise DataError if labels are not zeros and ones of the shape (N, L) of the probabilities."""
    if labels.shape != shape:
        raise DataError(f"labels: expected shape {shape}, got {labels.shape}")
    if labels.size and not np.isin(labels, (0, 1)).all():
        raise DataError("labels: expected zeros and ones")


@dataclass(frozen=True)
class ExampleStatistics:
    """Predictions of a split, example by example.

    Args:
        num_classes: C.
        confidence: (N,) float64, largest probability.
        predicted: (N,) int64, most probable class, the first among ties.
        entropy: (N,) float64, nats.
        squared_norm: (N,) float64, sum of the squared probabilities.
        labels: (N,) int64 in [0, C), or None for an unlabelled split; the fields below are then None as well.
        is_right: (N,) bool, whether the predicted class is the label.
        label_probability: (N,) float64.
        label_rank: (N,) int64, number of classes ranked before the label, ties by index; 0 exactly if is_right.
        of_labels: statistics of multi-label predictions, which have no other field about labels.
    """

    num_classes: int
    confidence: NDArray[np.float64]
    predicted: NDArray[np.int64]
    entropy: NDArray[np.float64]
    squared_norm: NDArray[np.float64]
    labels: NDArray[np.int64] | None = None
    is_right: NDArray[np.bool_] | None = None
    label_probability: NDArray[np.float64] | None = None
    label_rank: NDArray[np.int64] | None = None
    of_labels: LabelStatistics | None = None

    def __len__(self) -> int:
        return len(self.confidence)

    def take(self, rows: NDArray) -> ExampleStatistics:
        """Return the statistics of some examples (n,)."""
        found: dict[str, Any] = {"of_labels": None if self.of_labels is None else self.of_labels.take(rows)}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, np.ndarray):
                found[spec.name] = value[rows]
        return replace(self, **found)


def compute_example_statistics(
    probs: NDArray, labels: NDArray | None = None, *, num_classes: int | None = None, is_exclusive: bool = True
) -> ExampleStatistics:
    """Compute the statistics of probs (N, C) in one checked pass over blocks of rows.

    Args:
        probs: (N, C); may be memory-mapped.
        labels: (N,) integers in [0, C), or None; (N, C) zeros and ones for multi-label predictions.
        num_classes: expected C.
        is_exclusive: whether classes are mutually exclusive.

    Raises:
        DataError: values are not probabilities, or labels have another length or are outside [0, C).
    """
    size = probs.shape[1] if num_classes is None else num_classes
    if labels is not None and is_exclusive:
        check_labels(labels, probs.shape)
    classes = labels if is_exclusive else None
    found = [
        _of_block(
            block, None if classes is None else np.asarray(classes[rows], dtype=np.int64), is_exclusive=is_exclusive
        )
        for rows, block in check_blocks(probs, size, is_exclusive=is_exclusive)
    ]
    if not found:
        nothing = None if classes is None else np.empty(0, dtype=np.int64)
        found = [_of_block(np.empty((0, size)), nothing, is_exclusive=is_exclusive)]
    names = [spec.name for spec in fields(ExampleStatistics) if spec.name in found[0]]
    vectors: dict[str, Any] = {name: np.concatenate([part[name] for part in found]) for name in names}
    return ExampleStatistics(size, **vectors, of_labels=None if is_exclusive else label_statistics(probs, labels))


def check_labels(labels: NDArray, shape: tuple[int, ...]) -> None:
    """Raise DataError if labels do not fit probabilities of shape (N, C)."""
    if labels.shape != shape[:1]:
        raise DataError(f"labels: expected shape ({shape[0]},), got {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels: expected integers, got {labels.dtype}")
    if labels.size == 0:
        return
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0 or largest >= shape[1]:
        raise DataError(f"labels: expected 0 to {shape[1] - 1}, got {smallest} to {largest}")


def _of_block(probs: NDArray, labels: NDArray[np.int64] | None, *, is_exclusive: bool) -> dict[str, NDArray]:
    """Return the vectors of a block of rows, by name."""
    predicted = probs.argmax(axis=1)
    wide = probs.astype(np.float64)
    out: dict[str, NDArray] = {
        "confidence": np.take_along_axis(wide, predicted[:, None], axis=1)[:, 0],
        "predicted": predicted.astype(np.int64),
        "entropy": special.entr(np.maximum(wide, 0)).sum(axis=1),  # rounding may leave -1e-8
        "squared_norm": np.einsum("nc,nc->n", wide, wide),
    }
    if not is_exclusive:
        out["entropy"] = out["entropy"] + special.entr(np.clip(1 - wide, 0, 1)).sum(axis=1)
    if labels is not None:
        own = np.take_along_axis(wide, labels[:, None], axis=1)
        is_before = np.arange(probs.shape[1]) < labels[:, None]
        rank = (wide > own).sum(axis=1) + ((wide == own) & is_before).sum(axis=1)
        out |= {"labels": labels, "is_right": rank == 0, "label_probability": own[:, 0], "label_rank": rank}
    return out


# Clamp for log probabilities: float32 probabilities underflow to 0, whose log is infinite.
SMALLEST_PROBABILITY = 2.0**-126  # the smallest normal number of float32
NO_LABELS = "no labels"
Floats: TypeAlias = "NDArray[np.float64]"
Statistic: TypeAlias = "Callable[[NDArray], Floats]"


@dataclass(frozen=True)
class ScoreForm:
    """One score of a split.

    Args:
        name: accuracy, nll, ece and so on.
        choices: settings that define the number and distinguish its forms.
        higher_is_better: None if no direction is better.
        method: method of the bootstrap interval.
        bounds: range of the score.
        facts: accompanying numbers, such as how many probabilities were clamped.
        when_nan: why the score is undefined if the statistic is NaN.
    """

    name: str
    choices: Mapping[str, Any] = field(default_factory=dict)
    higher_is_better: bool | None = False
    method: str = "percentile"
    bounds: tuple[float, float] = (0.0, math.inf)
    facts: Mapping[str, Any] = field(default_factory=dict)
    when_nan: str = "undefined"


@dataclass(frozen=True)
class ScoreGroup:
    """Scores that are computed together.

    Args:
        members: the m scores.
        statistic: maps integer weights (b, N), how often each example counts, to scores (b, m); None if undefined. Rows
            sum to N, or, where whole groups of examples are resampled, to another positive number.
        undefined: the reason.
        cost: operations per example and replicate relative to a mean; expensive scores get fewer replicates.
        against_chance: for calibration errors, maps a generator, the level of intervals (None for no intervals) and the
            groups of dependent rows (None for none) to the extra fields of each member's row: `floor` (None: see
            `floor_undefined`), `p_calibrated` and, with a level, `interval`.
        per_class: for means over classes, returns the `per_class` values of each member's row, None if undefined.
    """

    members: Sequence[ScoreForm]
    statistic: Statistic | None
    undefined: str | None = None
    cost: float = 1.0
    against_chance: Callable[[np.random.Generator, float | None, RowGroups | None], list[Row]] | None = None
    per_class: Callable[[], list[list[float | None]]] | None = None


def total_weights(weights: NDArray) -> Floats:
    """Return the number of examples (b,) that weights (b, N) count."""
    return weights.sum(axis=1, dtype=np.float64)


def means(members: Sequence[ScoreForm], values: Sequence[NDArray]) -> ScoreGroup:
    """Return scores that are the mean over examples of a vector (N,) each."""
    columns = np.stack([np.asarray(value, dtype=np.float64) for value in values], axis=1)

    def statistic(weights: NDArray) -> Floats:
        # float64: differences of replicates may be below float32 rounding.
        return weights.astype(np.float64) @ columns / total_weights(weights)[:, None]

    return ScoreGroup(members, statistic)


def log_losses(label_probability: NDArray) -> Floats:
    """Return -log p(label) of each example (N,), nats, clamped at SMALLEST_PROBABILITY."""
    return -np.log(np.maximum(label_probability.astype(np.float64), SMALLEST_PROBABILITY))


def brier_losses(examples: ExampleStatistics) -> Floats:
    """Return the squared distance (N,) of the probabilities to the one-hot label, summed over classes; in [0, 2]."""
    assert examples.label_probability is not None
    return np.maximum(0.0, examples.squared_norm - 2 * examples.label_probability + 1)


def nll(probs: NDArray, labels: NDArray) -> float:
    """Return the NLL of probs (N, C), nats per example: the mean of -log p(label), clamped at SMALLEST_PROBABILITY."""
    return float(np.mean(nll_per_example(probs, labels)))


def nll_per_example(probs: NDArray, labels: NDArray) -> Floats:
    """Return -log p(label) of each example (N,), nats, clamped at SMALLEST_PROBABILITY.

    For multi-label predictions (N, L), the mean over labels of whether each is present.
    """
    if labels.ndim == 2:
        return decision_losses(probs, labels != 0)[0].mean(axis=1)
    column = np.asarray(labels, dtype=np.int64)[:, None]
    return log_losses(np.take_along_axis(np.asarray(probs), column, axis=1)[:, 0])

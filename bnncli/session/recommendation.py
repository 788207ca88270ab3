"""Read the recommendation of auto, the paired scores behind it, and stored metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.files import read_metrics
from bnncli.errors import BnnError, DataError, MissingInput
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.detection import DetectionForm, Ranking, form_rows, resample_rankings
from bnncli.evaluation.groups import RowGroups
from bnncli.evaluation.recommendation import LEVEL, Quality, accuracy_interval, loss_interval
from bnncli.evaluation.scores import detection_forms
from bnncli.evaluation.statistics import ScoreGroup
from bnncli.options.scoring import Quantity
from bnncli.session.revisions import AUTO
from bnncli.session.run import Run
from bnncli.session.score_rows import find_metric

if TYPE_CHECKING:
    from bnncli.evaluation.statistics import ExampleStatistics


Row = dict[str, Any]
Vectors = Mapping[str, NDArray | str]


@dataclass(frozen=True)
class ScoreMeasurement:
    """One score of one prediction.

    Args:
        row: its name, defining choices and higher_is_better.
        value: None if undefined, for the reason in `undefined`.
        replicates: (R,), NaN where undefined; None if the score is undefined or without bootstrap.
    """

    row: Row
    value: float | None
    undefined: str | None = None
    replicates: NDArray[np.float64] | None = None

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        """Return the key shared with the same score of other predictions."""
        return tuple((name, str(value)) for name, value in self.row.items())


def measure_split(
    predictions: Sequence[Sequence[ScoreGroup]],
    wanted: Sequence[Quantity],
    *,
    split: tuple[str, int],
    bootstrap: Bootstrap | None = None,
    take: Callable[[NDArray], Sequence[Sequence[ScoreGroup]]] | None = None,
) -> list[list[ScoreMeasurement]]:
    """Measure the wanted scores of several predictions of one split, in the given order.

    Args:
        predictions: score groups of each, from split_scores.
        split: its name and number of examples.
        take: returns the same of some rows (n,), to resample a part of a large split; None to resample all.
    """
    chosen = [_select_scores(scores, wanted) for scores in predictions]

    def statistic_of(chosen: Sequence[Sequence[tuple[ScoreGroup, int, Row]]]) -> Callable[[NDArray], NDArray]:
        def statistic(weights: NDArray) -> NDArray[np.float64]:
            """Return (b, all scores of all predictions), computing each group of scores once."""
            parts = []
            for picks in [[scores for scores, _, _ in picks] for picks in chosen]:
                known = {id(s): s.statistic(weights) for s in picks if s.statistic is not None and split[1] > 0}
                nothing = np.full((len(weights), 1), np.nan)
                parts += [known.get(id(s), np.repeat(nothing, len(s.members), axis=1)) for s in picks]
            return np.concatenate(parts, axis=1) if parts else np.zeros((len(weights), 0))

        return statistic

    statistic = statistic_of(chosen)
    values = statistic(np.ones((1, split[1])))[0]
    replicates = None
    if bootstrap is not None and split[1] > 1:

        def of_rows(rows: NDArray) -> Callable[[NDArray], NDArray]:
            assert take is not None
            return statistic_of([_select_scores(scores, wanted) for scores in take(rows)])

        replicates = bootstrap.replicates(statistic, split, take=None if take is None else of_rows)
    found, start = [], 0
    for picks in chosen:
        own = []
        for scores, member, row in picks:
            place = start + member
            start += len(scores.members)
            reason = scores.undefined if scores.statistic is None else "empty split" if split[1] == 0 else None
            own.append(
                _make_measurement(row, values[place], reason or scores.members[member].when_nan, replicates, place)
            )
        found.append(own)
    return found


def measure_detection(
    predictions: Sequence[tuple[Vectors, Vectors]],
    wanted: Sequence[Quantity],
    *,
    split: tuple[str, int],
    ood: tuple[str, int],
    bootstrap: Bootstrap | None = None,
) -> list[list[ScoreMeasurement]]:
    """Measure the wanted detection scores of several predictions of two splits, in the given order.

    Args:
        predictions: for each, the score names mapped to values on the split (N,) and on the other one (M,), or to the reason
            there are none.
        split, ood: name and number of examples of each.
    """
    chosen = []  # per prediction: row, form, and index of its ranking or the reason there is none
    rankings: list[Ranking] = []
    for inside, outside in predictions:
        picked = _detection_rows(list(inside), wanted, ood[0])
        names = dict.fromkeys(str(row["score"]) for row, _ in picked)
        places = {name: _append_ranking(inside[name], outside[name], ood[0], rankings) for name in names}
        chosen.append([(row, form, places[row["score"]]) for row, form in picked])

    # Group the forms by ranking, so that shared work is done once.
    needed = [
        list(dict.fromkeys(form.statistic for picks in chosen for _, form, own in picks if own == place))
        for place in range(len(rankings))
    ]

    def statistic_of(rankings: Sequence[Ranking]) -> Callable[..., NDArray]:
        def statistic(*weights: NDArray) -> NDArray[np.float64]:
            pairs = zip(rankings, needed, strict=True)
            found = [dict(zip(own, ranking.evaluate(own, *weights).T, strict=True)) for ranking, own in pairs]
            columns = [
                found[place][form.statistic] if isinstance(place, int) else np.full(len(weights[0]), np.nan)
                for picks in chosen
                for _, form, place in picks
            ]
            return np.stack(columns, axis=1) if columns else np.zeros((len(weights[0]), 0))

        return statistic

    values = statistic_of(rankings)(np.ones((1, split[1])), np.ones((1, ood[1])))[0]
    replicates = None
    if bootstrap is not None and rankings:
        replicates = resample_rankings(rankings, statistic_of, bootstrap, split=split[0], ood=ood[0])
    flat = iter(range(len(values)))
    return [
        [
            _make_measurement(row, values[column], place if isinstance(place, str) else "undefined", replicates, column)
            for (row, _, place), column in zip(picks, flat, strict=False)
        ]
        for picks in chosen
    ]


def select_needed_scores(names: Sequence[str], wanted: Sequence[Quantity], ood: str) -> list[str]:
    """Return the detection scores among `names` that the wanted scores use."""
    return list(dict.fromkeys(str(row["score"]) for row, _ in _detection_rows(names, wanted, ood)))


def _detection_rows(names: Sequence[str], wanted: Sequence[Quantity], ood: str) -> list[tuple[Row, DetectionForm]]:
    """Return row (without value) and form of every wanted detection score."""
    forms = form_rows(detection_forms())
    every = [({**row, "score": name, "ood": ood}, form) for name in names for row, form in forms]
    picked = _deduplicate_rows([row for one in wanted for row in find_metric([row for row, _ in every], one)])
    by_row = {id(row): form for row, form in every}
    return [(row, by_row[id(row)]) for row in picked]


def _select_scores(scores: Sequence[ScoreGroup], wanted: Sequence[Quantity]) -> list[tuple[ScoreGroup, int, Row]]:
    """Return each wanted score as its group, index within it, and row without value."""
    rows: list[tuple[ScoreGroup, int, Row]] = []
    for group in scores:
        for place, score in enumerate(group.members):
            row = {"name": score.name, **score.choices, "higher_is_better": score.higher_is_better}
            rows.append((group, place, row))
    picked = _deduplicate_rows([row for one in wanted for row in find_metric([row for _, _, row in rows], one)])
    by_row = {id(row): (group, place, row) for group, place, row in rows}
    return [by_row[id(row)] for row in picked]


def _deduplicate_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without repeated objects."""
    return list({id(row): row for row in rows}.values())


def _append_ranking(inside: NDArray | str, outside: NDArray | str, ood: str, rankings: list[Ranking]) -> int | str:
    """Append a ranking and return its index, or the reason there is none."""
    for side in (inside, outside):
        if isinstance(side, str):
            return side
    if len(inside) == 0 or len(outside) == 0:
        return (
            "the in-distribution split is empty"
            if len(inside) == 0
            else f"only one class is present: split {ood} is empty"
        )
    rankings.append(Ranking(np.asarray(inside), np.asarray(outside)))
    return len(rankings) - 1


def _make_measurement(row: Row, value: float, reason: str, replicates: NDArray | None, column: int) -> ScoreMeasurement:
    if np.isnan(value):
        return ScoreMeasurement(row, None, reason)
    return ScoreMeasurement(row, float(value), None, None if replicates is None else replicates[:, column])


@dataclass(frozen=True)
class RecommendedPredictor:
    """A posterior and an integrator to predict with, and why; `by` names the command that decided."""

    posterior: str
    integrator: str
    sentence: str = ""
    by: str = "auto"


@dataclass(frozen=True)
class SplitProbabilities:
    """Class probabilities of one split.

    Attributes:
        probs: (N, C). labels: (N,), (N, C) with several labels per example, or None.
        losses: (N,) nats, used instead of those of probs: held-out losses of a fit to these labels.
        groups: groups of dependent rows, or None.
    """

    name: str
    probs: NDArray
    labels: NDArray | None
    losses: NDArray[np.float64] | None = None
    groups: RowGroups | None = None

    @cached_property
    def examples(self) -> ExampleStatistics:
        """Return the statistics of each example."""
        from bnncli.evaluation.statistics import compute_example_statistics

        return compute_example_statistics(
            self.probs, self.labels, is_exclusive=self.labels is None or self.labels.ndim == 1
        )


def qualities(
    own: SplitProbabilities,
    base: SplitProbabilities,
    *,
    seed: int,
    level: float = LEVEL,
) -> list[Quality]:
    """Return NLL, accuracy and ECE of a split next to the baseline's, paired by example.

    Intervals of NLL and accuracy match the recommendation's tests (`loss_interval`, `accuracy_interval`); that of ECE
    is the symmetric bootstrap of compare.

    Args:
        own, base: predictions of the same examples.
        level: of each interval.
    """
    found = []
    if own.labels is not None and len(own.labels):
        from bnncli.evaluation.recommendation import score_predictive

        mine, theirs = (score_predictive(side.name, side.probs, own.labels, losses=side.losses) for side in (own, base))
        low, high = loss_interval(mine.losses, theirs.losses, level, groups=own.groups) or (None, None)
        found.append(Quality("nll", mine.nll, theirs.nll, low, high, False))
        assert mine.is_right is not None
        assert theirs.is_right is not None
        low, high = accuracy_interval(mine.is_right, theirs.is_right, level, groups=own.groups) or (None, None)
        right = float(mine.is_right.mean()), float(theirs.is_right.mean())
        found.append(Quality("accuracy", right[0], right[1], low, high, True))
        ece = compare_paired_scores("ece", _measure_calibration(own, base, seed, level), level=level)
        found += [] if ece is None else [ece]
    return found


def _measure_calibration(
    own: SplitProbabilities, base: SplitProbabilities, seed: int, level: float
) -> list[list[ScoreMeasurement]]:
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.scores import ScoredPredictions, split_scores

    groups = [split_scores(ScoredPredictions(side.probs, side.examples), ["ece"]) for side in (own, base)]
    bootstrap = Bootstrap(level=level, seed=seed).of_splits(own)
    return measure_split(groups, [Quantity("ece")], split=(own.name, len(own.examples)), bootstrap=bootstrap)


def compare_paired_scores(name: str, measured: Sequence[Sequence[ScoreMeasurement]], *, level: float) -> Quality | None:
    """Return a score of both sides with a bootstrap interval of the difference; None if it is undefined for either."""
    from bnncli.evaluation.comparison import Sample, difference
    from bnncli.evaluation.scores import all_scores

    if any(not side or side[0].value is None for side in measured):
        return None
    values = [float(side[0].value or 0.0) for side in measured]
    samples = [Sample(np.array([value]), side[0].replicates) for value, side in zip(values, measured, strict=True)]
    gap = difference(*samples, level=level)
    return Quality(name, values[0], values[1], gap.low, gap.high, bool(all_scores()[name].higher_is_better))


def parse_qualities(recorded: Sequence[dict[str, Any]]) -> list[Quality]:
    """Return qualities from their JSON."""
    names = ("score", "value", "baseline", "low", "high", "higher_is_better")
    return [Quality(**{name: one[name] for name in names}) for one in recorded]


def read_last_judgements(run: Run) -> dict[str, bool]:
    """Return whether the last recommendation found each posterior, by content digest, accurate for its target.

    Empty if it was made with other seeds or by another version, or is damaged.
    """
    path = run.folder.recommended
    try:
        header = read_metrics(path)
        made_alike = header.provenance["algo_rev"] == AUTO and header.provenance["params"]["seed"] == run.compute.seed
        judged = dict(header.meta["rows"][-1]["judged"]) if made_alike else {}
        return {str(digest): bool(is_good) for digest, is_good in judged.items()}
    except (DataError, MissingInput, KeyError, IndexError, TypeError, ValueError):
        return {}


def open_recommendation(run: Run) -> RecommendedPredictor | None:
    """Return the run's recommendation; None without one.

    Raises:
        DataError: it is stale or damaged.
    """
    path = run.folder.recommended
    if not path.is_file():
        return None
    try:
        header = read_metrics(path)
        run.use(header)
        row = next(row for row in header.meta["rows"] if row["is_recommended"])
        return RecommendedPredictor(
            str(row["posterior"]), str(row["integrator"]), str(header.meta["rows"][-1].get("sentence", ""))
        )
    except (DataError, KeyError, StopIteration, TypeError) as error:
        why = error.message if isinstance(error, DataError) else "it has no recommended row"
        raise DataError(
            f"cannot use auto's recommendation: {why}", code="stale_input", path=path,
            hint=f"run {run.suggest('auto')} again, or name a posterior: \0posterior\0 NAME",
        ) from None  # fmt: skip


def metrics_of(run: Run, *, posterior: str | None, split: str | None) -> list[dict[str, Any]]:
    """Return rows of the run's metrics files, optionally of one posterior or split.

    Raises:
        MissingInput: there are none.
        DataError: none can be used, or the named posterior's first one cannot.
    """
    files = run.folder.metrics_files()
    if not files:
        raise MissingInput(f"{run.checkpoint_path} has no metrics", hint=run.suggest("evaluate"))
    rows: list[dict[str, Any]] = []
    there: set[str] = set()
    unusable: list[BnnError] = []
    for path in files:
        names = {path.stem, path.stem.partition(".")[0]}  # by file name, also for unreadable files
        try:
            header = read_metrics(path)
            names |= {str(row.get("posterior")) for row in header.meta["rows"]}
            if posterior is None or posterior in names:
                run.use(header)
                rows += header.meta["rows"]
        except (DataError, MissingInput) as error:
            if posterior in names:
                raise
            unusable.append(error)
            if posterior is None:
                run.console.warn(f"skipping {path.stem}: {error.message}{error.advice}")
        there |= names
    if posterior is not None and posterior not in there:
        known = ", ".join(sorted(there))
        raise MissingInput(f"no metrics for posterior {posterior!r} (have: {known})", hint=run.suggest("evaluate"))
    if not rows:
        first = unusable[0]
        if any(error.code != "stale_input" for error in unusable):
            raise first
        raise DataError("all metrics files of the run are stale", code="stale_input", hint=first.hint, path=first.path)
    kept = [row for row in rows if split in (None, row.get("split"))]
    if not kept:
        known = ", ".join(sorted({str(row.get("split")) for row in rows}))
        raise MissingInput(f"no metrics for split {split!r} (have: {known})", hint=run.suggest("evaluate"))
    return kept

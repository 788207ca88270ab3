"""What to predict with in a run: auto's recommendation, which other commands quote, and a predictive's qualities beside the network's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.files import read_metrics
from bnncli.errors import DataError, MissingInput
from bnncli.evaluation.layer_gain import LEVEL, loss_interval
from bnncli.evaluation.recommendation import Quality, accuracy_interval
from bnncli.options.assertions import Quantity
from bnncli.run.revisions import AUTO
from bnncli.run.session import Run

if TYPE_CHECKING:
    from bnncli.evaluation.example_statistics import ExampleStatistics
    from bnncli.run.paired_scores import Measured


@dataclass(frozen=True)
class Recommended:
    """A posterior and the integrator to predict with, and why; `by` names the command that decided."""

    posterior: str
    integrator: str
    sentence: str = ""
    by: str = "auto"


@dataclass(frozen=True)
class SplitProbabilities:
    """Class probabilities of one split.

    Attributes:
        probs: (N, C). labels: (N,), (N, C) of several labels an example, or None.
        losses: (N,) nats, in place of those of probs: held-out ones, of what was fitted to these labels.
    """

    name: str
    probs: NDArray
    labels: NDArray | None
    losses: NDArray[np.float64] | None = None

    @cached_property
    def examples(self) -> ExampleStatistics:
        """The numbers of each example."""
        from bnncli.evaluation.example_statistics import examples_of

        return examples_of(self.probs, self.labels, is_exclusive=self.labels is None or self.labels.ndim == 1)


def qualities(
    own: SplitProbabilities,
    base: SplitProbabilities,
    *,
    seed: int,
    level: float = LEVEL,
) -> list[Quality]:
    """Return NLL, accuracy and ECE of a split, each beside the baseline's, paired by example.

    Intervals: of NLL and accuracy as the recommendation tests them (`loss_interval`, `accuracy_interval`); of ECE the symmetric bootstrap of compare.

    Args:
        own, base: predictions of the same examples.
        level: of each interval.
    """
    found = []
    if own.labels is not None and len(own.labels):
        from bnncli.evaluation.excess import score

        mine, theirs = (score(side.name, side.probs, own.labels, losses=side.losses) for side in (own, base))
        low, high = loss_interval(mine.losses, theirs.losses, level) or (None, None)
        found.append(Quality("nll", mine.nll, theirs.nll, low, high, False))
        assert mine.is_right is not None
        assert theirs.is_right is not None
        low, high = accuracy_interval(mine.is_right, theirs.is_right, level) or (None, None)
        right = float(mine.is_right.mean()), float(theirs.is_right.mean())
        found.append(Quality("accuracy", right[0], right[1], low, high, True))
        ece = paired_quality("ece", _measured_calibration(own, base, seed, level), level=level)
        found += [] if ece is None else [ece]
    return found


def _measured_calibration(
    own: SplitProbabilities, base: SplitProbabilities, seed: int, level: float
) -> list[list[Measured]]:
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.scores import ScoredPredictions, split_scores
    from bnncli.run.paired_scores import measure_split

    groups = [split_scores(ScoredPredictions(side.probs, side.examples), ["ece"]) for side in (own, base)]
    bootstrap = Bootstrap(level=level, seed=seed)
    return measure_split(groups, [Quantity("ece")], split=(own.name, len(own.examples)), bootstrap=bootstrap)


def paired_quality(name: str, measured: Sequence[Sequence[Measured]], *, level: float) -> Quality | None:
    """Return the quality of a score measured of both sides, with a bootstrap interval of the difference; None where it is undefined of either."""
    from bnncli.evaluation.paired import Sample, difference
    from bnncli.evaluation.scores import declared

    if any(not side or side[0].value is None for side in measured):
        return None
    values = [float(side[0].value or 0.0) for side in measured]
    samples = [Sample(np.array([value]), side[0].replicates) for value, side in zip(values, measured, strict=True)]
    gap = difference(*samples, level=level)
    return Quality(name, values[0], values[1], gap.low, gap.high, bool(declared()[name].higher_is_better))


def recorded_qualities(recorded: Sequence[dict[str, Any]]) -> list[Quality]:
    """Return qualities from their JSON."""
    names = ("score", "value", "baseline", "low", "high", "higher_is_better")
    return [Quality(**{name: one[name] for name in names}) for one in recorded]


def judged_before(run: Run) -> dict[str, bool]:
    """Of posteriors, by their content's digest, whether the last recommendation found them good for their target.

    Empty where it was made by other seeds or another version, or is damaged.
    """
    path = run.folder.recommended
    try:
        header = read_metrics(path)
        made_alike = header.provenance["algo_rev"] == AUTO and header.provenance["params"]["seed"] == run.compute.seed
        judged = dict(header.meta["rows"][-1]["judged"]) if made_alike else {}
        return {str(digest): bool(is_good) for digest, is_good in judged.items()}
    except (DataError, MissingInput, KeyError, IndexError, TypeError, ValueError):
        return {}


def recommended(run: Run) -> Recommended | None:
    """The run's recommendation; None without one. Raises DataError for one that is stale or damaged."""
    path = run.folder.recommended
    if not path.is_file():
        return None
    try:
        header = read_metrics(path)
        run.use(header)
        row = next(row for row in header.meta["rows"] if row["is_recommended"])
        return Recommended(
            str(row["posterior"]), str(row["integrator"]), str(header.meta["rows"][-1].get("sentence", ""))
        )
    except (DataError, KeyError, StopIteration, TypeError) as error:
        why = error.message if isinstance(error, DataError) else "it has no recommended row"
        raise DataError(
            f"cannot use auto's recommendation: {why}", code="stale_input", path=path,
            hint=f"run {run.suggest('auto')} again, or name a posterior: \0posterior\0 NAME",
        ) from None  # fmt: skip

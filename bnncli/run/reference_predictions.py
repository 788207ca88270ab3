"""Predictions that others are held against: of a posterior of the run, or of a file; the rows matched, and the draws halved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.predictions import PredictionFile
from bnncli.errors import DataError
from bnncli.evaluation.scores import fidelities
from bnncli.names import quoted
from bnncli.run.given_predictions import GivenPredictions

if TYPE_CHECKING:
    from bnncli.evaluation.bootstrap import Bootstrap
    from bnncli.evaluation.fidelity import Forecasts, ReferencePredictions

Row = dict[str, Any]
_OLD = "the reference's predictions store no groups of draws; run predict again"


@dataclass(frozen=True)
class MatchedForecasts:
    """Predictions that are held against a reference.

    Args:
        split: what they are of, for messages.
        sample_id: (N,), the row of each example in its data; None where it is not known.
    """

    split: str
    probs: NDArray
    labels: NDArray | None
    mutual_info: NDArray | None
    sample_id: NDArray | None
    is_exclusive: bool = True


def rows_against(
    ours: MatchedForecasts,
    reference: GivenPredictions,
    *,
    name: str,
    bootstrap: Bootstrap | None,
    tell: Callable[[str], None],
) -> list[Row]:
    """The rows of how near predictions are to a reference's.

    Args:
        name: of the reference, in rows.
        tell: hears which rows of the reference were taken.

    Raises:
        DataError: the reference has other rows, labels or classes.
    """
    from bnncli.evaluation.fidelity import Forecasts, fidelity_rows

    rows = check_against(ours, reference, tell=tell)
    found = fidelity_rows(
        Forecasts(ours.probs, ours.mutual_info),
        _of_rows(reference, rows, name),
        fidelities(),
        split=(ours.split, len(ours.probs)),
        bootstrap=bootstrap,
        is_exclusive=ours.is_exclusive,
    )
    return found


def check_against(
    ours: MatchedForecasts, reference: GivenPredictions, *, tell: Callable[[str], None] = lambda text: None
) -> NDArray[np.int64] | None:
    """The rows of `matching_rows`. Raises DataError as `rows_against` does."""
    if reference.is_exclusive != ours.is_exclusive or reference.probs.shape[1] != ours.probs.shape[1]:
        what = f"{reference.probs.shape[1]}" + ("" if reference.is_exclusive else " that are not mutually exclusive")
        raise DataError(
            f"{_shown(reference)}: expected {ours.probs.shape[1]} classes, as in split {ours.split!r}; got {what}"
        )
    reference.check()
    return matching_rows(ours, reference, tell=tell)


def matching_rows(
    ours: MatchedForecasts, reference: GivenPredictions, *, tell: Callable[[str], None]
) -> NDArray[np.int64] | None:
    """The rows (N,) of the reference that are the examples, None where these are all of them in their order.

    Where the reference says which rows of their data its examples are, they are found by these; one of more rows than the
    split is taken for the whole data that the split was held out of; one of as many has them in the split's order.

    Raises:
        DataError: the numbers of rows do not go together, or labels differ.
    """
    size, others = len(ours.probs), len(reference.probs)
    rows = None
    theirs = None if reference.file is None else np.asarray(reference.file.sample_id)
    ids = None if ours.sample_id is None else np.asarray(ours.sample_id)
    if theirs is not None and ids is not None:
        rows = None if np.array_equal(ids, theirs) else _places(ids, theirs)
        if rows is None and not np.array_equal(ids, theirs):
            raise DataError(
                f"{_shown(reference)} lacks some examples of split {ours.split!r}: their rows in the data differ",
                code="other_rows",
            )
    elif others != size:
        is_whole = (
            others > size and ids is not None and len(np.unique(ids)) == size and ids.min() >= 0 and ids.max() < others
        )
        if not is_whole or ids is None:
            raise DataError(
                f"{_shown(reference)} has {others} rows, but split {ours.split!r} has {size}", code="other_rows",
                hint="a reference needs the rows of the split in the same order, or the rows of the data that the "
                    "split was held out from",
            )  # fmt: skip
        rows = ids.astype(np.int64)
        tell(
            f"reference {_shown(reference)}: using the {size} of its {others} rows that belong to split {ours.split!r}"
        )
    _check_labels(ours, reference, rows)
    return rows


def _places(ids: NDArray, theirs: NDArray) -> NDArray[np.int64] | None:
    """Where each id is among theirs; None where one is not, or twice."""
    order = np.argsort(theirs)
    ordered = theirs[order]
    at = np.searchsorted(ordered, ids).clip(max=max(0, len(ordered) - 1))
    is_found = len(ordered) > 0 and bool((ordered[at] == ids).all()) and len(np.unique(theirs)) == len(theirs)
    return order[at] if is_found else None


def _check_labels(ours: MatchedForecasts, reference: GivenPredictions, rows: NDArray | None) -> None:
    """Raise DataError where both have labels, and they differ."""
    if ours.labels is None or reference.labels is None:
        return
    theirs = np.asarray(reference.labels)[rows if rows is not None else slice(None)]
    differs = np.asarray(ours.labels) != theirs
    count = int((differs.any(axis=1) if differs.ndim == 2 else differs).sum())
    if count:
        raise DataError(
            f"{_shown(reference)} and split {ours.split!r} have different labels in {count} of {len(theirs)} rows", code="other_rows",
            hint="its rows must be in the order of the split",
        )  # fmt: skip


def _of_rows(reference: GivenPredictions, rows: NDArray[np.int64] | None, name: str) -> ReferencePredictions:
    """The reference's predictions of these rows, and those of halves of its draws."""
    from bnncli.evaluation.fidelity import NO_DRAWS, Forecasts, ReferencePredictions

    info = reference.arrays.get("mutual_info")
    taken: Any = slice(None) if rows is None else rows
    predicted = Forecasts(reference.probs[taken], None if info is None else np.asarray(info)[taken])
    halves = None if reference.file is None else halves_of(reference.file, rows)
    has_draws = reference.file is not None and reference.samples is not None
    return ReferencePredictions(name, predicted, halves, _OLD if has_draws else NO_DRAWS)


def halves_of(file: PredictionFile, rows: NDArray[np.int64] | None) -> tuple[Forecasts, Forecasts] | None:
    """What each half of the draws predicts, of as many of these rows as the file tells; None where it does not tell.

    Every draw that is kept tells mutual information as well; else of the groups of draws every other one is a half.
    """
    from bnncli.evaluation.fidelity import Forecasts

    if file.probs_samples is not None and len(file.probs_samples) > 1:
        taken: Any = slice(None) if rows is None else rows
        parts = [np.asarray(file.probs_samples[start::2, taken], dtype=np.float64) for start in (0, 1)]
        first, second = (
            Forecasts(part.mean(axis=0), _mutual_info(part) if file.is_exclusive else None) for part in parts
        )
        return first, second
    if file.group_probs is None or file.group_rows is None or file.group_weights is None:
        return None
    kept = np.arange(len(file.group_rows))
    if rows is not None:
        kept = kept[np.isin(np.asarray(file.group_rows), rows)]
    weights = np.asarray(file.group_weights, dtype=np.float64)
    sums = []
    for start in (0, 1):
        own = weights[start::2]
        if own.sum() <= 0:
            return None
        means = np.asarray(file.group_probs[start::2])[:, kept].astype(np.float64)
        sums.append(Forecasts(np.tensordot(own / own.sum(), means, axes=1)))
    return sums[0], sums[1]


def _mutual_info(probs: NDArray) -> NDArray:
    """Of class and draw (N,), nats, from the probabilities of every draw (S, N, C)."""
    from bnncli.lazy import special

    found: NDArray = special.entr(probs.mean(axis=0)).sum(axis=-1) - special.entr(probs).sum(axis=-1).mean(axis=0)
    return found


def _shown(reference: GivenPredictions) -> str:
    return quoted(reference.path, limit=300)

"""Fidelity: how closely predictive probabilities match a reference such as full-batch HMC, example by example.

Agreement and total variation: Izmailov, Vikram, Hoffman and Wilson (2021), arXiv 2104.14421, section 6. Jensen-Shannon
divergence: Lin (1991), nats. None needs labels; all are means over examples. The rank correlation is Spearman's with
mean ranks for ties, for any integer weights of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.statistics import Floats, Row, ScoreForm, ScoreGroup, means, row_blocks, score_rows
from bnncli.lazy import special

_THRESHOLD = 0.5  # above it, a label is predicted as present
_CORRELATION_COST = 20.0  # operations per example and replicate
NO_DRAWS = "stored probabilities have no draws to halve"


@dataclass(frozen=True)
class Forecasts:
    """Predictions to compare.

    Args:
        probs: (N, C); may be memory-mapped.
        mutual_info: (N,) nats, or None.
    """

    probs: NDArray
    mutual_info: NDArray | None = None


@dataclass(frozen=True)
class ReferencePredictions:
    """Predictions of the reference.

    Args:
        name: name of the posterior or file.
        predicted: predictions of the rows that are compared.
        halves: predictions of the two halves of its draws, for as many rows as known; None: see `why_no_halves`.
    """

    name: str
    predicted: Forecasts
    halves: tuple[Forecasts, Forecasts] | None = None
    why_no_halves: str = NO_DRAWS


class PredictionPair:
    """Two predictions of the same examples, with cached statistics that several scores need.

    Args:
        is_exclusive: whether classes are mutually exclusive; if not, an example agrees only if all its labels do.

    Raises:
        DataError: the predictions differ in rows or classes.
    """

    def __init__(self, ours: Forecasts, theirs: Forecasts, *, is_exclusive: bool = True) -> None:
        if ours.probs.shape != theirs.probs.shape:
            raise DataError(
                f"expected two predictions of the same shape, got {ours.probs.shape} and {theirs.probs.shape}"
            )
        self.ours, self.theirs, self.is_exclusive = ours, theirs, is_exclusive

    @cached_property
    def per_example(self) -> tuple[NDArray[np.bool_], Floats, Floats]:
        """Agreement of the predicted class, total variation and Jensen-Shannon divergence (nats) per example, each (N,)."""
        size = len(self.ours.probs)
        agrees, variation, divergence = np.empty(size, dtype=bool), np.empty(size), np.empty(size)
        for rows in row_blocks(*self.ours.probs.shape):
            p, q = (np.asarray(side.probs[rows], dtype=np.float64) for side in (self.ours, self.theirs))
            p, q = np.maximum(p, 0), np.maximum(q, 0)  # rounding may leave -1e-8
            if self.is_exclusive:
                agrees[rows] = p.argmax(axis=1) == q.argmax(axis=1)
                variation[rows] = np.abs(p - q).sum(axis=1) / 2
                divergence[rows] = _divergences(p, q).sum(axis=1)
            else:
                agrees[rows] = ((p >= _THRESHOLD) == (q >= _THRESHOLD)).all(axis=1)
                variation[rows] = np.abs(p - q).mean(axis=1)
                absent = _divergences(np.maximum(1 - p, 0), np.maximum(1 - q, 0))
                divergence[rows] = (_divergences(p, q) + absent).mean(axis=1)
        return agrees, variation, divergence

    def mean(self, form: ScoreForm, place: int) -> ScoreGroup:
        """Return the mean of one column of `per_example`."""
        if len(self.ours.probs) == 0:
            return ScoreGroup([form], None, "empty split")
        return means([form], [self.per_example[place]])


def mutual_info_correlation(pair: PredictionPair) -> ScoreGroup:
    """Return Spearman's correlation of the mutual information of class and parameters."""
    form = ScoreForm(
        "mutual_info_correlation",
        {"estimator": "spearman"},
        True,
        bounds=(-1.0, 1.0),
        when_nan="one of them is constant",
    )
    ours, theirs = pair.ours.mutual_info, pair.theirs.mutual_info
    if ours is None or theirs is None:
        whose = (
            "neither has" if ours is theirs else "the predictions have no" if ours is None else "the reference has no"
        )
        return ScoreGroup([form], None, f"{whose} mutual information")
    first, second = (_Ranks(np.asarray(values, dtype=np.float64)) for values in (ours, theirs))

    def statistic(weights: NDArray) -> Floats:
        return _correlation(first.of(weights), second.of(weights), weights)[:, None]

    return ScoreGroup([form], statistic, cost=_CORRELATION_COST)


Maker = Callable[[PredictionPair], ScoreGroup]


def fidelity_rows(
    ours: Forecasts,
    reference: ReferencePredictions,
    makers: Sequence[Maker],
    *,
    split: tuple[str, int],
    bootstrap: Bootstrap | None = None,
    is_exclusive: bool = True,
) -> list[Row]:
    """Return a row per score with its `floor`, the score between the halves of the reference's draws, or why there is none.

    Args:
        split: name and number of examples, as in score_rows.
        is_exclusive: as in PredictionPair.
    """
    pair = PredictionPair(ours, reference.predicted, is_exclusive=is_exclusive)
    rows = score_rows([make(pair) for make in makers], split, bootstrap)
    if reference.halves is None:
        floors: list[Row] = [{"floor": None, "floor_undefined": reference.why_no_halves} for _ in rows]
    else:
        halves = PredictionPair(*reference.halves, is_exclusive=is_exclusive)
        found = score_rows([make(halves) for make in makers], ("halves", len(reference.halves[0].probs)))
        floors = [_floor(row) for row in found]
    return [_join_floor(row, floor, reference.name) for row, floor in zip(rows, floors, strict=True)]


def undefined_fidelity(makers: Sequence[Maker], *, reference: str, reason: str) -> list[Row]:
    """Return the rows of every score, undefined for this reason."""
    nothing = Forecasts(np.empty((0, 1)))
    rows = score_rows([make(PredictionPair(nothing, nothing)) for make in makers], ("", 0))
    return [{**row, "n": None, "undefined": reason, "reference": reference} for row in rows]


def _floor(row: Row) -> Row:
    if row["value"] is None:
        return {"floor": None, "floor_undefined": f"for halves of the draws: {row['undefined']}"}
    return {"floor": row["value"], "floor_n": row["n"]}


def _join_floor(row: Row, floor: Row, reference: str) -> Row:
    found: dict[str, Any] = {**row, "reference": reference}
    if row["value"] is None:
        return found
    excess = {"excess": row["value"] - floor["floor"]} if floor["floor"] is not None else {}
    return {**found, **floor, **excess}


def _divergences(p: NDArray, q: NDArray) -> Floats:
    """Return non-negative terms that sum to the Jensen-Shannon divergence of p and q; the terms in (p - m) cancel."""
    middle = (p + q) / 2
    found: Floats = (special.kl_div(p, middle) + special.kl_div(q, middle)) / 2
    return found


class _Ranks:
    """Ranks of values (N,) under weights, sorted once."""

    def __init__(self, values: NDArray) -> None:
        self.order = np.argsort(values)
        ordered = values[self.order]
        is_first = np.append(True, ordered[1:] != ordered[:-1])
        self.starts = np.flatnonzero(is_first)
        self.group = np.empty(len(values), dtype=np.intp)  # index of each value's group of ties
        self.group[self.order] = np.cumsum(is_first) - 1

    def of(self, weights: NDArray) -> Floats:
        """Return the mean rank (b, N) of each value's ties, with every value repeated by its weight (b, N)."""
        counts = np.add.reduceat(weights.take(self.order, axis=1).astype(np.float64), self.starts, axis=1)
        ranks: Floats = (np.cumsum(counts, axis=1) - (counts - 1) / 2).take(self.group, axis=1)
        return ranks


def _correlation(x: Floats, y: Floats, weights: NDArray) -> Floats:
    """Return the correlation (b,) of x and y (b, N) under weights; NaN if either is constant."""
    total = weights.sum(axis=1, dtype=np.float64)
    x, y = (values - (np.einsum("bn,bn->b", values, weights) / total)[:, None] for values in (x, y))
    products = [np.einsum("bn,bn,bn->b", one, other, weights) for one, other in ((x, y), (x, x), (y, y))]
    spread = np.sqrt(products[1] * products[2])
    found: Floats = np.where(spread > 0, np.clip(products[0] / np.where(spread > 0, spread, 1), -1, 1), np.nan)
    return found

"""Metric rows for strict JSON: a value with the settings that define it, or None with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.weighted_scores import ScoreForm, ScoreGroup
from bnncli.numerics.random import stream_seed
from bnncli.system.workers import Parts

Row = dict[str, Any]

MOST_OPERATIONS = 4e8  # for the replicates of one expensive group: below a second
FEWEST_REPLICATES = 100  # fewer give no useful standard error


def score_rows(scores: Sequence[ScoreGroup], split: tuple[str, int], bootstrap: Bootstrap | None = None) -> list[Row]:
    """Return a row per score of a split, given by name and number of examples; with intervals if there is a bootstrap."""
    size = split[1]
    values = [_estimate(group, size) for group in scores]
    replicates = _replicates(scores, values, split, bootstrap)
    rows = []
    for group, found, drawn in zip(scores, values, replicates, strict=True):
        chances = _against_chance(group, found, split, bootstrap)
        classes = None if group.per_class is None or found is None else group.per_class()
        for i, score in enumerate(group.members):
            reason = (group.undefined if group.statistic is None else "empty split") if found is None else None
            value = None if found is None or math.isnan(found[i]) else float(found[i])
            choices = {**score.choices, **score.facts, "higher_is_better": score.higher_is_better}
            row = {"name": score.name, "value": value, "n": size, **choices}
            if value is None:
                row["undefined"] = reason or score.when_nan
            elif bootstrap is not None:
                row |= _uncertainty(bootstrap, score, value, None if drawn is None else drawn[:, i])
            if value is not None and chances is not None:
                row |= _told(value, chances[i])
            if classes is not None:
                row["per_class"] = classes[i]
            rows.append(row)
    return rows


def _against_chance(
    group: ScoreGroup, found: NDArray | None, split: tuple[str, int], bootstrap: Bootstrap | None
) -> list[Row] | None:
    """Return floors, tests and intervals of calibration errors; None for other scores, or if all are undefined."""
    if group.against_chance is None or found is None or np.isnan(found).all():
        return None
    seed, level = (0, None) if bootstrap is None else (bootstrap.seed, bootstrap.level if split[1] > 1 else None)
    purpose = f"calibration/{group.members[0].choices['strategy']}/{split[0]}/{split[1]}"
    return group.against_chance(np.random.default_rng(stream_seed(seed, purpose)), level)


def _told(value: float, chance: Row) -> Row:
    """Return the extra fields of a calibration error's row, with a note if its interval excludes the value."""
    row = {**chance, "excess": value - chance["floor"]}
    ends = chance.get("interval")
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
    if bootstrap is None or split[1] <= 1:
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


def _affordable(group: ScoreGroup, size: int, bootstrap: Bootstrap) -> int:
    """Return the number of replicates for a group: all, as many as its cost allows, or none if that is too few."""
    most = int(MOST_OPERATIONS / (group.cost * size)) if group.cost > 1 else bootstrap.num_replicates
    return bootstrap.num_replicates if most >= bootstrap.num_replicates else most if most >= FEWEST_REPLICATES else 0


def _uncertainty(bootstrap: Bootstrap, score: ScoreForm, value: float, replicates: NDArray | None) -> Row:
    if replicates is None:
        return {"standard_error": None, "interval": None}
    return bootstrap.describe(value, replicates, method=score.method, bounds=score.bounds)

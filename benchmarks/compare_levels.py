"""Level and power of the marks of compare, against Holm's tests with the best of the sample, by simulation.

    python benchmarks/compare_levels.py --trials 500

Level: how often any of k equally good posteriors is told to be significantly worse. Power: how often one is that is worse
by so many standard errors of its difference from the others, which are equal, or all but one of which are hopeless.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.comparison import Sample, confidence_set, difference, holm
from bnncli.evaluation.detection import Ranking, auroc

ALPHA = 0.05


def marked_worse(samples: Sequence[Sample], *, higher: bool) -> NDArray[np.bool_]:
    """Who is told to be worse, (2, k): by Holm's tests with the best of the sample, and by compare."""
    sign = -1 if higher else 1
    best = min(range(len(samples)), key=lambda place: sign * samples[place].mean)
    p_values = [None if one is samples[best] else difference(one, samples[best]).p_value for one in samples]
    found = confidence_set(samples, higher_is_better=higher, alpha=ALPHA).p_values
    return np.array([[p is not None and p <= ALPHA for p in own] for own in (holm(p_values), found)])


def over_seeds(generator: np.random.Generator, size: int, count: int, shifts: NDArray, spread: float) -> list[Sample]:
    """Scores over seeds with a common effect of each; shifts in standard errors of a difference of equal spreads."""
    own = generator.normal(size=(size, count)) * np.geomspace(1, spread, count)
    values = 3 * generator.normal(size=(size, 1)) + own + shifts * math.sqrt(2 / size)
    return [Sample(column) for column in values.T]


def over_examples(generator: np.random.Generator, weights: NDArray, count: int, shifts: NDArray) -> list[Sample]:
    """Mean losses of N examples, most of whose spread is common; shifts in standard errors of a difference."""
    size = weights.shape[1]
    own = 0.1 * generator.standard_normal((size, count), dtype=np.float32)
    columns = generator.standard_normal((size, 1), dtype=np.float32) + own
    columns = columns + (shifts * 0.1 * math.sqrt(2 / size)).astype(np.float32)
    values, replicates = columns.mean(axis=0, dtype=np.float64), (weights @ columns / size).astype(np.float64)
    return [Sample(values[[place]], replicates[:, place]) for place in range(count)]


def areas(generator: np.random.Generator, splits: Sequence[NDArray], count: int) -> list[Sample]:
    """AUROC of scores that are mostly common."""
    sides = [
        generator.normal(size=(weights.shape[1], 1)) + 0.3 * generator.normal(size=(weights.shape[1], count)) + shift
        for weights, shift in zip(splits, (1.5, 0.0), strict=True)
    ]
    rankings = [Ranking(sides[0][:, place], sides[1][:, place]) for place in range(count)]
    return [Sample(np.array([one.estimate([auroc])[0]]), one.evaluate([auroc], *splits)[:, 0]) for one in rankings]


def weights_of(name: str, size: int, replicates: int) -> NDArray:
    return np.concatenate([block[0] for block in Bootstrap(replicates).weights((name, size))])


def levels(trials: int, replicates: int) -> Iterator[dict[str, object]]:
    """The share of trials in which any of k equal posteriors is told to be worse, by the old tests and the new."""
    generator = np.random.default_rng(0)
    for count in (2, 3, 8):
        none = np.zeros(count)
        for size in (3, 5, 10):
            for spread in (1.0, 20.0):
                drawn = (over_seeds(generator, size, count, none, spread) for _ in range(trials))
                rate = np.mean([marked_worse(own, higher=False).any(axis=1) for own in drawn], axis=0)
                yield {"over": f"{size} seeds", "spread": spread, "count": count, "holm": rate[0], "compare": rate[1]}
        for size in (2000, 8000):
            weights = weights_of("test", size, replicates)
            drawn = (over_examples(generator, weights, count, none) for _ in range(trials))
            rate = np.mean([marked_worse(own, higher=False).any(axis=1) for own in drawn], axis=0)
            yield {"over": f"{size} examples", "count": count, "holm": rate[0], "compare": rate[1]}
        splits = [weights_of("test", 1000, replicates), weights_of("far", 500, replicates)]
        drawn = (areas(generator, splits, count) for _ in range(trials))
        rate = np.mean([marked_worse(own, higher=True).any(axis=1) for own in drawn], axis=0)
        yield {"over": "AUROC of 1000 and 500 examples", "count": count, "holm": rate[0], "compare": rate[1]}


def powers(trials: int, replicates: int) -> Iterator[dict[str, object]]:
    """The share of trials in which the second posterior is told to be worse."""
    generator, weights = np.random.default_rng(1), weights_of("test", 2000, replicates)
    for count in (2, 3, 8):
        for others in (0.0, 100.0) if count > 2 else (0.0,):
            for shift in (1.0, 2.0, 4.0):
                shifts = np.array([0.0, shift, *[others] * (count - 2)])
                makers = {
                    "2000 examples": lambda s=shifts, k=count: over_examples(generator, weights, k, s),
                    "5 seeds": lambda s=shifts, k=count: over_seeds(generator, 5, k, s, 1.0),
                    "10 seeds": lambda s=shifts, k=count: over_seeds(generator, 10, k, s, 1.0),
                }
                for over, make in makers.items():
                    rate = np.mean([marked_worse(make(), higher=False)[:, 1] for _ in range(trials)], axis=0)
                    where = {"over": over, "count": count, "others": others, "shift": shift}
                    yield {**where, "holm": rate[0], "compare": rate[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--replicates", type=int, default=299)
    arguments = parser.parse_args()
    for what, make in (("level", levels), ("power", powers)):
        for row in make(arguments.trials, arguments.replicates):
            shown = {key: round(float(v), 4) if isinstance(v, np.floating) else v for key, v in row.items()}
            print(json.dumps({"what": what, **shown}), flush=True)


if __name__ == "__main__":
    main()

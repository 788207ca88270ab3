"""Scores of several posteriors, as paired comparisons take them."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.bootstrap import Bootstrap
from bnncli.evaluation.comparison import Sample, integration


def means(columns: NDArray, seed: int = 0, replicates: int = 1000) -> list[Sample]:
    """The mean of each column (N, V), resampled alike."""
    found = Bootstrap(replicates, seed=seed).replicates(lambda w: w @ columns / len(columns), ("test", len(columns)))
    return [Sample(np.array([value]), drawn) for value, drawn in zip(columns.mean(axis=0), found.T, strict=True)]


def noisy_scores(generator: np.random.Generator, count: int, degrees: int, trial: int) -> list[Sample]:
    """Equal true scores with sampling errors of 1, mostly shared, and integration errors of 1 told by a chi-square."""
    shared, sizes = generator.normal(size=2), (399,)
    drawn = generator.normal(size=sizes)
    samples = []
    for place in range(count):
        own = 0.2 * generator.normal(size=2)
        told = math.sqrt(generator.chisquare(degrees) / degrees)
        value = shared[0] + own[0] + generator.normal()
        replicates = value + drawn + 0.2 * generator.normal(size=sizes)
        noise = integration(told, degrees, size=sizes[0], seed=1000 * trial + place)
        samples.append(Sample(np.array([value]), replicates, noise))
    return samples

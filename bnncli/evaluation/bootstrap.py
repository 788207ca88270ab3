"""Bootstrap over examples: standard errors and intervals of scores from resampled example weights.

Efron and Tibshirani (1993), An Introduction to the Bootstrap, chapters 6 and 13. Basic and percentile intervals as in
Davison and Hinkley (1997), section 5.2. The weights of a split depend only on the seed and the split's name and size.
All posteriors are therefore resampled alike, and differences of scores are paired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.numerics.random import stream_seed
from bnncli.system import signals
from bnncli.system.workers import Parts

BLOCK_WEIGHTS = 1 << 20  # weights held at once (4 MB, fits into a cache)
_COUNTED = 1 << 17  # indices drawn and counted at once, to stay in the cache
METHODS = ("percentile", "basic")


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap settings.

    Args:
        num_replicates: R, at least 1.
        level: level of the intervals, between 0 and 1.
        seed: seed of the weights.
    """

    num_replicates: int = 1000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_replicates < 1 or not 0 < self.level < 1:
            raise ValueError(f"expected a replicate and a level in (0, 1), got {self.num_replicates} and {self.level}")

    def blocks(self, *splits: tuple[str, int]) -> list[range]:
        """Return the ranges of replicates whose weights for these splits (name, N) are held at once."""
        most = max(1, BLOCK_WEIGHTS // max(1, sum(size for _, size in splits)))
        every = range(self.num_replicates)
        return [every[start : start + most] for start in range(0, self.num_replicates, most)]

    def weights(
        self, *splits: tuple[str, int], only: Container[int] | None = None
    ) -> Iterator[tuple[NDArray[np.float32], ...]]:
        """Yield blocks (b, N) of example counts, one array per split (name, N >= 1); each row sums to N.

        Args:
            only: indices of the blocks to yield; all by default.
        """
        streams = [np.random.default_rng(stream_seed(self.seed, f"bootstrap/{name}/{size}")) for name, size in splits]
        for number, block in enumerate(self.blocks(*splits)):
            signals.raise_if_interrupted("bootstrap")
            if only is None or number in only:
                yield tuple(_counts(one, len(block), size) for one, (_, size) in zip(streams, splits, strict=True))
            else:
                for stream, (_, size) in zip(streams, splits, strict=True):
                    deque(_drawn(stream, len(block), size), maxlen=0)

    def replicates(self, statistic: Callable[..., NDArray], *splits: tuple[str, int]) -> NDArray[np.float64]:
        """Return the statistic of every replicate, (R, ...).

        The statistic maps weights (b, N), one array per split, to (b, ...). Worker processes of one command share the
        blocks.
        """
        blocks = self.blocks(*splits)
        parts = Parts(len(blocks))
        own = [np.asarray(statistic(*block), dtype=np.float64) for block in self.weights(*splits, only=parts.own)]
        return parts.of_all(np.concatenate(own), [len(block) for block in blocks])

    def describe(
        self,
        estimate: float,
        replicates: NDArray,
        *,
        method: str = "percentile",
        bounds: tuple[float, float] = (-np.inf, np.inf),
    ) -> dict[str, Any]:
        """Return `standard_error` and `interval` of a metric row; both None if fewer than half of the replicates are defined.

        Args:
            replicates: (R,); non-finite ones, where the statistic is undefined, are skipped.
            method: see `interval`.
            bounds: range of the score.
        """
        known = replicates[np.isfinite(replicates)]
        if 2 * len(known) < len(replicates) or len(known) < 2:
            return {"standard_error": None, "interval": None}
        low, high = interval(estimate, known, level=self.level, method=method, bounds=bounds)
        shown = {"low": low, "high": high, "level": self.level, "method": method, "replicates": len(known)}
        return {"standard_error": float(known.std(ddof=1)), "interval": shown}


def interval(
    estimate: float,
    replicates: NDArray,
    *,
    level: float = 0.95,
    method: str = "percentile",
    bounds: tuple[float, float] = (-np.inf, np.inf),
) -> tuple[float, float]:
    """Return the bootstrap interval around an estimate from finite replicates (R,).

    Args:
        level: coverage, between 0 and 1.
        method: `percentile`: quantiles of the replicates. `basic`: these quantiles mirrored at the estimate, which is
            right if resampling shifts the score as sampling did; calibration errors, for example, are biased upwards by
            both.
        bounds: range of the score, to which the ends are clipped.
    """
    if method not in METHODS:
        raise ValueError(f"expected one of {', '.join(METHODS)}, got {method!r}")
    low, high = np.quantile(np.asarray(replicates, dtype=np.float64), [(1 - level) / 2, (1 + level) / 2])
    if method == "basic":
        low, high = 2 * estimate - high, 2 * estimate - low
    return float(np.clip(low, *bounds)), float(np.clip(high, *bounds))


def _counts(stream: np.random.Generator, num_replicates: int, size: int) -> NDArray[np.float32]:
    """Return counts (b, N) of N draws with replacement from N examples; faster than binomial draws."""
    out = np.empty((num_replicates, size), dtype=np.float32)
    start = 0
    for drawn in _drawn(stream, num_replicates, size):
        rows = out[start : start + len(drawn)]
        drawn += size * np.arange(len(rows))[:, None]
        rows[:] = np.bincount(drawn.ravel(), minlength=rows.size).reshape(rows.shape)
        start += len(rows)
    return out


def _drawn(stream: np.random.Generator, num_replicates: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the drawn indices (b, N) of the replicates, a few replicates at a time."""
    at_once = max(1, _COUNTED // size)
    for start in range(0, num_replicates, at_once):
        yield stream.integers(size, size=(min(at_once, num_replicates - start), size))

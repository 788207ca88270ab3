"""Bootstrap over examples: the standard error of a score and an interval around it, from resampled weights.

Efron and Tibshirani (1993), An Introduction to the Bootstrap, chapters 6 and 13; basic and percentile intervals as in
Davison and Hinkley (1997), section 5.2. The weights of a split depend on the seed, its name and its size alone: all
posteriors are resampled alike, so that the difference of two scores is resampled in pairs.
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

BLOCK_WEIGHTS = 1 << 20  # weights held at once: 4 MB stay in a cache
_COUNTED = 1 << 17  # drawn and counted at once: what stays in the cache
METHODS = ("percentile", "basic")


@dataclass(frozen=True)
class Bootstrap:
    """How scores are resampled.

    Args:
        num_replicates: R, at least 1.
        level: of the intervals, between 0 and 1.
        seed: of the weights.
    """

    num_replicates: int = 1000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_replicates < 1 or not 0 < self.level < 1:
            raise ValueError(f"expected a replicate and a level in (0, 1), got {self.num_replicates} and {self.level}")

    def blocks(self, *splits: tuple[str, int]) -> list[range]:
        """The replicates whose weights, of these splits (name, N), are held at once."""
        most = max(1, BLOCK_WEIGHTS // max(1, sum(size for _, size in splits)))
        every = range(self.num_replicates)
        return [every[start : start + most] for start in range(0, self.num_replicates, most)]

    def weights(
        self, *splits: tuple[str, int], only: Container[int] | None = None
    ) -> Iterator[tuple[NDArray[np.float32], ...]]:
        """Blocks (b, N) of how often each example is drawn, one array for each (name, N >= 1); each row sums to N.

        Args:
            only: numbers of the blocks that are wanted; all by default.
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
        """The statistic of every replicate, (R, ...): a function of weights (b, N), one for each split, to (b, ...).

        Processes that share a command share out the blocks.
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
        """What a metric row gains: `standard_error` and `interval`; both None where the replicates do not tell.

        Args:
            replicates: (R,); those that are not finite, where the statistic is undefined, are left out and not counted.
            method: as of `interval`.
            bounds: the range of the score.
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
    """The interval around an estimate that replicates (R,), all finite, give.

    Args:
        level: the share of intervals that hold the true value, between 0 and 1.
        method: `percentile`, the quantiles of the replicates; `basic`, those mirrored at the estimate, which is right
            where resampling moves the score as sampling did: a calibration error is biased upwards by both.
        bounds: the range of the score, to which the ends are clipped.
    """
    if method not in METHODS:
        raise ValueError(f"expected one of {', '.join(METHODS)}, got {method!r}")
    low, high = np.quantile(np.asarray(replicates, dtype=np.float64), [(1 - level) / 2, (1 + level) / 2])
    if method == "basic":
        low, high = 2 * estimate - high, 2 * estimate - low
    return float(np.clip(low, *bounds)), float(np.clip(high, *bounds))


def _counts(stream: np.random.Generator, num_replicates: int, size: int) -> NDArray[np.float32]:
    """Counts (b, N) of N draws with replacement from N examples: multinomial, and faster than binomial draws."""
    out = np.empty((num_replicates, size), dtype=np.float32)
    start = 0
    for drawn in _drawn(stream, num_replicates, size):
        rows = out[start : start + len(drawn)]
        drawn += size * np.arange(len(rows))[:, None]
        rows[:] = np.bincount(drawn.ravel(), minlength=rows.size).reshape(rows.shape)
        start += len(rows)
    return out


def _drawn(stream: np.random.Generator, num_replicates: int, size: int) -> Iterator[NDArray[np.int64]]:
    """The draws (b, N) of so many replicates, a few at a time."""
    at_once = max(1, _COUNTED // size)
    for start in range(0, num_replicates, at_once):
        yield stream.integers(size, size=(min(at_once, num_replicates - start), size))

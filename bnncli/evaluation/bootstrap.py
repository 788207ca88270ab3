"""Standard errors of scores: bootstrap over examples or over groups of them, and the Monte Carlo error over draws of the posterior."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bnncli.errors import DataError
from bnncli.lazy import np
from bnncli.numerics.random import stream_seed
from bnncli.system import signals
from bnncli.system.workers import Parts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bnncli.evaluation.groups import RowGroups

BLOCK_WEIGHTS = 1 << 20  # weights held at once (4 MB, fits into a cache)
_COUNTED = 1 << 17  # indices drawn and counted at once, to stay in the cache
METHODS = ("percentile", "basic")
MOST_RESAMPLED = 50_000  # examples of the largest split; of more, a random part is resampled
_FEWEST_RESAMPLED = 2_000  # examples of the smallest split in such a part, if it has them


class GroupedSplit(Protocol):
    """A split whose rows may have groups."""

    @property
    def name(self) -> str:
        """Name of the split."""

    @property
    def groups(self) -> RowGroups | None:
        """Groups of dependent rows; None if all rows are independent."""


@dataclass(frozen=True)
class RandomPart:
    """A random part of large splits, resampled in place of all examples: m out of N of each, with one share m / N.

    Args:
        rows: (m,) ascending, of each split.
        share: m / N.
    """

    rows: tuple[NDArray[np.int64], ...]
    share: float

    def of_all(self, values: NDArray, part: NDArray, replicates: NDArray) -> NDArray:
        """Return replicates (R, m) of scores of all examples.

        Standard errors shrink with the square root of the number of examples (Bickel, Gotze and van Zwet 1997).

        Args:
            values, part: the scores (m,) of all examples, and of the part.
            replicates: of the part, (R, m).
        """
        found: NDArray = values + math.sqrt(self.share) * (replicates - part)
        return found


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap settings.

    Args:
        num_replicates: R, at least 1.
        level: level of the intervals, between 0 and 1.
        seed: seed of the weights.
        groups: groups of dependent rows, by split; a split that has them is resampled by whole groups.
    """

    num_replicates: int = 1000
    level: float = 0.95
    seed: int = 0
    groups: Mapping[str, RowGroups] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.num_replicates < 1 or not 0 < self.level < 1:
            raise ValueError(f"expected a replicate and a level in (0, 1), got {self.num_replicates} and {self.level}")

    def of_splits(self, *splits: GroupedSplit) -> Bootstrap:
        """Return the bootstrap that resamples these splits by their groups, where they have any."""
        return replace(self, groups={split.name: split.groups for split in splits if split.groups is not None})

    def part(self, *splits: tuple[str, int]) -> RandomPart | None:
        """Return the part of large splits (name, N) to resample; None to resample all examples, or whole groups."""
        share = self._share(*splits)
        if share == 1:
            return None
        streams = [np.random.default_rng(stream_seed(self.seed, f"part/{name}/{size}")) for name, size in splits]
        rows = [
            np.sort(stream.choice(size, round(share * size), replace=False))
            for stream, (_, size) in zip(streams, splits, strict=True)
        ]
        return RandomPart(tuple(rows), share)

    def _share(self, *splits: tuple[str, int]) -> float:
        sizes = [size for _, size in splits]
        if max(sizes) <= MOST_RESAMPLED or min(sizes) == 0 or any(name in self.groups for name, _ in splits):
            return 1.0
        return min(1.0, max(MOST_RESAMPLED / max(sizes), _FEWEST_RESAMPLED / min(sizes)))

    def sized(self, *splits: tuple[str, int]) -> dict[str, Any]:
        """Return what an interval over these splits (name, N) records: groups, or the size of a part; empty for all examples."""
        share = self._share(*splits)
        if share == 1:
            return self.resampled(*(name for name, _ in splits))
        counts = [round(share * size) for _, size in splits]
        return {"resampled": "part", "num_resampled": counts if len(counts) > 1 else counts[0]}

    def num_units(self, split: tuple[str, int]) -> int:
        """Return the number of groups, or else of examples, that are resampled in a split (name, N)."""
        name, size = split
        return len(self.groups[name]) if name in self.groups else size

    def resampled(self, *splits: str) -> dict[str, Any]:
        """Return what an interval over these splits records of groups; empty without groups."""
        counts = [len(self.groups[name]) if name in self.groups else None for name in splits]
        if not any(counts):
            return {}
        return {"resampled": "groups", "num_groups": counts if len(counts) > 1 else counts[0]}

    def blocks(self, *splits: tuple[str, int]) -> list[range]:
        """Return the ranges of replicates whose weights for these splits (name, N) are held at once."""
        most = max(1, BLOCK_WEIGHTS // max(1, sum(size for _, size in splits)))
        every = range(self.num_replicates)
        return [every[start : start + most] for start in range(0, self.num_replicates, most)]

    def weights(
        self, *splits: tuple[str, int], only: Container[int] | None = None
    ) -> Iterator[tuple[NDArray[np.float32], ...]]:
        """Yield blocks (b, N) of example counts, one array per split (name, N >= 1).

        Each row sums to N; with groups, to the size of all drawn groups.

        Args:
            only: indices of the blocks to yield; all by default.
        """
        units = [(name, self.num_units((name, size))) for name, size in splits]
        streams = [np.random.default_rng(stream_seed(self.seed, f"bootstrap/{name}/{size}")) for name, size in units]
        for number, block in enumerate(self.blocks(*splits)):
            signals.raise_if_interrupted("bootstrap")
            if only is None or number in only:
                counts = [
                    (name, _counts(one, len(block), size)) for one, (name, size) in zip(streams, units, strict=True)
                ]
                yield tuple(self.groups[name].spread(own) if name in self.groups else own for name, own in counts)
            else:
                for stream, (_, size) in zip(streams, units, strict=True):
                    deque(_draw_indices(stream, len(block), size), maxlen=0)

    def replicates(
        self,
        statistic: Callable[..., NDArray],
        *splits: tuple[str, int],
        take: Callable[..., Callable[..., NDArray]] | None = None,
    ) -> NDArray[np.float64]:
        """Return the statistic of every replicate, (R, ...).

        The statistic maps weights (b, N), one array per split, to (b, ...). Worker processes of one command share the
        blocks.

        Args:
            take: returns the same statistic of some rows (n,) of each split, to resample a random part of large splits; None
                to resample all.
        """
        part = None if take is None else self.part(*splits)
        if take is not None and part is not None:
            of_part = take(*part.rows)
            sized = [(name, len(rows)) for (name, _), rows in zip(splits, part.rows, strict=True)]
            values, own = (
                one(*(np.ones((1, size)) for _, size in some))[0]
                for one, some in ((statistic, splits), (of_part, sized))
            )
            return part.of_all(values, own, self.replicates(of_part, *sized))
        blocks = self.blocks(*splits)
        parts = Parts(len(blocks))
        own_blocks = self.weights(*splits, only=parts.own)
        found = [np.asarray(statistic(*block), dtype=np.float64) for block in own_blocks]
        return parts.of_all(np.concatenate(found), [len(block) for block in blocks])

    def describe(
        self,
        estimate: float,
        replicates: NDArray,
        *,
        splits: Sequence[tuple[str, int]] = (),
        method: str = "percentile",
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> dict[str, Any]:
        """Return `standard_error` and `interval` of a metric row; both None if fewer than half of the replicates are defined.

        Both are None, too, if a split has a single group.

        Args:
            replicates: (R,); non-finite ones, where the statistic is undefined, are skipped.
            splits: name and number of examples of the resampled splits.
            method: see `interval`.
            bounds: range of the score.
        """
        known = replicates[np.isfinite(replicates)]
        is_single = any(name in self.groups and len(self.groups[name]) < 2 for name, _ in splits)
        if 2 * len(known) < len(replicates) or len(known) < 2 or is_single:
            return {"standard_error": None, "interval": None}
        low, high = interval(estimate, known, level=self.level, method=method, bounds=bounds)
        shown = {"low": low, "high": high, "level": self.level, "method": method, "replicates": len(known)}
        shown |= self.sized(*splits) if splits else {}
        return {"standard_error": float(known.std(ddof=1)), "interval": shown}


def interval(
    estimate: float,
    replicates: NDArray,
    *,
    level: float = 0.95,
    method: str = "percentile",
    bounds: tuple[float, float] = (-math.inf, math.inf),
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
    for drawn in _draw_indices(stream, num_replicates, size):
        rows = out[start : start + len(drawn)]
        drawn += size * np.arange(len(rows))[:, None]
        rows[:] = np.bincount(drawn.ravel(), minlength=rows.size).reshape(rows.shape)
        start += len(rows)
    return out


def _draw_indices(stream: np.random.Generator, num_replicates: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the drawn indices (b, N) of the replicates, a few replicates at a time."""
    at_once = max(1, _COUNTED // size)
    for start in range(0, num_replicates, at_once):
        yield stream.integers(size, size=(min(at_once, num_replicates - start), size))


Probs: TypeAlias = "NDArray[np.float64]"


@dataclass(frozen=True)
class DrawGroups:
    """Mean class probabilities of disjoint, nearly independent groups of one prediction's draws.

    Args:
        probs: (G, R, C), G at least 2; may be memory-mapped.
        weights: (G,), each group's share of the draws or of their importance weights; sums to one.
    """

    probs: NDArray
    weights: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.probs.ndim != 3 or self.weights.shape != self.probs.shape[:1] or len(self.weights) < 2:
            shapes = f"{self.probs.shape} and {self.weights.shape}"
            raise DataError(
                f"groups of draws: expected probs (G, R, C) and weights (G,) with G at least 2, got {shapes}"
            )
        if not (np.all(self.weights >= 0) and np.all(self.weights < 1) and abs(self.weights.sum() - 1) < 1e-6):
            raise DataError(f"groups of draws: expected weights in [0, 1) that sum to one, got {self.weights}")

    def __len__(self) -> int:
        return len(self.weights)

    def mean(self) -> Probs:
        """Return the prediction of all draws, (R, C)."""
        return self._mixed(self.weights)

    def half(self, is_in: NDArray[np.bool_]) -> Probs:
        """Return the prediction of the groups marked in is_in (G,), (R, C)."""
        return self._mixed(np.where(is_in, self.weights, 0) / self.weights[is_in].sum())

    def _mixed(self, shares: NDArray[np.float64]) -> Probs:
        mixed = shares.astype(self.probs.dtype) @ self.probs.reshape(len(shares), -1)
        return mixed.reshape(self.probs.shape[1:]).astype(np.float64)


@dataclass(frozen=True)
class IntegrationError:
    """The Monte Carlo error of a score, estimated from groups.

    Args:
        variance: variance of the score over new draws, in squared units of the score; NaN if the score is not finite.
        degrees_of_freedom: degrees of freedom of the variance: G - 1, or fewer for uneven weights.
    """

    variance: float
    degrees_of_freedom: float

    @property
    def standard_error(self) -> float:
        """Square root of the variance, in the unit of the score."""
        return math.sqrt(self.variance)


def integration_error(score: Callable[..., float], *splits: DrawGroups) -> IntegrationError:
    """Return the Monte Carlo error of score(probs of the first split, of the second, ...), each (R, C) float64.

    Args:
        score: any function of the probabilities.
        splits: as in integration_errors, with the same errors.
    """
    return integration_errors(lambda *probs: [score(*probs)], *splits)[0]


def integration_errors(scores: Callable[..., Sequence[float]], *splits: DrawGroups) -> list[IntegrationError]:
    """Return the Monte Carlo error of each of scores(probs of the first split, of the second, ...), each (R, C) float64.

    Let v_h be the score of a half h of the groups, W_h the weight of that half, and v the mean of the v_h with weights
    W_h. The variance is the mean of W_h / (1 - W_h) (v_h - v)^2 over a balanced set of halves and their complements.
    For a mean over equal groups this is the sample variance of the groups divided by G. It is unbiased for unequal
    groups too; for a ratio, as with importance weights, it is the linearised variance.

    Args:
        scores: any function of the probabilities.
        splits: one or several splits whose group g holds the same draws (in-distribution and OOD).

    Raises:
        DataError: the splits differ in the number of groups or in weights.
    """
    weights = splits[0].weights
    for other in splits[1:]:
        if other.weights.shape != weights.shape or not np.allclose(other.weights, weights, rtol=0, atol=1e-9):
            raise DataError("groups of draws: the splits were predicted with different draws")
    halves = [half for half in balanced_halves(len(weights)) if 0 < weights[half].sum() < 1]
    values = np.array([scores(*(split.half(half) for split in splits)) for half in halves], dtype=np.float64)  # (H, m)
    shares = np.array([weights[half].sum() for half in halves])
    middle = shares @ values / shares.sum()
    variances = ((shares / (1 - shares))[:, None] * (values - middle) ** 2).mean(axis=0)
    return [IntegrationError(float(variance), _degrees_of_freedom(weights)) for variance in variances]


@lru_cache(maxsize=32)
def balanced_halves(num_groups: int) -> NDArray[np.bool_]:
    """Return halves (H, G) of G groups, each with its complement, that separate every pair of groups equally often.

    Rows of a Hadamard matrix of order q + 1 >= G by the construction of Paley (1933), q = 3, 7, 11, 19 ..., without the
    constant row. The halves are exact if G = q + 1. Empty halves and their complements are dropped.
    """
    order = next(size for size in range(3, 4 * num_groups + 60, 4) if size + 1 >= num_groups and _is_prime(size))
    squares = {step * step % order for step in range(1, order)}
    signs = np.ones((order, order + 1), dtype=bool)
    for row in range(order):
        signs[row, 1:] = [(column - row) % order in squares for column in range(order)]
    halves = np.concatenate([signs, ~signs])[:, :num_groups]
    return halves[halves.any(axis=1) & ~halves.all(axis=1)]


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _degrees_of_freedom(weights: NDArray[np.float64]) -> float:
    """Return Satterthwaite's degrees of freedom: G - 1 for equal weights."""
    squares = weights**2
    return float(squares.sum() ** 2 / (squares**2).sum()) * (1 - 1 / len(weights))

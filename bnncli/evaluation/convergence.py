"""Convergence of chains: rank-normalised R-hat, effective sample sizes, agreement of predictions, uniformity of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.lazy import special, torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import block_logits

if TYPE_CHECKING:
    from torch import Tensor


_TAILS = (0.05, 0.95)


class RankStatistics(NamedTuple):
    """R-hat (NaN for a single chain), bulk and tail effective sample size, (M,) each."""

    r_hat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor


def rank_statistics(draws: Tensor) -> RankStatistics:
    """Return R-hat, bulk and tail ESS of M quantities.

    Args:
        draws: (M, C, T), T >= 4, finite, no quantity constant within all half-chains.
    """
    draws = draws.double()
    num_chains, num_draws = draws.shape[1:]
    halves = _halves(draws)
    ordered, order = halves.flatten(1).sort(dim=1)
    scores = _normal_scores(ordered, order).view_as(halves)
    r_hat = torch.full(draws.shape[:1], math.nan, dtype=torch.float64, device=draws.device)
    if num_chains > 1:
        middle = 0.5 * (ordered[:, (ordered.shape[1] - 1) // 2] + ordered[:, ordered.shape[1] // 2])
        folded = (halves - middle.view(-1, 1, 1)).abs().flatten(1).sort(dim=1)
        r_hat = torch.maximum(_r_hat(scores), _r_hat(_normal_scores(*folded).view_as(halves)))
    everything = ordered if num_draws % 2 == 0 else draws.flatten(1).sort(dim=1).values
    tails = [_ess(_halves((draws <= _quantile(everything, share).view(-1, 1, 1)).double())) for share in _TAILS]
    return RankStatistics(r_hat, _ess(scores), torch.minimum(*tails))


def _halves(draws: Tensor) -> Tensor:
    """Split each chain into two, (M, 2 C, T // 2), dropping an odd draw in the middle."""
    half = draws.shape[2] // 2
    return torch.cat([draws[:, :, :half], draws[:, :, -half:]], dim=1)


def _normal_scores(ordered: Tensor, order: Tensor) -> Tensor:
    """Return normal quantiles of the ranks (M, n), mean ranks for ties, from a sort along dimension 1."""
    size = ordered.shape[1]
    place = torch.arange(size, device=ordered.device).expand_as(ordered)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(is_new, place, 0).cummax(dim=1).values
    is_last = torch.ones_like(is_new)
    is_last[:, :-1] = is_new[:, 1:]
    last = torch.where(is_last, place, size).flip(1).cummin(dim=1).values.flip(1)
    ranks = 0.5 * (first + last).double() + 1
    scores = torch.special.ndtri((ranks - 0.375) / (size + 0.25))
    return torch.empty_like(scores).scatter_(1, order, scores)


def _r_hat(chains: Tensor) -> Tensor:
    """Return the classic R-hat (M,) of chains (M, C, T)."""
    size = chains.shape[2]
    between = size * chains.mean(dim=2).var(dim=1)
    within = chains.var(dim=2).mean(dim=1)
    return torch.sqrt((between / within + size - 1) / size)


def _quantile(ordered: Tensor, share: float) -> Tensor:
    """Return the linearly interpolated quantile (M,) of ordered (M, n), rounded as in numpy."""
    position = (ordered.shape[1] - 1) * share
    below = math.floor(position)
    weight = position - below
    low, high = ordered[:, below], ordered[:, min(below + 1, ordered.shape[1] - 1)]
    step = high - low
    return high - step * (1 - weight) if weight >= 0.5 else low + step * weight


def _ess(chains: Tensor) -> Tensor:
    """Return the effective sample size (M,) of chains (M, C, T); the number of draws for a constant quantity."""
    num_chains, size = chains.shape[1:]
    total = num_chains * size
    mean_covariance = _mean_autocovariance(chains)
    within = mean_covariance[:, 0] * size / (size - 1)
    variance = mean_covariance[:, 0].clone()
    if num_chains > 1:
        variance += chains.mean(dim=2).var(dim=1)
    correlation = 1 - (within.unsqueeze(1) - mean_covariance) / variance.unsqueeze(1)
    correlation[:, 0] = 1
    pairs = correlation[:, : size // 2 * 2].unflatten(1, (-1, 2)).sum(dim=2)
    # The sum ends before the first non-positive pair or at the end of the chain; one more even lag counts once.
    largest = max(0, math.ceil((size - 2) / 2) - 1)
    num_pairs = (pairs > 0).long().cumprod(dim=1).sum(dim=1).clamp(max=largest)
    counted = torch.arange(pairs.shape[1], device=pairs.device) < num_pairs.unsqueeze(1)
    time = -1 + 2 * torch.where(counted, pairs.cummin(dim=1).values, 0.0).sum(dim=1)
    end = num_pairs.unsqueeze(1)
    even, pair = correlation.gather(1, 2 * end).squeeze(1), pairs.gather(1, end).squeeze(1)
    time += torch.where((even > 0) | (pair >= 0), even, 0.0)
    ess = total / time.clamp(min=1 / math.log10(total))
    spread = chains.amax(dim=(1, 2)) - chains.amin(dim=(1, 2))
    return torch.where(spread < 1e-15, float(total), ess)


def _mean_autocovariance(chains: Tensor) -> Tensor:
    """Return the autocovariance at every lag (M, T), divided by T and averaged over the chains (M, C, T)."""
    size = chains.shape[2]
    length = 1 << (2 * size - 1).bit_length()
    spectrum = torch.fft.rfft(chains - chains.mean(dim=2, keepdim=True), n=length)
    power = (spectrum.real.square() + spectrum.imag.square()).mean(dim=1)
    return torch.fft.irfft(power, n=length)[:, :size] / size


GOOD_RHAT = 1.05  # above it, chains disagree too much to be quoted
STUCK_ACCEPTANCE = 0.05  # a chain with a lower acceptance rate has sampled nothing
MIN_DRAWS = 4  # per chain: half-chains need a variance
_READ_VALUES = 1 << 25  # values read at once from an array that may be on disk and larger than memory
# Values judged at once: on a CPU the sorts stay in cache; a GPU needs few, large kernels (25 float64 copies, 0.8 GiB).
_WORK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 22}


@dataclass(frozen=True)
class Convergence:
    """The worst values over all parameters; None if undefined, with the reason.

    Args:
        r_hat: largest rank-normalised split R-hat; 1 at convergence.
        worst_parameter: index into P of the largest R-hat, or of the smallest bulk ESS if R-hat is undefined.
        ess_bulk: smallest effective number of draws for location.
        ess_tail: smallest effective number of draws for the 5% and 95% quantiles.
        undefined: why a value is None; None if all are defined.
    """

    r_hat: float | None
    worst_parameter: int | None
    ess_bulk: float | None
    ess_tail: float | None
    undefined: str | None = None


def deciding_numbers(metrics: Mapping[str, Any]) -> Convergence:
    """Return the recorded numbers that decide on convergence: of the parameters, or of the predictions in `judged_by`.

    Layers other than the last are judged by predictions: `heldout`, or `train` if there are no other labels.
    """
    prefix = f"{metrics['judged_by']}_" if "judged_by" in metrics else ""
    r_hat, ess_bulk, ess_tail = (metrics.get(prefix + name) for name in ("max_rhat", "min_ess_bulk", "min_ess_tail"))
    return Convergence(r_hat, None, ess_bulk, ess_tail, metrics.get(f"{prefix}undefined"))


def convergence(draws: NDArray, *, device: torch.device | None = None, progress: Progress = SILENT) -> Convergence:
    """Return the worst R-hat and the smallest bulk and tail ESS over the last axis of draws.

    Works for any quantity with a chain and a draw axis: parameters, log probabilities of held-out labels.

    Args:
        draws: (C, T, P); may be memory-mapped, read in blocks of parameters.
        device: device of the float64 computation, by default the CPU, which is also the fallback if the device is out
            of memory. Results agree up to rounding.
        progress: advances once per parameter.

    Raises:
        DataError: the draws have another shape or are not finite.
    """
    if draws.ndim != 3:
        raise DataError(f"draws: expected shape (C, T, P), got {draws.shape}")
    return blockwise_convergence(_reader(draws), draws.shape, device=device, progress=progress)


def blockwise_convergence(
    quantities: Callable[[slice, torch.device], Tensor],
    shape: tuple[int, ...],
    *,
    device: torch.device | None = None,
    progress: Progress = SILENT,
) -> Convergence:
    """Return the same as `convergence` for quantities computed in blocks.

    Args:
        quantities: returns the draws (C, T, m) of a slice of the quantities on a given device.
        shape: (C, T, M), of all quantities.
        device: by default the CPU; if it is out of memory, blocks shrink, and finally the CPU takes over.
        progress: advances once per quantity.
    """
    num_chains, num_draws, num_params = shape
    if num_chains == 0 or num_params == 0:
        return Convergence(None, None, None, None, undefined=f"no draws: shape {shape}")
    if num_draws < MIN_DRAWS:
        reason = f"needs at least {MIN_DRAWS} draws per chain, got {num_draws}"
        return Convergence(None, None, None, None, undefined=reason)
    task = progress.task("convergence", num_params)
    found: list[RankStatistics] = []
    stuck: list[int] = []
    for begin, look in _looks(quantities, shape, device or torch.device("cpu")):
        stuck += [begin + index for index in look.stuck]
        found += look.statistics
        task.advance(look.size)
    if stuck:
        reason = (
            f"constant draws: parameter {stuck[0]} does not move within any half-chain ({len(stuck)} such parameters)"
        )
        return Convergence(None, None, None, None, undefined=reason)
    r_hat, ess_bulk, ess_tail = (torch.cat(part) for part in zip(*found, strict=True))
    smallest = float(ess_bulk.min()), float(ess_tail.min())
    if num_chains == 1:
        return Convergence(None, int(ess_bulk.argmin()), *smallest, undefined="R-hat needs at least two chains, got 1")
    undefined = torch.nonzero(~torch.isfinite(r_hat)).flatten()
    if len(undefined):
        reason = f"parameter {int(undefined[0])} stays at the same distance from its median within half-chains"
        return Convergence(None, None, None, None, undefined=reason)
    return Convergence(float(r_hat.max()), int(r_hat.argmax()), *smallest)


def parameter_statistics(draws: NDArray, *, device: torch.device | None = None) -> RankStatistics | None:
    """Return R-hat, bulk and tail ESS of every parameter, (P,) each; None if some are stuck or there are too few draws.

    Args:
        draws: (C, T, P); may be memory-mapped.
    """
    if draws.shape[1] < MIN_DRAWS or 0 in draws.shape:
        return None
    looks = [look for _, look in _looks(_reader(draws), draws.shape, device or torch.device("cpu"))]
    if any(look.stuck for look in looks):
        return None
    parts = [one for look in looks for one in look.statistics]
    return RankStatistics(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _reader(draws: NDArray) -> Callable[[slice, torch.device], Tensor]:
    # np.array reads a memory-mapped block, and makes it writable as torch wants it.
    return lambda block, where: torch.from_numpy(np.array(draws[:, :, block])).to(where)


class _Look(NamedTuple):
    """A block of quantities: their number, the stuck ones, and the statistics if none is stuck."""

    size: int
    stuck: list[int]
    statistics: list[RankStatistics]


def _looks(
    quantities: Callable[[slice, torch.device], Tensor], shape: tuple[int, ...], device: torch.device
) -> Iterator[tuple[int, _Look]]:
    """Yield the start of each block and its statistics.

    If a GPU that the run itself fills runs out of memory, the blocks shrink. Once they would fit into a CPU's cache,
    the CPU takes the rest.
    """
    num_values, num_params = shape[0] * shape[1], shape[2]
    whole = size = max(1, _READ_VALUES // num_values)
    begin = 0
    while begin < num_params:
        look = None
        try:
            look = _look(quantities(slice(begin, min(begin + size, num_params)), device))
        except torch.OutOfMemoryError:
            if device.type == "cpu":
                raise
        if look is not None:
            yield begin, look
            begin += look.size
            continue
        torch.cuda.empty_cache()  # only now are the tensors of the failed block freed
        size = min(size, num_params - begin) // 2
        if size * num_values < _WORK_VALUES["cpu"]:
            size, device = whole, torch.device("cpu")


def _look(draws: Tensor) -> _Look:
    """Judge quantities (C, T, m) on their device; the statistics are on the CPU."""
    block = draws.permute(2, 0, 1).contiguous()
    if not bool(torch.isfinite(block).all()):
        raise DataError("draws: expected finite values, got NaN or infinity")
    stuck = _stuck(block).tolist()
    if stuck:
        return _Look(len(block), stuck, [])
    most = _WORK_VALUES.get(block.device.type, _WORK_VALUES["cuda"])
    parts = block.split(max(1, most // (block.shape[1] * block.shape[2])))
    return _Look(len(block), [], [RankStatistics(*(one.cpu() for one in rank_statistics(part))) for part in parts])


def _stuck(quantities: Tensor) -> Tensor:
    """Return which of the quantities (m, C, T) are constant in every half-chain, whose variance R-hat divides by."""
    half = quantities.shape[2] // 2
    moves = [part.amax(dim=2) > part.amin(dim=2) for part in (quantities[:, :, :half], quantities[:, :, -half:])]
    return (~(moves[0] | moves[1]).any(dim=1)).nonzero().flatten()


MAX_ROWS = 512
_THETA_VALUES = 1 << 24  # of draws read at once from an array that may be on disk
_LOGIT_VALUES = {"cpu": 1 << 22, "cuda": 1 << 24}  # computed at once


def held_out_convergence(
    draws: Tensor,
    features: Tensor,
    labels: Tensor,
    *,
    layout: HeadLayout,
    device: torch.device | None = None,
    progress: Progress = SILENT,
) -> Convergence:
    """Return the worst R-hat and smallest ESS of log p(y | x, theta) over the examples.

    Args:
        draws: (C, T, P); may be memory-mapped.
        features: (N, D).
        labels: (N,) int64.
        layout: layout of weight and bias in theta.
        device: device of the computation; falls back to the CPU if it runs out of memory.
    """

    def quantities(rows: slice, where: torch.device) -> Tensor:
        return log_probabilities(draws, features[rows].to(where), labels[rows].to(where), layout=layout)

    shape = (*draws.shape[:2], features.shape[0])
    return blockwise_convergence(quantities, shape, device=device, progress=progress)


def log_probabilities(draws: Tensor, features: Tensor, labels: Tensor, *, layout: HeadLayout) -> Tensor:
    """Return log p(y_n | x_n, theta), (C, T, N) float64 on the features' device, for draws (C, T, P)."""
    num_chains, num_draws = draws.shape[:2]
    features = features.float()
    out = features.new_empty(num_chains, num_draws, len(labels), dtype=torch.float64)
    most = _LOGIT_VALUES.get(features.device.type, _LOGIT_VALUES["cuda"])
    size = max(1, most // (num_chains * len(labels) * layout.num_outputs))
    for start in range(0, num_draws, size):
        theta = draws[:, start : start + size].to(features)
        logits = block_logits(features, theta.flatten(0, 1), layout).double()
        values = layout.likelihood.sharp_log_likelihoods(logits, labels)
        out[:, start : start + size] = values.view(num_chains, -1, len(labels))
    return out


class LabelledExamples(Protocol):
    """Labelled examples whose label probabilities depend on theta."""

    @property
    def num_examples(self) -> int:
        """Number of examples, M."""

    @property
    def device(self) -> torch.device:
        """Device of the computation."""

    def log_probabilities(self, theta: Tensor) -> Tensor:
        """Return log p of each label under each theta (S, P), (S, M) float64."""


def label_convergence(draws: Tensor, examples: LabelledExamples, *, progress: Progress = SILENT) -> Convergence:
    """Return the same as held_out_convergence for any kind of theta.

    Args:
        draws: (C, T, P); may be memory-mapped.
        examples: a few hundred.
    """
    num_chains, num_draws, num_params = draws.shape
    shape = (num_chains, num_draws, examples.num_examples)
    values = torch.empty(shape, dtype=torch.float64, device=examples.device)
    task = progress.task("log probabilities of labels", num_draws)
    for part, out in zip(
        *(one.split(max(1, _THETA_VALUES // (num_chains * num_params)), dim=1) for one in (draws, values)), strict=True
    ):
        out.copy_(examples.log_probabilities(part.flatten(0, 1)).view(out.shape))
        task.advance(part.shape[1])
    return convergence(values.cpu().numpy(), device=examples.device, progress=progress)


MOST_POINTS = 100  # points where the distribution function is compared with its bounds
_HALVINGS = 40

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class RankLaw:
    """Uniform ranks 0..num_draws of independent simulations.

    Args:
        num_simulations: M.
        num_draws: L, number of draws that the true value is ranked among.
    """

    num_simulations: int
    num_draws: int

    def __post_init__(self) -> None:
        if self.num_simulations < 2 or self.num_draws < 1:
            raise ValueError(f"expected at least 2 simulations and 1 draw, got {self!r}")

    @property
    def points(self) -> Counts:
        """Ranks (Q,) below which ranks are counted: 1..L, or a subset."""
        return np.unique(np.linspace(1, self.num_draws, min(self.num_draws, MOST_POINTS)).round().astype(np.int64))

    @property
    def shares(self) -> Floats:
        """Expected share of ranks below each point, (Q,)."""
        return self.points / (self.num_draws + 1)

    def counts(self, ranks: Counts) -> Counts:
        """Count the ranks (M,) below each point, (Q,)."""
        return np.searchsorted(np.sort(ranks), self.points, side="left").astype(np.int64)

    def p_value(self, ranks: Counts) -> float:
        """Return the probability that uniform ranks leave, anywhere, pointwise intervals as narrow as these ranks (M,) do."""
        counts = self.counts(ranks)
        tails = _tails(self.num_simulations, self.num_draws)
        return self._leaving(float(tails[np.arange(len(counts)), counts].min()))

    def bounds(self, level: float) -> tuple[Counts, Counts]:
        """Return bounds (Q,) on the counts that uniform ranks respect with probability at least 1 - level.

        Ranks violate them exactly if p_value is at most `level`.
        """
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._leaving(middle) <= level else (low, middle)
        return self._allowed(low)

    def _allowed(self, tail: float) -> tuple[Counts, Counts]:
        """Return the lowest and highest counts whose two-sided tail exceeds `tail`."""
        is_in = _tails(self.num_simulations, self.num_draws) > tail
        return is_in.argmax(axis=1), is_in.shape[1] - 1 - is_in[:, ::-1].argmax(axis=1)

    def _leaving(self, tail: float) -> float:
        """Return the probability that a path has a two-sided tail of at most `tail` anywhere."""
        if tail >= _tails(self.num_simulations, self.num_draws).max(axis=1).min():
            return 1.0
        return float(np.clip(1.0 - _staying(self.num_simulations, self.shares, *self._allowed(tail)), 0.0, 1.0))


@cache
def _tails(num_simulations: int, num_draws: int) -> Floats:
    """Return twice the smaller tail of each count 0..M at each point, (Q, M + 1); both tails include the count."""
    shares = RankLaw(num_simulations, num_draws).shares[:, None]
    counts = np.arange(num_simulations + 1)[None, :]
    below = special.bdtr(counts, num_simulations, shares)
    above = np.concatenate([np.ones_like(shares), special.bdtrc(counts[:, :-1], num_simulations, shares)], axis=1)
    tails: Floats = 2 * np.minimum(below, above)
    return tails


def _staying(num: int, shares: Floats, lowest: Counts, highest: Counts) -> float:
    """Return the probability that the counts of `num` uniform numbers below each share all stay within the bounds."""
    counts = np.arange(lowest[0], highest[0] + 1)
    mass = _binomial(counts, np.array(num), shares[0])
    for place in range(1, len(shares)):
        following = np.arange(lowest[place], highest[place] + 1)
        step = (shares[place] - shares[place - 1]) / (1 - shares[place - 1])
        mass = mass @ _binomial(following[None, :] - counts[:, None], (num - counts)[:, None], step)
        counts = following
    return float(mass.sum())


def _binomial(counts: Counts, num: Counts, share: float) -> Floats:
    """Return the binomial probability of each count; 0 for impossible counts."""
    is_possible = (counts >= 0) & (counts <= num)
    some = np.where(is_possible, counts, 0)
    logs = special.gammaln(num + 1.0) - special.gammaln(some + 1.0) - special.gammaln(num - some + 1.0)
    logs = logs + some * np.log(share) + (num - some) * np.log1p(-share)
    found: Floats = np.where(is_possible, np.exp(logs), 0.0)
    return found

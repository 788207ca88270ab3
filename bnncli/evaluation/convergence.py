"""Convergence of chains: the worst R-hat and the smallest effective sample sizes over all parameters.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), arXiv 1903.08008: rank-normalised split R-hat, bulk ESS, and
tail ESS at the 5% and 95% quantiles, equal to those of arviz-stats. Reports the worst because an average over
parameters would hide those that do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.rank_statistics import RankStatistics, rank_statistics
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

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


def deciding(metrics: Mapping[str, Any]) -> Convergence:
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

    def quantities(block: slice, where: torch.device) -> Tensor:
        return torch.from_numpy(np.array(draws[:, :, block])).to(where)

    return convergence_of(quantities, draws.shape, device=device, progress=progress)


def convergence_of(
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

    def quantities(block: slice, where: torch.device) -> Tensor:
        return torch.from_numpy(np.array(draws[:, :, block])).to(where)

    looks = [look for _, look in _looks(quantities, draws.shape, device or torch.device("cpu"))]
    if any(look.stuck for look in looks):
        return None
    parts = [one for look in looks for one in look.statistics]
    return RankStatistics(*(torch.cat(part) for part in zip(*parts, strict=True)))


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

"""Convergence of chains: the worst R-hat and the smallest effective sample sizes over all parameters.

Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), arXiv 1903.08008: rank-normalised split R-hat, bulk
ESS, and tail ESS at the 5 % and 95 % quantiles, the same numbers as arviz-stats. An average over parameters hides
the ones that do not mix, so the worst is what counts.
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

GOOD_RHAT = 1.05  # above it the chains do not agree well enough to be quoted
STUCK_ACCEPTANCE = 0.05  # a chain that accepts less of its moves has not sampled anything
MIN_DRAWS = 4  # per chain: fewer cannot be split into halves that have a variance
_READ_VALUES = 1 << 25  # of draws taken at a time from an array that may lie on disk, and may not fit in memory
# Judged at a time: on a CPU the sorts stay in cache; a GPU wants few, large kernels (25 copies in float64, 0.8 GiB).
_WORK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 22}


@dataclass(frozen=True)
class Convergence:
    """The worst values over all parameters; None where undefined, with the reason.

    Args:
        r_hat: largest rank-normalised split R-hat; 1 when converged.
        worst_parameter: index into P of the largest R-hat, of the smallest bulk ESS where R-hat is undefined.
        ess_bulk: smallest effective number of draws for location.
        ess_tail: smallest effective number of draws for the 5 % and 95 % quantiles.
        undefined: why some value is None; None when all are defined.
    """

    r_hat: float | None
    worst_parameter: int | None
    ess_bulk: float | None
    ess_tail: float | None
    undefined: str | None = None


def deciding(metrics: Mapping[str, Any]) -> Convergence:
    """The numbers of recorded draws that their verdict goes by: of the parameters, unless `judged_by` names predictions.

    Of other layers than the last it does: `heldout`, or `train` where there are no other labels.
    """
    prefix = f"{metrics['judged_by']}_" if "judged_by" in metrics else ""
    r_hat, ess_bulk, ess_tail = (metrics.get(prefix + name) for name in ("max_rhat", "min_ess_bulk", "min_ess_tail"))
    return Convergence(r_hat, None, ess_bulk, ess_tail, metrics.get(f"{prefix}undefined"))


def convergence(draws: NDArray, *, device: torch.device | None = None, progress: Progress = SILENT) -> Convergence:
    """The worst R-hat and smallest bulk and tail ESS over the last axis of draws.

    Any quantity with a chain and a draw axis can be judged: parameters, log probabilities of held-out labels.

    Args:
        draws: (C, T, P): C chains, T draws each; may be memory-mapped, it is read some parameters at a time.
        device: where they are judged, in float64: the CPU unless told, and where it has no memory left. The numbers are the
            same up to rounding.
        progress: advances once per parameter.

    Raises:
        DataError: draws of another shape, or not finite.
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
    """The same for quantities that are made a block at a time.

    Args:
        quantities: the draws (C, T, m) of those in a slice, on the device that it is told.
        shape: (C, T, M), of all of them.
        device: where they are judged, the CPU unless told; fewer at a time or on the CPU in the end where it has no memory left.
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
    """R-hat, bulk and tail ESS of every parameter, (P,) each, as `convergence` judges them; None where some are stuck or draws too few.

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
    """What a block of quantities is like: how many there are, which are stuck, and the statistics where none is."""

    size: int
    stuck: list[int]
    statistics: list[RankStatistics]


def _looks(
    quantities: Callable[[slice, torch.device], Tensor], shape: tuple[int, ...], device: torch.device
) -> Iterator[tuple[int, _Look]]:
    """Where each block begins, and the look at it.

    A GPU that is full of the run, and refuses memory anywhere on the way, gets smaller blocks; where those would be small
    enough for a CPU's cache, the CPU takes the rest.
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
        torch.cuda.empty_cache()  # only now are the tensors of the failed block free
        size = min(size, num_params - begin) // 2
        if size * num_values < _WORK_VALUES["cpu"]:
            size, device = whole, torch.device("cpu")


def _look(draws: Tensor) -> _Look:
    """At quantities (C, T, m), where they are; the statistics are on the CPU."""
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
    """Which of quantities (m, C, T) move in no half-chain: R-hat divides by the variance within those."""
    half = quantities.shape[2] // 2
    moves = [part.amax(dim=2) > part.amin(dim=2) for part in (quantities[:, :, :half], quantities[:, :, -half:])]
    return (~(moves[0] | moves[1]).any(dim=1)).nonzero().flatten()

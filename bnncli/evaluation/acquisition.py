"""Scores that rank the examples of a pool for labelling, and BatchBALD (Kirsch et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor


Array = np.ndarray


def _entropy(probs: Array, mutual_info: Array | None) -> Array:
    p = probs.astype(np.float64)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)


def _margin(probs: Array, mutual_info: Array | None) -> Array:
    two = np.sort(probs.astype(np.float64), axis=1)[:, -2:]
    return two[:, 0] - two[:, 1]


def _bald(probs: Array, mutual_info: Array | None) -> Array:
    if mutual_info is None:
        raise UsageError("\0by\0 bald needs draws, but this posterior or integrator has none: choose another")
    return mutual_info.astype(np.float64)


SCORES: dict[str, Callable[[Array, Array | None], Array]] = {"bald": _bald, "entropy": _entropy, "margin": _margin}
"""Map a name to a function of probs (N, C) and mutual_info (N,) or None that returns scores (N,), in nats except for
margin.
"""


def highest_scores(scores: Array, count: int) -> Array:
    """Return the rows (count,) of the highest scores (N,), highest first, ties by row."""
    return np.argsort(-scores, kind="stable")[:count]


LABELLINGS = 4096  # stored at once
_NUMBERS = 1 << 24  # float32 values held at once
_LOOKED_AT = 128  # examples in the first block of a step


class JointBatch(NamedTuple):
    """The chosen rows (B,), in order, and the gain in mutual information of each, nats (B,)."""

    rows: Tensor
    gains: Tensor


def batch_bald(
    probs: Tensor,
    count: int,
    *,
    generator: torch.Generator,
    num_labellings: int = LABELLINGS,
    progress: Progress = SILENT,
) -> JointBatch:
    """Return the greedy batch of `count` examples.

    Args:
        probs: (S, N, C), class probabilities of each weight draw; computed in float32.
        generator: CPU generator that samples the labellings.
        num_labellings: upper limit on stored labellings; fewer are less accurate.

    Raises:
        ValueError: there are fewer examples than `count`.
    """
    num_draws, num_rows, _ = probs.shape
    if not 1 <= count <= num_rows:
        raise ValueError(f"count: expected 1 to {num_rows}; got {count}")
    probs = probs.float()
    probs = probs / probs.sum(dim=2, keepdim=True)
    own = _joint_entropy(probs, dim=2)  # H(y_n | w) of each draw, (S, N)
    # weights of the draws given each labelling
    weights = torch.full((1, num_draws), 1 / num_draws, device=probs.device)
    chances = torch.ones(1, dtype=torch.float64, device=probs.device)  # probabilities of the labellings
    # upper bounds on each example's gain
    bounds = torch.full((num_rows,), math.inf, dtype=torch.float64, device=probs.device)
    rows, gains = [], []
    task = progress.task("batchbald", count)
    for _ in range(count):
        row, gain = _best(bounds, partial(_gains, probs, own, weights, chances))
        bounds[row] = -math.inf
        rows.append(row)
        gains.append(max(gain, 0.0))
        weights, chances = _extend_labellings(probs[:, row], weights, chances, num_labellings, generator)
        task.advance()
    return JointBatch(torch.tensor(rows), torch.tensor(gains, dtype=torch.float64))


def _best(bounds: Tensor, gain_of: Callable[[Tensor], Tensor]) -> tuple[int, float]:
    """Return the row with the largest gain, and the gain; replace the bounds of evaluated rows by their gains.

    Gains are submodular: they never grow with the batch. Earlier gains are therefore bounds, and few rows need to be
    evaluated again (Minoux 1978).
    """
    order = bounds.argsort(descending=True, stable=True)
    order = order[bounds[order] > -math.inf]  # without the chosen rows
    start, size, best = 0, _LOOKED_AT, (-1, -math.inf)
    while start < len(order) and (start == 0 or best[1] < float(bounds[order[start]])):
        some = order[start : start + size]
        gains = gain_of(some)
        bounds[some] = gains
        place = int(gains.argmax())
        if float(gains[place]) > best[1]:
            best = int(some[place]), float(gains[place])
        start, size = start + size, 2 * size
    return best


def _gains(probs: Tensor, own: Tensor, weights: Tensor, chances: Tensor, some: Tensor) -> Tensor:
    """Return the gains of some examples, (n,) nats.

    The mean of H(y_n | w) weights the draws as the labellings do. In expectation these weights are uniform; using them
    puts the noise of sampled labellings into both terms, so that draws already told apart contribute exactly zero.
    """
    weighed = chances @ weights.double()
    return _conditional_entropy(probs[:, some], weights, chances) - weighed @ own[:, some].double()


def _conditional_entropy(probs: Tensor, weights: Tensor, chances: Tensor) -> Tensor:
    """Return E[H(y_n | labelling)] of every example, (N,) float64, for labellings (M,) with weights (M, S) of the draws."""
    num_draws, num_rows, num_classes = probs.shape
    size = max(1, _NUMBERS // (len(weights) * num_classes))
    found = []
    for start in range(0, num_rows, size):
        block = probs[:, start : start + size]
        predictive = (weights @ block.reshape(num_draws, -1)).view(len(weights), -1, num_classes)
        found.append(chances @ _joint_entropy(predictive, dim=2).double())
    return torch.cat(found)


def _joint_entropy(probs: Tensor, dim: int) -> Tensor:
    return torch.special.entr(probs).sum(dim=dim)


def _extend_labellings(
    probs: Tensor, weights: Tensor, chances: Tensor, most: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Extend the labellings by an example with probabilities (S, C): to all, or to `most` sampled ones."""
    predictive = weights @ probs  # label probabilities given each labelling, (M, C)
    if predictive.numel() <= most:
        joint = weights.unsqueeze(1) * probs.T.unsqueeze(0)  # (M, C, S)
        found = joint.flatten(0, 1) / predictive.flatten().unsqueeze(1).clamp_min(torch.finfo(joint.dtype).tiny)
        return found, (chances.unsqueeze(1) * predictive).flatten()
    if len(chances) < most:  # the first time that labellings are sampled
        # Systematic resampling: each labelling appears about as often as expected.
        places = (
            torch.arange(most, dtype=torch.float64) + torch.rand(1, generator=generator, dtype=torch.float64)
        ) / most
        which = torch.searchsorted(chances.cumsum(0).cpu(), places * float(chances.sum())).clamp_max(len(chances) - 1)
        weights, predictive = weights[which.to(weights.device)], predictive[which.to(weights.device)]
        chances = torch.full((most,), 1 / most, dtype=torch.float64, device=chances.device)
    uniform = torch.rand(len(weights), 1, generator=generator).to(predictive.device)
    label = (predictive.cumsum(dim=1) < uniform * predictive.sum(dim=1, keepdim=True)).sum(dim=1)
    label = label.clamp_max(predictive.shape[1] - 1)
    found = weights * probs.T[label]
    return found / found.sum(dim=1, keepdim=True).clamp_min(torch.finfo(found.dtype).tiny), chances

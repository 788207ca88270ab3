"""BatchBALD: a batch whose labels together tell most of the weights (Kirsch, van Amersfoort and Gal 2019, arXiv:1906.08158).

Greedy: each step takes the example n that adds most to the mutual information of the labels of the batch and the weights,

    I(y_1 .. y_m, y_n ; w) - I(y_1 .. y_m ; w) = E[H(y_n | y_1 .. y_m)] - E_w[H(y_n | w)],

the expectation being over labels of those taken (their equations 8 and 14). Of every labelling y_1 .. y_m the weights' draws have
posterior probabilities, which are kept instead of the labelling's own probabilities: products of many never underflow. As long as there
are few labellings all are kept, with their probabilities; later some are drawn from their distribution, each label given those before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

LABELLINGS = 4096  # kept at once
_NUMBERS = 1 << 24  # float32, held at once
_LOOKED_AT = 128  # examples at first, in a step


class JointBatch(NamedTuple):
    """Rows (B,) in the order they were taken, and what each added to the mutual information, nats (B,)."""

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
    """The batch of `count` examples, greedily.

    Args:
        probs: (S, N, C), probabilities of each draw of the weights; of any type, computed with in float32.
        generator: of labellings, on the CPU.
        num_labellings: how many are kept at most; fewer are less exact.

    Raises:
        ValueError: fewer examples than count.
    """
    num_draws, num_rows, _ = probs.shape
    if not 1 <= count <= num_rows:
        raise ValueError(f"count: expected 1 to {num_rows}; got {count}")
    probs = probs.float()
    probs = probs / probs.sum(dim=2, keepdim=True)
    own = _entropy(probs, dim=2)  # H(y_n | w) of each draw, (S, N)
    weights = torch.full((1, num_draws), 1 / num_draws, device=probs.device)  # of draws given each labelling
    chances = torch.ones(1, dtype=torch.float64, device=probs.device)  # of labellings
    bounds = torch.full((num_rows,), math.inf, dtype=torch.float64, device=probs.device)  # on what each may still add
    rows, gains = [], []
    task = progress.task("batchbald", count)
    for _ in range(count):
        row, gain = _best(bounds, partial(_gains, probs, own, weights, chances))
        bounds[row] = -math.inf
        rows.append(row)
        gains.append(max(gain, 0.0))
        weights, chances = _extended(probs[:, row], weights, chances, num_labellings, generator)
        task.advance()
    return JointBatch(torch.tensor(rows), torch.tensor(gains, dtype=torch.float64))


def _best(bounds: Tensor, gain_of: Callable[[Tensor], Tensor]) -> tuple[int, float]:
    """The row that adds most, and what; `bounds` of the rows that were looked at become what they add.

    What an example adds never grows with the batch, so that what it added before is a bound, and few are looked at again (Minoux 1978).
    """
    order = bounds.argsort(descending=True, stable=True)
    order = order[bounds[order] > -math.inf]  # without those that were taken
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
    """What each of some examples would add, (n,) nats.

    The mean of H(y_n | w) is over the draws as the labellings weigh them, which is each alike but for the noise of drawn labellings:
    that noise is then in both terms, and what draws that are told apart already add is zero.
    """
    weighed = chances @ weights.double()
    return _conditional_entropy(probs[:, some], weights, chances) - weighed @ own[:, some].double()


def _conditional_entropy(probs: Tensor, weights: Tensor, chances: Tensor) -> Tensor:
    """E[H(y_n | labelling)] of every example, (N,) float64, over labellings (M,) with draws' weights (M, S) under each."""
    num_draws, num_rows, num_classes = probs.shape
    size = max(1, _NUMBERS // (len(weights) * num_classes))
    found = []
    for start in range(0, num_rows, size):
        block = probs[:, start : start + size]
        predictive = (weights @ block.reshape(num_draws, -1)).view(len(weights), -1, num_classes)
        found.append(chances @ _entropy(predictive, dim=2).double())
    return torch.cat(found)


def _entropy(probs: Tensor, dim: int) -> Tensor:
    return torch.special.entr(probs).sum(dim=dim)


def _extended(
    probs: Tensor, weights: Tensor, chances: Tensor, most: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Labellings with one more example, of probabilities (S, C) under each draw: all of them, or `most` that are drawn."""
    predictive = weights @ probs  # of the label given each labelling, (M, C)
    if predictive.numel() <= most:
        joint = weights.unsqueeze(1) * probs.T.unsqueeze(0)  # (M, C, S)
        found = joint.flatten(0, 1) / predictive.flatten().unsqueeze(1).clamp_min(torch.finfo(joint.dtype).tiny)
        return found, (chances.unsqueeze(1) * predictive).flatten()
    if len(chances) < most:  # the first time that some are drawn
        # Of the cumulated chances at evenly spread places: each labelling about as often as it should be.
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

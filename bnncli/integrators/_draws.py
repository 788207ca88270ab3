"""Averages over draws of the logits: mean softmax, mutual information, central intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bnncli.integrators import Prediction, check_features, chunk_budget, entropy, slices
from bnncli.integrators._partitions import DrawPartition, central_interval, tail_shares
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import ClassifierLayout, LogitMaker
from bnncli.progress import SILENT, Progress
from bnncli.system.signals import raise_if_interrupted

if TYPE_CHECKING:
    from torch import Tensor


_CHUNK_EXAMPLES = 512  # at least: fewer make the products too thin; measured on two CPU cores
# Probabilities of one class, of all draws, held at once for the interval.
_KEPT = {"cpu": 2**26, "cuda": 2**27}


@dataclass(frozen=True)
class BlockDraws:
    """Draws of the logits at a block of n examples.

    Args:
        center: (K, n), logits near the middle of the draws: their largest is the guess of the predicted class.
        logits: returns a slice of the draws, (s, K, n). Classes stand before examples: a softmax over a strided axis
          vectorises over the examples.
    """

    center: Tensor
    logits: Callable[[slice], Tensor]


class LogitDraws(Protocol):
    """S draws of the logits, the same however the examples are cut into blocks."""

    @property
    def layout(self) -> ClassifierLayout:
        """Return the layout of theta."""

    @property
    def num_draws(self) -> int:
        """Return S."""

    @property
    def width(self) -> int:
        """Return how many numbers a draw of an example's logits takes while it is made."""

    def at(self, features: Tensor) -> BlockDraws:
        """Return the draws at features (n, D)."""


def average(
    draws: LogitDraws,
    features: Tensor,
    *,
    weights: Tensor | None = None,
    groups: DrawPartition | None = None,
    group_rows: Tensor | None = None,
    progress: Progress = SILENT,
) -> Prediction:
    """Average probabilities over the draws, with mutual information and, from two draws on, the predicted class's interval.

    In multi-label data every label has an interval.
    Sums over chunks of draws are float64. The interval needs all draws' probabilities of the predicted class, which is
    known only when all are summed: those of a guessed class are kept, and the few examples with a wrong guess are
    computed again.

    Args:
        draws: S draws of the logits.
        features: (N, D).
        weights: (S,) of the draws, float64, summing to one; None for equal ones.
        groups: of the draws; their means are kept where there are at least two groups and rows are asked for.
        group_rows: (R,) int64 ascending, on the CPU: the examples of the group means.
        progress: advances once per chunk.
    """
    check_features(draws.layout, features)
    if group_rows is None or groups is None or len(groups) < 2:
        groups, group_rows = DrawPartition.of([draws.num_draws]), None
    num_examples, num_classes = features.shape[0], draws.layout.num_classes
    is_exclusive = draws.layout.likelihood.is_exclusive
    example_slices, draw_slices = chunks(features, draws)
    task = progress.task("predict", len(example_slices) * len(draw_slices))
    probs = features.new_empty(num_examples, num_classes, dtype=torch.float32)
    entropy_of_mean = features.new_empty(num_examples, dtype=torch.float32)
    mutual_info = torch.empty_like(entropy_of_mean)
    ends = (2,) if is_exclusive else (num_classes, 2)
    interval = features.new_empty(num_examples, *ends, dtype=torch.float32)
    guess = torch.empty(num_examples, dtype=torch.int64, device=features.device)
    means = _GroupMeans(groups, group_rows, probs)
    tails = tail_shares(draws.num_draws, weights)
    for rows in example_slices:
        block = draws.at(features[rows])
        sums = _Sums(block.center, draws.layout.likelihood, draws.num_draws, groups)
        for some in draw_slices:
            raise_if_interrupted("the predictions")
            sums.add(block.logits(some), some, weights, is_all=len(draw_slices) == 1)
            task.advance()
        means.keep(rows, sums.by_group)
        mean_probs = sums.probs.T
        total = entropy(mean_probs, is_exclusive=is_exclusive)
        probs[rows] = mean_probs.float()
        entropy_of_mean[rows] = total.float()
        mutual_info[rows] = (total - sums.entropy).clamp_min(0).float()
        guess[rows] = sums.guess
        if draws.num_draws > 1:
            kept = sums.kept.flatten(1).T.contiguous()
            interval[rows] = central_interval(kept, weights, tails).view(*ends[:-1], -1, 2).movedim(-2, 0)
    if draws.num_draws < 2:
        return Prediction(probs, entropy_of_mean, mutual_info, group_probs=means.found)
    if not is_exclusive:
        return Prediction(probs, entropy_of_mean, mutual_info, interval, group_probs=means.found)
    wrong = (probs.argmax(dim=1) != guess).nonzero().squeeze(1) if num_examples else guess
    for some_rows in wrong.split(max(1, example_slices[0].stop)) if len(wrong) else ():
        kept = _probs_of_class(draws, features[some_rows], probs[some_rows].argmax(dim=1), draw_slices)
        interval[some_rows] = central_interval(kept.T.contiguous(), weights, tails)
    return Prediction(probs, entropy_of_mean, mutual_info, interval, group_probs=means.found)


def probs_of_draws(draws: LogitDraws, features: Tensor) -> Tensor:
    """Return class probabilities of each draw, (S, N, C) float16 on the CPU."""
    check_features(draws.layout, features)
    kept = torch.empty(draws.num_draws, features.shape[0], draws.layout.num_classes, dtype=torch.float16)
    example_slices, draw_slices = chunks(features, draws)
    for rows in example_slices:
        block = draws.at(features[rows])
        for some in draw_slices:
            probs = draws.layout.likelihood.class_probabilities(block.logits(some), dim=1)
            kept[some, rows] = probs.transpose(1, 2).to("cpu", torch.float16)
    return kept


def chunks(features: Tensor, draws: LogitDraws) -> tuple[list[slice], list[slice]]:
    """Return slices of examples, wide enough for fast products, and of draws; the logits of a pair fit the budget."""
    examples, num_draws = chunk_sizes(features, draws.layout, draws.num_draws, width=draws.width)
    return list(slices(features.shape[0], examples)), list(slices(draws.num_draws, num_draws))


def chunk_sizes(
    features: Tensor, layout: ClassifierLayout, num_draws: int, *, width: int | None = None
) -> tuple[int, int]:
    """Return how many examples of features (N, ...), and how many of S draws, are taken at once.

    Args:
        width: numbers that a draw of an example takes; by default those of a forward pass.
    """
    budget = chunk_budget(features) // (width or layout.widest)
    examples = min(max(1, features.shape[0]), max(_CHUNK_EXAMPLES, budget // _CHUNK_EXAMPLES))
    num_kept = num_draws * (1 if layout.likelihood.is_exclusive else layout.likelihood.num_classes)
    examples = min(examples, max(1, _KEPT.get(features.device.type, _KEPT["cuda"]) // num_kept))
    return examples, max(1, budget // examples)


class _Sums:
    """Running sums of a block of examples.

    Attributes:
        by_group: (G, C, n) float64, probabilities of each group's draws so far over S, or weighted.
        entropy: (n,) float64, nats, of all draws likewise.
        guess: (n,), the class whose probabilities are kept.
        kept: (S, n), its probability under every draw so far; (S, C, n), of all classes, in multi-label data.
    """

    def __init__(self, center: Tensor, likelihood: Likelihood, num_draws: int, groups: DrawPartition) -> None:
        self.groups, self.likelihood = groups, likelihood
        self.by_group = center.new_zeros(len(groups), likelihood.num_classes, center.shape[1], dtype=torch.float64)
        self.entropy = center.new_zeros(center.shape[1], dtype=torch.float64)
        self.guess = likelihood.class_logits(center, dim=0).argmax(dim=0)
        of_classes = () if likelihood.is_exclusive else (likelihood.num_classes,)
        self.kept = center.new_empty(num_draws, *of_classes, center.shape[1])

    @property
    def probs(self) -> Tensor:
        """Return the mean probabilities (C, n) float64 of the draws so far."""
        return self.by_group.sum(dim=0)

    def add(self, logits: Tensor, some: slice, weights: Tensor | None, *, is_all: bool) -> None:
        """Add the logits (s, K, n) of some draws; when these are all draws, the guess becomes exact."""
        probs, weighted = self.likelihood.entropy_terms(logits, dim=1)
        num_draws = len(self.kept)
        own = None if weights is None else weights[some].to(probs)
        for group, part in self.groups.parts(some):
            if own is None:
                self.by_group[group] += probs[part].sum(dim=0) / num_draws
            else:
                self.by_group[group] += (own[part] @ probs[part].flatten(1)).view_as(self.by_group[group])
        if is_all:
            self.guess = self.probs.float().argmax(dim=0)
        if not self.likelihood.is_exclusive:
            self.kept[some] = probs
        elif num_draws > 1:
            torch.gather(probs, 1, self.guess.expand(len(probs), 1, -1), out=self.kept[some].unsqueeze(1))
        if own is None:
            self.entropy -= weighted.sum(dim=(0, 1)) / num_draws
        else:
            self.entropy -= own @ weighted.sum(dim=1)


class _GroupMeans:
    """Means (G, R, C) float32 of each group at the requested rows, filled block by block; None where there are no rows."""

    def __init__(self, groups: DrawPartition, group_rows: Tensor | None, probs: Tensor) -> None:
        self.rows = group_rows
        self.found = None if group_rows is None else probs.new_empty(len(groups), len(group_rows), probs.shape[1])
        # A group without weight has no mean; any finite divisor gives 0.
        shares = groups.weights.clamp_min(torch.finfo(torch.float64).tiny).to(probs.device)
        self.shares = shares.view(-1, 1, 1)

    def keep(self, block: slice, by_group: Tensor) -> None:
        """Store the sums by_group (G, C, n) of a block of examples as means."""
        if self.rows is None or self.found is None:
            return
        first, last = torch.searchsorted(self.rows, torch.tensor([block.start, block.stop])).tolist()
        if last - first < block.stop - block.start:
            by_group = by_group[:, :, (self.rows[first:last] - block.start).to(by_group.device)]
        self.found[:, first:last] = (by_group / self.shares).transpose(1, 2).float()


def _probs_of_class(draws: LogitDraws, features: Tensor, classes: Tensor, draw_slices: list[slice]) -> Tensor:
    """Return the probabilities (S, n) under every draw of one class (n,) of each example."""
    block = draws.at(features)
    kept = features.new_empty(draws.num_draws, features.shape[0], dtype=torch.float32)
    for some in draw_slices:
        probs = draws.layout.likelihood.class_probabilities(block.logits(some), dim=1)
        kept[some] = probs.gather(1, classes.expand(len(probs), 1, -1)).squeeze(1)
    return kept


@dataclass(frozen=True)
class ThetaDraws:
    """S draws of the logits from draws of theta.

    Args:
        layout: of theta.
        num_draws: S.
        made: the layout's maker of logits.
    """

    layout: ClassifierLayout
    num_draws: int
    made: LogitMaker

    @classmethod
    def of(cls, layout: ClassifierLayout, theta: Tensor, weights: Tensor | None) -> ThetaDraws:
        """Return the logits of draws theta (S, P) with weights (S,), None for equal ones."""
        return cls(layout, theta.shape[0], layout.logit_draws(theta, weights))

    @property
    def width(self) -> int:
        """Return the numbers of a forward pass."""
        return self.layout.widest

    def at(self, features: Tensor) -> BlockDraws:
        """Return the draws at features (n, D)."""
        return BlockDraws(*self.made(features))

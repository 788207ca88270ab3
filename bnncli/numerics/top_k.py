"""Uncertainty-aware ranking: how many of the most probable classes cannot be told apart; and a plain rule to compare with.

Hobbhahn (2020), arXiv 2003.01227, Algorithm 1: classes in the order of their concentration, each kept as long as the
Beta marginals of it and of a class before it overlap. The algorithm compares neighbours (`neighbor`), and so chains; the
code published with it compares each class with the first (`best`). That code leaves its `overlap` on each side, where
the algorithm leaves T / 2: an overlap of 0.05 there is a threshold of 0.1 here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.names import not_one_of
from bnncli.numerics import dirichlet

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("neighbor", "best")


def ranked_lengths(
    log_concentration: Tensor, *, rule: str = "neighbor", threshold: float = 0.05, cap: int = 10
) -> Tensor:
    """How many of the most probable classes each example keeps, (N,) int64, at least 1 and at most `cap`.

    A class is added while the upper (1 - threshold / 2) quantile of its probability is above the lower (threshold / 2)
    quantile of the class that it is compared with. Only the `cap` most probable classes are looked at.

    Args:
        log_concentration: (N, K), the logarithms of a Dirichlet's parameters.
        rule: `neighbor`, each class against the one before it; `best`, against the first.
        threshold: T, the mass outside both quantiles, between 0 and 1; less keeps more.
        cap: most classes to keep.

    Raises:
        UsageError: a rule, threshold or cap that does not exist.
    """
    if rule not in RULES:
        raise not_one_of("top-k rule", rule, RULES)
    if not 0 < threshold < 1:
        raise UsageError(f"top-k threshold: expected a number between 0 and 1; got {threshold}")
    if cap < 1:
        raise UsageError(f"top-k cap: expected at least 1; got {cap}")
    classes = log_concentration.topk(min(cap, log_concentration.shape[1]), dim=1).indices
    log_a, log_b = dirichlet.beta_marginals(log_concentration, classes)
    lengths = torch.ones(len(classes), dtype=torch.int64, device=classes.device)
    kept = torch.arange(len(classes), device=classes.device)
    for place in range(1, classes.shape[1]):  # a quantile is dear, and most examples keep few
        other = place - 1 if rule == "neighbor" else 0
        lower = dirichlet.beta_quantile(log_a[kept, other], log_b[kept, other], threshold / 2)
        upper = dirichlet.beta_quantile(log_a[kept, place], log_b[kept, place], 1 - threshold / 2)
        kept = kept[upper > lower]
        lengths[kept] += 1
    return lengths


def cumulative_lengths(sorted_probs: Tensor, *, mean_length: float) -> Tensor:
    """Lengths (N,) int64 of the cumulative-probability rule whose mean is `mean_length`, to the nearest 1 / N.

    The rule keeps the fewest most probable classes whose probabilities sum to a threshold, one for all examples. A
    threshold fixes the mean only up to the examples that change at it; of those as many as needed get the longer
    length, shorter ones first, then in the order of the examples.

    Args:
        sorted_probs: (N, J), the J largest probabilities of each example, in descending order; J is the longest length.
        mean_length: from 1 to J.

    Raises:
        ValueError: a mean length that cannot be had.
    """
    num_examples, most = sorted_probs.shape
    if not 1 <= mean_length <= most:
        raise ValueError(f"expected a mean length from 1 to {most}, got {mean_length}")
    cumulative = sorted_probs.double().cumsum(dim=1)[:, :-1]
    num_steps = round(mean_length * num_examples) - num_examples
    # An example is longer than j where its first j probabilities stay below the threshold: the lowest sums are taken.
    # By length first, so that a tie (sums that rounding ends at 1) cannot take a later step without the one before.
    chosen = cumulative.T.flatten().argsort(stable=True)[:num_steps]
    return 1 + torch.bincount(chosen % max(num_examples, 1), minlength=num_examples)

"""Dirichlet distributions over class probabilities, the Laplace bridge (Hobbhahn et al. 2020), and top-k ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.lazy import special, torch
from bnncli.names import unknown_value_error

if TYPE_CHECKING:
    from torch import Tensor


# Variances outside give concentrations indistinguishable from a point mass or from 0; a variance of zero becomes the
# first.
_SMALLEST_VARIANCE, _LARGEST_VARIANCE = 1e-30, 1e30
_LARGEST_EXPONENT = 600.0  # its exponential and inverse are finite in float64, and so are their sums
# log a and b: if both are above, their logit is normal; the limit of scipy
_LARGE_BETA, _LARGEST_BETA = math.log(1e8), 40.0
_SMALLEST_BETA = -300.0  # below, scipy before 1.17 returns NaN; the quantiles are 0 and 1


def mean(log_concentration: Tensor) -> Tensor:
    """Return alpha_k / alpha_0, (N, K) float64, for log alpha (N, K)."""
    return torch.softmax(log_concentration.double(), dim=1)


def variance(log_concentration: Tensor) -> Tensor:
    """Return the variance of each probability, p_k (1 - p_k) / (alpha_0 + 1), (N, K) float64, for log alpha (N, K)."""
    probs = mean(log_concentration)
    return probs * (1 - probs) * _inverse_total_plus_one(log_concentration).unsqueeze(1)


def total_variance(log_concentration: Tensor) -> Tensor:
    """Return the sum of the variances of the probabilities, (N,) float64, for log alpha (N, K)."""
    return variance(log_concentration).sum(dim=1)


def entropy(log_concentration: Tensor) -> Tensor:
    """Return the differential entropy on the simplex (coordinates p_1 .. p_{K-1}), nats, (N,) float64.

    A difference of terms of size alpha_0 log alpha_0: at a concentration of 1e12, three decimals are left.
    """
    alpha = log_concentration.double().exp()
    total = alpha.sum(dim=1)
    log_norm = alpha.lgamma().sum(dim=1) - total.lgamma()
    return log_norm + (total - alpha.shape[1]) * total.digamma() - ((alpha - 1) * alpha.digamma()).sum(dim=1)


def expected_entropy(log_concentration: Tensor) -> Tensor:
    """Return the mean entropy of the probabilities, nats, (N,) float64: digamma(alpha_0 + 1) - sum_k p_k digamma(alpha_k + 1)."""
    log_alpha = log_concentration.double()
    return _entropy_of_mean(log_alpha) - mutual_information(log_alpha)


def mutual_information(log_concentration: Tensor) -> Tensor:
    """Return the entropy of the mean minus the mean entropy, nats, (N,) float64, at least 0.

    sum_k p_k g(alpha_k) - g(alpha_0) with g(a) = digamma(a + 1) - log a: the large logarithms cancel before the
    difference is taken, so the result is accurate even at a concentration of 1e15.
    """
    log_alpha = log_concentration.double()
    parts = (log_alpha.softmax(dim=1) * _digamma_excess(log_alpha)).sum(dim=1)
    return (parts - _digamma_excess(log_alpha.logsumexp(dim=1))).clamp_min(0)


def beta_marginals(log_concentration: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return log a and log b, both (N, J) float64, of the Beta(a, b) marginals of the classes (N, J).

    a = alpha_k and b = alpha_0 - alpha_k, computed without cancellation if alpha_k dominates alpha_0.
    """
    log_alpha = log_concentration.double()
    log_total, top = log_alpha.logsumexp(dim=1, keepdim=True), log_alpha.argmax(dim=1, keepdim=True)
    rest_of_top = log_alpha.scatter(1, top, -math.inf).logsumexp(dim=1, keepdim=True)
    log_a = log_alpha.gather(1, classes)
    others = log_total + torch.log1p(-(log_a - log_total).exp().clamp_max(0.75))
    return log_a, torch.where(classes == top, rest_of_top, others)


def beta_quantile(log_a: Tensor, log_b: Tensor, level: float) -> Tensor:
    """Return the quantile of Beta(a, b) at a level, with the shape of log a and log b, float64, on their device.

    scipy's inverse of the incomplete beta function fails if a and b are both above 1e15. From 1e8 on, the logit is
    treated as normal with mean log a - log b - 1/(2a) + 1/(2b) and variance 1/a + 1/b, with an error of at most 1e-3
    standard deviations.
    """
    log_a, log_b = log_a.double(), log_b.double()
    arguments = [log.clamp(_SMALLEST_BETA, _LARGEST_BETA).exp().cpu().numpy() for log in (log_a, log_b)]
    exact = torch.as_tensor(special.betaincinv(*arguments, level), device=log_a.device)
    inverse_a, inverse_b = (-log_a).exp(), (-log_b).exp()
    deviation = (inverse_a + inverse_b).sqrt() * float(special.ndtri(level))
    normal = torch.sigmoid(log_a - log_b - (inverse_a - inverse_b) / 2 + deviation)
    return torch.where(torch.minimum(log_a, log_b) > _LARGE_BETA, normal, exact)


def interval(log_concentration: Tensor, classes: Tensor, *, level: float = 0.95) -> Tensor:
    """Return the central interval (N, 2) float64 with mass `level` of the probability of one class (N,) per example."""
    log_a, log_b = beta_marginals(log_concentration, classes.unsqueeze(1))
    return central_interval(log_a[:, 0], log_b[:, 0], level=level)


def central_interval(log_a: Tensor, log_b: Tensor, *, level: float = 0.95) -> Tensor:
    """Return the central interval (N, 2) float64 of Beta(a, b), given log a and log b (N,)."""
    low, high = (beta_quantile(log_a, log_b, side) for side in ((1 - level) / 2, (1 + level) / 2))
    return torch.stack([low, torch.maximum(low, high)], dim=1)


def merge(log_concentration: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Return the log concentration (N, G + R) float64 of each union of classes, then of the R classes in no group.

    Sums of Dirichlet probabilities are Dirichlet with the sums of the parameters: exact.

    Args:
        log_concentration: (N, K).
        groups: G disjoint lists of class indices.

    Raises:
        ValueError: a group is empty, or an index is in two groups or not a class.
    """
    log_alpha, named = log_concentration.double(), [index for group in groups for index in group]
    num_classes = log_alpha.shape[1]
    if not all(groups) or len(set(named)) < len(named) or not set(named) <= set(range(num_classes)):
        raise ValueError(f"expected disjoint, nonempty groups of classes 0 to {num_classes - 1}; got {groups}")
    parts = [list(group) for group in groups] + [[k] for k in range(num_classes) if k not in set(named)]
    return torch.stack([log_alpha[:, part].logsumexp(dim=1) for part in parts], dim=1)


def from_gaussian(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the log concentration (N, K) float64 of the Dirichlet given by the bridge; eq. (2.7).

    alpha_k = (1 - 2/K + e^{mu_k} / K^2 sum_l e^{-mu_l}) / S_kk, in log space, so that no logit overflows. For logits
    that sum to zero, the inverse of MacKay's Gaussian. Adding a constant to all means changes nothing.

    Args:
        mean: of the logits, (N, K), K at least 2.
        variance: of the logits, (N, K). Scaling all by c divides all alpha by c and keeps the mean. Zeros become 1e-30,
            which gives a distribution without uncertainty the limit of that mean and a huge alpha_0.
    """
    mu, num_classes = mean.double(), mean.shape[1]
    log_variance = variance.double().clamp(_SMALLEST_VARIANCE, _LARGEST_VARIANCE).log()
    ratio = mu + torch.logsumexp(-mu, dim=1, keepdim=True) - 2 * math.log(num_classes)
    if num_classes > 2:
        ratio = torch.logaddexp(ratio, ratio.new_tensor(math.log1p(-2 / num_classes)))
    return ratio - log_variance


def _inverse_total_plus_one(log_concentration: Tensor) -> Tensor:
    """Return 1 / (alpha_0 + 1), (N,), for any alpha_0."""
    return torch.sigmoid(-log_concentration.double().logsumexp(dim=1))


def _entropy_of_mean(log_alpha: Tensor) -> Tensor:
    """Return the entropy (N,) of the mean probabilities."""
    return torch.special.entr(log_alpha.softmax(dim=1)).sum(dim=1)


def _digamma_excess(log_a: Tensor) -> Tensor:
    """Return digamma(a + 1) - log a; for large a, where they nearly cancel, 1 / (2 a) - 1 / (12 a^2)."""
    bounded = log_a.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    inverse = (-bounded).exp()
    series = inverse * (0.5 - inverse / 12)
    return torch.where(bounded > math.log(1e4), series, bounded.exp().add(1).digamma() - bounded)


RULES = ("neighbor", "best")


def ranked_lengths(
    log_concentration: Tensor, *, rule: str = "neighbor", threshold: float = 0.05, cap: int = 10
) -> Tensor:
    """Return how many of the most probable classes each example keeps, (N,) int64, between 1 and `cap`.

    A class is added while the upper (1 - threshold / 2) quantile of its probability exceeds the lower (threshold / 2)
    quantile of the class it is compared with.

    Args:
        log_concentration: (N, K), logarithms of a Dirichlet's parameters.
        rule: `neighbor` compares each class with the one before it, `best` with the first.
        threshold: T, mass outside both quantiles, between 0 and 1; smaller keeps more.
        cap: largest number of classes to keep.

    Raises:
        UsageError: rule, threshold or cap is invalid.
    """
    if rule not in RULES:
        raise unknown_value_error("top-k rule", rule, RULES)
    if not 0 < threshold < 1:
        raise UsageError(f"top-k threshold: expected a number between 0 and 1; got {threshold}")
    if cap < 1:
        raise UsageError(f"top-k cap: expected at least 1; got {cap}")
    classes = log_concentration.topk(min(cap, log_concentration.shape[1]), dim=1).indices
    log_a, log_b = beta_marginals(log_concentration, classes)
    lengths = torch.ones(len(classes), dtype=torch.int64, device=classes.device)
    kept = torch.arange(len(classes), device=classes.device)
    for place in range(1, classes.shape[1]):  # quantiles are expensive, and most examples keep few
        other = place - 1 if rule == "neighbor" else 0
        lower = beta_quantile(log_a[kept, other], log_b[kept, other], threshold / 2)
        upper = beta_quantile(log_a[kept, place], log_b[kept, place], 1 - threshold / 2)
        kept = kept[upper > lower]
        lengths[kept] += 1
    return lengths


def cumulative_lengths(sorted_probs: Tensor, *, mean_length: float) -> Tensor:
    """Return lengths (N,) int64 of the cumulative-probability rule with mean `mean_length`, to the nearest 1 / N.

    The rule keeps the fewest most probable classes whose probabilities sum to a common threshold. A threshold
    determines the mean only up to the examples that change at it; as many as needed get the longer length, shorter ones
    first, then in example order.

    Args:
        sorted_probs: (N, J), the J largest probabilities per example, descending; J is the longest length.
        mean_length: from 1 to J.

    Raises:
        ValueError: the mean length is impossible.
    """
    num_examples, most = sorted_probs.shape
    if not 1 <= mean_length <= most:
        raise ValueError(f"expected a mean length from 1 to {most}, got {mean_length}")
    cumulative = sorted_probs.double().cumsum(dim=1)[:, :-1]
    num_steps = round(mean_length * num_examples) - num_examples
    # An example is longer than j if its first j probabilities stay below the threshold: take the lowest sums. Sort by
    # length first, so that a tie (sums rounded to 1) cannot take a later step before an earlier one.
    chosen = cumulative.T.flatten().argsort(stable=True)[:num_steps]
    return 1 + torch.bincount(chosen % max(num_examples, 1), minlength=num_examples)

"""Dirichlet distributions over class probabilities and the Laplace bridge (Hobbhahn et al. 2020), and top-k ranking under them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.lazy import special, torch
from bnncli.names import not_one_of

if TYPE_CHECKING:
    from torch import Tensor


# Variances outside give concentrations that nothing can tell from a point, or from none; a variance of zero is the first.
_SMALLEST_VARIANCE, _LARGEST_VARIANCE = 1e-30, 1e30
_LARGEST_EXPONENT = 600.0  # exp of it and of its negative is finite in float64, and so are sums of them
_LARGE_BETA, _LARGEST_BETA = math.log(1e8), 40.0  # log a and b: both above, their logit is normal; as far as scipy goes


def mean(log_concentration: Tensor) -> Tensor:
    """alpha_k / alpha_0, (N, K) float64, of log alpha (N, K)."""
    return torch.softmax(log_concentration.double(), dim=1)


def variance(log_concentration: Tensor) -> Tensor:
    """Variance of each probability, p_k (1 - p_k) / (alpha_0 + 1), (N, K) float64, of log alpha (N, K)."""
    probs = mean(log_concentration)
    return probs * (1 - probs) * _inverse_total_plus_one(log_concentration).unsqueeze(1)


def total_variance(log_concentration: Tensor) -> Tensor:
    """Sum of the variances of the probabilities, (N,) float64, of log alpha (N, K)."""
    return variance(log_concentration).sum(dim=1)


def entropy(log_concentration: Tensor) -> Tensor:
    """Differential entropy of the Dirichlet on the simplex (coordinates p_1 .. p_{K-1}), nats, (N,) float64.

    A difference of terms of the size of alpha_0 log alpha_0: of a concentration of 1e12 three decimals are left.
    """
    alpha = log_concentration.double().exp()
    total = alpha.sum(dim=1)
    log_norm = alpha.lgamma().sum(dim=1) - total.lgamma()
    return log_norm + (total - alpha.shape[1]) * total.digamma() - ((alpha - 1) * alpha.digamma()).sum(dim=1)


def expected_entropy(log_concentration: Tensor) -> Tensor:
    """Mean of the entropy of the probabilities, nats, (N,) float64: digamma(alpha_0 + 1) - sum_k p_k digamma(alpha_k + 1)."""
    log_alpha = log_concentration.double()
    return _entropy_of_mean(log_alpha) - mutual_information(log_alpha)


def mutual_information(log_concentration: Tensor) -> Tensor:
    """Entropy of the mean minus the mean entropy, nats, (N,) float64, at least 0.

    sum_k p_k g(alpha_k) - g(alpha_0) with g(a) = digamma(a + 1) - log a: the large logarithms are gone before the
    difference is taken, so that it is right where the concentration is 1e15, too.
    """
    log_alpha = log_concentration.double()
    parts = (log_alpha.softmax(dim=1) * _digamma_excess(log_alpha)).sum(dim=1)
    return (parts - _digamma_excess(log_alpha.logsumexp(dim=1))).clamp_min(0)


def beta_marginals(log_concentration: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """log a and log b, both (N, J) float64, of the Beta(a, b) that the probability of each of the classes (N, J) has.

    a = alpha_k and b = alpha_0 - alpha_k, which is not taken as a difference where alpha_k is most of alpha_0.
    """
    log_alpha = log_concentration.double()
    log_total, top = log_alpha.logsumexp(dim=1, keepdim=True), log_alpha.argmax(dim=1, keepdim=True)
    rest_of_top = log_alpha.scatter(1, top, -math.inf).logsumexp(dim=1, keepdim=True)
    log_a = log_alpha.gather(1, classes)
    others = log_total + torch.log1p(-(log_a - log_total).exp().clamp_max(0.75))
    return log_a, torch.where(classes == top, rest_of_top, others)


def beta_quantile(log_a: Tensor, log_b: Tensor, level: float) -> Tensor:
    """The point below which Beta(a, b) has the given mass, of the shape of log a and log b, float64, on their device.

    scipy's inverse of the incomplete beta function, which has no answer where a and b are both above 1e15. There, and
    from 1e8 on, the logit is normal with mean log a - log b - 1/(2a) + 1/(2b) and variance 1/a + 1/b: 1e-3 standard
    deviations away at the most.
    """
    log_a, log_b = log_a.double(), log_b.double()
    arguments = [log.clamp(-_LARGEST_EXPONENT, _LARGEST_BETA).exp().cpu().numpy() for log in (log_a, log_b)]
    exact = torch.as_tensor(special.betaincinv(*arguments, level), device=log_a.device)
    inverse_a, inverse_b = (-log_a).exp(), (-log_b).exp()
    deviation = (inverse_a + inverse_b).sqrt() * float(special.ndtri(level))
    normal = torch.sigmoid(log_a - log_b - (inverse_a - inverse_b) / 2 + deviation)
    return torch.where(torch.minimum(log_a, log_b) > _LARGE_BETA, normal, exact)


def interval(log_concentration: Tensor, classes: Tensor, *, level: float = 0.95) -> Tensor:
    """The central interval (N, 2) float64 that holds `level` of the probability of one class (N,) of each example."""
    log_a, log_b = beta_marginals(log_concentration, classes.unsqueeze(1))
    return central_interval(log_a[:, 0], log_b[:, 0], level=level)


def central_interval(log_a: Tensor, log_b: Tensor, *, level: float = 0.95) -> Tensor:
    """The central interval (N, 2) float64 of Beta(a, b), from log a and log b (N,)."""
    low, high = (beta_quantile(log_a, log_b, side) for side in ((1 - level) / 2, (1 + level) / 2))
    return torch.stack([low, torch.maximum(low, high)], dim=1)


def merge(log_concentration: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Log concentration (N, G + R) float64 of the union of each group, then of each of the R classes in no group.

    Sums of a Dirichlet's probabilities are a Dirichlet with the sums of its parameters: exact.

    Args:
        log_concentration: (N, K).
        groups: G lists of class indices, without an index in common.

    Raises:
        ValueError: a group is empty, an index stands in two groups or is no class.
    """
    log_alpha, named = log_concentration.double(), [index for group in groups for index in group]
    num_classes = log_alpha.shape[1]
    if not all(groups) or len(set(named)) < len(named) or not set(named) <= set(range(num_classes)):
        raise ValueError(f"expected disjoint, nonempty groups of classes 0 to {num_classes - 1}; got {groups}")
    parts = [list(group) for group in groups] + [[k] for k in range(num_classes) if k not in set(named)]
    return torch.stack([log_alpha[:, part].logsumexp(dim=1) for part in parts], dim=1)


def from_gaussian(mean: Tensor, variance: Tensor) -> Tensor:
    """Log concentration (N, K) float64 of the Dirichlet that the bridge gives; eq. (2.7).

    alpha_k = (1 - 2/K + e^{mu_k} / K^2 sum_l e^{-mu_l}) / S_kk, by logarithms, which no logit overflows. For logits
    that sum to zero the inverse of MacKay's Gaussian. Adding a constant to all means changes nothing.

    Args:
        mean: of the logits, (N, K), K at least 2.
        variance: of the logits, (N, K). All of them times c: all alpha divided by c, and the same mean. Zeros count as
            1e-30, so that a distribution without uncertainty gets the limit of that mean and a huge alpha_0.
    """
    mu, num_classes = mean.double(), mean.shape[1]
    log_variance = variance.double().clamp(_SMALLEST_VARIANCE, _LARGEST_VARIANCE).log()
    ratio = mu + torch.logsumexp(-mu, dim=1, keepdim=True) - 2 * math.log(num_classes)
    if num_classes > 2:
        ratio = torch.logaddexp(ratio, ratio.new_tensor(math.log1p(-2 / num_classes)))
    return ratio - log_variance


def _inverse_total_plus_one(log_concentration: Tensor) -> Tensor:
    """1 / (alpha_0 + 1), (N,), for any alpha_0."""
    return torch.sigmoid(-log_concentration.double().logsumexp(dim=1))


def _entropy_of_mean(log_alpha: Tensor) -> Tensor:
    """Entropy (N,) of the mean probabilities."""
    return torch.special.entr(log_alpha.softmax(dim=1)).sum(dim=1)


def _digamma_excess(log_a: Tensor) -> Tensor:
    """digamma(a + 1) - log a; for large a, where both are nearly the same, 1 / (2 a) - 1 / (12 a^2)."""
    bounded = log_a.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    inverse = (-bounded).exp()
    series = inverse * (0.5 - inverse / 12)
    return torch.where(bounded > math.log(1e4), series, bounded.exp().add(1).digamma() - bounded)


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
    log_a, log_b = beta_marginals(log_concentration, classes)
    lengths = torch.ones(len(classes), dtype=torch.int64, device=classes.device)
    kept = torch.arange(len(classes), device=classes.device)
    for place in range(1, classes.shape[1]):  # a quantile is dear, and most examples keep few
        other = place - 1 if rule == "neighbor" else 0
        lower = beta_quantile(log_a[kept, other], log_b[kept, other], threshold / 2)
        upper = beta_quantile(log_a[kept, place], log_b[kept, place], 1 - threshold / 2)
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

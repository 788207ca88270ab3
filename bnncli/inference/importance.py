"""How far q is from the posterior, told by importance sampling: ELBO, log-weight spread, Pareto k, evidence.

Yao, Vehtari, Simpson, Gelman (2018), arXiv:1802.02538: variational approximations judged by the tail of their
importance weights. Vehtari, Simpson, Gelman, Yao, Gabry (2024), arXiv:1507.02646: Pareto-smoothed importance sampling,
and the threshold of k that depends on the number of draws (section 3.2.4); the fit is that of arviz-stats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bnncli.inference.elbo import ElboEstimate, elbo
from bnncli.lazy import torch
from bnncli.posteriors import HasNoise
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.target import Target

FIRST_DRAWS = 512
FIRST_NETWORK_DRAWS = 32  # where a draw is a pass of a network: enough to see weights that are far from equal
LEAST_NETWORK_DRAWS = 64
# Numbers that the examples leave on their way through a network in all draws' passes.
_NETWORK_WORK = 2**35
MOST_DRAWS = 8192
# The ELBO's standard error is wanted at most this large and at most this share of it, but never below the least.
WANTED_NATS = 2.0
WANTED_SHARE = 0.01
LEAST_NATS = 0.01
MIN_TAIL_DRAWS = 25  # the tail is a fifth of the draws, and arviz-stats fits at least five
# Weights that spread more have no estimate but the ELBO, whose error 512 draws make a small share of the spread: none are
# added, each of which is a pass over all data.
_FAR_NATS = 50.0
_EQUAL_NATS = 1e-6  # log weights that spread less are all equal, up to rounding


@dataclass(frozen=True)
class ImportanceDiagnostics:
    """What the log weights log p(D, theta) - log q(theta) of S draws from q say; None where undefined.

    Args:
        num_draws: S.
        elbo: their mean, nats; None when a log weight is not finite.
        elbo_error: standard error of elbo, nats.
        log_weight_sd: their standard deviation, nats; 0 when q is the posterior.
        pareto_k: shape of the generalised Pareto distribution fitted to the largest weights.
        k_threshold: above it estimates from S weights cannot be trusted: min(1 - 1 / log10 S, 0.7).
        log_evidence: log of the mean Pareto-smoothed weight, an estimate of log p(D), nats.
        log_evidence_error: its standard error by the delta method, nats.
        undefined: reason for pareto_k, or for all when elbo is None.
        evidence_undefined: reason for log_evidence.
    """

    num_draws: int
    elbo: float | None
    elbo_error: float | None
    log_weight_sd: float | None
    pareto_k: float | None
    k_threshold: float
    log_evidence: float | None
    log_evidence_error: float | None
    undefined: str | None = None
    evidence_undefined: str | None = None


def diagnose_importance(
    target: Target,
    posterior: HasNoise,
    *,
    generator: torch.Generator,
    num_draws: int | None = None,
    first_draws: int = FIRST_DRAWS,
    enough_draws: int = FIRST_DRAWS,
    progress: Progress = SILENT,
) -> ImportanceDiagnostics:
    """Importance diagnostics of posterior on target, all data.

    Args:
        target: the log posterior.
        posterior: q.
        generator: of the draws.
        num_draws: S; None doubles S from 512 until the ELBO's standard error is at most 2 nats and 1 %, S is 8192,
            or the log weights spread by more than 50 nats.
        first_draws: looked at before those 512; they are all where the log weights spread by more than 50 nats.
        enough_draws: at most 512; where there are to be fewer, S is not doubled from there.
        progress: advanced once a draw.
    """
    estimate = elbo(target, posterior, generator=generator, num_samples=num_draws or first_draws, progress=progress)
    while num_draws is None and _wants_more(estimate, enough_draws):
        drawn = len(estimate.log_weights)
        size = max(enough_draws - drawn, 0) or drawn  # doubled past enough
        more = elbo(target, posterior, generator=generator, num_samples=size, progress=progress)
        estimate = ElboEstimate.of(torch.cat([estimate.log_weights, more.log_weights]))
    return diagnose_weights(estimate.log_weights)


def diagnose_weights(log_weights: Tensor) -> ImportanceDiagnostics:
    """Importance diagnostics of log weights (S,), S at least 2."""
    values = log_weights.detach().double().cpu()
    size = len(values)
    threshold = k_threshold(size)
    num_bad = int((~torch.isfinite(values)).sum())
    if num_bad:
        reason = f"{num_bad} of {size} log weights are not finite"
        return ImportanceDiagnostics(size, None, None, None, None, threshold, None, None, reason, reason)
    estimate = ElboEstimate.of(values)
    known = (size, estimate.value, estimate.standard_error, estimate.log_weight_sd)
    if estimate.log_weight_sd <= _EQUAL_NATS:
        equal = "all weights are equal, so there is no tail to fit"
        return ImportanceDiagnostics(*known, None, threshold, estimate.value, estimate.standard_error, undefined=equal)
    if size < MIN_TAIL_DRAWS:
        few = f"needs at least {MIN_TAIL_DRAWS} draws, got {size}"
        return ImportanceDiagnostics(*known, None, threshold, None, None, few, few)
    smoothed, pareto_k = pareto_smooth(values)
    if not (math.isfinite(pareto_k) and bool(torch.isfinite(smoothed).all())):  # either, by arviz-stats's release
        reason = "a few draws outweigh all others by more than float64 can represent, so the tail cannot be fitted"
        return ImportanceDiagnostics(*known, None, threshold, None, None, reason, reason)
    if not pareto_k <= threshold:
        reason = f"Pareto k {pareto_k:.2f} is above {threshold:.2f}: {size} weights are too few to estimate their mean"
        return ImportanceDiagnostics(*known, pareto_k, threshold, None, None, evidence_undefined=reason)
    log_evidence = float(smoothed.logsumexp(dim=0)) - math.log(size)
    shares = torch.softmax(smoothed, dim=0)
    # Var(mean w) / mean^2 = (S sum of squared shares - 1) / (S - 1).
    error = math.sqrt(max(0.0, size * float(shares.square().sum()) - 1) / (size - 1))
    return ImportanceDiagnostics(*known, pareto_k, threshold, log_evidence, error)


def k_threshold(num_draws: int) -> float:
    """The Pareto k above which `num_draws` weights are too few: min(1 - 1 / log10 S, 0.7)."""
    return min(1 - 1 / math.log10(num_draws), 0.7)


def network_draws(num_examples: int, widest: int) -> int:
    """Draws that are enough for a posterior over a network: 512, or fewer where as many passes over all data would take long.

    Args:
        num_examples: of the data.
        widest: numbers that one leaves on its way through the network.
    """
    affordable = _NETWORK_WORK // (num_examples * widest)
    return min(FIRST_DRAWS, max(LEAST_NETWORK_DRAWS, affordable))


def _wants_more(estimate: ElboEstimate, enough: int) -> bool:
    """Whether the ELBO is still too noisy for a q that is not far off, and more draws are allowed."""
    wanted = min(WANTED_NATS, max(LEAST_NATS, WANTED_SHARE * abs(estimate.value)))
    is_far = estimate.log_weight_sd > _FAR_NATS
    is_noisy = estimate.standard_error > wanted  # False where it is NaN
    has_few = len(estimate.log_weights) < enough and math.isfinite(estimate.value)
    most = MOST_DRAWS if enough == FIRST_DRAWS else enough
    return len(estimate.log_weights) < most and (is_noisy or has_few) and not is_far


def pareto_smooth(log_weights: Tensor) -> tuple[Tensor, float]:
    """Pareto-smoothed log weights (S,), float64, and Pareto k; not finite where all but a few weights underflow."""
    from arviz_stats.base import array_stats  # slow to import, and every `predict` looks at every integrator

    with np.errstate(invalid="ignore", divide="ignore"):
        normalized, pareto_k = array_stats.psislw(-log_weights.numpy())
    smoothed = torch.from_numpy(normalized)
    # arviz-stats normalises the weights; the smallest one is never in the tail and tells the constant.
    lowest = int(log_weights.argmin())
    return smoothed + (log_weights[lowest] - smoothed[lowest]), float(pareto_k)

"""The evidence lower bound with its standard error, and importance sampling: Pareto k, evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bnncli.evaluation.gain import LOOKS, judge_gain
from bnncli.evaluation.paired import skewness_of
from bnncli.lazy import torch
from bnncli.posteriors import HasNoise, made_at_once, noise_blocks
from bnncli.progress import SILENT, Progress, Task

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.target import Target


_MOST_AT_ONCE = 64  # draws whose log weights are found at once


@dataclass(frozen=True)
class ElboEstimate:
    """A Monte Carlo estimate.

    Args:
        value: nats.
        standard_error: of value, nats.
        log_weights: (S,) float64, log p(D, theta) - log q(theta).
        log_weight_sd: their standard deviation, nats; 0 when q is the posterior.
    """

    value: float
    standard_error: float
    log_weights: Tensor
    log_weight_sd: float

    @classmethod
    def of(cls, log_weights: Tensor) -> ElboEstimate:
        """The estimate that log weights (S,) give."""
        sd = float(log_weights.std())
        return cls(float(log_weights.mean()), sd / math.sqrt(len(log_weights)), log_weights, sd)


def elbo(
    target: Target,
    posterior: HasNoise,
    *,
    generator: torch.Generator,
    num_samples: int = 512,
    progress: Progress = SILENT,
) -> ElboEstimate:
    """The ELBO of posterior on target.

    Args:
        target: the log posterior, with all data.
        posterior: q.
        generator: of the draws.
        num_samples: S; the standard error is log_weight_sd / sqrt(S).
        progress: advanced once a draw.
    """
    task = progress.task("importance weights", num_samples)
    parts = [log_weights(target, posterior, noise, task) for noise in noise_blocks(posterior, num_samples, generator)]
    return ElboEstimate.of(torch.cat(parts))


@dataclass(frozen=True)
class Gain:
    """What one posterior's ELBO is above another's.

    Args:
        before, after: of the two, from the same noise.
        value: nats.
        standard_error: of value, from the differences draw by draw: much of the noise is common to both.
        verdict: one of bnncli.evaluation.gain.VERDICTS.
    """

    before: ElboEstimate
    after: ElboEstimate
    value: float
    standard_error: float
    verdict: str


def measure_gain(
    target: Target,
    before: HasNoise,
    after: HasNoise,
    *,
    generator: torch.Generator,
    num_samples: int = 256,
    progress: Progress = SILENT,
) -> Gain:
    """The gain of after over before, from as many draws as the verdict needs: num_samples, or 2, 4, 8 or 16 times as many.

    Values that are not finite end it, and are returned as they are.
    """
    drawn: list[tuple[Tensor, Tensor]] = []
    for look in range(LOOKS):
        for _ in range(max(1, 2 ** (look - 1))):  # as many again as there are
            task = progress.task("importance weights", 2 * num_samples)
            for noise in noise_blocks(before, num_samples, generator):
                first, second = (log_weights(target, posterior, noise, task) for posterior in (before, after))
                drawn.append((first, second))
        old, new = (ElboEstimate.of(torch.cat(part)) for part in zip(*drawn, strict=True))
        difference = ElboEstimate.of(new.log_weights - old.log_weights)
        value, error = difference.value, difference.standard_error
        is_last = look == LOOKS - 1 or not (math.isfinite(value) and math.isfinite(error))
        drawn_gains = difference.log_weights.cpu().numpy()
        skewness = skewness_of(drawn_gains) if error > 0 and math.isfinite(error) else 0.0
        verdict = judge_gain(value, error, len(drawn_gains), is_last=is_last, skewness=skewness)
        if verdict is not None:
            return Gain(old, new, value, error, verdict)
    raise AssertionError("the last look decides")


def weighed_at_once(num_params: int) -> int:
    """Of how many draws of so many parameters log weights are found at once."""
    return min(_MOST_AT_ONCE, made_at_once(num_params))


def log_weights(target: Target, posterior: HasNoise, noise: Tensor, task: Task | None = None) -> Tensor:
    """log p(D, theta) - log q(theta), (S,) float64, at the theta that posterior makes of noise (S, P); task counts draws."""
    parts = []
    for block in noise.split(weighed_at_once(posterior.layout.num_params)):
        theta, log_density = posterior.from_noise(block)
        parts.append(target.log_joint(theta) - log_density)
        if task is not None:
            task.advance(block.shape[0])
    return torch.cat(parts)


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

"""The evidence lower bound (ELBO) with its standard error, and importance sampling diagnostics: Pareto k, evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bnncli.evaluation.comparison import sample_skewness
from bnncli.evaluation.verdict import LOOKS, judge_gain
from bnncli.lazy import torch
from bnncli.posteriors import HasNoise, noise_blocks, thetas_at_once
from bnncli.progress import SILENT, Progress, Task

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.target import Target


_MOST_AT_ONCE = 64  # draws whose log weights are computed at once


@dataclass(frozen=True)
class ElboEstimate:
    """A Monte Carlo estimate of the ELBO.

    Args:
        value: nats.
        standard_error: of the value, nats.
        log_weights: (S,) float64, log p(D, theta) - log q(theta).
        log_weight_sd: standard deviation of the log weights, nats; 0 if q is the posterior.
    """

    value: float
    standard_error: float
    log_weights: Tensor
    log_weight_sd: float

    @classmethod
    def of(cls, log_weights: Tensor) -> ElboEstimate:
        """Compute the estimate from log weights (S,)."""
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
    """Estimate the ELBO of a posterior on a target.

    Args:
        target: the log posterior, with all data.
        posterior: q.
        generator: random generator of the draws.
        num_samples: S; the standard error is log_weight_sd / sqrt(S).
        progress: advances once per draw.
    """
    task = progress.task("importance weights", num_samples)
    parts = [log_weights(target, posterior, noise, task) for noise in noise_blocks(posterior, num_samples, generator)]
    return ElboEstimate.of(torch.cat(parts))


@dataclass(frozen=True)
class Gain:
    """The difference of two posteriors' ELBOs.

    Args:
        before, after: the two estimates, from the same noise.
        value: nats.
        standard_error: of the value, from paired differences of the draws, which share much of their noise.
        verdict: one of bnncli.evaluation.verdict.VERDICTS.
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
    """Measure the gain of after over before with as many draws as the verdict needs: 1, 2, 4, 8 or 16 times num_samples.

    Non-finite values end the measurement and are returned as they are.
    """
    drawn: list[tuple[Tensor, Tensor]] = []
    for look in range(LOOKS):
        for _ in range(max(1, 2 ** (look - 1))):  # doubles the number of draws
            task = progress.task("importance weights", 2 * num_samples)
            for noise in noise_blocks(before, num_samples, generator):
                first, second = (log_weights(target, posterior, noise, task) for posterior in (before, after))
                drawn.append((first, second))
        old, new = (ElboEstimate.of(torch.cat(part)) for part in zip(*drawn, strict=True))
        difference = ElboEstimate.of(new.log_weights - old.log_weights)
        value, error = difference.value, difference.standard_error
        is_last = look == LOOKS - 1 or not (math.isfinite(value) and math.isfinite(error))
        drawn_gains = difference.log_weights.cpu().numpy()
        skewness = sample_skewness(drawn_gains) if error > 0 and math.isfinite(error) else 0.0
        verdict = judge_gain(value, error, len(drawn_gains), is_last=is_last, skewness=skewness)
        if verdict is not None:
            return Gain(old, new, value, error, verdict)
    raise AssertionError("the last look decides")


def draws_weighted_at_once(num_params: int) -> int:
    """Return how many draws of num_params parameters are weighted at once."""
    return min(_MOST_AT_ONCE, thetas_at_once(num_params))


def log_weights(target: Target, posterior: HasNoise, noise: Tensor, task: Task | None = None) -> Tensor:
    """Return log p(D, theta) - log q(theta), (S,) float64, for the posterior's draws from noise (S, P); task counts draws."""
    parts = []
    for block in noise.split(draws_weighted_at_once(posterior.layout.num_params)):
        theta, log_density = posterior.from_noise(block)
        parts.append(target.log_joint(theta) - log_density)
        if task is not None:
            task.advance(block.shape[0])
    return torch.cat(parts)


JUDGING_DRAWS = 64


def log_weight_spread(target: Target, posterior: HasNoise, generator: torch.Generator) -> float:
    """Return the standard deviation of the log weights of 64 draws, nats; NaN if one is not finite."""
    return float(log_weights(target, posterior, posterior.noise(JUDGING_DRAWS, generator)).std())


FIRST_DRAWS = 512
FIRST_NETWORK_DRAWS = 32  # for networks, where each draw is a forward pass: enough to detect very unequal weights
LEAST_NETWORK_DRAWS = 64
# Limit on activations over the passes of all draws through a network.
_NETWORK_WORK = 2**35
MOST_DRAWS = 8192
# Goal for the ELBO's standard error: both limits hold, but no less than LEAST_NATS is required.
WANTED_NATS = 2.0
WANTED_SHARE = 0.01
LEAST_NATS = 0.01
MIN_TAIL_DRAWS = 25  # the tail is a fifth of the draws, and arviz-stats needs at least five
# Weights with a larger spread allow no estimate but the ELBO, which 512 draws already estimate well relative to the
# spread. More draws, each a pass over all data, would not help.
_FAR_NATS = 50.0
_EQUAL_NATS = 1e-6  # log weights with a smaller spread are equal up to rounding


@dataclass(frozen=True)
class ImportanceDiagnostics:
    """Diagnostics of S log weights log p(D, theta) - log q(theta); None if undefined.

    Args:
        num_draws: S.
        elbo: their mean, nats; None if a log weight is not finite.
        elbo_error: standard error of elbo, nats.
        log_weight_sd: their standard deviation, nats; 0 if q is the posterior.
        pareto_k: shape of the generalised Pareto distribution fitted to the largest weights.
        k_threshold: above it, estimates from S weights are unreliable: min(1 - 1 / log10 S, 0.7).
        log_evidence: log of the mean Pareto-smoothed weight, an estimate of log p(D), nats.
        log_evidence_error: its standard error by the delta method, nats.
        undefined: why pareto_k is None, or everything if elbo is None.
        evidence_undefined: why log_evidence is None.
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
    """Diagnose importance sampling from a posterior for a target with all data.

    Args:
        target: the log posterior.
        posterior: q.
        generator: random generator of the draws.
        num_draws: S; None doubles S from 512 until the ELBO's standard error is at most 2 nats and 1%, S is 8192, or
            the log weights spread by more than 50 nats.
        first_draws: initial draws; sufficient if the log weights spread by more than 50 nats.
        enough_draws: at most 512; if fewer, S is not doubled beyond it.
        progress: advances once per draw.
    """
    estimate = elbo(target, posterior, generator=generator, num_samples=num_draws or first_draws, progress=progress)
    while num_draws is None and _wants_more(estimate, enough_draws):
        drawn = len(estimate.log_weights)
        size = max(enough_draws - drawn, 0) or drawn  # doubled past enough
        more = elbo(target, posterior, generator=generator, num_samples=size, progress=progress)
        estimate = ElboEstimate.of(torch.cat([estimate.log_weights, more.log_weights]))
    return diagnose_weights(estimate.log_weights)


def diagnose_weights(log_weights: Tensor) -> ImportanceDiagnostics:
    """Diagnose log weights (S,), S at least 2."""
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
    # which of the two is not finite depends on the arviz-stats version
    if not (math.isfinite(pareto_k) and bool(torch.isfinite(smoothed).all())):
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
    """Return the Pareto k above which `num_draws` weights are too few: min(1 - 1 / log10 S, 0.7)."""
    return min(1 - 1 / math.log10(num_draws), 0.7)


def network_draws(num_examples: int, widest: int) -> int:
    """Return a sufficient number of draws for a posterior over a network: 512, or fewer if passes over all data are slow.

    Args:
        num_examples: of the data.
        widest: activations per example.
    """
    affordable = _NETWORK_WORK // (num_examples * widest)
    return min(FIRST_DRAWS, max(LEAST_NETWORK_DRAWS, affordable))


def _wants_more(estimate: ElboEstimate, enough: int) -> bool:
    """Return whether the ELBO is too noisy, q is not too far off, and more draws are allowed."""
    wanted = min(WANTED_NATS, max(LEAST_NATS, WANTED_SHARE * abs(estimate.value)))
    is_far = estimate.log_weight_sd > _FAR_NATS
    is_noisy = estimate.standard_error > wanted  # False for NaN
    has_few = len(estimate.log_weights) < enough and math.isfinite(estimate.value)
    most = MOST_DRAWS if enough == FIRST_DRAWS else enough
    return len(estimate.log_weights) < most and (is_noisy or has_few) and not is_far


def pareto_smooth(log_weights: Tensor) -> tuple[Tensor, float]:
    """Return Pareto-smoothed log weights (S,), float64, and Pareto k; not finite if all but a few weights underflow."""
    from arviz_stats.base import array_stats  # slow import; every `predict` imports every integrator

    with np.errstate(invalid="ignore", divide="ignore"):
        normalized, pareto_k = array_stats.psislw(-log_weights.numpy())
    smoothed = torch.from_numpy(normalized)
    # arviz-stats normalises the weights; the smallest is never in the tail and reveals the constant.
    lowest = int(log_weights.argmin())
    return smoothed + (log_weights[lowest] - smoothed[lowest]), float(pareto_k)

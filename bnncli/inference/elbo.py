"""The evidence lower bound of a posterior that is made from noise, on all data, with its standard error.

The log importance weights log p(D, theta) - log q(theta) over draws of q have the ELBO as mean; their spread says how
far q is from the posterior, and Pareto k is made from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

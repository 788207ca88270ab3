"""Importance-weighted prediction: draws of an approximation, weighted towards the exact posterior.

Weights log p(D, theta) - log q(theta), Pareto-smoothed and self-normalised: Vehtari, Simpson, Gelman, Yao and Gabry
(2024), arXiv:1507.02646. Where Pareto k is above its threshold the weights are unreliable, and the same draws are
averaged unweighted, with a warning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bnncli.errors import UsageError
from bnncli.inference.elbo import MIN_TAIL_DRAWS, diagnose_weights, log_weights, pareto_smooth
from bnncli.integrators import HasLayout, Prediction, Ready, SamplingIntegrator, require_support
from bnncli.integrators._partitions import DrawPartition, group_ends
from bnncli.integrators.mc import DrawnMc, check_num_samples
from bnncli.lazy import torch
from bnncli.options.declaration import Draws
from bnncli.posteriors import sample_from_noise
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor


class HasDensity(HasLayout, Protocol):
    """A posterior whose draws come with their density (gaussian, flow)."""

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Return standard normal draws (S, P)."""

    def from_noise(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return theta (S, P) and its log density (S,) for standard normal noise (S, P)."""

    def log_density(self, theta: Tensor) -> Tensor:
        """Return the log density (S,) of any theta (S, P)."""


DRAWS = Draws(1000)  # a tail of 200 weights, and a threshold of k of 0.67


@dataclass(frozen=True)
class Importance(SamplingIntegrator):
    """Weighted mean of the softmax over S draws of theta; exact in the limit where the weights are reliable."""

    needs: ClassVar[str] = "log_density"
    needs_target: ClassVar[bool] = True
    default_samples: ClassVar[int] = DRAWS.default

    def prepare(
        self,
        posterior: Any,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        target: Any = None,
        progress: Progress = SILENT,
    ) -> WeightedMc:
        """Draw theta and weigh the draws, for any number of blocks of features.

        Args:
            posterior: one with a density (gaussian, flow).
            num_samples: S; None for 1,000.
            generator: makes the draws.
            target: log posterior on the training split.
            progress: advances once a draw.

        Raises:
            UsageError: the posterior has no density, there is no target, or no draw was asked for.
        """
        require_support("importance", posterior)
        check_num_samples(num_samples)
        if target is None:
            raise UsageError("\0integrator\0 importance needs the features of the training split")
        size = num_samples or self.default_samples
        task = progress.task("importance weights", size)
        found: list[Tensor] = []

        def weigh(noise: Tensor) -> None:
            found.append(log_weights(target, posterior, noise, task))

        theta = sample_from_noise(posterior, size, generator, also=weigh)
        weights, pareto_k, warning = importance_weights(torch.cat(found).cpu())
        groups = DrawPartition.of(group_ends(size), weights)
        return WeightedMc(DrawnMc(posterior.layout, theta, groups, weights), pareto_k, warning)


@dataclass(frozen=True)
class WeightedMc(Ready):
    """Weighted draws of theta, ready to predict any features.

    Args:
        drawn: the draws, without weights where these are unreliable.
        pareto_k: of the weights; NaN where it is undefined, because all weights are equal or there are too few.
        warning: why there are no weights; None where there are.
    """

    drawn: DrawnMc
    pareto_k: float
    warning: str | None

    @property
    def groups(self) -> DrawPartition:  # type: ignore[override]
        """Return the groups of the draws, with their weights."""
        return self.drawn.groups

    @property
    def num_draws(self) -> int:
        """Return S."""
        return self.drawn.num_draws

    @property
    def interval_level(self) -> float | None:
        """Return the level of the interval, by the effective number of draws; None with a single draw."""
        return self.drawn.interval_level

    def notes(self) -> dict[str, Any]:
        """Return Pareto k, None where it is undefined, and the warning."""
        return {"pareto_k": self.pareto_k if math.isfinite(self.pareto_k) else None, "warning": self.warning}

    def predict(
        self,
        posterior: HasDensity,
        features: Tensor,
        *,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        group_rows: Tensor | None = None,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities of features (N, D), weighted mutual information and interval, and group means at the requested rows.

        num_samples and generator are not used.
        """
        return self.drawn.predict(posterior, features, group_rows=group_rows, progress=progress)  # type: ignore[arg-type]


def importance_weights(log_weights: Tensor) -> tuple[Tensor | None, float, str | None]:
    """Return weights (S,) float64 that sum to one, Pareto k, and a warning; None for weights when all are equal or unreliable.

    Args:
        log_weights: (S,), on the CPU.
    """
    if len(log_weights) < 2:
        return None, math.nan, _warn_of_equal_weights(f"needs at least {MIN_TAIL_DRAWS} draws, got {len(log_weights)}")
    found = diagnose_weights(log_weights)
    if found.pareto_k is None:
        is_known = found.log_evidence is not None  # equal weights
        return None, math.nan, None if is_known else _warn_of_equal_weights(f"{found.undefined}")
    if found.evidence_undefined is not None:
        return None, found.pareto_k, _warn_of_equal_weights(found.evidence_undefined)
    smoothed, _ = pareto_smooth(log_weights.double())
    return torch.softmax(smoothed, dim=0), found.pareto_k, None


def _warn_of_equal_weights(reason: str) -> str:
    return f"importance weights are not reliable ({reason}): averaged the draws with equal weights, as mc does"

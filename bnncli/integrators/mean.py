"""The network at its mean weights, alpha mu, without draws.

Skaaret-Lund (2022), section 5.3, 'posterior mean'; with multipliers at their mean, which the thesis draws instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from bnncli.integrators import HasLayout, Integrator, Prediction, require_support
from bnncli.integrators.plug_in import predict_at
from bnncli.lazy import torch
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor


class HasMean(HasLayout, Protocol):
    """A posterior that knows the mean of theta."""

    @property
    def mean_theta(self) -> Tensor:
        """Return E[theta], (P,)."""


@dataclass(frozen=True)
class Mean(Integrator):
    """Class probabilities of the logits at E[theta]."""

    needs: ClassVar[str] = "mean_theta"

    def predict(
        self,
        posterior: HasMean,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities at the posterior's mean.

        Args:
            posterior: latent-binary.
            features: (N, D).
            num_samples, generator: not used.
            progress: advances once per example.

        Raises:
            UsageError: the posterior has no mean of its own.
        """
        require_support("mean", posterior)
        return predict_at(posterior.layout, posterior.mean_theta, features, progress)

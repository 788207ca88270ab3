"""Probit prediction: closed-form class probabilities from the mean and variance of the logits, without draws.

Binary: MacKay (1992), "The evidence framework applied to classification networks"; at most 0.0177 away from
the exact integral. Multi-class: the multi-class probit approximation (MPA) of Gibbs (1998), as in Kristiadi,
Eschenhagen and Hennig (2022), arXiv 2205.10041, eq. (2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.errors import UsageError
from bnncli.integrators import Integrator, Prediction, check_features, require_support
from bnncli.integrators._moments import HasLogitMarginals, check_choice, example_blocks
from bnncli.lazy import torch
from bnncli.options.declaration import PROJECTION
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = {
    "projection": PROJECTION.of(
        default="none",
        own="{default} (unchanged, the default), sum-zero (subtract their mean) or difference (for two classes)",
        choices=("none", "sum-zero", "difference"),
    )
}


@dataclass(frozen=True)
class Probit(Integrator):
    """Softmax of the logit means, each divided by sqrt(1 + pi/8 * its variance); see `probit_probs`.

    A single logit uses `binary_probit_probs`, multi-label data `label_probit_probs`.

    Args:
        projection: what the logits are reduced to first, where there are two or more; a single logit needs none.
          none: nothing, the published formula. It changes when an uncertain constant is added to all logits,
          which the softmax does not.
          sum-zero: logits minus their mean, mean P m and variance diag(P S P). Does not change with such a constant.
          For two classes it gives sigma(d / sqrt(1 + pi v / 32)), d and v the mean and variance of the logits'
          difference: overconfident, the right one has pi v / 8.
          difference: for two classes only, the difference of the logits, sigma(d / sqrt(1 + pi v / 8)).
    """

    needs: ClassVar[str] = "logit_marginals"
    projection: str = SETTINGS["projection"].default

    def __post_init__(self) -> None:
        check_choice("probit", "projection", self.projection, SETTINGS["projection"].choices)

    def predict(
        self,
        posterior: HasLogitMarginals,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities from the posterior's logit means and variances.

        Args:
            posterior: one with logit marginals (gaussian, point).
            features: (N, D).
            num_samples: not used, there are no draws.
            generator: not used.
            progress: advances once per example.

        Raises:
            UsageError: the posterior has no logit marginals, or `difference` is asked of more than two classes.
        """
        require_support("probit", posterior)
        layout = posterior.layout
        check_features(layout, features)
        likelihood = layout.likelihood
        if self.projection == "difference" and not likelihood.is_exclusive:
            raise UsageError("probit, projection difference: expected two classes, but the data are multi-label")
        if self.projection == "difference" and layout.num_classes > 2:
            raise UsageError(
                f"probit, projection difference: expected two classes, but the head has {layout.num_classes}",
                hint="use \0projection\0 sum-zero",
            )
        is_projected = self.projection != "none" and likelihood.is_shift_invariant
        is_binary = self.projection == "difference" or not likelihood.is_shift_invariant
        to_probs = binary_probit_probs if is_binary else probit_probs
        to_probs = to_probs if likelihood.is_exclusive else label_probit_probs
        probs = features.new_empty(features.shape[0], layout.num_classes, dtype=torch.float32)
        for rows in example_blocks(features, progress, elements=layout.num_outputs):
            mean, variance = posterior.logit_marginals(features[rows], is_projected=is_projected)
            if self.projection == "difference" and is_projected:
                mean, variance = difference_of_projected(mean, variance)
            probs[rows] = to_probs(mean, variance).float()
        return Prediction.from_probs(probs, is_exclusive=likelihood.is_exclusive)


def probit_probs(mean: Tensor, variance: Tensor) -> Tensor:
    """Return class probabilities (n, K) for logits of mean (n, K) and variance (n, K): softmax(f_k / sqrt(1 + pi/8 S_kk)).

    This is the raw multi-class formula: for K = 2 it is not the binary one on the logit difference (it
    equals it only for f = (m, 0), S = diag(s^2, 0)), it ignores covariances between logits, and unless all
    variances are equal it changes when a constant is added to all logits.
    """
    return torch.softmax(_scale(mean, variance), dim=1)


def binary_probit_probs(mean: Tensor, variance: Tensor) -> Tensor:
    """Return probabilities [1 - p, p] (n, 2) for a logit of mean (n, 1) and variance (n, 1): p = sigma(m / sqrt(1 + pi s^2 / 8))."""
    scaled = _scale(mean, variance)
    return torch.cat([torch.sigmoid(-scaled), torch.sigmoid(scaled)], dim=1)


def label_probit_probs(mean: Tensor, variance: Tensor) -> Tensor:
    """Return probabilities (n, L) of labels with logits of mean (n, L) and variance (n, L): sigma(m / sqrt(1 + pi s^2 / 8))."""
    return torch.sigmoid(_scale(mean, variance))


def _scale(mean: Tensor, variance: Tensor) -> Tensor:
    return mean / torch.sqrt(1 + math.pi / 8 * variance)


def difference_of_projected(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance (n, 1) of z_1 - z_0, from the mean and variance (n, 2) of two logits minus their mean.

    P S P = (S_00 + S_11 - 2 S_01) / 4 [[1, -1], [-1, 1]].
    """
    return mean[:, 1:] - mean[:, :1], 4 * variance[:, :1]

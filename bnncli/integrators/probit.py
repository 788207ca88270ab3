"""Probit prediction: closed-form class probabilities from the mean and variance of the logits, without draws.

Binary: MacKay (1992), "The evidence framework applied to classification networks"; at most 0.0177 away from
the exact integral. Multi-class: the multi-class probit approximation (MPA) of Gibbs (1998), as in Kristiadi,
Eschenhagen and Hennig (2022), arXiv 2205.10041, eq. (2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from bnncli.integrators import HasLayout, Prediction, check_features, chunk_budget, require_support, slices
from bnncli.progress import SILENT, Progress

_CHUNK_EXAMPLES = 4096  # at most: posteriors need further memory per example for the variances


class HasLogitMarginals(HasLayout, Protocol):
    """A posterior under which each logit has a known mean and variance."""

    def logit_marginals(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and variance (n, K) of the logits of features (n, D)."""


@dataclass(frozen=True)
class Probit:
    """Softmax of the logit means, each divided by sqrt(1 + pi/8 * its variance); see `probit_probs`."""

    needs: ClassVar[str] = "logit_marginals"
    is_sampling: ClassVar[bool] = False

    def predict(
        self,
        posterior: HasLogitMarginals,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Class probabilities from the posterior's logit means and variances.

        Args:
            posterior: one with logit marginals (gaussian, point).
            features: (N, D).
            num_samples: not used, there are no draws.
            generator: not used.
            progress: advances once per example.

        Raises:
            UsageError: the posterior has no logit marginals.
        """
        require_support("probit", posterior)
        layout = posterior.layout
        check_features(layout, features)
        num_examples = features.shape[0]
        probs = features.new_empty(num_examples, layout.num_classes, dtype=torch.float32)
        task = progress.task("predict", num_examples)
        chunk = min(_CHUNK_EXAMPLES, max(1, 8 * chunk_budget(features) // layout.num_outputs))
        for rows in slices(num_examples, chunk):
            probs[rows] = probit_probs(*posterior.logit_marginals(features[rows])).float()
            task.advance(rows.stop - rows.start)
        return Prediction.from_probs(probs)


def probit_probs(mean: Tensor, variance: Tensor) -> Tensor:
    """Class probabilities (n, C) for logits of the given mean (n, K) and variance (n, K).

    K = 1: sigma(m / sqrt(1 + pi s^2 / 8)), as [1 - p, p]. K >= 2: softmax(f_k / sqrt(1 + pi/8 S_kk)). The
    second is the raw multi-class formula: for K = 2 it is not the binary one on the logit difference (it
    equals it only for f = (m, 0), S = diag(s^2, 0)), it ignores covariances between logits, and unless all
    variances are equal it changes when a constant is added to all logits.
    """
    scaled = mean / torch.sqrt(1 + math.pi / 8 * variance)
    if mean.shape[1] == 1:
        return torch.cat([torch.sigmoid(-scaled), torch.sigmoid(scaled)], dim=1)
    return torch.softmax(scaled, dim=1)

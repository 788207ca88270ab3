"""Monte Carlo prediction: the mean of the softmax over draws of theta, converging to the exact integral.

Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, eq. (1). Mutual information as in Houlsby et al.
(2011), arXiv 1112.5745, eq. (2): entropy of the mean minus mean entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from bnncli.errors import UsageError
from bnncli.integrators import (
    HasLayout,
    Prediction,
    check_features,
    chunk_budget,
    entropy,
    require_support,
    slices,
    with_reference_class,
)
from bnncli.layout import HeadLayout
from bnncli.progress import SILENT, Progress

_CHUNK_EXAMPLES = 512  # at least: fewer make the products too thin; measured on two CPU cores


class CanSample(HasLayout, Protocol):
    """A posterior that draws theta."""

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Draws of theta (S, P)."""


@dataclass(frozen=True)
class Mc:
    """Mean over S draws of theta of the softmax; the draws are made once and shared by all examples."""

    needs: ClassVar[str] = "sample"
    is_sampling: ClassVar[bool] = True

    def predict(
        self,
        posterior: CanSample,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Class probabilities averaged over draws, with mutual information.

        The standard error of a probability is at most 0.5 / sqrt(S). Sums over chunks of draws are float64.

        Args:
            posterior: one that can sample.
            features: (N, D).
            num_samples: S; None takes every stored draw, where the posterior has stored draws.
            generator: makes the draws.
            progress: advances once per chunk.

        Raises:
            UsageError: the posterior cannot sample, or no draw was asked for.
        """
        require_support("mc", posterior)
        layout, num_examples = posterior.layout, features.shape[0]
        check_features(layout, features)
        if num_samples is not None and num_samples < 1:
            raise UsageError(f"Monte Carlo prediction needs at least one draw, got {num_samples}")
        theta = posterior.sample(num_samples, generator).to(features)
        example_slices, draw_slices = _chunks(features, layout, num_draws=theta.shape[0])
        task = progress.task("predict", len(example_slices) * len(draw_slices))

        probs = features.new_empty(num_examples, layout.num_classes, dtype=torch.float32)
        entropy_of_mean = features.new_empty(num_examples, dtype=torch.float32)
        mutual_info = torch.empty_like(entropy_of_mean)
        for rows in example_slices:
            columns = layout.augment_features(features[rows]).T
            sum_probs = features.new_zeros(layout.num_classes, columns.shape[1], dtype=torch.float64)
            sum_entropy = features.new_zeros(columns.shape[1], dtype=torch.float64)
            for draws in draw_slices:
                chunk_probs, chunk_entropy = _sum_over_draws(layout.augment(theta[draws]), columns)
                sum_probs += chunk_probs
                sum_entropy += chunk_entropy
                task.advance()
            mean_probs = sum_probs.T / theta.shape[0]
            total = entropy(mean_probs)
            probs[rows] = mean_probs.float()
            entropy_of_mean[rows] = total.float()
            mutual_info[rows] = (total - sum_entropy / theta.shape[0]).clamp_min(0).float()
        return Prediction(probs=probs, entropy=entropy_of_mean, mutual_info=mutual_info)


def probs_of_draws(
    posterior: CanSample, features: Tensor, *, num_samples: int | None, generator: torch.Generator
) -> Tensor:
    """Class probabilities of each draw, (S, N, C) float16 on the CPU; their mean over S is what `Mc` predicts.

    Args:
        posterior, features, num_samples, generator: as for Mc.predict; the same generator state gives the same draws.
    """
    layout = posterior.layout
    check_features(layout, features)
    theta = posterior.sample(num_samples, generator).to(features)
    kept = torch.empty(theta.shape[0], features.shape[0], layout.num_classes, dtype=torch.float16)
    example_slices, draw_slices = _chunks(features, layout, num_draws=theta.shape[0])
    for rows in example_slices:
        for draws in draw_slices:
            logits = with_reference_class(layout.logits(features[rows], theta[draws]), dim=2)
            kept[draws, rows] = torch.softmax(logits, dim=2).to("cpu", torch.float16)
    return kept


def _chunks(features: Tensor, layout: HeadLayout, *, num_draws: int) -> tuple[list[slice], list[slice]]:
    """Slices of examples, wide enough for fast products, and of draws; logits of a pair fit the budget."""
    budget = chunk_budget(features) // layout.num_classes
    num_examples = features.shape[0]
    examples = min(max(1, num_examples), max(_CHUNK_EXAMPLES, budget // _CHUNK_EXAMPLES))
    return list(slices(num_examples, examples)), list(slices(num_draws, max(1, budget // examples)))


def _sum_over_draws(augmented: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over draws of the probabilities (C, n) and of their entropy (n,), nats.

    Classes stand before examples: a softmax over a strided axis vectorises over the examples.

    Args:
        augmented: weights and bias of each draw, (s, K, D + 1).
        columns: features and a row of ones, (D + 1, n).
    """
    logits = (augmented.flatten(0, 1) @ columns).unflatten(0, augmented.shape[:2])
    log_probs = torch.log_softmax(with_reference_class(logits, dim=1), dim=1)
    probs = log_probs.exp()
    sum_probs = probs.sum(dim=0)
    return sum_probs, -log_probs.mul_(probs).sum(dim=(0, 1))

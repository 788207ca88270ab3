"""Convergence of chains judged by predictions: log p(y | x, theta) of held-out examples as quantities of every draw.

Parameters may mix badly along directions that change no prediction, and vice versa. Parameters of hidden layers are not
even identified: units can be permuted and, for odd activations, change sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from bnncli.evaluation.convergence import Convergence, convergence, convergence_of
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import block_logits

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 512
_THETA_VALUES = 1 << 24  # of draws read at once from an array that may be on disk
_LOGIT_VALUES = {"cpu": 1 << 22, "cuda": 1 << 24}  # computed at once


def held_out_convergence(
    draws: Tensor,
    features: Tensor,
    labels: Tensor,
    *,
    layout: HeadLayout,
    device: torch.device | None = None,
    progress: Progress = SILENT,
) -> Convergence:
    """Return the worst R-hat and smallest ESS of log p(y | x, theta) over the examples.

    Args:
        draws: (C, T, P); may be memory-mapped.
        features: (N, D).
        labels: (N,) int64.
        layout: layout of weight and bias in theta.
        device: device of the computation; falls back to the CPU if it runs out of memory.
    """

    def quantities(rows: slice, where: torch.device) -> Tensor:
        return log_probabilities(draws, features[rows].to(where), labels[rows].to(where), layout=layout)

    shape = (*draws.shape[:2], features.shape[0])
    return convergence_of(quantities, shape, device=device, progress=progress)


def log_probabilities(draws: Tensor, features: Tensor, labels: Tensor, *, layout: HeadLayout) -> Tensor:
    """Return log p(y_n | x_n, theta), (C, T, N) float64 on the features' device, for draws (C, T, P)."""
    num_chains, num_draws = draws.shape[:2]
    features = features.float()
    out = features.new_empty(num_chains, num_draws, len(labels), dtype=torch.float64)
    most = _LOGIT_VALUES.get(features.device.type, _LOGIT_VALUES["cuda"])
    size = max(1, most // (num_chains * len(labels) * layout.num_outputs))
    for start in range(0, num_draws, size):
        theta = draws[:, start : start + size].to(features)
        logits = block_logits(features, theta.flatten(0, 1), layout).double()
        values = layout.likelihood.sharp_log_likelihoods(logits, labels)
        out[:, start : start + size] = values.view(num_chains, -1, len(labels))
    return out


class Labelled(Protocol):
    """Labelled examples whose label probabilities depend on theta."""

    @property
    def num_examples(self) -> int:
        """Number of examples, M."""

    @property
    def device(self) -> torch.device:
        """Device of the computation."""

    def log_probabilities(self, theta: Tensor) -> Tensor:
        """Return log p of each label under each theta (S, P), (S, M) float64."""


def label_convergence(draws: Tensor, examples: Labelled, *, progress: Progress = SILENT) -> Convergence:
    """Return the same as held_out_convergence for any kind of theta.

    Args:
        draws: (C, T, P); may be memory-mapped.
        examples: a few hundred.
    """
    num_chains, num_draws, num_params = draws.shape
    shape = (num_chains, num_draws, examples.num_examples)
    values = torch.empty(shape, dtype=torch.float64, device=examples.device)
    task = progress.task("log probabilities of labels", num_draws)
    for part, out in zip(
        *(one.split(max(1, _THETA_VALUES // (num_chains * num_params)), dim=1) for one in (draws, values)), strict=True
    ):
        out.copy_(examples.log_probabilities(part.flatten(0, 1)).view(out.shape))
        task.advance(part.shape[1])
    return convergence(values.cpu().numpy(), device=examples.device, progress=progress)

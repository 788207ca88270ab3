"""Do the chains agree on predictions: log p(y | x, theta) of held-out examples as quantities of every draw.

Parameters may mix badly along directions that change no prediction, and the other way round. Those of hidden layers are not
even identified: units can be exchanged, and of an odd activation change their signs.
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
_THETA_VALUES = 1 << 24  # of draws taken at a time from an array that may lie on disk
_LOGIT_VALUES = {"cpu": 1 << 22, "cuda": 1 << 24}  # made at a time


def held_out_convergence(
    draws: Tensor,
    features: Tensor,
    labels: Tensor,
    *,
    layout: HeadLayout,
    device: torch.device | None = None,
    progress: Progress = SILENT,
) -> Convergence:
    """The worst R-hat and smallest ESS of log p(y | x, theta) over the examples.

    Args:
        draws: (C, T, P); may be mapped from a file.
        features: (N, D). labels: (N,) int64.
        device: where the work is to be done; on the CPU where it has no memory left.
        layout: how weight and bias lie in theta.
    """

    def quantities(rows: slice, where: torch.device) -> Tensor:
        return log_probabilities(draws, features[rows].to(where), labels[rows].to(where), layout=layout)

    shape = (*draws.shape[:2], features.shape[0])
    return convergence_of(quantities, shape, device=device, progress=progress)


def log_probabilities(draws: Tensor, features: Tensor, labels: Tensor, *, layout: HeadLayout) -> Tensor:
    """log p(y_n | x_n, theta), (C, T, N) float64 on the features' device, for draws (C, T, P)."""
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
    """Examples with labels, which theta gives probabilities."""

    @property
    def num_examples(self) -> int:
        """M."""

    @property
    def device(self) -> torch.device:
        """Where the work is done."""

    def log_probabilities(self, theta: Tensor) -> Tensor:
        """log p of each label under each theta (S, P), (S, M) float64."""


def label_convergence(draws: Tensor, examples: Labelled, *, progress: Progress = SILENT) -> Convergence:
    """The same as held_out_convergence, of theta of any kind.

    Args:
        draws: (C, T, P); may be mapped from a file.
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

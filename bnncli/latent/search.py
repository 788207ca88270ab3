"""The slab's standard deviation that the val split prefers: every candidate is a repeat of one short batched fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnncli.latent.model import LatentModel
from bnncli.latent.scaling import Inputs, Scaling
from bnncli.lazy import no_grad, torch
from bnncli.targets.stream import FeatureBlocks

if TYPE_CHECKING:
    from torch import Tensor

# Geometric: neighbours differ by 1.9, which a posterior hardly notices.
CANDIDATES = tuple(0.01 * 300 ** (i / 9) for i in range(10))
NUM_NETWORKS = 10  # of a prediction
EPOCHS_SHARE = 0.1  # of the fit's epochs that each candidate gets, and at least MIN_EPOCHS
MIN_EPOCHS = 5


def search_epochs(epochs: int) -> int:
    """How many epochs the search takes, for a fit of so many."""
    return min(epochs, max(MIN_EPOCHS, round(EPOCHS_SHARE * epochs)))


@no_grad
def nll_of_repeats(
    model: LatentModel,
    features: Tensor,
    labels: Tensor,
    generator: torch.Generator,
    *,
    scaling: Scaling | None = None,
) -> Tensor:
    """Mean NLL (R,) float64 of labels (N,) or (N, C) under the mean probability of NUM_NETWORKS networks of each repeat.

    Args:
        features: (N, D), on the model's device or the CPU. labels: on the model's device.
        scaling: of the features, none by default.
    """
    layout, found = model.layout, []
    inputs = Inputs(FeatureBlocks(features, model.device), scaling)
    for repeat in range(model.num_repeats):
        repeats = torch.full((NUM_NETWORKS,), repeat, device=model.device)
        theta = layout.join(*model.draw_weights(repeats, generator))
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        for rows, block in inputs.blocks():
            logits = layout.logits(block, theta)
            if layout.likelihood.is_exclusive:
                single = layout.likelihood.log_likelihoods(logits, labels[rows]).double()
            else:  # each label by itself, as it is predicted: draws (S, n L)
                decisions = layout.likelihood.decision_logs(logits.permute(2, 0, 1), labels[rows]).double()
                single = decisions.transpose(0, 1).flatten(1)
            losses = math.log(NUM_NETWORKS) - torch.logsumexp(single, dim=0)
            total += losses.sum() * len(block) / len(losses)
        found.append(total / len(features))
    return torch.stack(found)

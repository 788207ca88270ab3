"""A whole network of a few parameters as a target, and its loss written out by torch's own functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.targets.curvature_choice import USUAL, CurvatureChoice
from bnncli.targets.network import NetworkTarget
from problems.seeds import seeded


def tiny_target(
    outputs: int = 3, *, examples: int = 25, prior: Prior | None = None, choice: CurvatureChoice = USUAL, seed: int = 0
) -> NetworkTarget:
    """Tanh layers 4-5-outputs on random inputs, float64; labels depend on the inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()
    inputs = torch.randn(examples, 4, generator=seeded(seed + 1), dtype=torch.float64)
    noise = torch.randn(examples, max(2, outputs), generator=seeded(seed + 2), dtype=torch.float64)
    labels = (2 * inputs[:, : max(2, outputs)] + noise).argmax(dim=1)
    layout = ModuleLayout.of(ModuleNetwork(module), num_outputs=outputs, input_shape=(4,))
    return NetworkTarget(inputs, labels, layout, prior or Prior(2.0, 0.5), choice=choice)


def losses_of(target: NetworkTarget, theta: Tensor) -> Tensor:
    """Minus the log likelihood of each label, (N,), under theta (P,)."""
    logits = target.layout.logits(target.inputs, theta.unsqueeze(0))[0]
    if logits.shape[1] == 1:
        return binary_cross_entropy_with_logits(logits[:, 0], target.labels.double(), reduction="none")
    return cross_entropy(logits, target.labels, reduction="none")

"""Parameters as a network has them before it is trained: where chains and trainings start from initialisation."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.theta.layout import LogitLayout

if TYPE_CHECKING:
    from torch import Tensor, nn

_WHY = "use \0start\0 checkpoint"


def initial_theta(layout: LogitLayout, num_starts: int, seed: int) -> Tensor:
    """theta (S, P) float64, each from PyTorch's own initialisation of the layers, seeded.

    Raises:
        UsageError: the network has batch norm, whose statistics are those of the trained weights, or a chosen parameter is of a module that
            does not say how it is initialised.
    """
    if layout.network is None:
        assert layout.head is not None
        bound = 1 / math.sqrt(layout.head.num_features)  # nn.Linear's own, of weight and bias
        generator = torch.Generator().manual_seed(seed)
        return bound * (2 * torch.rand(num_starts, layout.num_params, generator=generator, dtype=torch.float64) - 1)
    module = layout.network.module
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise UsageError(
                f"\0start\0 init: the network has batch norm ({name}) with statistics from the trained weights, "
                "which do not fit new weights",
                hint=_WHY,
            )
    for part in layout.parts:
        owner = module.get_submodule(part.name.rpartition(".")[0])
        if not hasattr(owner, "reset_parameters"):
            raise UsageError(
                f"\0start\0 init: {type(owner).__name__} does not define how to initialise its {part.name}", hint=_WHY
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([_initialised(layout, module) for _ in range(num_starts)])


def _initialised(layout: LogitLayout, module: nn.Module) -> Tensor:
    """theta (P,) of a copy of the module on the CPU whose layers were initialised anew."""
    fresh = copy.deepcopy(module).cpu()
    for part in fresh.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
    found = dict(fresh.named_parameters())
    return torch.cat([found[part.name].detach().double().flatten() for part in layout.parts])

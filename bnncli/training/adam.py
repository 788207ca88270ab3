"""Adam (Kingma and Ba 2015, arXiv:1412.6980), and what it has learnt of its parameters, as tensors of a resume state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def new_adam(groups: Sequence[Sequence[Tensor]], device: torch.device) -> torch.optim.Optimizer:
    """An optimizer of groups of parameters, with a learning rate on the device for each, which every step is to set."""
    settings = [{"params": list(group), "lr": torch.zeros((), device=device)} for group in groups]
    return torch.optim.Adam(settings, fused=True, capturable=device.type == "cuda")


def adam_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of the parameters and of Adam's state for each, named by their place."""
    tensors = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        tensors[f"parameter.{index}"] = parameter.detach().clone()
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"adam.{index}.{name}"] = value.clone()
    return tensors


def load_adam(optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Take up what adam_tensors gave; everything goes where the parameters are."""
    for index, parameter in enumerate(_parameters(optimizer)):
        parameter.data.copy_(state[f"parameter.{index}"])
        prefix = f"adam.{index}."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        # The step counter lies on the CPU unless the optimizer is captured in a graph.
        places = dict.fromkeys(own, parameter.device)
        if parameter.device.type != "cuda":
            places["step"] = torch.device("cpu")
        if own:
            optimizer.state[parameter] = {name: own[name].clone().to(places[name]) for name in own}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

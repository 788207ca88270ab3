"""What an optimizer is to a training, and what it has learnt of its parameters, as tensors of a resume state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class Optimizer(Protocol):
    """One update of parameters by their gradients; its state lies on their device, so that a step can be captured.

    Attributes:
        name: what its tensors in a resume state are called by.
        param_groups: each with its parameters (`params`) and its learning rate (`lr`), a tensor that every step is to set.
        state: of each parameter that has had a gradient; `step` counts its updates.
    """

    name: ClassVar[str]
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    def zero_grad(self) -> None:
        """Forget the gradients, and their memory."""

    def step(self) -> None:
        """One update of every parameter that has a gradient."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All of its parameters."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def with_gradients(group: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a group that have a gradient, and their gradients."""
    found = [parameter for parameter in group["params"] if parameter.grad is not None]
    return found, [parameter.grad for parameter in found]


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of the parameters and of what the optimizer keeps of each, named by their place."""
    tensors = {}
    for index, parameter in enumerate(parameters_of(optimizer)):
        tensors[f"parameter.{index}"] = parameter.detach().clone()
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{optimizer.name}.{index}.{name}"] = value.clone()
    return tensors


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Take up what optimizer_tensors gave; everything goes where the parameters are."""
    for index, parameter in enumerate(parameters_of(optimizer)):
        parameter.data.copy_(state[f"parameter.{index}"])
        prefix = f"{optimizer.name}.{index}."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if own:
            # The step counter lies on the CPU unless the optimizer is captured in a graph.
            counter = parameter.device if parameter.device.type == "cuda" else torch.device("cpu")
            # The others lie as the parameter does, channels last perhaps: fused kernels do not look.
            optimizer.state[parameter] = {
                name: value.clone().to(counter) if name == "step" else torch.empty_like(parameter.detach()).copy_(value)
                for name, value in own.items()
            }

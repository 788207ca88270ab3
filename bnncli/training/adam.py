"""Adam (Kingma and Ba 2015, arXiv:1412.6980), and what it has learnt of its parameters, as tensors of a resume state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

_BETAS = (0.9, 0.999)  # Algorithm 1's own settings, which torch has too
_EPSILON = 1e-8


class Adam:
    """Adam's update in torch's fused kernel, to the bits of torch.optim.Adam(fused=True), which imports torch._dynamo, for seconds.

    Args:
        groups: of parameters, each with a learning rate of its own, which every step is to set.
        device: of the parameters; there the rates and counts of steps lie, so that a step can be captured.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(group), "lr": torch.zeros((), device=device)} for group in groups
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Forget the gradients, and their memory."""
        for parameter in _parameters(self):
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            found, gradients, states = [], [], []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found.append(parameter)
                    gradients.append(parameter.grad)
                    states.append(self._state_of(parameter))
            adam(
                found,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],  # maxima, of AMSGrad alone
                [state["step"] for state in states],
                lr=group["lr"],
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                eps=_EPSILON,
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
                fused=True,
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The count of its steps and the running means of its gradient and the square of that; zeros at first."""
        state = self.state.setdefault(parameter, {})
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return state


def adam_tensors(optimizer: Adam) -> dict[str, Tensor]:
    """Copies of the parameters and of Adam's state for each, named by their place."""
    tensors = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        tensors[f"parameter.{index}"] = parameter.detach().clone()
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"adam.{index}.{name}"] = value.clone()
    return tensors


def load_adam(optimizer: Adam, state: Mapping[str, Tensor]) -> None:
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


def _parameters(optimizer: Adam) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

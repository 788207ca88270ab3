"""Adam, AdamW and SGD with momentum, in torch's fused kernels, with state that can be saved.

Kingma and Ba 2015 (arXiv:1412.6980); Loshchilov and Hutter 2019 (arXiv:1711.05101); Sutskever et al. 2013.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bnncli.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


class Optimizer(Protocol):
    """Updates parameters by their gradients; its state is on their device, so that a step can be captured.

    Attributes:
        name: prefix of its tensors in a resume state.
        param_groups: each with its parameters (`params`) and its learning rate (`lr`), a tensor that every step sets.
        state: per parameter that has had a gradient; `step` counts its updates.
    """

    name: ClassVar[str]
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    def zero_grad(self) -> None:
        """Drop the gradients, and their memory."""

    def step(self) -> None:
        """Update every parameter that has a gradient."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def with_gradients(group: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of a group that have a gradient, and their gradients."""
    found = [parameter for parameter in group["params"] if parameter.grad is not None]
    return found, [parameter.grad for parameter in found]


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of the parameters and their optimizer state, named by index."""
    tensors = {}
    for index, parameter in enumerate(parameters_of(optimizer)):
        tensors[f"parameter.{index}"] = parameter.detach().clone()
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{optimizer.name}.{index}.{name}"] = value.clone()
    return tensors


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Tensor]) -> None:
    """Load what optimizer_tensors returned, onto the parameters' device."""
    for index, parameter in enumerate(parameters_of(optimizer)):
        parameter.data.copy_(state[f"parameter.{index}"])
        prefix = f"{optimizer.name}.{index}."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        if own:
            # The step counter is on the CPU unless the optimizer is captured in a graph.
            counter = parameter.device if parameter.device.type == "cuda" else torch.device("cpu")
            # Other state has the parameter's memory format (channels last, for example), which fused kernels assume.
            optimizer.state[parameter] = {
                name: value.clone().to(counter) if name == "step" else torch.empty_like(parameter.detach()).copy_(value)
                for name, value in own.items()
            }


def join_memory(tensors: Sequence[Tensor]) -> Tensor:
    """Return a vector of which the tensors become views, with their gradients as views of its gradient; same device and type."""
    whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
    whole.grad = torch.zeros_like(whole)
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, own, gradient in zip(tensors, whole.split(sizes), whole.grad.split(sizes), strict=True):
        tensor.data = own.view_as(tensor)
        tensor.grad = gradient.view_as(tensor)
    return whole


_BETAS = (0.9, 0.999)  # settings of Algorithm 1 and torch's defaults
_EPSILON = 1e-8


class Adam:
    """Adam in torch's fused kernel, bit-equal to torch.optim.Adam(fused=True), which would import torch._dynamo for seconds.

    Args:
        groups: of parameters, each with its own learning rate, which every step sets.
        device: of the parameters, learning rates and step counts, so that a step can be captured.
        weight_decay: added to the gradients.
        is_decoupled: apply the weight decay to the parameters in each step instead: AdamW.
    """

    name: ClassVar[str] = "adam"

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        device: torch.device,
        *,
        weight_decay: float = 0.0,
        is_decoupled: bool = False,
    ) -> None:
        self.weight_decay, self.is_decoupled = weight_decay, is_decoupled
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(group), "lr": torch.zeros((), device=device)} for group in groups
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Drop the gradients, and their memory."""
        for parameter in parameters_of(self):
            parameter.grad = None

    @no_grad
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        from torch.optim.adam import adam  # not an attribute of torch.optim

        for group in self.param_groups:
            found, gradients = with_gradients(group)
            states = [self._state_of(parameter) for parameter in found]
            adam(
                found,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],  # maxima, only for AMSGrad
                [state["step"] for state in states],
                lr=group["lr"],
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                eps=_EPSILON,
                weight_decay=self.weight_decay,
                decoupled_weight_decay=self.is_decoupled,
                amsgrad=False,
                maximize=False,
                fused=True,
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return step count and running means of the gradient and its square, initially zero."""
        state = self.state.setdefault(parameter, {})
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return state


class Sgd:
    """SGD in torch's fused kernel, bit-equal to torch.optim.SGD(fused=True).

    Args:
        groups, device: as in Adam.
        momentum: in [0, 1).
        is_nesterov: whether to use Nesterov momentum.
        weight_decay: added to the gradients.
    """

    name: ClassVar[str] = "sgd"

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        device: torch.device,
        *,
        momentum: float = 0.0,
        is_nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        self.momentum, self.is_nesterov, self.weight_decay = momentum, is_nesterov, weight_decay
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(group), "lr": torch.zeros((), device=device)} for group in groups
        ]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Drop the gradients, and their memory."""
        for parameter in parameters_of(self):
            parameter.grad = None

    @no_grad
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        from torch.optim.sgd import sgd  # not an attribute of torch.optim

        for group in self.param_groups:
            found, gradients = with_gradients(group)
            states = [self._state_of(parameter) for parameter in found]
            sgd(
                found,
                gradients,
                [state.get("momentum") for state in states],
                lr=group["lr"],
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                dampening=0.0,
                nesterov=self.is_nesterov,
                maximize=False,
                fused=True,
            )
            for state in states:
                state["step"] += 1

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return step count and velocity, initially zero, so that the first step is the gradient's, as in torch."""
        state = self.state.setdefault(parameter, {})
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if self.momentum:
                state["momentum"] = torch.zeros_like(parameter)
        return state

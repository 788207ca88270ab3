"""Stochastic gradient descent with momentum, Polyak's (1964) or Nesterov's (1983) as Sutskever et al. (2013) have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import no_grad, torch
from bnncli.training.optimizer import parameters_of, with_gradients

if TYPE_CHECKING:
    from torch import Tensor


class Sgd:
    """SGD's update in torch's fused kernel, to the bits of torch.optim.SGD(fused=True).

    Args:
        groups, device: as of Adam.
        momentum: from 0 to below 1.
        is_nesterov: whether a step looks ahead along the momentum.
        weight_decay: of the parameters themselves, added to their gradients.
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
        """Forget the gradients, and their memory."""
        for parameter in parameters_of(self):
            parameter.grad = None

    @no_grad
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        from torch.optim.sgd import sgd  # no attribute of torch.optim

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
        """The count of its steps and its velocity, zeros at first: with these the first step is the gradient's, as torch's is."""
        state = self.state.setdefault(parameter, {})
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if self.momentum:
                state["momentum"] = torch.zeros_like(parameter)
        return state

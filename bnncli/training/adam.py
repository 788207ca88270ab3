"""Adam (Kingma and Ba 2015, arXiv:1412.6980), and with its weight decay apart AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import no_grad, torch
from bnncli.training.optimizer import parameters_of, with_gradients

if TYPE_CHECKING:
    from torch import Tensor

_BETAS = (0.9, 0.999)  # Algorithm 1's own settings, which torch has too
_EPSILON = 1e-8


class Adam:
    """Adam's update in torch's fused kernel, to the bits of torch.optim.Adam(fused=True), which imports torch._dynamo, for seconds.

    Args:
        groups: of parameters, each with a learning rate of its own, which every step is to set.
        device: of the parameters; there the rates and counts of steps lie, so that a step can be captured.
        weight_decay: of the parameters themselves, added to their gradients.
        is_decoupled: whether it is not, but takes its share off the parameters in each step: AdamW.
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
        """Forget the gradients, and their memory."""
        for parameter in parameters_of(self):
            parameter.grad = None

    @no_grad
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        from torch.optim.adam import adam  # no attribute of torch.optim

        for group in self.param_groups:
            found, gradients = with_gradients(group)
            states = [self._state_of(parameter) for parameter in found]
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
                weight_decay=self.weight_decay,
                decoupled_weight_decay=self.is_decoupled,
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

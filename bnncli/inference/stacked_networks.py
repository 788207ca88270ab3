"""Several networks of one architecture that compute as one, each on inputs of its own: parameters and buffers stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bnncli.lazy import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor, nn


class StackedNetworks:
    """S networks of one architecture, whose parameters and buffers lie together where there are several.

    Args:
        modules: of one architecture, all on one device; those of several are copies until `separate`.
        logits_of: the logits (n, K) in what a network returns.

    Attributes:
        params: those that learn, by name, each (S, ...), or of one network as it has it.
    """

    def __init__(self, modules: Sequence[nn.Module], logits_of: Callable[[Any], Tensor]) -> None:
        self.modules, self.logits_of = list(modules), logits_of
        self._is_one = len(self.modules) == 1
        self._all: dict[str, Tensor] = dict(self.modules[0].named_parameters())
        self._stacked: dict[str, Tensor] = {}
        if not self._is_one:
            self._all, self._stacked = torch.func.stack_module_state(self.modules)
        self.params = {name: value for name, value in self._all.items() if value.requires_grad}

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """By name, each (S, ...), or of one network as it has it; training changes them."""
        return dict(self.modules[0].named_buffers()) if self._is_one else self._stacked

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits (S, n, K) of inputs (S, n, ...), those of each network's own."""
        if self._is_one:
            found: Tensor = self.logits_of(self.modules[0](inputs[0]))
            return found.reshape(len(found), -1).unsqueeze(0)
        stacked: Tensor = torch.vmap(self._one)(self._all, self._stacked, inputs)
        return stacked

    def _one(self, params: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        returned = torch.func.functional_call(self.modules[0], (params, buffers), (inputs,))
        found = self.logits_of(returned)
        return found.reshape(len(inputs), -1)

    @no_grad
    def separate(self) -> list[nn.Module]:
        """The networks, with what each has learnt so far."""
        if not self._is_one:
            for place, module in enumerate(self.modules):
                for own, stacked in ((module.named_parameters(), self._all), (module.named_buffers(), self._stacked)):
                    for name, value in own:
                        value.copy_(stacked[name][place])
        return self.modules

    def set_training(self, mode: bool) -> None:
        """Whether dropout, batch norm and the like do what they do in training."""
        for module in self.modules:
            module.train(mode)

"""A torch module as a function of inputs and parameters: some that vary, the others as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch
from bnncli.theta.differentiable import differentiable, is_of_transform, uneven_embeddings

if TYPE_CHECKING:
    from torch import Tensor, nn

_PAIRS = 256  # of a draw and an example that convolutions take together on a CPU: thousands leave its caches


@dataclass(frozen=True, eq=False)
class ModuleNetwork:
    """A module as a function of inputs and parameters.

    Args:
        module: in evaluation mode, on the device; never changed.
        logits_of: the logits (n, K), given a call that runs the module and returns what it returns.
        names: of the arguments that packed inputs (n, arguments, ...) are; empty for inputs that are one tensor.
        takes_tokens: whether inputs are whole numbers, such as token ids; they are given as real ones, exact below 2^24.
            Packed ones (n, arguments, length) may have any length.
        features_of: what its last layer takes, (n, D), given the module, the same call and that layer's weight (K, D) and bias (K,); None where
            that is not known.
        kept: of logits linearised at one theta, while `logits._kept.keeping` asks for that.
    """

    module: nn.Module
    logits_of: Callable[[Callable[[], Any]], Tensor] = lambda run: run()
    names: tuple[str, ...] = ()
    takes_tokens: bool = False
    features_of: Callable[[nn.Module, Callable[[], Any], Tensor, Tensor | None], Tensor] | None = None
    kept: dict[str, Any] = field(default_factory=dict, repr=False)
    _states: dict[Any, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    def __call__(self, inputs: Tensor, params: Mapping[str, Tensor]) -> Tensor:
        """Logits (n, K) of inputs (n, ...) under these parameters, in their precision; autograd and vmap pass through."""
        with differentiable(self._embeddings):
            return self.logits_of(self._pass(inputs, params))

    def features(self, inputs: Tensor, params: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the last layer takes, (n, D), of inputs (n, ...) under these parameters.

        Args:
            weight, bias: that layer's own among them, (K, D) and (K,).
        """
        assert self.features_of is not None
        return self.features_of(self.module, self._pass(inputs, params), weight, bias)

    def _pass(self, inputs: Tensor, params: Mapping[str, Tensor]) -> Callable[[], Any]:
        """A call of the module on inputs (n, ...) under these parameters."""
        dtype = next(iter(params.values())).dtype
        state = {**self._frozen(dtype, params), **params}
        inputs = inputs.long() if self.takes_tokens else inputs.to(dtype)
        named = dict(zip(self.names, inputs.unbind(1), strict=True)) if self.names else {}
        return partial(torch.func.functional_call, self.module, state, () if named else (inputs,), named)

    def draws_at_once(self, num_examples: int, device: torch.device) -> int | None:
        """Draws of the parameters that go through the network together with so many examples; None for all."""
        if device.type != "cpu" or not self._convolves:
            return None
        return max(1, _PAIRS // max(1, num_examples))

    @cached_property
    def _convolves(self) -> bool:
        """Whether it has convolutions, which many weights at once make slow on a CPU."""
        kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        return any(isinstance(module, kinds) for module in self.module.modules())

    def shaped(self, features: Tensor, input_shape: Sequence[int]) -> Tensor:
        """Inputs (N, D), flat, or (N, ...), in the shape that the network takes; packed token ids may be of any length."""
        return features.reshape(
            len(features), *((len(self.names), -1) if self.names and self.takes_tokens else input_shape)
        )

    @contextmanager
    def briefly(self, dtype: torch.dtype, varying: Collection[str]) -> Iterator[None]:
        """What of the network does not vary is held in this precision no longer than within, where it was not before."""
        is_new = dtype not in self._states
        try:
            self._frozen(dtype, varying)
            yield
        finally:
            if is_new:
                self._states.pop(dtype, None)

    def _frozen(self, dtype: torch.dtype, varying: Collection[str]) -> dict[str, Tensor]:
        """All other parameters and buffers, those that are real numbers in this precision; made once for each."""
        state = self._states.setdefault(dtype, {})
        missing = [name for name in self._every if name not in varying and name not in state]
        found = {name: self._every[name].detach() for name in missing}
        found = {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}
        if any(map(is_of_transform, found.values())):  # it ends with the transform of torch.func that it was made in
            return {**state, **found}
        state.update(found)
        return state

    @cached_property
    def _every(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    @cached_property
    def _embeddings(self) -> list[nn.Embedding]:
        return uneven_embeddings(self.module)

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return next(self.module.parameters()).device

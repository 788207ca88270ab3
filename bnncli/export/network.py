"""Combine preprocessing, the network up to its last layer, and the Bayesian head for export."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bnncli.data.pixels import Preprocess
from bnncli.data.splits import Inputs
from bnncli.errors import DataError
from bnncli.export.steps import Values
from bnncli.models.head import Head as NetworkHead
from bnncli.models.head import HeadForm, choose_output, linear_layers

_FEW = 64  # numbers; halving fewer saves nothing


class FeatureNetwork(nn.Module):
    """Features (B, D) of inputs (B, ...) or several by name: preprocessing, then the network up to its head.

    Args:
        model: in evaluation mode, on the CPU.
        head: the network's own.
        preprocess: applied to stored inputs first; None if they are already preprocessed.
    """

    def __init__(self, model: nn.Module, head: NetworkHead, preprocess: Preprocess | None) -> None:
        super().__init__()
        self.model, self.form, self.preprocess = model, head.form, preprocess
        self.layer = None if head.form is not None else head.name
        for name in ("weight", "bias"):
            part = None if head.form is None else getattr(head, name)
            self.register_buffer(f"head_{name}", part)
        check_exportable(head.form)

    def forward(self, inputs: Inputs) -> Tensor:
        if self.preprocess is not None:
            assert isinstance(inputs, Tensor)
            inputs = self.preprocess.apply(inputs, is_sized=True)
        given: dict[str, Tensor] = inputs if isinstance(inputs, dict) else {}
        arguments = () if isinstance(inputs, dict) else (inputs,)
        if self.form is not None:
            passed, returned = self.form.run(self.model, lambda: self.model(*arguments, **given))
            weight: Any = self.head_weight
            num_rows = next(iter((*arguments, *given.values()))).shape[0]
            output = choose_output(returned, self.form.output).reshape(num_rows, -1)
            return self.form.features(passed, output, weight, self.head_bias)  # type: ignore[arg-type]
        assert self.layer is not None
        captured: list[Tensor] = []
        layer = linear_layers(self.model)[self.layer]

        def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured.append(args[0] if args else kwargs["input"])

        hook = layer.register_forward_pre_hook(capture, with_kwargs=True)
        try:
            self.model(*arguments, **given)
        finally:
            hook.remove()
        return captured[0]


def check_exportable(form: HeadForm | None) -> None:
    """Check that a head's features pass through modules, or are the output.

    Raises:
        DataError: they do not.
    """
    if form is not None and any(isinstance(tap.at, int) for tap in form.taps):
        raise DataError(
            "export cannot reach this network's features, which are computed inside a module",
            hint="export only the head: \0head_only\0",
            code="not_exportable",
        )


class WholeNetwork(nn.Module):
    """Named outputs of inputs (B, ...)."""

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, inputs: Inputs) -> Values:
        outputs: Values = self.head(self.trunk(inputs))
        return outputs


class HalfPrecisionStorage(nn.Module):
    """A module that stores its numbers as float16 if they fit, and computes in float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._inner = (module,)  # not a submodule, so that its own numbers are not stored
        self._names: dict[str, str] = {}
        for number, (name, tensor) in enumerate([*module.named_parameters(), *module.named_buffers()]):
            stored = tensor.detach()
            if stored.dtype == torch.float32 and stored.numel() >= _FEW and bool(stored.half().isfinite().all()):
                stored = stored.half()
            self._names[f"number_{number}"] = name
            self.register_buffer(f"number_{number}", stored.clone())

    def forward(self, inputs: Inputs) -> Tensor:
        own = dict(self.named_buffers())
        state = {
            name: own[place].float() if own[place].dtype == torch.float16 else own[place]
            for place, name in self._names.items()
        }
        features: Tensor = torch.func.functional_call(self._inner[0], state, (inputs,))
        return features

"""The last linear layer of a network: which one it is, its weights, and the proof that nothing comes after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bnncli.errors import DataError, DeviceError, UsageError
from bnncli.machine.user_code import running
from bnncli.names import listed, quoted
from bnncli.theta.head import HeadLayout

if TYPE_CHECKING:
    from bnncli.data import Inputs

# Largest |features @ W.T + b - logits| that rounding explains, in units of 1 + max |logits|.
HEAD_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Head:
    """The last linear layer: its name in the network, weight (K, D) and bias (K,) or None, float32 on the CPU."""

    name: str
    weight: Tensor
    bias: Tensor | None

    @property
    def layout(self) -> HeadLayout:
        """How weight and bias lie in theta."""
        return HeadLayout(self.weight.shape[0], self.weight.shape[1], self.bias is not None)


def find_last_linear(model: nn.Module, example: Inputs) -> str:
    """Name of the linear layer that is called last when the model sees `example` (n, ...).

    Raises:
        DataError: no linear layer is called, or the last one is called more than once.
        UsageError: the model cannot take the example.
    """
    called: list[str] = []
    linear = linear_layers(model)
    hooks = [
        layer.register_forward_pre_hook(lambda module, inputs, name=name: called.append(name))
        for name, layer in linear.items()
    ]
    try:
        forward(model.eval(), example)
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        has = f"its linear layers are {listed(linear)}" if linear else "it has none"
        raise DataError(
            f"the network calls no linear layer (torch.nn.Linear); {has}", code="no_head",
            hint="the last layer must be linear; \0model\0 flatten uses raw inputs as features",
        )  # fmt: skip
    return called[-1]


def head_of(model: nn.Module, name: str) -> Head:
    """The linear layer called `name`.

    Raises:
        UsageError: there is no such linear layer; lists those there are.
    """
    linear = linear_layers(model)
    if name not in linear:
        raise UsageError(
            f"\0last_layer\0: expected one of {listed(linear, limit=20) or 'none: there is no torch.nn.Linear'}; "
            f"got {name!r}"
        )
    layer = linear[name]
    bias = None if layer.bias is None else plain_copy(layer.bias)
    return Head(name, plain_copy(layer.weight), bias)


def prove_head(head: Head, features: Tensor, output: Tensor) -> None:
    """Nothing, when features (n, D) times head are the network's output (n, K) up to rounding.

    Raises:
        DataError: they are not; says what the output looks like, such as a softmax of the logits.
    """
    logits = features.double() @ head.weight.to(features.device).double().T
    if head.bias is not None:
        logits = logits + head.bias.to(features.device).double()
    actual = output.double()
    if actual.numel() != logits.numel():
        raise DataError(
            f"the network's output has shape {tuple(output.shape)}, its linear layer {quoted(head.name)} gives "
            f"{tuple(logits.shape)}: that layer is not the last step",
            code="not_the_head", hint="name another layer with \0last_layer\0, or return its output as it is",
        )  # fmt: skip
    actual = actual.reshape(logits.shape)
    error = (actual - logits).abs().max()
    if error <= HEAD_TOLERANCE * (1 + actual.abs().max()):
        return
    raise DataError(
        f"features times {quoted(head.name)} differ from the network's output by {float(error):.3g}; "
        f"{_explain(logits, actual)}",
        code="not_the_head", hint="the network must return the output of its last linear layer as it is",
    )  # fmt: skip


def advise_layer(error: DataError, model: nn.Module, inputs: Inputs) -> DataError:
    """The error of a layer that is not the head, with the layer that is, where one linear layer gives the output."""
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
        for name, layer in linear_layers(model).items()
    ]
    try:
        raw = run_network(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    logits = logits_of(raw)
    parts = f"the network returns {len(raw)} outputs, of which the first is taken; " if _is_several(raw) else ""
    same = [name for name, output in outputs.items() if output.shape == logits.shape and bool((output == logits).all())]
    if same:
        message = f"{error.message}; {parts}that output is what its linear layer {quoted(same[-1])} gives"
        return DataError(message, code=error.code, hint=f"add \0last_layer\0 {same[-1]}")
    others = f"; \0last_layer\0 NAME names another linear layer (there: {listed(outputs, limit=20)})"
    hint = f"{error.hint}{others if len(outputs) > 1 else ''}"
    return DataError(error.message + (f"; {parts.removesuffix('; ')}" if parts else ""), code=error.code, hint=hint)


def _is_several(output: object) -> bool:
    """Whether a network returned more than one thing in a tuple or list."""
    return isinstance(output, (tuple, list)) and len(output) > 1


def _explain(logits: Tensor, output: Tensor) -> str:
    """What the network does to the logits, when it is one of the usual things."""
    scale = (logits * output).sum() / logits.square().sum().clamp(min=1e-30)
    centered = logits - logits.mean(dim=1, keepdim=True)
    usual: Mapping[str, Tensor] = {
        "it is the softmax of the logits: remove the softmax": logits.softmax(1),
        "it is the log-softmax of the logits: remove the log-softmax": logits.log_softmax(1),
        "it is the sigmoid of the logits: remove the sigmoid": logits.sigmoid(),
        "it is the ReLU of the logits: remove the ReLU": logits.relu(),
        "it is the logits less their mean: remove the centring": centered,
        f"it is the logits times {float(scale):.4g}: remove the scale": logits * scale,
    }
    for text, changed in usual.items():
        if (changed - output).abs().max() <= HEAD_TOLERANCE * (1 + output.abs().max()):
            return text
    return "something comes after that layer"


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    """The network's output tensor for inputs (n, ...), without gradients; logits are found in tuples and mappings.

    Raises:
        DataError: the network cannot take the inputs, or returns no tensor.
        DeviceError: not enough memory.
    """
    return logits_of(run_network(model, inputs))


def run_network(model: nn.Module, inputs: Inputs) -> Any:
    """Whatever the network returns for inputs (n, ...), or for those of several names. Raises as `forward` does."""
    try:
        with torch.inference_mode(), running("the network", but=RuntimeError):
            return model(**inputs) if isinstance(inputs, dict) else model(inputs)
    except torch.OutOfMemoryError as error:
        first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
        raise DeviceError(
            f"not enough memory on {first.device} for {len(first)} inputs", code="out_of_memory"
        ) from error
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0][:200]
        raise DataError(
            f"the network cannot take inputs of shape {_shapes(inputs)}: {first_line}",
            code="wrong_inputs", hint="is it the right \0data\0 for this \0model\0? \0resize\0 and \0crop\0 change sizes",
        ) from error  # fmt: skip


def _shapes(inputs: Inputs) -> str:
    """The shape of inputs, or the shapes of each by its name."""
    if isinstance(inputs, dict):
        return ", ".join(f"{tuple(tensor.shape)} ({name})" for name, tensor in inputs.items())
    return str(tuple(inputs.shape))


def logits_of(output: Any) -> Tensor:
    """The logits in what a network returned. Raises DataError where there is no tensor."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    elif isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise DataError(f"the network returned {type(output).__name__}, expected a tensor of logits", code="no_logits")
    return output


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers by name, in the order they were declared."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def plain_copy(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An ordinary tensor on the CPU, free of inference mode and of the network's own memory."""
    return tensor.detach().to("cpu", dtype, copy=True)

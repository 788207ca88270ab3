"""Record one forward pass, operation by operation: which products with weights give an output, and what follows them.

A product is an operation of data with weights that do not depend on data: a linear layer, a convolution, a matrix
product. The operations between products and an output can be replayed with other values, in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bnncli.models import Place

# Argument positions of input, weight (and whether it is (D, K)) and bias.
_PRODUCTS = {
    "aten::linear": (0, 1, False, 2),
    "aten::matmul": (0, 1, True, None),
    "aten::mm": (0, 1, True, None),
    "aten::addmm": (1, 2, True, 0),
    "aten::conv1d": (0, 1, False, 2),
    "aten::conv2d": (0, 1, False, 2),
    "aten::conv3d": (0, 1, False, 2),
    "aten::convolution": (0, 1, False, 2),
    "quantized::linear_dynamic": (0, 1, False, None),
}
# What networks apply to logits at the end; the first argument is the input.
LINK_OF = {
    "aten::log_softmax": "log_softmax",
    "aten::_log_softmax": "log_softmax",
    "aten::softmax": "softmax",
    "aten::_softmax": "softmax",
    "aten::sigmoid": "sigmoid",
    "aten::sigmoid_": "sigmoid",
}


_TAPPED = {**{name: place[0] for name, place in _PRODUCTS.items()}, **dict.fromkeys(LINK_OF, 0)}
_UNCHANGED = {"aten::contiguous", "aten::clone", "aten::detach", "aten::alias", "aten::to", "aten::_to_copy"}


class Call(NamedTuple):
    """An operation, and the stack of modules being called, innermost last."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    modules: tuple[str, ...]

    @property
    def operation(self) -> str:
        """Name without overload, such as aten::linear."""
        return str(self.function._schema.name)

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensor arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


class Product(NamedTuple):
    """A call as weights (K, D) and bias (K,), float64 on the CPU.

    Attributes:
        at: index of the call.
        inputs: multiplied by the weights.
        outputs: with the same axes.
        axis: of the features in `inputs` and of the outputs in `outputs`; 1 or the last.
        is_whole: a convolution over more than one position, whose features are its whole input if the kernel covers
            that.
        reduce_range: whether the product rounds its inputs to 7 instead of 8 bits; None if it does not round.
        name: of the calling module, or of the parameter.
    """

    at: int
    inputs: Tensor
    outputs: Tensor
    weight: Tensor
    bias: Tensor | None
    axis: int
    is_whole: bool
    reduce_range: bool | None
    name: str


class Tape(TorchDispatchMode):
    """Records all calls inside `with tape:`, and keeps their tensors."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model = model
        self.calls: list[Call] = []
        self.places: dict[int, list[Place]] = {}
        self._stack: list[str] = []
        self._num_calls: dict[str, int] = {}
        self._writers: dict[int, list[int]] = {}
        self._kept: list[Any] = [inputs]  # so that no id of a freed tensor is reused
        self._data = {id(leaf) for leaf in tree_leaves(inputs)}
        self.num_rows = len(tree_leaves(inputs)[0])
        self._parameters = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
        self._hooks: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, which keeps PyTorch from importing its compiler, which takes seconds."""
        return False

    def __enter__(self) -> Tape:
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leaving(name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record one operation."""
        result = func(*args, **(kwargs or {}))
        call = Call(func, tuple(args), kwargs or {}, result, tuple(self._stack))
        is_data = any(id(tensor) in self._data for tensor in call.tensors)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._writers.setdefault(id(leaf), []).append(len(self.calls))
                (self._data.add if is_data else self._data.discard)(id(leaf))
        self.calls.append(call)
        return result

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append(name)
            number = self._num_calls[name] = self._num_calls.get(name, -1) + 1
            for position, value in enumerate(args):
                self._pass(value, Place(name, position, number))
            for keyword, value in kwargs.items():
                self._pass(value, Place(name, keyword, number))

        return hook

    def _leaving(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()
            self._pass(output, Place(name, None, self._num_calls[name]))

        return hook

    def _pass(self, value: Any, place: Place) -> None:
        if isinstance(value, Tensor):
            self._kept.append(value)
            self.places.setdefault(id(value), []).append(place)

    def writer(self, tensor: Tensor, before: int) -> int | None:
        """Return the index of the last call before another that wrote a tensor; None if it existed before."""
        return max((index for index in self._writers.get(id(tensor), ()) if index < before), default=None)

    def origin(self, tensor: Tensor, before: int) -> Tensor:
        """Return the tensor that this one is a plain copy of."""
        index = self.writer(tensor, before)
        while index is not None and self.calls[index].operation in _UNCHANGED:
            tensor = self.calls[index].args[0]
            index = self.writer(tensor, index)
        return tensor

    def products(self) -> list[Product]:
        """Return all products, in call order."""
        found = (self.product(index) for index in range(len(self.calls)))
        return [product for product in found if product is not None]

    def product(self, index: int) -> Product | None:
        """Return the call at an index as a product; None if it is none."""
        call = self.calls[index]
        if call.operation not in _PRODUCTS or not self._is_product(call):
            return None
        first, second, is_transposed, third = _PRODUCTS[call.operation]
        inputs, weight, reduce_range = call.args[first], call.args[second], None
        bias = call.args[third] if third is not None and len(call.args) > third else None
        if call.operation == "quantized::linear_dynamic":
            packed, bias = weight.unpack()
            weight, reduce_range = packed.dequantize(), len(call.args) > 2 and bool(call.args[2])
        is_conv = "conv" in call.operation
        is_whole = is_conv and weight.shape[2:].numel() > 1
        name = self._name(call, call.args[second])
        matrix = _plain(weight.T if is_transposed else weight.flatten(1))
        axis = 1 if is_conv else -1
        return Product(
            index, inputs, call.result, matrix, None if bias is None else _plain(bias), axis, is_whole, reduce_range, name
        )  # fmt: skip

    def _is_product(self, call: Call) -> bool:
        """Return whether one operand is data, and the other weights with one entry per output and feature."""
        first, second, _, third = _PRODUCTS[call.operation]
        inputs, weight = call.args[first], call.args[second]
        if id(inputs) not in self._data or id(weight) in self._data:
            return False
        bias = call.args[third] if third is not None and len(call.args) > third else None
        if isinstance(bias, Tensor) and (bias.ndim != 1 or id(bias) in self._data):
            return False
        if "conv" in call.operation:
            return bool(inputs.shape[1] == weight.shape[1])  # stride, padding and kernel show in the output
        return not isinstance(weight, Tensor) or (weight.ndim == 2 and not call.kwargs)

    def _name(self, call: Call, weight: Any) -> str:
        """Return the innermost calling module if the weight is its own; else the weight's parameter."""
        inner = call.modules[-1] if call.modules else ""
        parameter = self._parameter(weight, len(self.calls)) if isinstance(weight, Tensor) else None
        if inner and (parameter is None or parameter.startswith(f"{inner}.")):
            return inner
        return parameter or inner

    def _parameter(self, tensor: Tensor, before: int) -> str | None:
        """Return the name of the parameter that a weight is computed from."""
        if id(tensor) in self._parameters:
            return self._parameters[id(tensor)]
        index = self.writer(tensor, before)
        made_from = () if index is None else self.calls[index].tensors
        names = (self._parameter(one, index or 0) for one in made_from)
        return next((name for name in names if name is not None), None)

    def before(self, target: Tensor) -> tuple[list[int], list[int]] | None:
        """Return indices of the products that a tensor comes from, and of later calls; None if it also depends on data directly."""
        products: set[int] = set()
        tail: set[int] = set()
        waiting = [(target, len(self.calls))]
        while waiting:
            tensor, end = waiting.pop()
            if id(tensor) not in self._data or not tensor.is_floating_point():
                continue
            index = self.writer(tensor, end)
            if index is None:
                return None
            if index in products or index in tail:
                continue
            if self.product(index) is not None:
                products.add(index)
            else:
                tail.add(index)
                waiting += [(one, index) for one in self.calls[index].tensors]
        return (sorted(products), sorted(tail)) if products else None

    def depends(self, target: Tensor, on: Tensor) -> bool:
        """Return whether a tensor is computed from another."""
        seen, waiting = set[int](), [(target, len(self.calls))]
        while waiting:
            tensor, end = waiting.pop()
            index = self.writer(tensor, end)
            if index is None or index in seen:
                continue
            seen.add(index)
            inputs = self.calls[index].tensors
            if any(one is on for one in inputs):
                return True
            waiting += [(one, index) for one in inputs]
        return False

    def replay(self, target: Tensor, tail: Sequence[int], values: Mapping[int, Tensor]) -> Tensor:
        """Recompute a tensor with other values of the products at given indices; float64 on the CPU."""
        known: dict[int, Any] = {}

        def other(value: Any) -> Any:
            if isinstance(value, Tensor):
                return known[id(value)] if id(value) in known else _plain(value)
            if isinstance(value, torch.dtype) and value.is_floating_point:
                return torch.float64
            return torch.device("cpu") if isinstance(value, torch.device) else value

        for index in sorted([*tail, *values]):
            call = self.calls[index]
            if index in values:
                known[id(call.result)] = values[index].clone()
                continue
            result = call.function(*tree_map(other, call.args), **tree_map(other, call.kwargs))
            for old, new in zip(tree_leaves(call.result), tree_leaves(result), strict=True):
                known[id(old)] = new
        found: Tensor = known[id(target)]
        return found


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, floats as float64."""
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor


class TappedInputs(TorchDispatchMode):
    """Keeps the inputs of operations at given numbers, counted over all possible products and links."""

    def __init__(self, wanted: Sequence[int]) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._wanted, self._count = {*wanted}, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, which keeps PyTorch from importing its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        operation = str(func._schema.name)
        if operation in _TAPPED:
            if self._count in self._wanted:
                self.found[self._count] = args[_TAPPED[operation]]
            self._count += 1
        return func(*args, **(kwargs or {}))


def tap_number(tape: Tape, index: int) -> int:
    """Return the number, as TappedInputs counts, of the operation at a call index."""
    return sum(call.operation in _TAPPED for call in tape.calls[:index])

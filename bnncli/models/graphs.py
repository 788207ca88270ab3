"""Saved graphs as networks: find the last linear step of a graph, and the features it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bnncli.errors import DataError, UsageError
from bnncli.models.checkpoint_files import describe_wrong_kind
from bnncli.models.checkpoints import check_finite
from bnncli.names import format_names, quote_name

_PROGRAMS = {"pt2": ("an exported program", "export"), "torchscript": ("a TorchScript program", "jit")}
_WEIGHTS = ("torch-zip", "torch-legacy", "safetensors")


@dataclass(frozen=True)
class GraphFile:
    """Common base of graph files of every format.

    Attributes:
        files: the graph's own first.
        feature_node: node whose output the head takes; None for the last linear step.
    """

    files: tuple[Path, ...]
    feature_node: str | None
    classes: tuple[str, ...] | None = None
    transform: None = None
    task: str | None = None

    def refuse(self, state: Mapping[str, Any] | None) -> None:
        """Raise UsageError if checkpoint tensors are to be loaded into the graph."""
        if state is not None:
            raise UsageError(
                f"{self.files[0]} has its own weights, but CKPT is a different weights file",
                hint="give the graph's file as CKPT too, or a name for the run",
            )


def wrong_program_error(expected: str, kind: str) -> DataError:
    """Return the error for a file of another kind, with advice.

    Args:
        expected: pt2 or torchscript.
        kind: from sniff and sniff_zip.
    """
    wanted, hint = _PROGRAMS[expected][0], None
    if kind in _PROGRAMS:
        what, form = _PROGRAMS[kind]
        hint = f"use \0model\0 {form}:FILE"
    elif kind in _WEIGHTS:
        what = "a weights file"
        hint = "pass the weights as CKPT, and define their network with \0model\0 file.py:factory"
    else:
        what = describe_wrong_kind(kind)
    return DataError(f"expected {wanted}, got {what.removeprefix('the file is ')}", code=f"is_{kind}", hint=hint)


# Known kinds of steps; other steps are opaque.
LINEAR, CONV, ADD, POOL, SHAPE, AFTER = "linear", "conv", "add", "pool", "shape", "after"
_MOST_LISTED = 20


class GraphStep(NamedTuple):
    """One node of a graph.

    Attributes:
        does: one of the kinds above, or "".
        output: name of its first output value.
        inputs: names of its input values; for LINEAR and CONV features, weight and bias; None for a non-tensor.
        name: of the node in the graph.
        is_transposed: whether a LINEAR's weight is (D, K) instead of (K, D).
    """

    does: str
    output: str
    inputs: tuple[str | None, ...]
    name: str = ""
    is_transposed: bool = False


class GraphHead(NamedTuple):
    """A linear step of a graph.

    Attributes:
        features: name of its input value.
        weight, bias: (K, D) and (K,) or None, float32.
        is_pooled: whether its outputs at all positions are averaged.
        is_channels_first: whether the features are (n, D, ...) instead of (n, ..., D).
        tail: values from the head's step to an output of the graph, excluding its own; empty if unknown.
        missing: why there is no such step; the features are then an output of the graph, and the weight is empty.
    """

    features: str
    weight: np.ndarray
    bias: np.ndarray | None
    is_pooled: bool
    is_channels_first: bool = False
    tail: tuple[str, ...] = ()
    missing: DataError | None = None


class HeadSearch:
    """Finds the linear steps of a graph whose weights do not depend on its inputs.

    Args:
        what: the graph, for messages.
        constant: returns a value by name as an array; None if it depends on the inputs.
    """

    def __init__(self, what: str, steps: Sequence[GraphStep], constant: Callable[[str], np.ndarray | None]) -> None:
        self._what, self._steps, self._constant = what, steps, constant
        self._maker = {step.output: step for step in steps}

    def find(self, outputs: Sequence[str], feature_node: str | None) -> GraphHead:
        """Return the head before the first output that has one, or after the named node; `missing` lists the linear steps.

        Raises:
            UsageError: no linear step takes the output of the named node.
        """
        ends = [head for output in outputs if (head := self._before(output)) is not None]
        if feature_node is not None:
            named = self._after(feature_node)
            return next((head for head in ends if head.features == named.features), named)
        if ends:
            return ends[0]
        missing = DataError(
            f"{self._what}: its output does not come from a linear layer; {self._candidates()}", code="no_head",
            hint="if one of these linear layers is the head, name the node before it with \0feature_node\0",
        )  # fmt: skip
        return GraphHead(outputs[0], np.empty((0, 0), np.float32), None, is_pooled=False, missing=missing)

    def _before(self, output: str) -> GraphHead | None:
        """Return the linear step that the value comes from, through steps that may follow a head."""
        is_pooled, tail = False, list[str]()
        value: str | None = output
        while value is not None and (step := self._maker.get(value)) is not None:
            if (head := self._head(step, is_pooled)) is not None:
                return head._replace(tail=tuple(tail[::-1]))
            if step.does not in (ADD, POOL, SHAPE, AFTER):
                return None
            is_pooled |= step.does == POOL
            tail.append(value)
            value = self._only_input(step)
        return None

    def _after(self, name: str) -> GraphHead:
        """Return the last linear step that takes a node's output, through changes of shape only."""
        named = {step.output for step in self._steps if name in (step.name, step.output)} or {name}
        for step in reversed(self._steps):
            if (head := self._head(step, is_pooled=False)) is not None and named & {*self._way_back(head.features)}:
                pools = [one.inputs[0] for one in self._steps if one.does == POOL]
                return head._replace(is_pooled=any(step.output in self._way_back(value) for value in pools))
        raise UsageError(
            f"\0feature_node\0: no linear layer of {self._what} takes {quote_name(name)} as input; {self._candidates()}"
        )

    def _way_back(self, value: str | None) -> Iterator[str]:
        """Yield the value and its predecessors through changes of shape or pooling."""
        while value is not None:
            yield value
            step = self._maker.get(value)
            value = self._only_input(step) if step is not None and step.does in (SHAPE, POOL) else None

    def _only_input(self, step: GraphStep) -> str | None:
        """Return the only input that depends on the graph's inputs; None if there are several."""
        taken = step.inputs[:1] if step.does in (SHAPE, POOL) else step.inputs  # the others are sizes
        free = [name for name in taken if name is not None and self._constant(name) is None]
        return free[0] if len(free) == 1 else None

    def _head(self, step: GraphStep, is_pooled: bool) -> GraphHead | None:
        """Return the step as a head; None if it is none."""
        if step.does == ADD:
            return self._sum(step, is_pooled)
        if step.does not in (LINEAR, CONV) or step.inputs[0] is None or len(step.inputs) < 2:
            return None
        features, weight = step.inputs[0], self._matrix(step)
        if weight is None or self._constant(features) is not None:
            return None
        bias = self._vector(step.inputs[2] if len(step.inputs) > 2 else None, len(weight))
        return GraphHead(features, weight, bias, is_pooled, step.does == CONV)

    def _sum(self, step: GraphStep, is_pooled: bool) -> GraphHead | None:
        """Return the head of two steps: a product of features and weights, plus a bias."""
        terms = [name for name in step.inputs[:2] if name is not None]
        for product, bias in (terms, terms[::-1]) if len(terms) == 2 else ():
            maker = self._maker.get(product)
            head = self._head(maker, is_pooled) if maker is not None and maker.does in (LINEAR, CONV) else None
            vector = None if head is None else self._vector(bias, len(head.weight))
            if head is not None and head.bias is None and vector is not None:
                return head._replace(bias=vector)
        return None

    def _matrix(self, step: GraphStep) -> np.ndarray | None:
        """Return the weight (K, D) of a linear step or 1 x 1 convolution; None for other steps."""
        value = None if step.inputs[1] is None else self._constant(step.inputs[1])
        if value is None or value.dtype.kind != "f":
            return None
        if step.does == CONV:
            value = value.reshape(value.shape[:2]) if value.ndim > 2 and {*value.shape[2:]} == {1} else None
        elif step.is_transposed and value.ndim == 2:
            value = value.T
        return value.astype(np.float32) if value is not None and value.ndim == 2 and value.size else None

    def _vector(self, name: str | None, size: int) -> np.ndarray | None:
        value = None if name is None else self._constant(name)
        return value.reshape(-1).astype(np.float32) if value is not None and value.size == size else None

    def _candidates(self) -> str:
        """Return the existing linear steps, by the names the user would type."""
        found: Mapping[str, GraphHead] = {
            self._name(head.features): head
            for step in self._steps
            if step.does != ADD and (head := self._head(step, is_pooled=False)) is not None
        }
        if not found:
            return "it has no linear layer with weights of its own"
        shown = [f"{quote_name(name)} (weight {head.weight.shape})" for name, head in found.items()]
        more = f" and {len(shown) - _MOST_LISTED} more" if len(shown) > _MOST_LISTED else ""
        return f"nodes before linear layers, with weights (K, D): {', '.join(shown[-_MOST_LISTED:])}{more}"

    def _name(self, value: str) -> str:
        """Return the graph's name of the node that outputs a value; the value itself if unnamed."""
        step = self._maker.get(value)
        return step.name if step is not None and step.name else value


def names_of(names: Sequence[str]) -> str:
    """Return names of a graph's inputs or outputs, for messages."""
    return format_names(names, limit=_MOST_LISTED) or "none"


def outputs_in_order(outputs: Sequence[str], keys: Sequence[str] | None) -> list[str]:
    """Return the outputs of a graph, possible logits first; keys: of the mapping it returns, if any."""
    first = [name for name, key in zip(outputs, keys or (), strict=False) if key == "logits"]
    return [*first, *(name for name in outputs if name not in first)]


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
# Positions of features, weight and bias among the arguments, and whether the weight is (D, K).
_LINEAR = {"linear": ((0, 1, 2), False), "addmm": ((1, 2, 0), True), "mm": ((0, 1), True), "matmul": ((0, 1), True)}
_WORDS = {
    ADD: ("add", "add_"),
    POOL: (
        "mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d",
        "avg_pool1d", "avg_pool2d", "avg_pool3d",
    ),
    SHAPE: (
        "view", "reshape", "_reshape_alias", "_unsafe_view", "flatten", "squeeze", "squeeze_", "unsqueeze", "contiguous",
        "clone", "alias", "detach", "dropout", "dropout_", "feature_dropout", "to", "_to_copy", "lift_fresh_copy",
        "type_as", "float",
    ),
    AFTER: (
        "softmax", "_softmax", "log_softmax", "_log_softmax", "sigmoid", "mul", "mul_", "div", "div_", "sub", "batch_norm",
        "_native_batch_norm_legit_no_training",
    ),
}  # fmt: skip
_DOES = {name: does for does, names in _WORDS.items() for name in names}


def convert_aten_operator(operator: str, output: str, inputs: Sequence[str | None], *, name: str = "") -> GraphStep:
    """Return the step for an operator such as `addmm` and its arguments, with None for non-tensors."""
    if operator in _LINEAR:
        places, is_transposed = _LINEAR[operator]
        picked = tuple(inputs[place] if place < len(inputs) else None for place in places)
        return GraphStep(LINEAR, output, picked, name, is_transposed)
    if operator in _CONVOLUTIONS:
        return GraphStep(CONV, output, tuple(inputs[:3]), name)
    return GraphStep(_DOES.get(operator, ""), output, tuple(inputs), name)


class GraphInput(NamedTuple):
    """An input of a graph: type, and shape with None for any size; None if unspecified."""

    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        if self.shape is None:
            return dtype or "a tensor"
        sizes = [
            "N" if size is None and axis == 0 else "any" if size is None else str(size)
            for axis, size in enumerate(self.shape)
        ]
        return f"{dtype} ({', '.join(sizes)}{',' if len(sizes) == 1 else ''})".strip()


class GraphNetwork(nn.Module):
    """A graph, and its head.

    Args:
        program: called with the inputs by name; returns the graph's outputs, and the features.
        inputs: inputs of the graph by name, in order.
        outputs: names of the entries if the graph returns a mapping; None for a tensor or tuple.
        tail: recomputes an output from the head's logits, or returns the one that the graph computed.
        tail_at: index of that output.

    Attributes:
        no_head: why it has no head, raised when one is looked for; None if it has one.
    """

    def __init__(
        self,
        program: nn.Module,
        inputs: Mapping[str, GraphInput],
        outputs: Sequence[str] | None,
        head: GraphHead,
        *,
        tail: nn.Module | None = None,
        tail_at: int = 0,
    ) -> None:
        super().__init__()
        self.program, self.tail, self._tail_at = program, tail, tail_at
        self._inputs, self._outputs = dict(inputs), outputs
        self._is_pooled, self._is_channels_first = head.is_pooled, head.is_channels_first
        self.no_head = head.missing
        self.head = None if head.missing is not None else _linear(head)
        check_finite(self.state_dict())

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Return the graph's output for inputs (n, ...)."""
        given = self._checked(self._named(args, kwargs))
        outputs, features = self._in_batches(given)
        logits = None if self.head is None else self.head(self._rows(features))
        if self.tail is not None and logits is not None:
            outputs[self._tail_at] = self.tail(logits, outputs[self._tail_at])
        if self._outputs is not None:
            return dict(zip(self._outputs, outputs, strict=True))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _named(self, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs by name. Raises DataError if they are not those of the graph."""
        free = [name for name in self._inputs if name not in kwargs]
        given = {**dict(zip(free, args, strict=False)), **kwargs}
        if len(args) > len(free) or given.keys() != self._inputs.keys():
            takes = (
                f"the graph takes {len(self._inputs)} inputs" if len(self._inputs) > 1 else "the graph takes one input"
            )
            came = f"inputs named {names_of([*kwargs])}" if kwargs else f"{len(args)} unnamed"
            raise DataError(
                f"{takes}, {names_of([*self._inputs])}; got {came}", code="wrong_inputs",
                hint="with \0data\0 py:, return a mapping of tensors with these names",
            )  # fmt: skip
        return {name: given[name] for name in self._inputs}

    def _checked(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the inputs to the graph's types. Raises DataError if type or shape do not fit."""
        for name, tensor in given.items():
            wanted = self._inputs[name]
            is_kind = wanted.dtype is None or wanted.dtype.is_floating_point == tensor.is_floating_point()
            shape = wanted.shape or (None,) * tensor.ndim
            fits = len(shape) == tensor.ndim and all(
                size in (None, got) for size, got in zip(shape[1:], tensor.shape[1:], strict=True)
            )
            if not (is_kind and fits):
                got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
                raise DataError(
                    f"the graph's input {quote_name(name)} expects {wanted}, got {got}", code="wrong_inputs",
                    hint="check that \0data\0 matches \0model\0; \0resize\0 and \0crop\0 change image sizes",
                )  # fmt: skip
        return {name: tensor.to(self._inputs[name].dtype or tensor.dtype) for name, tensor in given.items()}

    def _in_batches(self, given: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return outputs and features for all rows, in batches of the size that the graph fixes, if any."""
        sizes = {one.shape[0] for one in self._inputs.values() if one.shape} - {None}
        num_rows = len(next(iter(given.values())))
        if not sizes or sizes == {num_rows}:
            outputs, features = self.program(given)
            return list(outputs), features
        size = max(size for size in sizes if size is not None)
        parts = []
        for start in range(0, num_rows, size):
            rows = {name: _fill_rows(tensor[start : start + size], size) for name, tensor in given.items()}
            outputs, features = self.program(rows)
            parts.append([*outputs, features])
        whole = [torch.cat(part)[:num_rows] if part[0].ndim else part[0] for part in zip(*parts, strict=True)]
        return whole[:-1], whole[-1]

    def _rows(self, features: Tensor) -> Tensor:
        """Return features (n, D), averaged over positions if the head's outputs are."""
        if self._is_channels_first:
            features = features.movedim(1, -1)
        if features.ndim > 2 and (self._is_pooled or {*features.shape[1:-1]} == {1}):
            features = features.flatten(1, -2).mean(1)
        return features.float()


def _linear(head: GraphHead) -> nn.Linear:
    """Return the head's step as a layer."""
    num_classes, num_features = head.weight.shape
    layer = nn.Linear(num_features, num_classes, bias=head.bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight))
        if head.bias is not None:
            layer.bias.copy_(torch.from_numpy(head.bias))
    return layer


def _fill_rows(rows: Tensor, size: int) -> Tensor:
    """Pad rows to `size` by repeating the last one."""
    return rows if len(rows) == size else torch.cat([rows, rows[-1:].expand(size - len(rows), *rows.shape[1:])])

"""A graph as a network: it returns what the graph returns, and its head sees the features that the graph itself has made.

The value that the head gives is not used: that features times head are the graph's output is there to be proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bnncli.checkpoints.load import check_finite
from bnncli.errors import DataError
from bnncli.models._graph_head import GraphHead, names_of
from bnncli.names import quoted


class GraphInput(NamedTuple):
    """What a graph takes: a type, and a shape with None where any size will do; None where it does not tell."""

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
        inputs: what the graph takes, by name, in its order.
        outputs: names of the entries where the graph returns a mapping; None where it returns a tensor or a tuple.
        tail: makes an output of the head's logits again, or gives back the one that the graph has made.
        tail_at: which output that is.

    Attributes:
        no_head: why it has none, which is raised where one is looked for; None where it has.
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
        """What the graph returns for inputs (n, ...)."""
        given = self._checked(self._named(args, kwargs))
        outputs, features = self._in_batches(given)
        logits = None if self.head is None else self.head(self._rows(features))
        if self.tail is not None and logits is not None:
            outputs[self._tail_at] = self.tail(logits, outputs[self._tail_at])
        if self._outputs is not None:
            return dict(zip(self._outputs, outputs, strict=True))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _named(self, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs by name. Raises DataError where they are not those that the graph takes."""
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
        """The inputs in the types of the graph. Raises DataError where type or shape do not fit."""
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
                    f"the graph's input {quoted(name)} expects {wanted}, got {got}", code="wrong_inputs",
                    hint="check that \0data\0 matches \0model\0; \0resize\0 and \0crop\0 change image sizes",
                )  # fmt: skip
        return {name: tensor.to(self._inputs[name].dtype or tensor.dtype) for name, tensor in given.items()}

    def _in_batches(self, given: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Outputs and features for all rows; where the graph fixes the size of a batch, of as many batches as it takes."""
        sizes = {one.shape[0] for one in self._inputs.values() if one.shape} - {None}
        num_rows = len(next(iter(given.values())))
        if not sizes or sizes == {num_rows}:
            outputs, features = self.program(given)
            return list(outputs), features
        size = max(size for size in sizes if size is not None)
        parts = []
        for start in range(0, num_rows, size):
            rows = {name: _filled(tensor[start : start + size], size) for name, tensor in given.items()}
            outputs, features = self.program(rows)
            parts.append([*outputs, features])
        whole = [torch.cat(part)[:num_rows] if part[0].ndim else part[0] for part in zip(*parts, strict=True)]
        return whole[:-1], whole[-1]

    def _rows(self, features: Tensor) -> Tensor:
        """Features (n, D), of those at all positions where the head's outputs are averaged over these."""
        if self._is_channels_first:
            features = features.movedim(1, -1)
        if features.ndim > 2 and (self._is_pooled or {*features.shape[1:-1]} == {1}):
            features = features.flatten(1, -2).mean(1)
        return features.float()


def _linear(head: GraphHead) -> nn.Linear:
    """The head's step as a layer."""
    num_classes, num_features = head.weight.shape
    layer = nn.Linear(num_features, num_classes, bias=head.bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight))
        if head.bias is not None:
            layer.bias.copy_(torch.from_numpy(head.bias))
    return layer


def _filled(rows: Tensor, size: int) -> Tensor:
    """As many rows as asked for, the last one repeated."""
    return rows if len(rows) == size else torch.cat([rows, rows[-1:].expand(size - len(rows), *rows.shape[1:])])

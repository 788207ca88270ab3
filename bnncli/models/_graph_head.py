"""The head of a graph: the last linear step before its output, and the value that goes into it.

Graphs of every format are looked at as steps, in the few words that finding a head takes. What comes after the head, such as
a softmax, is passed on the way back from the output; whether the head gives the output is proven by running it, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bnncli.errors import DataError, UsageError
from bnncli.names import listed, quoted

# What a step may do; of any other step nothing is known.
LINEAR, CONV, ADD, POOL, SHAPE, AFTER = "linear", "conv", "add", "pool", "shape", "after"
_MOST_LISTED = 20


class GraphStep(NamedTuple):
    """One node of a graph.

    Attributes:
        does: one of the words above, or "".
        output: name of the first value that it gives.
        inputs: names of the values it takes; of LINEAR and CONV features, weight and bias; None for one that is no tensor.
        name: what the graph calls the node.
        is_transposed: whether a LINEAR's weight is (D, K) in place of (K, D).
    """

    does: str
    output: str
    inputs: tuple[str | None, ...]
    name: str = ""
    is_transposed: bool = False


class GraphHead(NamedTuple):
    """A linear step of a graph.

    Attributes:
        features: name of the value that goes into it.
        weight, bias: (K, D) and (K,) or None, float32.
        is_pooled: whether its outputs at all positions are averaged behind it.
        is_channels_first: whether the features are (n, D, ...) in place of (n, ..., D).
        tail: the values from the head's step on to an output of the graph, without its own; empty where none is known.
        missing: why there is no such step; the features are an output of the graph then, and the weight is empty.
    """

    features: str
    weight: np.ndarray
    bias: np.ndarray | None
    is_pooled: bool
    is_channels_first: bool = False
    tail: tuple[str, ...] = ()
    missing: DataError | None = None


class HeadSearch:
    """The linear steps of a graph whose weights are known without its inputs.

    Args:
        what: the graph, for messages.
        constant: the value of that name as an array; None where it depends on the inputs.
    """

    def __init__(self, what: str, steps: Sequence[GraphStep], constant: Callable[[str], np.ndarray | None]) -> None:
        self._what, self._steps, self._constant = what, steps, constant
        self._maker = {step.output: step for step in steps}

    def find(self, outputs: Sequence[str], feature_node: str | None) -> GraphHead:
        """The head before the first of the outputs that has one, or after the node of that name; what is missing lists the linear steps.

        Raises:
            UsageError: no linear step takes what the named node gives.
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
        """The linear step that the value comes from, through what may stand behind a head."""
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
        """The last linear step that takes the output of a node, through what changes the shape alone."""
        named = {step.output for step in self._steps if name in (step.name, step.output)} or {name}
        for step in reversed(self._steps):
            if (head := self._head(step, is_pooled=False)) is not None and named & {*self._way_back(head.features)}:
                pools = [one.inputs[0] for one in self._steps if one.does == POOL]
                return head._replace(is_pooled=any(step.output in self._way_back(value) for value in pools))
        raise UsageError(
            f"\0feature_node\0: no linear layer of {self._what} takes {quoted(name)} as input; {self._candidates()}"
        )

    def _way_back(self, value: str | None) -> Iterator[str]:
        """The value, and those that it has come from by a change of shape or pooling."""
        while value is not None:
            yield value
            step = self._maker.get(value)
            value = self._only_input(step) if step is not None and step.does in (SHAPE, POOL) else None

    def _only_input(self, step: GraphStep) -> str | None:
        """The input that is not known without the graph's inputs; None where there are several."""
        taken = step.inputs[:1] if step.does in (SHAPE, POOL) else step.inputs  # the others are sizes
        free = [name for name in taken if name is not None and self._constant(name) is None]
        return free[0] if len(free) == 1 else None

    def _head(self, step: GraphStep, is_pooled: bool) -> GraphHead | None:
        """The step as a head; None where it is none."""
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
        """A product of features and weights plus a bias, of two steps."""
        terms = [name for name in step.inputs[:2] if name is not None]
        for product, bias in (terms, terms[::-1]) if len(terms) == 2 else ():
            maker = self._maker.get(product)
            head = self._head(maker, is_pooled) if maker is not None and maker.does in (LINEAR, CONV) else None
            vector = None if head is None else self._vector(bias, len(head.weight))
            if head is not None and head.bias is None and vector is not None:
                return head._replace(bias=vector)
        return None

    def _matrix(self, step: GraphStep) -> np.ndarray | None:
        """The weight of a linear step or of a convolution of single positions, (K, D); None where it is none of these."""
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
        """The linear steps that there are, by what the user would name."""
        found: Mapping[str, GraphHead] = {
            self._name(head.features): head
            for step in self._steps
            if step.does != ADD and (head := self._head(step, is_pooled=False)) is not None
        }
        if not found:
            return "it has no linear layer with weights of its own"
        shown = [f"{quoted(name)} (weight {head.weight.shape})" for name, head in found.items()]
        more = f" and {len(shown) - _MOST_LISTED} more" if len(shown) > _MOST_LISTED else ""
        return f"nodes before linear layers, with weights (K, D): {', '.join(shown[-_MOST_LISTED:])}{more}"

    def _name(self, value: str) -> str:
        """What the graph calls the node that gives a value; the value itself where that has no name."""
        step = self._maker.get(value)
        return step.name if step is not None and step.name else value


def names_of(names: Sequence[str]) -> str:
    """Names of a graph's inputs or outputs, for messages."""
    return listed(names, limit=_MOST_LISTED) or "none"


def outputs_in_order(outputs: Sequence[str], keys: Sequence[str] | None) -> list[str]:
    """The outputs of a graph, those first that may be the logits; keys: of the mapping that it returns, if it does."""
    first = [name for name, key in zip(outputs, keys or (), strict=False) if key == "logits"]
    return [*first, *(name for name in outputs if name not in first)]

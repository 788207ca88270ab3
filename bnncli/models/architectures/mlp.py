"""A fully connected network: linear layers with an activation between them, inputs flattened first.

Keys: `features.0`, `features.2`, ... (hidden layers), `ll` (the last one).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from bnncli.errors import UsageError
from bnncli.names import unknown_value_error

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


class Mlp(nn.Module):
    """Linear layers of sizes inputs, hidden..., classes."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int, activation: type[nn.Module]) -> None:
        super().__init__()
        sizes = (inputs, *hidden)
        layers: list[nn.Module] = []
        for size, next_size in itertools.pairwise(sizes):
            layers += [nn.Linear(size, next_size), activation()]
        self.features = nn.Sequential(*layers)
        self.ll = nn.Linear(sizes[-1], classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (N, K) for inputs (N, ...)."""
        logits: Tensor = self.ll(self.features(inputs.flatten(1)))
        return logits


def build(
    *, inputs: int = 784, hidden: tuple[int, ...] = (50, 50), classes: int = 10, activation: str = "relu"
) -> nn.Module:
    """Return a fully connected network with random weights; `hidden` is written 50,50.

    Raises:
        UsageError: the activation is not relu, tanh or sigmoid, or a layer has no units.
    """
    if activation not in _ACTIVATIONS:
        raise unknown_value_error("activation", activation, [*_ACTIVATIONS])
    if min(inputs, *hidden, classes) < 1:
        raise UsageError(
            f"expected layers of at least one unit; got inputs {inputs}, hidden {','.join(map(str, hidden))}, classes {classes}"
        )
    return Mlp(inputs, hidden, classes, _ACTIVATIONS[activation])


def arguments_from(state: Mapping[str, Tensor]) -> dict[str, object]:
    """Infer the arguments of `build` from a state dict's shapes: all but the activation."""
    keys = itertools.takewhile(state.__contains__, (f"features.{i}.weight" for i in itertools.count(0, 2)))
    shapes = [tuple(state[key].shape) for key in (*keys, "ll.weight") if key in state]
    if not shapes or any(len(shape) != 2 for shape in shapes):
        return {}
    return {
        "inputs": shapes[0][1],
        "hidden": tuple(shape[0] for shape in shapes[:-1]),
        "classes": shapes[-1][0],
    }

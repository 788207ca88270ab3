"""Which tensors of a state dict could be the last linear layer's, by their names and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_OTHERS = re.compile(r"embed|token|position|rel_pos|relative|norm", re.IGNORECASE)
_LAST = re.compile(
    r"(?:^|\.)(?:classifier|fc|head|heads|linear|ll|logits|output|out|score|predictions?)(?:\.|$)", re.IGNORECASE
)


class HeadTensors(NamedTuple):
    """A layer that could be the head."""

    name: str
    num_classes: int
    num_features: int


def possible_heads(shapes: Mapping[str, tuple[int, ...]]) -> list[HeadTensors]:
    """Linear layers, and 1 x 1 convolutions, whose outputs no other layer takes, the likeliest first.

    Args:
        shapes: of every tensor by its name, in the order of the network.
    """
    layers = []
    for name, shape in shapes.items():
        is_linear = len(shape) >= 2 and set(shape[2:]) <= {1}
        if name.rpartition(".")[2] == "weight" and is_linear and not _OTHERS.search(name):
            layers.append(HeadTensors(name, shape[0], shape[1]))
    taken = {shape[1] for shape in shapes.values() if len(shape) >= 2}
    taken |= {shape[0] for name, shape in shapes.items() if name.endswith("running_mean")}
    last = layers[-1:]
    free = [one for one in layers if one.num_classes not in taken and f"{one.name[:-6]}bias" in shapes] or last
    return sorted(free, key=lambda one: (one not in last, _LAST.search(one.name.removesuffix("weight")) is None))

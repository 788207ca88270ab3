"""What every layout of theta says: how many numbers there are, where those of each part lie, and which are biases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Part(NamedTuple):
    """A weight or a bias in theta.

    Args:
        name: as posterior files have it.
        shape: of the tensor, which lies row-major.
        offset: its first place in theta.
        is_bias: whether its prior is that of the biases.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    is_bias: bool

    @property
    def place(self) -> slice:
        """Where it lies in theta."""
        return slice(self.offset, self.offset + math.prod(self.shape))


class ParamLayout(Protocol):
    """How parameters lie in theta (P,), whatever they are parameters of."""

    @property
    def num_params(self) -> int:
        """P."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of theta, in order."""

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it: name, shape and offset of each part."""

    def to_meta(self) -> dict[str, Any]:
        """Its sizes as JSON, from which a posterior that is read makes it again."""


def consecutive(parts: Sequence[tuple[str, tuple[int, ...], bool]]) -> tuple[Part, ...]:
    """Parts that lie one behind the other, of their names, shapes, and whether they are biases."""
    offsets = [0]
    for _, shape, _ in parts:
        offsets.append(offsets[-1] + math.prod(shape))
    return tuple(
        Part(name, shape, offset, is_bias) for (name, shape, is_bias), offset in zip(parts, offsets, strict=False)
    )


def parts_to_json(parts: Sequence[Part]) -> list[dict[str, object]]:
    """Parts as posterior files state them: name, shape and offset of each."""
    return [{"name": part.name, "shape": list(part.shape), "offset": part.offset} for part in parts]

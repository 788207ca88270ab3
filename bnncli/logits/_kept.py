"""Cache of the ingredients of logits linearised at one theta, for repeated requests with the same inputs.

A search for the prior precision makes several passes over val, and several integrators are then scored on it. All need
the same network passes, one forward and one backward per output. These take nearly all of the time if the parameters
are few of a large network's, such as a LoRA adapter's, and their results need little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bnncli.lazy import torch
from bnncli.numerics.random import row_keys

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout, ModuleNetwork

LOGITS, DERIVATIVES = "logits", "derivatives"
Made = TypeVar("Made", bound=tuple[Any, ...])


class Rows(NamedTuple):
    """One tensor, (n, ...)."""

    rows: Tensor


class Kept:
    """Cache at one theta, keyed by a hash of each input's values, independent of how inputs are split into blocks.

    Args:
        most: largest number of inputs.

    Attributes:
        beside: other values cached for this theta.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._theta: Tensor | None = None
        self._forget()

    def at(self, theta: Tensor) -> Kept:
        """Return the cache, emptied unless it belongs to this theta (P,)."""
        if self._theta is None or theta.dtype != self._theta.dtype or not torch.equal(theta, self._theta):
            self._theta = theta
            self._forget()
        return self

    def block(self, inputs: Tensor) -> KeptBlock | None:
        """Return the cache entries of inputs (n, ...), known or to be filled; None if they do not fit."""
        keys = row_keys(inputs).tolist()
        new = [key for key in dict.fromkeys(keys) if key not in self.places]
        there = self.places | {key: len(self.places) + index for index, key in enumerate(new)}
        if len(there) > self.most:
            return None
        index = torch.tensor([there[key] for key in keys], device=inputs.device)
        return KeptBlock(self, index, there, is_known=not new)

    def _forget(self) -> None:
        self.beside: Any = None
        self.places: dict[int, int] = {}
        self.made: dict[Any, tuple[Any, ...]] = {}


class KeptBlock:
    """Cache entries of one block of inputs.

    Args:
        index: (n,), places of the inputs in the cache.
        places: of all inputs, including these.
        is_known: whether all of them are already cached.
    """

    def __init__(self, kept: Kept, index: Tensor, places: dict[int, int], *, is_known: bool) -> None:
        self.is_known = is_known
        self._kept, self._index, self._places = kept, index, places

    def get(self, name: Any) -> Any:
        """Return the value stored under a name, for these inputs."""
        every = self._kept.made[name]
        return type(every)(*(one[self._index] if isinstance(one, torch.Tensor) else one for one in every))

    def put(self, name: Any, made: Made) -> Made:
        """Store a named tuple of tensors (n, ...) and of values shared by all inputs; returns it."""
        if name not in self._kept.made:
            room = [
                one.new_empty(self._kept.most, *one.shape[1:]) if isinstance(one, torch.Tensor) else one for one in made
            ]
            self._kept.made[name] = type(made)(*room)
        for every, one in zip(self._kept.made[name], made, strict=True):
            if isinstance(one, torch.Tensor):
                every[self._index] = one.detach()
        return made

    def finish(self) -> None:
        """Mark these inputs as completely cached."""
        self._kept.places = self._places


@contextmanager
def keeping(network: ModuleNetwork, most: int) -> Iterator[None]:
    """Cache the ingredients of linearised logits inside the context, for up to `most` inputs."""
    if most:
        network.kept.update({name: Kept(most) for name in (LOGITS, DERIVATIVES)})
    try:
        yield
    finally:
        network.kept.clear()


def kept_at(layout: ModuleLayout, theta: Tensor, name: str) -> Kept | None:
    """Return the cache at theta (P,); None without a cache."""
    found: Kept | None = None if layout.network is None else layout.network.kept.get(name)
    return None if found is None else found.at(theta)


def logits_at(layout: ModuleLayout, inputs: Tensor, theta: Tensor) -> Tensor:
    """Return logits (n, K) of inputs (n, ...) under theta (P,), from the cache if possible."""
    kept = kept_at(layout, theta, LOGITS)
    block = None if kept is None else kept.block(inputs)
    if block is not None and block.is_known and len(inputs):
        rows: Tensor = block.get(LOGITS).rows
        return rows
    logits = layout.logits(inputs, theta.unsqueeze(0))[0]
    if block is not None:
        block.put(LOGITS, Rows(logits))
        block.finish()
    return logits

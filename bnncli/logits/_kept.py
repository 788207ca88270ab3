"""What logits linearised at one theta are made of, kept for whoever asks for the same inputs again.

A prior precision is searched for in rounds, each over all of val, and what comes of it is measured there by several integrators:
all need the same passes of the network, one forward and one back for each output. They take nearly all of the time where the
parameters are few of a large network's, as a LoRA adapter's are, and what they give takes little room.
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
    """What is made of inputs at one theta, by a hash of each input's numbers, whatever blocks they come in.

    Args:
        most: inputs that there is room for.

    Attributes:
        beside: what else is kept of this theta.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._theta: Tensor | None = None
        self._forget()

    def at(self, theta: Tensor) -> Kept:
        """This, empty unless it is of this theta (P,)."""
        if self._theta is None or theta.dtype != self._theta.dtype or not torch.equal(theta, self._theta):
            self._theta = theta
            self._forget()
        return self

    def block(self, inputs: Tensor) -> KeptBlock | None:
        """What is kept of inputs (n, ...), or is to be; None where there is no room for them."""
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
    """What is kept of one block of inputs.

    Args:
        index: (n,), the places of the inputs.
        places: of all inputs with these.
        is_known: whether there is everything of them.
    """

    def __init__(self, kept: Kept, index: Tensor, places: dict[int, int], *, is_known: bool) -> None:
        self.is_known = is_known
        self._kept, self._index, self._places = kept, index, places

    def get(self, name: Any) -> Any:
        """What was put under a name, of these inputs."""
        every = self._kept.made[name]
        return type(every)(*(one[self._index] if isinstance(one, torch.Tensor) else one for one in every))

    def put(self, name: Any, made: Made) -> Made:
        """Keep a named tuple of tensors (n, ...) and of what is the same for all inputs; returns it."""
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
        """There is everything of these inputs now."""
        self._kept.places = self._places


@contextmanager
def keeping(network: ModuleNetwork, most: int) -> Iterator[None]:
    """Within, what linearised logits are made of is kept for up to so many inputs."""
    if most:
        network.kept.update({name: Kept(most) for name in (LOGITS, DERIVATIVES)})
    try:
        yield
    finally:
        network.kept.clear()


def kept_at(layout: ModuleLayout, theta: Tensor, name: str) -> Kept | None:
    """What is kept at theta (P,); None where nothing is to be."""
    found: Kept | None = None if layout.network is None else layout.network.kept.get(name)
    return None if found is None else found.at(theta)


def logits_at(layout: ModuleLayout, inputs: Tensor, theta: Tensor) -> Tensor:
    """Logits (n, K) of inputs (n, ...) under theta (P,), as they are kept where they were asked for before."""
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

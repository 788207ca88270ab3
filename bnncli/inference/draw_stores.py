"""Where the draws of a run are kept as they come, and what is needed to continue it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class DrawStore(Protocol):
    """Where draws go as they come."""

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P), float32, of every chain."""

    def draws(self) -> Tensor:
        """All of them, (C, T, P) float32 on the CPU."""


class MemoryDraws:
    """Draws kept in memory."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of every chain."""
        self._kept.append(theta)

    def draws(self) -> Tensor:
        """All of them, (C, T, P) on the CPU."""
        return torch.stack(self._kept, dim=1).cpu()


class SomeDraws:
    """Some draws of each chain kept in memory.

    Args:
        places: (T', C), which of its draws, in rising order.
    """

    def __init__(self, places: Tensor) -> None:
        self._places, self._num_seen = places, 0
        self._kept: Tensor | None = None

    def append(self, theta: Tensor) -> None:
        """Keep one draw (C, P) of the chains whose turn it is."""
        if self._kept is None:
            self._kept = theta.new_empty(theta.shape[0], len(self._places), theta.shape[1])
        turns, chains = (self._places == self._num_seen).nonzero(as_tuple=True)
        self._num_seen += 1
        turns, chains = turns.to(theta.device), chains.to(theta.device)
        self._kept[chains, turns] = theta.index_select(0, chains)

    def draws(self) -> Tensor:
        """All of them, (C, T', P) on the CPU."""
        assert self._kept is not None
        return self._kept.cpu()


class ResumeStore(Protocol):
    """Where the resume states of an unfinished run are kept; the draws are the store's."""

    def restore(self) -> dict[str, Tensor] | None:
        """The state to continue from, the store cut to its draws; None to start afresh."""

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Called after every transition: store the state if it is time, or the last chance to."""


class NoResume:
    """Keeps nothing."""

    def restore(self) -> None:
        """Start afresh."""

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Nothing to do."""

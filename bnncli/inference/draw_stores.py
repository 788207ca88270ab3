"""Where the draws of a run are kept as they come, and what is needed to continue it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
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

"""What train makes of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Trained:
    """A network after training: its state dict, that of its running average where there is one, and what is said of it."""

    state: dict[str, Tensor]
    averaged: dict[str, Tensor] | None
    meta: dict[str, Any]

"""A graph in a file as a saved model: its weights are its own, and its inputs are arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.errors import UsageError


@dataclass(frozen=True)
class GraphFile:
    """What the graphs of every format have in common.

    Attributes:
        files: the graph's own first.
        feature_node: the node whose output the head takes; None for the last linear step.
    """

    files: tuple[Path, ...]
    feature_node: str | None
    classes: tuple[str, ...] | None = None
    transform: None = None
    task: str | None = None

    def refuse(self, state: Mapping[str, Any] | None) -> None:
        """Nothing, when no tensors of a checkpoint are to fill the graph. Raises UsageError otherwise."""
        if state is not None:
            raise UsageError(
                f"{self.files[0]} has weights of its own, and CKPT is another file of weights",
                hint="give the graph's file as CKPT too, or a name for the run",
            )

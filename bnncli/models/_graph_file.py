"""A graph in a file as a saved model: its weights are its own, and its inputs are arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.checkpoints.sniff import describe_wrong_kind
from bnncli.errors import DataError, UsageError

_PROGRAMS = {"pt2": ("an exported program", "export"), "torchscript": ("a TorchScript program", "jit")}
_WEIGHTS = ("torch-zip", "torch-legacy", "safetensors")


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
                f"{self.files[0]} has its own weights, but CKPT is a different weights file",
                hint="give the graph's file as CKPT too, or a name for the run",
            )


def not_a_program(expected: str, kind: str) -> DataError:
    """The error of a file of another kind, with the way there is for it.

    Args:
        expected: pt2 or torchscript.
        kind: as sniff and sniff_zip tell it.
    """
    wanted, hint = _PROGRAMS[expected][0], None
    if kind in _PROGRAMS:
        what, form = _PROGRAMS[kind]
        hint = f"use \0model\0 {form}:FILE"
    elif kind in _WEIGHTS:
        what = "a weights file"
        hint = "pass the weights as CKPT, and define their network with \0model\0 file.py:factory"
    else:
        what = describe_wrong_kind(kind)
    return DataError(f"expected {wanted}, got {what.removeprefix('the file is ')}", code=f"is_{kind}", hint=hint)

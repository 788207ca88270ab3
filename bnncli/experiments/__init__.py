"""Experiments that no command can express: one file each, which measures numbers by the library's own functions, and draws them.

A file has `measure`, and `draw` where there is a figure; or `prepare`, which makes the arrays that a study's commands read. The
recipes of `reproduce` name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.evaluation.agreement import Estimate
from bnncli.progress import Progress

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

Settings = Mapping[str, Any]  # of the recipe, for one scale
Inputs = Mapping[str, Path]  # files that the recipe needs, by its names for them


@dataclass(frozen=True)
class Measurements:
    """What an experiment gives.

    Args:
        values: by name, each with its standard error where it has one.
        arrays: what is drawn, by name; shapes are the experiment's own.
    """

    values: Mapping[str, Estimate]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class Measure(Protocol):
    """`measure` of an experiment."""

    def __call__(
        self, settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress
    ) -> Measurements:
        """The numbers, from these settings and files alone; randomness from the generator, on the CPU."""


class Draw(Protocol):
    """`draw` of an experiment."""

    def __call__(self, measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
        """Figures by the names of their files."""


class Prepare(Protocol):
    """`prepare` of an experiment."""

    def __call__(self, inputs: Inputs, settings: Settings) -> Mapping[str, NDArray[Any]]:
        """Arrays of an NPZ file, by name."""

"""What stands in checkpoints beside tensors and is no code: NumPy's numbers and arrays, paths, the arguments of a command line.

Lightning keeps hyperparameters, timm the metric, everybody the best accuracy. In the place of the classes that a pickle names for
them are these, which make plain values; none of NumPy's own is called with what a file says.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_NUMBER = re.compile(r"[iuf][1248]|b1")


class NumberType:
    """In the place of numpy.dtype: a name such as f8, and the order of bytes."""

    def __init__(self, name: str, *others: object) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.order = state[1]


class Array:
    """In the place of numpy.ndarray: there, and not read; no weight is kept so."""

    def __setstate__(self, state: object) -> None:
        pass


def number(kind: NumberType, content: bytes) -> bool | int | float:
    """The number that these bytes are; not a number for a kind that is no plain one."""
    name = f"{kind.order}{kind.name}".lstrip("=|")
    if not isinstance(content, bytes) or not _NUMBER.fullmatch(name.lstrip("<>")):
        return math.nan
    found: bool | int | float = np.frombuffer(content, name)[0].item()
    return found


def array(*arguments: object) -> Array:
    """An array before its content comes."""
    return Array()


def path(*parts: str) -> str:
    """The path of these parts, as text."""
    return "/".join(str(part).rstrip("/") for part in parts)


_OF_NUMPY = {"scalar": number, "_reconstruct": array}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
# By the full names that pickles have for them, of every release of NumPy and Python.
STAND_INS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": NumberType,
    "numpy.ndarray": Array,
    **{f"numpy.{core}.multiarray.{name}": made for core in ("core", "_core") for name, made in _OF_NUMPY.items()},
    **{f"{module}.{name}": path for module in ("pathlib", "pathlib._local") for name in _PATHS},
}

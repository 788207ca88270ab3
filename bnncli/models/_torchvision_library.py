"""torchvision, which model kinds need in the build that belongs to the torch beside it; and images through its transforms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from bnncli.data._transform import Transformed
from bnncli.errors import UsageError
from bnncli.models._extra import require


def require_torchvision(kind: str) -> ModuleType:
    """torchvision, imported now.

    Args:
        kind: of model that needs it.

    Raises:
        UsageError: it is not installed, or its compiled part is for another torch.
    """
    try:
        return require("torchvision", extra=kind)
    except UsageError as error:
        if error.__cause__ is None:
            raise
        hint = (
            f"install the torchvision release that matches torch {_torch()}, built for the same platform (CPU, or "
            "the same CUDA version)"
        )
        raise UsageError(error.message, code=error.code, hint=hint) from error


def _torch() -> str:
    import torch  # here, for its time

    return str(torch.__version__)


def stacked(transform: Callable[[Any], Any], items: Sequence[Any]) -> Transformed:
    """What a transform of single images makes of several: (n, C, H, W) float32."""
    return Transformed(np.stack([transform(item).numpy() for item in items]).astype(np.float32, copy=False))


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with its number after each that several classes have: a crane is a bird, and a machine."""
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(names))


@contextmanager
def building(spec: str) -> Iterator[None]:
    """What the library raises inside the block is about the arguments that the user gave: one line."""
    try:
        yield
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AssertionError,
        LookupError,
        AttributeError,
        NotImplementedError,
    ) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"cannot build \0model\0 {spec}: {type(error).__name__}: {reason}"
        raise UsageError(message, hint="check the names and values of \0model_arg\0") from error

"""Optional libraries that models need, and the torchvision build that matches the installed torch."""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from bnncli.data.transform import TransformedInputs
from bnncli.errors import UsageError
from bnncli.lazy import torch


def require(name: str, *, extra: str, kind: str | None = None, what: str | None = None) -> ModuleType:
    """Import the module `name`.

    Args:
        extra: package extra that installs the library.
        kind: of model that needs it; None if named like the extra.
        what: needs it, if not a model.

    Raises:
        UsageError: it is not installed or cannot be imported; says how to install it.
    """
    what, hint = what or f"\0model\0 {kind or extra}", f"pip install 'bnncli[{extra}]'"
    library = name.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"{what} needs {library}, which is not installed", code="missing_library", hint=hint)
    try:
        return importlib.import_module(name)
    except Exception as error:  # foreign code: a failing import may raise anything
        why = " ".join(str(error).split())[:200]
        message = f"{what} needs {library}, which cannot be imported: {type(error).__name__}: {why}"
        raise UsageError(message, code="missing_library", hint=hint) from error


def library_attribute(library: ModuleType, name: str, *, extra: str) -> Any:
    """Return a library's attribute, which it may import only now; None if it has none.

    Raises:
        UsageError: it cannot be imported, for example because a dependency is built for another torch.
    """
    try:
        return getattr(library, name, None)
    except Exception as error:  # as above
        first: BaseException = error
        while (deeper := first.__cause__ or first.__context__) is not None:
            first = deeper
        message = (
            f"{library.__name__} cannot import {name}: {type(first).__name__}: {' '.join(str(first).split())[:200]}"
        )
        hint = (
            f"fix or uninstall the library that raises this error, or run pip install 'bnncli[{extra}]' in a new "
            "environment"
        )
        raise UsageError(message, code="missing_library", hint=hint) from error


def require_torchvision(kind: str) -> ModuleType:
    """Import torchvision.

    Args:
        kind: of model that needs it.

    Raises:
        UsageError: it is not installed, or its compiled part is built for another torch.
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

    return str(torch.__version__)


def stack_images(transform: Callable[[Any], Any], items: Sequence[Any]) -> TransformedInputs:
    """Apply a transform of single images to several and stack the results: (n, C, H, W) float32."""
    return TransformedInputs(np.stack([transform(item).numpy() for item in items]).astype(np.float32, copy=False))


def disambiguate_names(names: Sequence[str]) -> tuple[str, ...]:
    """Append the index to names that occur several times: a crane is a bird, and a machine."""
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(names))


@contextmanager
def convert_build_errors(spec: str) -> Iterator[None]:
    """Convert exceptions of the library inside the block to an error about the user's arguments."""
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


def require_onnx() -> None:
    """Pass where everything is installed that writes and runs ONNX. Raises UsageError with what installs it otherwise."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        require(library, extra="onnx", what="\0format\0 onnx")

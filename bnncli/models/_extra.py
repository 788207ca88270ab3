"""Libraries that models need and that the package does not bring: optional extras of it."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from bnncli.errors import UsageError


def require(name: str, *, extra: str, kind: str | None = None, what: str | None = None) -> ModuleType:
    """The module called `name`, imported now.

    Args:
        extra: of this package, with which the library is installed.
        kind: of model that needs it; None where it is called as the extra is.
        what: needs it, where that is no model.

    Raises:
        UsageError: it is not installed, or cannot be imported; one line, with what installs it.
    """
    what, hint = what or f"\0model\0 {kind or extra}", f"pip install 'bnncli[{extra}]'"
    library = name.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"{what} needs {library}, which is not installed", code="missing_library", hint=hint)
    try:
        return importlib.import_module(name)
    except Exception as error:  # others' code: a library that fails to import may raise anything
        why = " ".join(str(error).split())[:200]
        message = f"{what} needs {library}, which cannot be imported: {type(error).__name__}: {why}"
        raise UsageError(message, code="missing_library", hint=hint) from error


def part(library: ModuleType, name: str, *, extra: str) -> Any:
    """What a library has of this name, imported by it now; None where it has none.

    Raises:
        UsageError: it cannot be imported, as where a library that this one uses is made for another torch.
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

"""Import slow libraries on first use, so that quick commands start fast.

Modules that commands import for decisions use `from bnncli.lazy import torch` instead of `import torch`. Names used
only in annotations are imported under TYPE_CHECKING.
"""

from __future__ import annotations

import importlib
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bnncli.errors import MORE_ADDRESSES, DeviceError


def addresses_left() -> int:
    """Return the bytes that the limit of addresses (ulimit -v) leaves this process; huge without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = 0
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    with suppress(OSError, ValueError):  # no /proc
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return max(0, limit - used)


if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pyarrow
    import torch as torch
    from scipy import sparse as sparse
    from scipy import special as special
else:
    # SciPy's OpenBLAS allocates a buffer on load; without room it retries forever and ignores signals.
    _SCIPY_BYTES = 80 << 20  # 67 MiB measured, including the libraries

    def _require_addresses(name: str) -> None:
        """Raise DeviceError if the address limit leaves no room for a part of SciPy."""
        left = addresses_left()
        if left < _SCIPY_BYTES and name not in sys.modules:
            raise DeviceError(
                f"out of memory: cannot load {name}, which needs {_SCIPY_BYTES >> 20} MiB; the limit leaves {left >> 20} MiB",
                code="out_of_memory", hint=MORE_ADDRESSES,
            )  # fmt: skip

    class _Later:
        """A module that is imported on first attribute access."""

        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, attribute: str) -> Any:
            if self.__name__.startswith("scipy."):
                _require_addresses(self.__name__)
            module = importlib.import_module(self.__name__)
            # Share the module's namespace: later look-ups are direct, and patches of either apply to both.
            self.__dict__ = module.__dict__
            return getattr(module, attribute)

    np, pyarrow, torch, special, sparse = map(_Later, ("numpy", "pyarrow", "torch", "scipy.special", "scipy.sparse"))

Function = TypeVar("Function", bound=Callable[..., Any])


def no_grad(function: Function) -> Function:
    """Run a function under torch.no_grad without importing torch at decoration."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return cast(Function, run)

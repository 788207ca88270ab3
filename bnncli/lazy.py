"""Libraries that take long to import, imported when they are first used: a command with nothing to do need not wait for them.

Modules that commands decide with take them from here, `from bnncli.lazy import torch` in place of `import torch`. Annotations
are no use of a library: their names are imported under TYPE_CHECKING.
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

if TYPE_CHECKING:
    import numpy as np
    import torch as torch
    from scipy import sparse as sparse
    from scipy import special as special
else:
    # SciPy's OpenBLAS takes a buffer when it is loaded, and without room for it tries again for ever, deaf to signals.
    _SCIPY_BYTES = 80 << 20  # 67 MiB measured, with the libraries themselves

    def _require_addresses(name: str) -> None:
        """Raise DeviceError where the limit of addresses (ulimit -v) leaves no room for a part of SciPy."""
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY or name in sys.modules:
            return
        with suppress(OSError, ValueError):  # no /proc
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            if limit - used < _SCIPY_BYTES:
                raise DeviceError(
                    f"out of memory: cannot load {name}, which needs {_SCIPY_BYTES >> 20} MiB; the limit leaves "
                        f"{(limit - used) >> 20} MiB",
                    code="out_of_memory", hint=MORE_ADDRESSES,
                )  # fmt: skip

    class _Later:
        """A module that is imported when something of it is asked for."""

        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, attribute: str) -> Any:
            if self.__name__.startswith("scipy."):
                _require_addresses(self.__name__)
            module = importlib.import_module(self.__name__)
            # From now on what is in the module is found at once, and what is replaced there is replaced here.
            self.__dict__ = module.__dict__
            return getattr(module, attribute)

    np, torch, special, sparse = map(_Later, ("numpy", "torch", "scipy.special", "scipy.sparse"))

Function = TypeVar("Function", bound=Callable[..., Any])


def no_grad(function: Function) -> Function:
    """Return the function run under torch.no_grad, which would import torch where it decorates."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return cast(Function, run)

"""Libraries that take long to import, imported when they are first used: a command with nothing to do need not wait for them.

Modules that commands decide with take them from here, `from bnncli.lazy import torch` in place of `import torch`. Annotations
are no use of a library: their names are imported under TYPE_CHECKING.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from scipy import sparse as sparse
    from scipy import special as special
else:

    class _Later:
        """A module that is imported when something of it is asked for."""

        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, attribute: str) -> Any:
            module = importlib.import_module(self.__name__)
            # From now on what is in the module is found at once, and what is replaced there is replaced here.
            self.__dict__ = module.__dict__
            return getattr(module, attribute)

    torch, special, sparse = _Later("torch"), _Later("scipy.special"), _Later("scipy.sparse")

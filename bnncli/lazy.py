"""PyTorch, imported when it is first used: that takes two seconds, which a command with nothing to do need not wait for.

Modules that commands decide with take it from here, `from bnncli.lazy import torch` in place of `import torch`: their
annotations are no use of it, and what they decide from are sizes and declarations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Later:
        """A module that is not imported yet."""

        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, attribute: str) -> Any:
            module = importlib.import_module(self.__name__)
            # As quick as the module from now on, and the same where something in it is replaced.
            self.__dict__ = module.__dict__
            return getattr(module, attribute)

    torch = _Later("torch")

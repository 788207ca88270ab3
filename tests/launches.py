"""How many operations a piece of work gives the device: each is a launch on a GPU, and a host sync is a wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = ("view", "reshape", "expand", "transpose", "permute", "t", "slice", "select", "unsqueeze", "squeeze", "alias")
_VIEWS += ("detach", "diagonal", "split", "unbind", "as_strided", "_unsafe_view", "unflatten", "lift_fresh")
_MADE = ("empty", "new_empty", "empty_like", "promote_types")  # memory alone, or nothing at all
_SYNCS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")


class Launches(TorchDispatchMode):
    """Counts the operations inside a `with` block by name; those that only look at memory in another way do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in (*_VIEWS, *_MADE):
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        """Operations that a device runs."""
        return sum(self.by_name.values()) - self.syncs

    @property
    def syncs(self) -> int:
        """Times that the host waits for a number."""
        return sum(self.by_name[name] for name in _SYNCS)


def count(work: Callable[[], Any]) -> Launches:
    """The operations of one call."""
    with torch.no_grad(), Launches() as seen:
        work()
    return seen

"""Checkpoints of samplers in memory, for runs that end early and go on."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bnncli.errors import Interrupted


class StopAt:
    """Keeps the state of a run that is interrupted after so many transitions; of one that is not, none.

    Args:
        left: transitions until the interruption; -1 for none.
        stored: the state to go on from.
    """

    def __init__(self, left: int = -1, stored: dict[str, Tensor] | None = None) -> None:
        self.left, self.stored = left, stored

    def restore(self) -> dict[str, Tensor] | None:
        """The state to go on from."""
        return self.stored

    def offer(self, tensors: Callable[[], dict[str, Tensor]], *, is_last: bool = False) -> None:
        """Keeps the last state, as nothing else is one."""
        self.left -= 1
        if is_last:
            self.stored = {name: tensor.cpu().clone() for name, tensor in tensors().items()}
        elif self.left == 0:
            raise Interrupted(15, "interrupted")

"""Triangular roots of the inverse of one large matrix, panel by panel: a factor and its inverse in one go, half of the operations
of a factor and a solve, in the memory of one matrix, shared out among workers where there are several.

A panel is some consecutive columns of the lower triangle. The factor's panels come from left to right; each changes all columns to
its right, of the factor, and all to its left, of the inverse, which are whole with the last one. Golub and Van Loan (2013), Matrix
Computations, 4.2.9 (block outer product Cholesky) and 3.1.3. Workers own panels in turn, and a panel that is done is all that they send:
every product is of the same numbers, and rounds alike, for any number of workers. Between two products a signal ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from bnncli.lazy import torch
from bnncli.system import signals
from bnncli.system.memory import panel_width
from bnncli.system.workers import Team

if TYPE_CHECKING:
    from torch import Tensor

NAME = "a Cholesky factorisation"

# Of these columns (start, stop) of a symmetric matrix the rows from `start` on, new, (F - start, stop - start).
Columns: TypeAlias = "Callable[[int, int], Tensor]"


def panelled_root(columns: Columns, size: int, team: Team, *, device: torch.device) -> Tensor | None:
    """L (F, F), lower triangular, float64, with L L^T = A^{-1}; None where A has no Cholesky factor.

    Args:
        columns: of A with its rows and columns in reversed order. Those of a worker's own panels are asked for, each once.
        size: F.
        team: the workers, of whom each gets all of L.
        device: of the columns, and of L.

    Raises:
        Interrupted: a signal has come.
    """
    panels = _Panels(size, team, device)
    for number in panels.own:
        panels.left[number] = columns(*panels.ends(number))
    for number in range(panels.count):
        done = panels.shared(number, panels.factored(number))
        if not _is_sound(done):
            return None
        panels.take(number, done)
    return panels.root()


def _is_sound(panel: Tensor) -> bool:
    """Whether the panel has a factor; on a GPU that is seen at the end, in what it leads to, and nobody waits for it here."""
    return panel.device.type != "cpu" or bool(torch.isfinite(panel[0]).all())


@dataclass
class _Panels:
    """The panels of one factorisation that are this worker's.

    Args:
        left: of the matrix, less what the factor's panels so far explain; gone when they are factored.
        inverse: of the factor's inverse, as far as the panels so far tell.
    """

    size: int
    team: Team
    device: torch.device
    left: dict[int, Tensor] = field(default_factory=dict)
    inverse: dict[int, Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Columns of each, but the last."""
        return panel_width(self.device.type)

    @property
    def count(self) -> int:
        """How many all of them are."""
        return -(-self.size // self.width)

    @property
    def own(self) -> range:
        """This worker's."""
        return range(self.team.rank, self.count, self.team.size)

    def ends(self, number: int) -> tuple[int, int]:
        """Its first column, and the first of the next."""
        return number * self.width, min((number + 1) * self.width, self.size)

    def factored(self, number: int) -> Tensor | None:
        """The factor's panel, the inverse in place of its square head; NaN where there is none; None where it is another's."""
        panel = self.left.pop(number, None)
        if panel is None:
            return None
        width = panel.shape[1]
        head, failed = torch.linalg.cholesky_ex(panel[:width])
        head = torch.where(failed > 0, torch.nan, head)
        eye = torch.eye(width, dtype=panel.dtype, device=panel.device)
        inverse = torch.linalg.solve_triangular(head, eye, upper=False)
        panel[width:] = panel[width:] @ inverse.T
        panel[:width] = inverse
        return panel

    def shared(self, number: int, panel: Tensor | None) -> Tensor:
        """The panel, as its owner has it."""
        start, stop = self.ends(number)
        if panel is None:
            panel = torch.empty(self.size - start, stop - start, dtype=torch.float64, device=self.device)
        return self.team.broadcast(panel, owner=number % self.team.size)

    def take(self, number: int, panel: Tensor) -> None:
        """What a panel of the factor changes of the others."""
        (start, stop), width = self.ends(number), panel.shape[1]
        head, below = panel[:width], panel[width:]
        for other in self.own:
            signals.raise_if_interrupted(NAME)
            first, last = self.ends(other)
            if other > number:
                rows = below[first - stop :]
                self.left[other].addmm_(rows, rows[: last - first].T, alpha=-1)
                continue
            if other == number:
                self.inverse[other] = panel.new_zeros(self.size - first, last - first)
                self.inverse[other][:width].fill_diagonal_(1.0)
            mine = self.inverse[other]
            done = head @ mine[start - first : stop - first]
            mine[start - first : stop - first] = done
            mine[stop - first :].addmm_(below, done, alpha=-1)

    def root(self) -> Tensor:
        """The inverse's transpose with rows and columns in reversed order: L of the matrix as it was."""
        root = torch.zeros(self.size, self.size, dtype=torch.float64, device=self.device)
        for number in range(self.count):
            signals.raise_if_interrupted(NAME)
            panel = self.shared(number, self.inverse.pop(number, None))
            start, stop = self.ends(number)
            root[self.size - stop : self.size - start, : self.size - start] = panel.T.flip(0, 1)
        return root

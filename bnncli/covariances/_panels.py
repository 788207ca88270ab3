"""Triangular root of the inverse of one large matrix, panel by panel, distributed over workers.

Computes a Cholesky factor and its inverse together, with half the operations of factor and solve, in the memory of one
matrix.

A panel is a set of consecutive columns of the lower triangle. The panels of the factor are computed from left to right.
Each updates the factor's columns to its right and the inverse's columns to its left; the inverse is complete after the
last panel. Golub and Van Loan (2013), Matrix Computations, 4.2.9 (block outer product Cholesky) and 3.1.3. Workers own
panels in turn and send only finished panels. Every product has the same operands, and so rounds alike, for any number
of workers. A signal stops the computation between two products.
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

# Returns, for columns (start, stop) of a symmetric matrix, a new tensor of the rows from `start` on.
Columns: TypeAlias = "Callable[[int, int], Tensor]"


def panelled_root(columns: Columns, size: int, team: Team, *, device: torch.device) -> Tensor | None:
    """Return L (F, F), lower triangular, float64, with L L^T = A^{-1}; None if A has no Cholesky factor.

    Args:
        columns: columns of A with rows and columns in reversed order; called once for each panel that this worker owns.
        size: F.
        team: the workers; each gets all of L.
        device: of the columns and of L.

    Raises:
        Interrupted: a signal arrived.
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
    """Return whether the panel has a factor. On a GPU, the final result shows it, without a synchronisation here."""
    return panel.device.type != "cpu" or bool(torch.isfinite(panel[0]).all())


@dataclass
class _Panels:
    """This worker's panels of a factorisation.

    Args:
        left: columns of the matrix minus the contribution of the factor's panels so far; removed once factored.
        inverse: columns of the factor's inverse, as far as computed.
    """

    size: int
    team: Team
    device: torch.device
    left: dict[int, Tensor] = field(default_factory=dict)
    inverse: dict[int, Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Columns per panel, except the last."""
        return panel_width(self.device.type)

    @property
    def count(self) -> int:
        """Number of panels of all workers."""
        return -(-self.size // self.width)

    @property
    def own(self) -> range:
        """Panels of this worker."""
        return range(self.team.rank, self.count, self.team.size)

    def ends(self, number: int) -> tuple[int, int]:
        """Return the first column of a panel and of the next."""
        return number * self.width, min((number + 1) * self.width, self.size)

    def factored(self, number: int) -> Tensor | None:
        """Return the factor's panel, its square head inverted; NaN without a factor, None if another worker owns it."""
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
        """Return the panel, broadcast by its owner."""
        start, stop = self.ends(number)
        if panel is None:
            panel = torch.empty(self.size - start, stop - start, dtype=torch.float64, device=self.device)
        return self.team.broadcast(panel, owner=number % self.team.size)

    def take(self, number: int, panel: Tensor) -> None:
        """Update this worker's panels with a panel of the factor."""
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
        """Return the inverse's transpose with rows and columns in reversed order: L of the original matrix."""
        root = torch.zeros(self.size, self.size, dtype=torch.float64, device=self.device)
        for number in range(self.count):
            signals.raise_if_interrupted(NAME)
            panel = self.shared(number, self.inverse.pop(number, None))
            start, stop = self.ends(number)
            root[self.size - stop : self.size - start, : self.size - start] = panel.T.flip(0, 1)
        return root

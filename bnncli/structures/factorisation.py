"""Roots of precision matrices: in one piece, panel by panel over the workers, and packed for many products."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.system import signals
from bnncli.system.memory import is_large, panel_width
from bnncli.system.signals import interruptible
from bnncli.system.workers import Team, team

if TYPE_CHECKING:
    from torch import Tensor


Result = TypeVar("Result")
Rows: TypeAlias = "Callable[[int, int], Tensor]"  # rows start..stop of a symmetric matrix (F, F), (stop - start, F)

_LOOK = 256  # rows checked at a time

# Relative to the mean diagonal of the precision; a matrix that needs more is wrong, not rounded.
JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)


def inverse_root(precision: Tensor) -> tuple[Tensor, float]:
    """Return L (..., F, F), lower triangular with L L^T = (precision + jitter I)^{-1}, and the jitter, nearly always 0.

    Args:
        precision: (..., F, F), float64, symmetric, one matrix or a batch; its diagonal is overwritten if jitter is
            needed.

    Raises:
        NumericError: a matrix is not finite, or has no Cholesky factor even with the largest jitter.
    """
    if precision.ndim == 2 and is_large(len(precision)):
        zero = precision.new_zeros(len(precision))
        return root_of_sum(lambda start, stop: precision[start:stop], zero, mean=float(precision.diagonal().mean()))
    diagonal = precision.diagonal(dim1=-2, dim2=-1)
    size, before = float(diagonal.mean()), [0.0]

    def root(added: float) -> Tensor | None:
        diagonal.add_(added - before[0])
        before[0] = added
        # With the parameters in reversed order, the inverse of the factor is lower triangular again.
        root, failed = _long(precision, 1 / 3, lambda: torch.linalg.cholesky_ex(precision.flip(-2, -1)))
        return None if failed.any() else _long(precision, 1, partial(_inverse_transposed, root.flip(-2, -1)))

    return _add_jitter(root, size, is_finite=lambda: bool(torch.isfinite(precision).all()))


def root_of_sum(rows: Rows, diagonal: Tensor, *, mean: float) -> tuple[Tensor, float]:
    """Return the root of the inverse of a large matrix plus a diagonal (F,), by panels distributed over the workers.

    Args:
        rows: rows of the matrix.
        mean: mean diagonal of the sum.
    """
    size, workers = len(diagonal), team() or Team(0, 1)

    def root(added: float) -> Tensor | None:
        def columns(start: int, stop: int) -> Tensor:
            part = rows(size - stop, size - start)[:, : size - start].flip(0, 1).T.contiguous()
            part.diagonal().add_(diagonal[size - stop : size - start].flip(0) + added)
            return part

        return panelled_root(columns, size, workers, device=diagonal.device)

    return _add_jitter(
        root, mean, is_finite=lambda: all(_is_finite(rows, start, size) for start in range(0, size, _LOOK))
    )


def _is_finite(rows: Rows, start: int, size: int) -> bool:
    return bool(torch.isfinite(rows(start, min(start + _LOOK, size))).all())


def _add_jitter(
    root: Callable[[float], Tensor | None], size: float, *, is_finite: Callable[[], bool]
) -> tuple[Tensor, float]:
    """Return the first root that exists and the jitter added to the diagonal. Raises NumericError if there is none."""
    if math.isfinite(size):  # a matrix with infinite entries can have a root of zeros
        for step in JITTERS:
            found = root(step * size)
            if found is not None and math.isfinite(float(found.sum())):  # torch.isfinite would copy a large matrix
                return found, step * size
    if not math.isfinite(size) or not is_finite():
        raise NumericError("the posterior precision is not finite", hint="check the inputs")
    raise NumericError(
        "the posterior precision is not positive definite",
        hint="use a larger \0prior_precision\0, or \0structure\0 kron",
    )


def _long(matrices: Tensor, share: float, work: Callable[[], Result]) -> Result:
    """Run interruptible work on matrices (..., F, F), of `share` * F^3 operations each."""
    operations = share * matrices.numel() * matrices.shape[-1]
    return interruptible(work, operations=operations, device=matrices.device, name="a Cholesky factorisation")


def _inverse_transposed(upper: Tensor) -> Tensor:
    """Return the transposed inverse, (..., F, F), of upper triangular matrices."""
    eye = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device).expand_as(upper)
    return torch.linalg.solve_triangular(upper, eye, upper=True).mT.contiguous()


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


_WIDTH = 1024  # rows and columns of a part
_USUAL_ROWS = 16  # number of vectors, such as chains, that the layout is optimised for; others give the same numbers


@dataclass(frozen=True)
class PackedTriangle:
    """L (P, P), lower triangular, float32, on a CPU, without the zero half.

    Args:
        rows: row panels up to the diagonal, each with its last column.
        columns: column panels from the diagonal on, each with its first row.
    """

    rows: tuple[tuple[int, Tensor], ...]
    columns: tuple[tuple[int, Tensor], ...]

    @classmethod
    def of(cls, root: Tensor) -> PackedTriangle | None:
        """Pack L in float32; None if L is not on a CPU or PyTorch lacks the layouts."""
        if root.device.type != "cpu" or not has_layouts():
            return None
        ends = [(start, min(start + _WIDTH, len(root))) for start in range(0, len(root), _WIDTH)]
        rows = tuple((stop, _pack(root[start:stop, :stop])) for start, stop in ends)
        columns = tuple((start, _pack(root[start:, start:stop].T)) for start, stop in ends)
        return cls(rows, columns)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        z = z.float()
        return torch.cat([_product(z[:, :stop], part) for stop, part in self.rows], dim=1)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        gradient = gradient.float()
        return torch.cat([_product(gradient[:, start:], part) for start, part in self.columns], dim=1)


@cache
def has_layouts() -> bool:
    """Return whether PyTorch supports packed products on this CPU. The operators are not public and may disappear."""
    if not torch.backends.mkldnn.is_available():
        return False
    with suppress(AttributeError, RuntimeError):
        return bool(_product(torch.ones(1, 2), _pack(torch.ones(3, 2))).sum() == 6)
    return False


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = _kernels()._reorder_linear_weight(weight.float().contiguous(), _USUAL_ROWS)
    return packed


def _product(vectors: Tensor, packed: Tensor) -> Tensor:
    """Return vectors (S, n) times the transpose of a packed matrix (m, n)."""
    product: Tensor = _kernels()._linear_pointwise(vectors, packed, None, "none", [], "")
    return product


def _kernels() -> Any:
    return torch.ops.mkldnn

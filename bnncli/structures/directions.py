"""Directions of largest variance of a Gaussian over theta, in whitened coordinates.

With Sigma = L L^T and theta = m + L z, the right singular vectors w of L with the K largest singular values are
orthonormal directions of z along which theta varies most: L w = sqrt(variance) u, where u is the eigenvector of Sigma
with that variance. The coordinates of z along and orthogonal to them are independent standard normals. A transformation
of the former alone therefore changes only their density: exactly, whatever the directions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.numerics.random import source_of
from bnncli.parameters.layouts import MatrixLayout, vector_layout
from bnncli.shapes import check_shapes
from bnncli.structures import Covariance

if TYPE_CHECKING:
    from torch import Tensor

_MOST_DENSE = 2048  # parameters up to which L^T L is formed and decomposed
_MORE = 8  # extra directions beyond those wanted, because the last ones converge slowest
_POWERS = 2  # powers of L^T L added per round
_ROUNDS, _RISE = 100, 1e-7  # maximum rounds; relative increase of the variance below which iteration stops


@dataclass(frozen=True)
class Subspace:
    """Directions of whitened coordinates.

    Args:
        basis: W (P, K), float64, orthonormal columns, largest variance first.
    """

    basis: Tensor

    def __post_init__(self) -> None:
        check_shapes(basis=(self.basis, "P K"))

    @classmethod
    def widest(cls, covariance: Covariance, count: int, generator: torch.Generator) -> Subspace:
        """Return the K = count directions of largest variance, 1 <= K <= P.

        A structure may know them (`widest(count) -> (P, K)`, or None); for uncorrelated `pieces`, they are the widest
        of each piece's. Otherwise they come from products with L^T L: from all of it if it is small, else from block
        Krylov iterations (Musco and Musco 2015, arXiv:1504.05477), which find directions of nearly the largest variance
        even if many variances are close.

        Args:
            generator: for the starting directions.
        """
        basis = _widest(covariance, count, generator)
        # Fix the arbitrary sign: the largest entry is positive.
        peaks = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
        return cls((basis * peaks.sign()).contiguous())

    @property
    def layout(self) -> MatrixLayout:
        """Layout of the K coordinates."""
        return vector_layout(self.basis.shape[1])

    def reduce(self, z: Tensor) -> Tensor:
        """Return the coordinates (..., K) of z (..., P), in z's precision."""
        return z @ self.basis.to(z)

    def lift(self, inside: Tensor) -> Tensor:
        """Return z (..., P) with zeros outside the subspace, from coordinates (..., K). `reduce` inverts it."""
        return inside @ self.basis.T.to(inside)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Subspace:
        """Return a copy on another device or in another precision."""
        return replace(self, basis=self.basis.to(device=device, dtype=dtype))


def _widest(covariance: Covariance, count: int, generator: torch.Generator) -> Tensor:
    """Return directions (P, K), from the structure, its pieces, or products with L^T L."""
    own = getattr(covariance, "widest", None)
    known: Tensor | None = None if own is None else own(count)
    if known is not None:
        return known
    pieces: Sequence[Covariance] = getattr(covariance, "pieces", ())
    return _of_pieces(pieces, count, generator) if pieces else _from_products(covariance, count, generator)


def _of_pieces(pieces: Sequence[Covariance], count: int, generator: torch.Generator) -> Tensor:
    """Return directions (P, K), each within one consecutive piece of theta; ties go to the first."""
    bases = [_widest(piece, min(count, piece.num_params), generator) for piece in pieces]
    variances = torch.cat(
        [piece.unwhiten(basis.T).double().square().sum(dim=1) for piece, basis in zip(pieces, bases, strict=True)]
    )
    chosen = variances.sort(descending=True, stable=True).indices[:count]
    found = torch.zeros(sum(piece.num_params for piece in pieces), count, dtype=torch.float64, device=variances.device)
    row, column = 0, 0
    for basis in bases:
        size, width = basis.shape
        inside = (chosen >= column) & (chosen < column + width)
        found[row : row + size, inside] = basis[:, chosen[inside] - column]
        row, column = row + size, column + width
    return found


def _from_products(covariance: Covariance, count: int, generator: torch.Generator) -> Tensor:
    """Return directions (P, K) from products with L^T L."""
    size = covariance.num_params
    device = covariance.unwhiten(torch.zeros(1, size, dtype=torch.float64)).device
    if size <= max(_MOST_DENSE, (_POWERS + 1) * (count + _MORE)):
        rows = torch.eye(size, dtype=torch.float64, device=device)
        matrix = covariance.pull_back(covariance.unwhiten(rows))
        return torch.linalg.eigh(0.5 * (matrix + matrix.T))[1].flip(1)[:, :count]
    source = source_of(generator, size, device)
    first = torch.randn(count + _MORE, size, generator=source, device=source.device, dtype=torch.float64)
    return _iterate_krylov(lambda rows: covariance.pull_back(covariance.unwhiten(rows)), first.to(device), count)


def _iterate_krylov(multiply: Callable[[Tensor], Tensor], rows: Tensor, count: int) -> Tensor:
    """Return directions (P, K) by block Krylov iteration from starting directions (K + extra, P)."""
    found = 0.0
    for _ in range(_ROUNDS):
        powers = [rows]
        for _ in range(_POWERS):
            image = multiply(powers[-1])
            powers.append(image / torch.linalg.vector_norm(image, dim=1, keepdim=True))
        basis = torch.linalg.qr(torch.cat(powers).T)[0]
        matrix = basis.T @ multiply(basis.T).T
        values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.T))
        rows = (basis @ vectors.flip(1)[:, : len(rows)]).T
        before, found = found, float(values[-count:].sum())
        if found <= before * (1 + _RISE):
            break
    return rows[:count].T

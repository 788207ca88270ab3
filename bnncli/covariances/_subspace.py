"""The directions in which a Gaussian over theta is widest, in the coordinates that it is whitened by.

With Sigma = L L^T and theta = m + L z, the right singular vectors w of L that have its K largest singular values are orthonormal
directions of z along which theta moves as far as it can: L w = sqrt(variance) u, u the eigenvector of Sigma that has that
variance. The coordinates of z along them and orthogonal to them are independent standard normals, so that what is done to the
former alone has the density of the former alone to account for: exactly, whatever the directions are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bnncli.covariances import Covariance
from bnncli.lazy import torch
from bnncli.numerics.random import source_of
from bnncli.parameters.layouts import MatrixLayout, vector_layout
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

_MOST_DENSE = 2048  # parameters up to which L^T L is made and decomposed as a whole
_MORE = 8  # directions that are sought beside those that are wanted: the last of them come slowest
_POWERS = 2  # of L^T L that a round adds to the directions it has
_ROUNDS, _RISE = 100, 1e-7  # at most; and the part by which the variance found must rise for another one


@dataclass(frozen=True)
class Subspace:
    """Some directions of whitened coordinates.

    Args:
        basis: W (P, K), float64, orthonormal columns, the direction of the largest variance first.
    """

    basis: Tensor

    def __post_init__(self) -> None:
        check_shapes(basis=(self.basis, "P K"))

    @classmethod
    def widest(cls, covariance: Covariance, count: int, generator: torch.Generator) -> Subspace:
        """The K = count directions of the largest variance, 1 to P.

        A structure may know them (`widest(count) -> (P, K)`, or None where it does not after all); of uncorrelated `pieces`
        they are the widest of each piece's. Else they are found from products with L^T L: all of it where it is small, or by
        block Krylov iterations (Musco and Musco 2015, arXiv:1504.05477), which find directions of nearly as large a variance
        where many have nearly the same.

        Args:
            generator: of the first directions of an iteration.
        """
        basis = _widest(covariance, count, generator)
        # A direction's sign is arbitrary: its largest entry is positive.
        peaks = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
        return cls((basis * peaks.sign()).contiguous())

    @property
    def layout(self) -> MatrixLayout:
        """Of the K coordinates."""
        return vector_layout(self.basis.shape[1])

    def reduce(self, z: Tensor) -> Tensor:
        """The coordinates (..., K) of z (..., P), in z's precision."""
        return z @ self.basis.to(z)

    def lift(self, inside: Tensor) -> Tensor:
        """z (..., P) with nothing outside, from coordinates (..., K); reduce is its inverse."""
        return inside @ self.basis.T.to(inside)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Subspace:
        """A copy elsewhere or in another precision."""
        return replace(self, basis=self.basis.to(device=device, dtype=dtype))


def _widest(covariance: Covariance, count: int, generator: torch.Generator) -> Tensor:
    """Directions (P, K): the structure's own, its pieces', or those that products with L^T L find."""
    own = getattr(covariance, "widest", None)
    known: Tensor | None = None if own is None else own(count)
    if known is not None:
        return known
    pieces: Sequence[Covariance] = getattr(covariance, "pieces", ())
    return _of_pieces(pieces, count, generator) if pieces else _from_products(covariance, count, generator)


def _of_pieces(pieces: Sequence[Covariance], count: int, generator: torch.Generator) -> Tensor:
    """Directions (P, K), each in one of theta's consecutive pieces; of equal variances the first."""
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
    """The same, from products with L^T L."""
    size = covariance.num_params
    device = covariance.unwhiten(torch.zeros(1, size, dtype=torch.float64)).device
    if size <= max(_MOST_DENSE, (_POWERS + 1) * (count + _MORE)):
        rows = torch.eye(size, dtype=torch.float64, device=device)
        matrix = covariance.pull_back(covariance.unwhiten(rows))
        return torch.linalg.eigh(0.5 * (matrix + matrix.T))[1].flip(1)[:, :count]
    source = source_of(generator, size, device)
    first = torch.randn(count + _MORE, size, generator=source, device=source.device, dtype=torch.float64)
    return _iterated(lambda rows: covariance.pull_back(covariance.unwhiten(rows)), first.to(device), count)


def _iterated(multiply: Callable[[Tensor], Tensor], rows: Tensor, count: int) -> Tensor:
    """The same, from first directions (K + more, P)."""
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

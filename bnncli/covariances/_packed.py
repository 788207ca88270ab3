"""Products of a few vectors with a large triangular matrix, packed once into the layout of the CPU's kernels.

Otherwise each product packs it again, which takes longer than the product: with P = 7,700, 16 vectors and two threads,
products with L take 15 ms and with its transpose 24 ms; packed, 8 and 9 ms. The layouts are oneDNN's, as used by
torch.compile for frozen weights.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

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
        rows = tuple((stop, _packed(root[start:stop, :stop])) for start, stop in ends)
        columns = tuple((start, _packed(root[start:, start:stop].T)) for start, stop in ends)
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
        return bool(_product(torch.ones(1, 2), _packed(torch.ones(3, 2))).sum() == 6)
    return False


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = _kernels()._reorder_linear_weight(weight.float().contiguous(), _USUAL_ROWS)
    return packed


def _product(vectors: Tensor, packed: Tensor) -> Tensor:
    """Return vectors (S, n) times the transpose of a packed matrix (m, n)."""
    product: Tensor = _kernels()._linear_pointwise(vectors, packed, None, "none", [], "")
    return product


def _kernels() -> Any:
    return torch.ops.mkldnn

"""The diagonal of H: squared per-example gradients for each column of the Hessian's root, one layer at a time.

For a linear layer used once per example, this is the product of two sums, (sum_m g_m^2) x^2, without any gradients.
Other layers compute gradients (n, P_l) for a few examples at once, never Jacobians of all outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.network_curvature._columns import Columns
from bnncli.network_curvature._matrices import MatrixUse, PatchesUse, matrices_of
from bnncli.network_curvature._rest import diagonal_of
from bnncli.network_curvature._scales import scales_of
from bnncli.network_curvature._uses import Finder, Piece, Use, called, forward, gradients, place_of, tried
from bnncli.parameters.layouts import ParamPart

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget

_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # of per-example gradients of a layer at once


class Diag:
    """`hessian.diag` (P,)."""

    order: ClassVar[int] = 70
    about: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.diag`, (P,) float64."""
        return _diagonal(target, theta, are=tried)

    @staticmethod
    def one_block(target: NetworkTarget, theta: Tensor) -> object:
        """Compute the diagonal of one block, without checking the pieces."""
        return _diagonal(target, theta, are=called)

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return P."""
        return layout.num_params


def _diagonal(target: NetworkTarget, theta: Tensor, *, are: Finder) -> dict[str, Tensor]:
    """Return `hessian.diag`, using the pieces that `are` accepts."""
    layout = target.layout
    theta = theta.to(target.device, target.dtype)
    total = torch.zeros(layout.num_params, dtype=torch.float64, device=target.device)
    pieces = are(layout, theta, target.inputs[:2].to(target.device), [*matrices_of(layout), *scales_of(layout)])
    known = {part.name for piece in pieces for part in piece.parts}
    _add_pieces(total, target, theta, pieces)
    others: list[ParamPart] = [part for part in layout.parts if part.name not in known]
    columns = Columns(target, num_drawn=0, seed=0)
    for part, values in zip(others, diagonal_of(target, theta, others, columns), strict=True):
        total[part.place] = values
    return {"hessian.diag": total.mul_(target.likelihood_scale)}


def _add_pieces(total: Tensor, target: NetworkTarget, theta: Tensor, pieces: list[Piece]) -> None:
    """Add the squared per-example gradients of the pieces' parameters to their places in total (P,)."""
    columns = Columns(target, num_drawn=0, seed=0)
    places = {piece.parts[0].name: place_of(piece) for piece in pieces}
    for rows in target.row_blocks(1, theta.dtype) if pieces else ():
        logits, noted = forward(target.layout, theta, target.inputs[rows].to(target.device), pieces)
        for column, is_last in columns.of(logits, rows):
            for name, pairs in gradients(logits, noted, column, is_last=is_last).items():
                _add_squares(total[places[name]], pairs)


def _add_squares(total: Tensor, pairs: list[tuple[Use, Tensor]]) -> None:
    """Add the squares for one column and one piece to total (P_l,); the gradient is summed over the piece's uses."""
    use, gradient = pairs[0]
    if len(pairs) == 1 and isinstance(use, MatrixUse) and not isinstance(use, PatchesUse):
        slopes = use.outputs(gradient)
        if slopes.shape[2] == 1:
            squares, inputs = slopes[:, :, 0].square(), use.inputs.flatten(1)
            size = squares.shape[1] * inputs.shape[1]
            total[:size] += (squares.T @ inputs.square()).flatten()
            total[size:] += squares.sum(dim=0)[: len(total) - size]
            return
    size = max(1, _ELEMENTS.get(total.device.type, 2**20) // len(total))
    for start in range(0, use.num_examples, size):
        some = slice(start, start + size)
        parts = [one.of(some).per_example(slope[some]) for one, slope in pairs]
        whole = parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)
        total += whole.square_().sum(dim=0, dtype=torch.float64)

"""The diagonal of the Gauss-Newton matrix in the eigenbasis of its Kronecker factors, one basis per layer.

With U and V the eigenvectors of a layer's factors, the curvature along u_i kron v_j is sum_n (u_i^T G_n v_j)^2, with
G_n an example's gradient for each column of the Hessian's root. This is the best diagonal in that basis (George et al.
2018, arXiv:1806.03884), whereas the factors' own eigenvalues assume that inputs, gradients and positions are
independent. The random columns differ from those used for the basis. Parameters that form no matrix keep the diagonal
computed with the factors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.structures.kron import Basis, EigenLayers, LayerFactors, NetworkKron, build_parts, describe_factors
from bnncli.structures.network_sums import (
    Columns,
    coordinates,
    forward,
    gradients,
    is_complete,
    num_drawn,
    row_coordinates,
)

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.structures.network_sums import MatrixUse
    from bnncli.targets.network import NetworkTarget


class Ekfac(EigenLayers):
    """One block per layer; parameters that form no matrix have a diagonal."""

    structure: ClassVar[str] = "ekfac"


_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # of a block's per-example sums, or of inputs at all positions


class NetworkEkfac:
    """`hessian.ekfac.<weight>.values` (K, F), `.outputs` (K, K), `.features` (F, F), and `hessian.ekfac.rest`."""

    order: ClassVar[int] = 30
    about: ClassVar[str] = "Kronecker factors with a diagonal fitted in their eigenbasis"
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return the eigenvectors of each layer's factors, the curvature along them, and the diagonal of the rest."""
        factors = LayerFactors.of(target, theta)
        bases = factors.bases()
        return build_parts("ekfac", factors, bases, _values(target, theta, factors, bases))

    @staticmethod
    def metrics(hessian: dict[str, Tensor]) -> dict[str, Any]:
        """Return how the basis was computed."""
        return describe_factors("ekfac", hessian)

    @staticmethod
    def num_elements(layout: ModuleLayout, rank: int | None = None) -> int:
        """Return the number of elements of the factors."""
        return NetworkKron.num_elements(layout, rank)


def _values(target: NetworkTarget, theta: Tensor, factors: LayerFactors, bases: dict[str, Basis]) -> dict[str, Tensor]:
    """Return the curvature (K, F) along each pair of eigenvectors, by weight name, float64."""
    theta = theta.to(target.device, target.dtype)
    turned = {name: (basis.outputs.to(theta), basis.features.to(theta)) for name, basis in bases.items()}
    totals = {name: torch.zeros_like(basis.values) for name, basis in bases.items()}
    columns = Columns(target, num_drawn=min(num_drawn(target), 1), seed=1)
    for rows in target.row_blocks(1, theta.dtype) if totals else ():
        inputs = target.inputs[rows].to(target.device)
        logits, noted = forward(target.layout, theta, inputs, factors.matrices)
        back = [gradients(logits, noted, column, is_last=is_last) for column, is_last in columns.of(logits, rows)]
        for name, basis in turned.items():
            squares = _squares([of_column[name] for of_column in back], *basis)
            totals[name] += _mean_outside(_mean_outside(squares, basis[1]).T, basis[0]).T
    return {name: total * target.likelihood_scale for name, total in totals.items()}


def _squares(back: list[list[tuple[MatrixUse, Tensor]]], outputs: Tensor, features: Tensor) -> Tensor:
    """Return the sum over examples and columns of (U^T G V)^2 in coordinates, (K, F) float64, with G summed over uses and positions.

    Args:
        back: per column, the uses of one weight with the gradients at their outputs.
        outputs, features: U (K, K) and V (F, F), or the leading columns.
    """
    uses = [use for use, _ in back[0]]
    num_outputs, num_features = (sum(one.shape) if not is_complete(one) else len(one) for one in (outputs, features))
    slopes = [[use.outputs(gradient) for use, gradient in of_column] for of_column in back]
    num_positions = slopes[0][0].shape[2]
    # Multiply V where it is cheaper: with each G, or with the inputs at each position.
    turns_sums = len(back) * num_outputs < num_positions
    total = torch.zeros(num_outputs, num_features, dtype=torch.float64, device=outputs.device)
    size = max(1, _ELEMENTS.get(outputs.device.type, 2**20) // (num_features * max(num_positions, num_outputs)))
    for start in range(0, uses[0].num_examples, size):
        some = slice(start, start + size)
        columns = [] if turns_sums else [use.of(some).in_basis(features) for use in uses]
        for of_column in slopes:
            turned = [coordinates(outputs, slope[some]) for slope in of_column]
            if turns_sums:
                sums = sum_of([use.of(some).sums(slope) for use, slope in zip(uses, turned, strict=True)])
                sums = row_coordinates(features, sums)
            elif len(turned) == num_positions == 1:
                total += (turned[0][:, :, 0].square().T @ columns[0][:, :, 0].square()).double()
                continue
            else:
                sums = sum_of([slope @ column.mT for slope, column in zip(turned, columns, strict=True)])
            total += sums.square_().sum(dim=0).double()
    return total


def _mean_outside(values: Tensor, basis: Tensor) -> Tensor:
    """Return values (n, k + F) of coordinates in a basis (F, k) with the mean per dimension outside its span last, (n, k + 1)."""
    if is_complete(basis):
        return values
    size, rank = basis.shape
    return torch.cat([values[:, :rank], values[:, rank:].sum(dim=1, keepdim=True) / (size - rank)], dim=1)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """Return the sum; a single tensor is returned as it is."""
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).sum(dim=0)

"""Kronecker factors of the Gauss-Newton matrix, a layer each: of every weight that multiplies as a matrix, with its bias.

With inputs x_nt and gradients g_nt at the outputs of positions t = 1..T of example n, for each column of the Hessian's root,
a layer's block sum_n (sum_t g_nt kron x_nt)(sum_t g_nt kron x_nt)^T is approximated by (sum_nt g g^T) kron (mean_nt x x^T):
Martens and Grosse (2015), arXiv:1503.05671; over positions Grosse and Martens (2016), arXiv:1602.01407, the setting "expand" of
Eschenhagen et al. (2023), arXiv:2311.00636. It is exact where x or g are the same for all n and there is one position. The
diagonal of all other parameters stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.machine.interruptible import eigenvectors
from bnncli.network_curvature._columns import Columns, num_drawn
from bnncli.network_curvature._matrices import Matrix, forward, gradients, matrices_of, used_as_matrices
from bnncli.network_curvature._rest import diagonal_of

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget
    from bnncli.theta.module import ModuleLayout


class Kron:
    """`hessian.kron.<weight>.values` (K, F), `.outputs` (K, K), `.features` (F, F), and `hessian.kron.rest`."""

    order: ClassVar[int] = 40
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """The eigenvectors of each layer's factors, the products of their eigenvalues, and the diagonal of the rest."""
        found = LayerFactors.of(target, theta)
        bases = found.bases()
        return in_parts("kron", found, bases, {name: basis.values for name, basis in bases.items()})

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """F^2 + K^2 for each layer, and P."""
        return sum(one.num_columns**2 + one.num_outputs**2 for one in matrices_of(layout)) + layout.num_params


@dataclass(frozen=True)
class Basis:
    """The eigenvectors of the factors of one layer.

    Args:
        outputs: U (K, K).
        features: V (F, F).
        values: (K, F), products of their eigenvalues.
    """

    outputs: Tensor
    features: Tensor
    values: Tensor


@dataclass(frozen=True)
class LayerFactors:
    """The factors of each layer, float64.

    Args:
        matrices: the layers.
        features: by the weight's name, the mean of x x^T, (F, F).
        outputs: the sum of g g^T, (K, K).
        rest: the diagonal of all other parameters.
    """

    matrices: list[Matrix]
    features: dict[str, Tensor]
    outputs: dict[str, Tensor]
    rest: Tensor

    @classmethod
    def of(cls, target: NetworkTarget, theta: Tensor) -> LayerFactors:
        """At theta (P,)."""
        layout = target.layout
        theta = theta.to(target.device, target.dtype)
        first = target.inputs[:2].to(target.device)
        matrices = used_as_matrices(layout, theta, first)
        drawn = num_drawn(layout.likelihood, layout.num_outputs)
        features, outputs, positions = _sums(
            target, theta, matrices, Columns(layout.likelihood, num_drawn=drawn, seed=0)
        )
        taken = {part.name for matrix in matrices for part in matrix.parts}
        others = [part for part in layout.parts if part.name not in taken]
        rest = diagonal_of(target, theta, others, Columns(layout.likelihood, num_drawn=drawn, seed=0))
        scale = target.likelihood_scale
        return cls(
            matrices,
            {name: total / positions[name] for name, total in features.items()},
            {name: total * scale for name, total in outputs.items()},
            rest * scale,
        )

    def bases(self) -> dict[str, Basis]:
        """By the weight's name. Raises NumericError where a factor is not finite."""
        found = {}
        for name, factor in self.features.items():
            what = f"the Kronecker factors of {name}"
            feature_values, features = eigenvectors(factor, what=what)
            output_values, outputs = eigenvectors(self.outputs[name], what=what)
            values = torch.outer(output_values.clamp(min=0), feature_values.clamp(min=0))
            found[name] = Basis(outputs.contiguous(), features.contiguous(), values)
        return found


def in_parts(
    structure: str, factors: LayerFactors, bases: dict[str, Basis], values: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A Hessian's parts, `hessian.<structure>.`, of the bases and the curvature (K, F) along them."""
    parts: dict[str, Tensor] = {}
    for name, basis in bases.items():
        own = {"values": values[name], "outputs": basis.outputs, "features": basis.features}
        parts |= {f"hessian.{structure}.{name}.{key}": tensor for key, tensor in own.items()}
    return {**parts, f"hessian.{structure}.rest": factors.rest} if len(factors.rest) else parts


def _sums(
    target: NetworkTarget, theta: Tensor, matrices: list[Matrix], columns: Columns
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """By the weight's name: sum x x^T (F, F) and sum g g^T (K, K) over examples and positions, and the number of these."""

    def zeros(size: int) -> Tensor:
        return torch.zeros(size, size, dtype=torch.float64, device=target.device)

    features = {one.name: zeros(one.num_columns) for one in matrices}
    outputs = {one.name: zeros(one.num_outputs) for one in matrices}
    positions = dict.fromkeys(features, 0)
    for rows in target.row_blocks(1, theta.dtype) if matrices else ():
        logits, uses = forward(target.layout, theta, target.inputs[rows].to(target.device), matrices)
        for name, of in uses.items():
            for use in of:
                columns_of_use = use.columns()
                features[name] += torch.einsum("nft,ngt->fg", columns_of_use, columns_of_use).double()
                positions[name] += columns_of_use.shape[0] * columns_of_use.shape[2]
        for column, is_followed in columns.of(logits):
            for name, found in gradients(logits, uses, column, keep=is_followed).items():
                for one in found:
                    outputs[name] += torch.einsum("nkt,nlt->kl", one, one).double()
    return features, outputs, positions

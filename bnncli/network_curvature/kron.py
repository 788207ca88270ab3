"""Kronecker factors of the Gauss-Newton matrix, one pair for every weight that acts as a matrix, with its bias.

With inputs x_nt and gradients g_nt at the outputs of positions t = 1..T of example n, for each column of the Hessian's
root, a layer's block sum_n (sum_t g_nt kron x_nt)(sum_t g_nt kron x_nt)^T is approximated by (sum_nt g g^T) kron
(mean_nt x x^T): Martens and Grosse (2015), arXiv:1503.05671; over positions Grosse and Martens (2016),
arXiv:1602.01407, the setting "expand" of Eschenhagen et al. (2023), arXiv:2311.00636. It is exact if x or g are the
same for all n and there is one position. All other parameters have a diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.network_curvature._columns import Columns, num_drawn, num_drawn_rest
from bnncli.network_curvature._matrices import Matrix, matrices_of
from bnncli.network_curvature._rest import diagonal_of
from bnncli.network_curvature._scales import scales_of
from bnncli.network_curvature._uses import Finder, Piece, called, forward, gradients, place_of, tried
from bnncli.system.memory import give_back_freed
from bnncli.system.signals import eigenvectors

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.network import NetworkTarget


class Kron:
    """`hessian.kron.<weight>.values` (K, F), `.outputs` (K, K), `.features` (F, F), and `hessian.kron.rest`."""

    order: ClassVar[int] = 40
    about: ClassVar[str] = "Kronecker factors of each layer"
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return each layer's eigenvectors, the products of the eigenvalues, and the diagonal of the rest."""
        found = LayerFactors.of(target, theta)
        bases = found.bases()
        return in_parts("kron", found, bases, {name: basis.values for name, basis in bases.items()})

    @staticmethod
    def metrics(hessian: dict[str, Tensor]) -> dict[str, Any]:
        """Return how the factors were computed."""
        return told_of("kron", hessian)

    @staticmethod
    def one_block(target: NetworkTarget, theta: Tensor) -> object:
        """Compute the factors of one block."""
        return LayerFactors.of(target, theta, are=called)

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return F^2 + K^2 summed over layers, plus P."""
        return sum(one.num_columns**2 + one.num_outputs**2 for one in matrices_of(layout)) + layout.num_params


@dataclass(frozen=True)
class Basis:
    """Eigenvectors of the factors of one layer.

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
    """Factors of each layer, float64.

    Args:
        matrices: the layers.
        features: by weight name, the mean of x x^T, (F, F).
        outputs: by weight name, the sum of g g^T, (K, K).
        rest: diagonal of all other parameters.
        num_drawn: random columns per example used for the factors or the rest; 0 for all columns.
    """

    matrices: list[Matrix]
    features: dict[str, Tensor]
    outputs: dict[str, Tensor]
    rest: Tensor
    num_drawn: int

    @classmethod
    def of(cls, target: NetworkTarget, theta: Tensor, *, are: Finder = tried) -> LayerFactors:
        """Compute the factors at theta (P,), using the pieces that `are` accepts."""
        layout = target.layout
        theta = theta.to(target.device, target.dtype)
        pieces = are(layout, theta, target.inputs[:2].to(target.device), [*matrices_of(layout), *scales_of(layout)])
        matrices = [piece for piece in pieces if isinstance(piece, Matrix)]
        sums = _Sums.empty(matrices, layout.num_params, target.device)
        sums.add_all(target, theta, pieces)
        give_back_freed()  # of smaller blocks, such as the last; what follows needs larger ones
        known = {part.name for piece in pieces for part in piece.parts}
        others = [part for part in layout.parts if part.name not in known]
        drawn_rest = (num_drawn_rest(target) if pieces else num_drawn(target)) if others else 0
        columns = Columns(target, num_drawn=drawn_rest, seed=0)
        for part, values in zip(others, diagonal_of(target, theta, others, columns), strict=True):
            sums.diagonal[part.place] = values
        taken = {part.name for matrix in matrices for part in matrix.parts}
        rest = [sums.diagonal[part.place] for part in layout.parts if part.name not in taken]
        scale = target.likelihood_scale
        return cls(
            matrices,
            {name: total / sums.positions[name] for name, total in sums.features.items()},
            {name: total * scale for name, total in sums.outputs.items()},
            torch.cat(rest) * scale if rest else sums.diagonal[:0],
            max(num_drawn(target), drawn_rest),
        )

    def bases(self) -> dict[str, Basis]:
        """Return the eigenbases by weight name. Raises NumericError if a factor is not finite."""
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
    """Return the parts `hessian.<structure>.` of a Hessian from the bases and the curvatures (K, F) along them."""
    parts: dict[str, Tensor] = {}
    for name, basis in bases.items():
        own = {"values": values[name], "outputs": basis.outputs, "features": basis.features}
        parts |= {f"hessian.{structure}.{name}.{key}": tensor for key, tensor in own.items()}
    if len(factors.rest):
        parts[f"hessian.{structure}.rest"] = factors.rest
    return parts | {f"hessian.{structure}.drawn": torch.tensor([factors.num_drawn], dtype=torch.float64)}


def told_of(structure: str, hessian: dict[str, Tensor]) -> dict[str, Any]:
    """Return the number of random columns per example (0 for all) and the number of parameters with a diagonal."""
    rest = hessian.get(f"hessian.{structure}.rest")
    drawn = int(hessian[f"hessian.{structure}.drawn"])
    return {"columns_drawn": drawn, "num_diagonal_params": 0 if rest is None else len(rest)}


@dataclass(frozen=True)
class _Sums:
    """Sums over examples and positions, float64.

    Args:
        features: by weight name, the sum of x x^T (F, F).
        outputs: by weight name, the sum of g g^T (K, K).
        positions: by weight name, the number of x.
        diagonal: (P,), sums of squared gradients of scales.
    """

    features: dict[str, Tensor]
    outputs: dict[str, Tensor]
    positions: dict[str, int]
    diagonal: Tensor

    @classmethod
    def empty(cls, matrices: Sequence[Matrix], num_params: int, device: torch.device) -> _Sums:
        """Return zeros."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        return cls(
            {one.name: zeros(one.num_columns, one.num_columns) for one in matrices},
            {one.name: zeros(one.num_outputs, one.num_outputs) for one in matrices},
            {one.name: 0 for one in matrices},
            zeros(num_params),
        )

    def add_all(self, target: NetworkTarget, theta: Tensor, pieces: Sequence[Piece]) -> None:
        """Add all examples of the target, at theta (P,)."""
        columns = columns_for(target, seed=0)
        places = {piece.parts[0].name: place_of(piece) for piece in pieces}
        for rows in target.row_blocks(1, theta.dtype) if pieces else ():
            logits, noted = forward(target.layout, theta, target.inputs[rows].to(target.device), pieces)
            for name in self.features:
                for use, _ in noted[name]:
                    gram, count = use.gram()
                    self.features[name] += gram
                    self.positions[name] += count
            for column, is_last in columns.of(logits, rows):
                for name, pairs in gradients(logits, noted, column, is_last=is_last).items():
                    if name in self.outputs:
                        for use, gradient in pairs:
                            slopes = use.outputs(gradient).transpose(0, 1).flatten(1)
                            self.outputs[name] += (slopes @ slopes.T).double()
                    else:
                        slopes = sum(use.per_example(gradient) for use, gradient in pairs)
                        self.diagonal[places[name]] += slopes.square().sum(dim=0, dtype=torch.float64)


def columns_for(target: NetworkTarget, *, seed: int) -> Columns:
    """Return all columns of the Hessian's root if they are few, else random ones."""
    return Columns(target, num_drawn=num_drawn(target), seed=seed)

"""The covariance of one layer of which the curvature is diagonal in a Kronecker product of two bases.

H = W diag(s) W^T with W = U kron V, the eigenvectors of the outputs' and the features' factors. Where the biases have a precision
of their own, output direction i has the precision V (diag(s_i) + weight precision + d v v^T) V^T, v the last row of V and d
the difference of the precisions: a diagonal matrix and one of rank one, whose inverse and root are written down (Sherman and
Morrison 1950). With D = diag(s_i) + weight precision, q = D^{-1/2} v and c = 1 + d |q|^2,
L = W D^{-1/2} (I - g q q^T) W^T, g = (1 - c^{-1/2}) / |q|^2: exact for every prior, in bases that do not depend on it. As |v| = 1,
c = sum_j v_j^2 (s_ij + bias precision) / (s_ij + weight precision), of which no digits cancel where biases are nearly free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from bnncli.lazy import torch
from bnncli.parameters.layouts import MatrixLayout

if TYPE_CHECKING:
    from torch import Tensor


class _RankOne(NamedTuple):
    """What a precision of the biases' own adds, by output direction.

    Args:
        direction: q, (K, F).
        shrinkage: g, (K, 1).
        growth: c, (K, 1).
    """

    direction: Tensor
    shrinkage: Tensor
    growth: Tensor


@dataclass(frozen=True)
class InEigenbasis:
    """(W diag(s) W^T + Lambda)^{-1} over the parameters of one layer.

    Args:
        values: s, (K, F), not negative.
        output_basis, feature_basis: U (K, K) and V (F, F), orthogonal.
        weight_precision, bias_precision: of the prior.
        layout: how the augmented matrix (K, F) lies in the layer's parameters.
    """

    structure: ClassVar[str] = "kron"
    values: Tensor
    output_basis: Tensor
    feature_basis: Tensor
    weight_precision: float
    bias_precision: float
    layout: MatrixLayout

    @property
    def num_params(self) -> int:
        """Of the layer."""
        return self.values.numel()

    def unwhiten(self, z: Tensor) -> Tensor:
        """z L^T, (S, P)."""
        return self._from_basis(self._scales * self._shrunk(self._to_basis(z)))

    def whiten(self, x: Tensor) -> Tensor:
        """L^{-1} x, (S, P)."""
        scaled = self._to_basis(x) / self._scales
        if self._own_bias is not None:
            direction, shrinkage, growth = self._own_bias
            along = (scaled * direction).sum(dim=-1, keepdim=True)
            scaled = scaled + shrinkage * growth.sqrt() * along * direction
        return self._from_basis(scaled)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P)."""
        return self._from_basis(self.pull_back_turned(self._to_basis(gradient)))

    def pull_back_turned(self, gradient: Tensor) -> Tensor:
        """The same in the bases: of W^T gradient (..., K, F), less the turn back."""
        return self._shrunk(self._scales.to(gradient) * gradient)

    @property
    def variances(self) -> Tensor | None:
        """Of the coordinates in the bases, (K, F); None where they are correlated."""
        return self._scales.square() if self._own_bias is None else None

    def widest(self, count: int) -> Tensor | None:
        """Products of the bases' directions, those of the largest variances, (P, K) float64; None where they are correlated."""
        if self.variances is None:
            return None
        return self._from_basis(largest_coordinates(self.variances, count)).T.double()

    def log_det_scale(self) -> float:
        """log|det L|."""
        value = float(self._scales.double().log().sum())
        return value if self._own_bias is None else value - 0.5 * float(self._own_bias.growth.double().log().sum())

    def to_tensors(self) -> dict[str, Tensor]:
        """`values` (K, F), `outputs` (K, K) and `features` (F, F), float64: what the prior is not in."""
        tensors = {"values": self.values, "outputs": self.output_basis, "features": self.feature_basis}
        return {name: tensor.double().cpu().contiguous() for name, tensor in tensors.items()}

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> InEigenbasis:
        """A copy elsewhere or in another precision."""
        values, outputs, features = (
            tensor.to(device=device, dtype=dtype) for tensor in (self.values, self.output_basis, self.feature_basis)
        )
        return replace(self, values=values, output_basis=outputs, feature_basis=features)

    @cached_property
    def _scales(self) -> Tensor:
        """D^{-1/2}, (K, F)."""
        return (self.values + self.weight_precision).rsqrt()

    @cached_property
    def _own_bias(self) -> _RankOne | None:
        """None where the biases have the weights' precision."""
        difference = self.bias_precision - self.weight_precision
        if difference == 0 or not self.layout.has_bias:
            return None
        values, last = self.values.double(), self.feature_basis[-1].double()
        direction = (values + self.weight_precision).rsqrt() * last
        length = direction.square().sum(dim=1, keepdim=True)
        lifted = (values + self.bias_precision) / (values + self.weight_precision)
        growth = (lifted * last.square()).sum(dim=1, keepdim=True) / last.square().sum()
        shrinkage = (1 - growth.rsqrt()) / length
        return _RankOne(*(one.to(self.values.dtype) for one in (direction, shrinkage, growth)))

    def _shrunk(self, rotated: Tensor) -> Tensor:
        """(I - g q q^T) of coordinates (S, K, F) in the basis."""
        if self._own_bias is None:
            return rotated
        direction, shrinkage = self._own_bias.direction.to(rotated), self._own_bias.shrinkage.to(rotated)
        return rotated - shrinkage * (rotated * direction).sum(dim=-1, keepdim=True) * direction

    def _to_basis(self, x: Tensor) -> Tensor:
        """W^T x, (S, K, F)."""
        return self.output_basis.T @ self.layout.augment(x.to(self.values)) @ self.feature_basis

    def _from_basis(self, rotated: Tensor) -> Tensor:
        """W x, (S, P)."""
        return self.layout.flatten(self.output_basis @ rotated @ self.feature_basis.T)


def largest_coordinates(variances: Tensor, count: int) -> Tensor:
    """One-hot matrices (count, K, F) at the largest of variances (K, F); of equal ones the first."""
    places = variances.flatten().sort(descending=True, stable=True).indices[:count]
    found = variances.new_zeros(count, variances.numel()).scatter_(1, places.unsqueeze(1), 1.0)
    return found.unflatten(1, variances.shape)

"""The covariance of a layer whose curvature is diagonal in a Kronecker product of two bases.

H = W diag(s) W^T with W = U kron V, the eigenvectors of the output and feature factors. If the biases have a precision
of their own, output direction i has the precision V (diag(s_i) + weight precision + d v v^T) V^T, where v is the last
row of V and d the difference of the precisions: a diagonal matrix plus one of rank one, with a closed-form inverse and
root (Sherman and Morrison 1950). With D = diag(s_i) + weight precision, q = D^{-1/2} v and c = 1 + d |q|^2, L = W
D^{-1/2} (I - g q q^T) W^T, g = (1 - c^{-1/2}) / |q|^2. This is exact for every prior, in bases that do not depend on
it. As |v| = 1, c = sum_j v_j^2 (s_ij + bias precision) / (s_ij + weight precision), which loses no digits to
cancellation when biases are nearly free.
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
    """Rank-one term from a separate bias precision, by output direction.

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
        weight_precision, bias_precision: prior precisions.
        layout: position of the augmented matrix (K, F) in the layer's parameters.
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
        """Number of parameters of the layer."""
        return self.values.numel()

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._from_basis(self._scales * self._shrunk(self._to_basis(z)))

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        scaled = self._to_basis(x) / self._scales
        if self._own_bias is not None:
            direction, shrinkage, growth = self._own_bias
            along = (scaled * direction).sum(dim=-1, keepdim=True)
            scaled = scaled + shrinkage * growth.sqrt() * along * direction
        return self._from_basis(scaled)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._from_basis(self.pull_back_turned(self._to_basis(gradient)))

    def pull_back_turned(self, gradient: Tensor) -> Tensor:
        """Return the pull-back in the bases, given W^T gradient (..., K, F)."""
        return self._shrunk(self._scales.to(gradient) * gradient)

    @property
    def variances(self) -> Tensor | None:
        """Variances of the coordinates in the bases, (K, F); None if they are correlated."""
        return self._scales.square() if self._own_bias is None else None

    def widest(self, count: int) -> Tensor | None:
        """Return the widest products of basis vectors, (P, K) float64; None if coordinates are correlated."""
        if self.variances is None:
            return None
        return self._from_basis(largest_coordinates(self.variances, count)).T.double()

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        value = float(self._scales.double().log().sum())
        return value if self._own_bias is None else value - 0.5 * float(self._own_bias.growth.double().log().sum())

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `values` (K, F), `outputs` (K, K) and `features` (F, F), float64, without the prior."""
        tensors = {"values": self.values, "outputs": self.output_basis, "features": self.feature_basis}
        return {name: tensor.double().cpu().contiguous() for name, tensor in tensors.items()}

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> InEigenbasis:
        """Return a copy on another device or in another precision."""
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
        """The rank-one term; None if biases have the weights' precision."""
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
        """Return (I - g q q^T) times coordinates (S, K, F) in the basis."""
        if self._own_bias is None:
            return rotated
        direction, shrinkage = self._own_bias.direction.to(rotated), self._own_bias.shrinkage.to(rotated)
        return rotated - shrinkage * (rotated * direction).sum(dim=-1, keepdim=True) * direction

    def _to_basis(self, x: Tensor) -> Tensor:
        """Return W^T x, (S, K, F)."""
        return self.output_basis.T @ self.layout.augment(x.to(self.values)) @ self.feature_basis

    def _from_basis(self, rotated: Tensor) -> Tensor:
        """Return W x, (S, P)."""
        return self.layout.flatten(self.output_basis @ rotated @ self.feature_basis.T)


def largest_coordinates(variances: Tensor, count: int) -> Tensor:
    """Return one-hot matrices (count, K, F) at the largest of variances (K, F); ties go to the first."""
    places = variances.flatten().sort(descending=True, stable=True).indices[:count]
    found = variances.new_zeros(count, variances.numel()).scatter_(1, places.unsqueeze(1), 1.0)
    return found.unflatten(1, variances.shape)

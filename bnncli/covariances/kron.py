"""The Kronecker-factored covariance: H is approximated by B kron A, outputs times features.

With A = V diag(a) V^T and B = U diag(b) U^T, Sigma = (U kron V) diag(1 / (b_i a_j + precision)) (U kron V)^T exactly. L
is its symmetric root, which does not depend on the signs and the order of the eigenvectors.

If the biases have a precision of their own, they are rescaled to the weights' precision: R = diag(1, ..., 1,
sqrt(weight precision / bias precision)) turns B kron A + I kron Lambda into B kron R A R + precision I, and L = (I kron
R) times the symmetric root of the inverse. This is still exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.covariances._eigenbasis import largest_coordinates
from bnncli.covariances._layers import KronLayers
from bnncli.lazy import torch
from bnncli.parameters.layouts import MatrixLayout
from bnncli.parameters.prior import Prior
from bnncli.system.signals import eigenvectors

if TYPE_CHECKING:
    from torch import Tensor

_FACTOR = "hessian.kron.A"  # the feature factor of a head; parts of layers have longer names


@dataclass(frozen=True)
class Kron:
    """(B kron A + Lambda)^{-1} in a joint eigenbasis; build with from_hessian.

    Args:
        feature_factor, output_factor: A (F, F) with F = D + 1 (D without a bias), B (K, K).
        feature_values, output_values: eigenvalues a (F,) of R A R and b (K,) of B.
        feature_basis, output_basis: eigenvectors V (F, F) of R A R and U (K, K) of B, in columns.
        scales: (K, F), (b_i a_j + weight precision)^{-1/2}.
        prior: of weights and biases.
        layout: position of the augmented matrix (K, F) in theta.
    """

    structure: ClassVar[str] = "kron"
    feature_factor: Tensor
    output_factor: Tensor
    feature_values: Tensor
    output_values: Tensor
    feature_basis: Tensor
    output_basis: Tensor
    scales: Tensor
    prior: Prior
    layout: MatrixLayout

    @property
    def num_params(self) -> int:
        """P."""
        return self.scales.numel()

    @property
    def bias_unit(self) -> float:
        """Last entry of R, the scale of the biases; 1 if they have the weights' precision."""
        return _bias_unit(self.prior, self.layout)

    @classmethod
    def from_hessian(
        cls, hessian: dict[str, Tensor], prior: Prior, layout: MatrixLayout, *, before: Kron | None = None
    ) -> Kron | KronLayers:
        """Return (B kron A + Lambda)^{-1} with prior precisions Lambda, per layer if the Hessian has several.

        Args:
            before: another covariance; reuses the eigenvectors of each factor that is the same tensor. Those of A
                depend on the prior only through the scale of the biases, so with a single precision they are computed
                once.

        Raises:
            NumericError: a factor is not finite.
        """
        if _FACTOR not in hessian:
            return KronLayers.from_hessian(hessian, prior, layout)
        feature_factor, output_factor = hessian[_FACTOR].double(), hessian["hessian.kron.B"].double()
        unit = _bias_unit(prior, layout)
        if before is not None and before.feature_factor is feature_factor and before.bias_unit == unit:
            feature_values, feature_basis = before.feature_values, before.feature_basis
        else:
            feature_values, feature_basis = _eigenvectors(_in_bias_units(feature_factor, unit))
        if before is not None and before.output_factor is output_factor:
            output_values, output_basis = before.output_values, before.output_basis
        else:
            output_values, output_basis = _eigenvectors(output_factor)
        curvature = torch.outer(output_values.clamp(min=0), feature_values.clamp(min=0))
        scales = (curvature + prior.weight_precision).rsqrt()
        return cls(
            feature_factor, output_factor, feature_values, output_values, feature_basis, output_basis, scales, prior, layout
        )  # fmt: skip

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._scale_biases(self._in_eigenbasis(z, self.scales), self.bias_unit)

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return self._in_eigenbasis(self._scale_biases(x, 1 / self.bias_unit), 1 / self.scales)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._in_eigenbasis(self._scale_biases(gradient, self.bias_unit), self.scales)

    def rotated(self) -> RotatedKron:
        """Return another root of the same covariance, which takes half the products."""
        return RotatedKron(self)

    def widest(self, count: int) -> Tensor | None:
        """Return the products of eigenvectors with the largest variances, (P, K) float64; None if biases are rescaled."""
        if self.bias_unit != 1:
            return None
        chosen = largest_coordinates(self.scales, count)
        return self.layout.flatten(self.output_basis @ chosen @ self.feature_basis.T).T.double()

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(self.scales.double().log().sum()) + self.layout.num_outputs * math.log(self.bias_unit)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `hessian.kron.A`, `hessian.kron.B` and the prior's tensors; loading recomputes the eigenbasis."""
        return {
            _FACTOR: self.feature_factor.double().cpu().contiguous(),
            "hessian.kron.B": self.output_factor.double().cpu().contiguous(),
            **self.prior.to_tensors(),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: MatrixLayout) -> Kron | KronLayers:
        """Invert to_tensors."""
        return cls.from_hessian(tensors, Prior.from_tensors(tensors), layout)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Kron:
        """Return a copy on another device or in another precision."""
        tensors: dict[str, Any] = {
            field.name: value.to(device=device, dtype=dtype)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **tensors)

    def _scale_biases(self, x: Tensor, factor: float) -> Tensor:
        """Multiply the biases in x (..., P) by a factor."""
        if factor == 1:
            return x
        size = self.layout.num_outputs * self.layout.num_features
        return torch.cat([x[..., :size], x[..., size:] * factor], dim=-1)

    def _in_eigenbasis(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply the coordinates of x (S, P) in the joint eigenbasis by factors (K, F)."""
        matrix = self.layout.augment(x.to(self.scales))
        rotated = (self.output_basis.T @ matrix @ self.feature_basis) * factors
        return self.layout.flatten(self.output_basis @ rotated @ self.feature_basis.T)


@dataclass(frozen=True)
class RotatedKron:
    """L R, with L of a Kron and R the rotation to its eigenbasis; for linear systems, whose coordinates do not matter."""

    kron: Kron

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z (L R)^T, (S, P)."""
        kron = self.kron
        scaled = kron.layout.augment(z.to(kron.scales)) * kron.scales
        rotated = kron.layout.flatten(kron.output_basis @ scaled @ kron.feature_basis.T)
        return kron._scale_biases(rotated, kron.bias_unit)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L R, (S, P)."""
        kron = self.kron
        matrix = kron.layout.augment(kron._scale_biases(gradient, kron.bias_unit).to(kron.scales))
        return kron.layout.flatten((kron.output_basis.T @ matrix @ kron.feature_basis) * kron.scales)

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RotatedKron:
        """Return a copy on another device or in another precision."""
        return RotatedKron(self.kron.to(device=device, dtype=dtype))


def _eigenvectors(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (F,) and eigenvectors (F, F) of a factor. Raises NumericError if it is not finite."""
    return eigenvectors(factor, what="the Kronecker factors of the Hessian")


def _bias_unit(prior: Prior, layout: MatrixLayout) -> float:
    """Return sqrt(weight precision / bias precision); 1 without a bias or a separate precision."""
    if prior.is_isotropic or prior.bias_precision is None or not layout.has_bias:
        return 1.0
    return math.sqrt(prior.weight_precision / prior.bias_precision)


def _in_bias_units(factor: Tensor, unit: float) -> Tensor:
    """Return R A R, (F, F), for A (F, F)."""
    if unit == 1:
        return factor
    scaled = factor.clone()
    scaled[-1] *= unit
    scaled[:, -1] *= unit
    return scaled

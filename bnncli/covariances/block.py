"""The block covariance: all pairs of parameters of the same output.

One F x F matrix per output: K F^2 numbers, where a full covariance has K^2 F^2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bnncli.covariances._layers import BlockLayers
from bnncli.covariances._roots import inverse_root
from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.parameters.layouts import MatrixLayout
from bnncli.parameters.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Sigma_k = L_k L_k^T for each output k, with L_k lower triangular.

    Args:
        scale_tril: (K, F, F), in the order of the augmented matrix: an output's weights, then its bias.
        layout: position of the augmented matrix (K, F) in theta.
        jitter: added to the precisions' diagonals to factor them; nearly always 0.
    """

    structure: ClassVar[str] = "block"
    scale_tril: Tensor
    layout: MatrixLayout
    jitter: float = 0.0

    @property
    def num_params(self) -> int:
        """P."""
        return self.scale_tril.shape[0] * self.scale_tril.shape[1]

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: MatrixLayout) -> Block | BlockLayers:
        """Return (H_k + Lambda_k)^{-1} for each output, with prior precisions Lambda_k, factored in float64.

        If the Hessian has parts for several layers, each gets a block.

        Raises:
            NumericError: a block is not finite, or not positive definite with the largest jitter.
        """
        if "hessian.block" not in hessian:
            return BlockLayers.from_hessian(hessian, prior, layout)
        precision = hessian["hessian.block"].double().clone()
        if not torch.isfinite(precision).all():
            raise NumericError("the blocks of the Hessian are not finite", hint="check the features")
        precision.diagonal(dim1=1, dim2=2).add_(layout.augment(prior.diagonal(layout, device=precision.device)))
        scale, jitter = inverse_root(precision)
        return cls(scale, layout, jitter)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._by_output(z, self.scale_tril.mT)

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        columns = self.layout.augment(x.to(self.scale_tril)).permute(1, 2, 0)
        solved = torch.linalg.solve_triangular(self.scale_tril, columns, upper=False)
        return self.layout.flatten(solved.permute(2, 0, 1))

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._by_output(gradient, self.scale_tril)

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(self.scale_tril.diagonal(dim1=1, dim2=2).double().log().sum())

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `cov.block.scale_tril` (K, F, F) and `cov.jitter` (1,), float64."""
        jitter = torch.tensor([self.jitter], dtype=torch.float64)
        return {"cov.block.scale_tril": self.scale_tril.double().cpu().contiguous(), "cov.jitter": jitter}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: MatrixLayout) -> Block | BlockLayers:
        """Invert to_tensors."""
        if "cov.block.scale_tril" not in tensors:
            return BlockLayers.from_tensors(tensors, layout)
        scale, size = tensors["cov.block.scale_tril"], layout.num_features + layout.has_bias
        if scale.shape != (layout.num_outputs, size, size):
            raise ValueError(f"cov.block.scale_tril: expected {(layout.num_outputs, size, size)}, got {scale.shape}")
        return cls(scale, layout, float(tensors["cov.jitter"]))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Block:
        """Return a copy on another device or in another precision."""
        return replace(self, scale_tril=self.scale_tril.to(device=device, dtype=dtype))

    def _by_output(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Multiply each output's parameters in x (S, P), as a row vector, by its matrix of (K, F, F)."""
        rows = self.layout.augment(x.to(self.scale_tril)).transpose(0, 1)
        return self.layout.flatten((rows @ matrices).transpose(0, 1))

"""The covariance of several layers: independent, consecutive pieces of theta."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from bnncli.covariances import Covariance
from bnncli.covariances._eigenbasis import InEigenbasis
from bnncli.covariances._roots import inverse_root
from bnncli.covariances.diag import Diag
from bnncli.covariances.full import Full
from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout, ParamLayout
from bnncli.parameters.module import module_places
from bnncli.parameters.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class InLayers:
    """Sigma with one block per consecutive piece of theta.

    Args:
        pieces: in theta order.
        stored: tensors of the posterior file, float64.
    """

    structure: ClassVar[str]
    pieces: tuple[Covariance, ...]
    stored: dict[str, Tensor]

    @property
    def num_params(self) -> int:
        """P."""
        return sum(piece.num_params for piece in self.pieces)

    @property
    def jitter(self) -> float:
        """Largest jitter added to a piece's precision."""
        return max(float(getattr(piece, "jitter", 0.0)) for piece in self.pieces)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._each(z, lambda piece, some: piece.unwhiten(some))

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return self._each(x, lambda piece, some: piece.whiten(some))

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._each(gradient, lambda piece, some: piece.pull_back(some))

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return sum(piece.log_det_scale() for piece in self.pieces)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors, float64."""
        return {name: tensor.double().cpu().contiguous() for name, tensor in self.stored.items()}

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Return a copy on another device or in another precision; stored tensors stay float64."""
        pieces = tuple(piece.to(device=device, dtype=dtype) for piece in self.pieces)
        return type(self)(pieces, {name: tensor.to(device=device) for name, tensor in self.stored.items()})

    def _each(self, x: Tensor, work: Callable[[Covariance, Tensor], Tensor]) -> Tensor:
        """Apply `work` to each piece of x (S, P)."""
        parts = x.split([piece.num_params for piece in self.pieces], dim=-1)
        return torch.cat([work(piece, part) for piece, part in zip(self.pieces, parts, strict=True)], dim=-1)


class EigenLayers(InLayers):
    """Curvatures that are diagonal in a Kronecker product of bases, one per layer; other parameters have a diagonal.

    H has parts `hessian.<structure>.<weight's name>.` with `values` (K, F), `outputs` (K, K) and `features` (F, F), for
    a weight as a matrix, and for its bias if F is one more than the number of columns; and `hessian.<structure>.rest`,
    the diagonal of all other parameters, in theta order. A file stores these parts and the prior.
    """

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Self:
        """Return (H + Lambda)^{-1}. Raises NumericError if H is not finite."""
        stored = {name: part.double() for name, part in hessian.items() if name.startswith("hessian.")}
        if not all(torch.isfinite(part).all() for part in stored.values()):
            raise NumericError("the Hessian is not finite", hint="check the inputs")
        precisions, prefix = prior.diagonal(layout), f"hessian.{cls.structure}"
        pieces: list[Covariance] = []
        parts, taken = iter(layout.parts), 0
        for part in parts:
            values = stored.get(f"{prefix}.{part.name}.values")
            if values is None:
                rest, size = stored[f"{prefix}.rest"], math.prod(part.shape)
                pieces.append(Diag(1 / (rest[taken : taken + size] + precisions[part.place].to(rest.device))))
                taken += size
                continue
            own = HeadLayout(part.shape[0], math.prod(part.shape[1:]), has_bias=False)
            has_bias = values.shape[1] == own.num_features + 1
            last = next(parts) if has_bias else part
            pieces.append(
                InEigenbasis(
                    values.clamp(min=0),
                    stored[f"{prefix}.{part.name}.outputs"],
                    stored[f"{prefix}.{part.name}.features"],
                    float(precisions[part.offset]),
                    float(precisions[last.offset]),
                    HeadLayout(own.num_outputs, own.num_features, has_bias=has_bias),
                )
            )
        return cls(tuple(pieces), stored | prior.to_tensors())

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        return cls.from_hessian(tensors, Prior.from_tensors(tensors), layout)


class KronLayers(EigenLayers):
    """Kronecker factors, one pair per layer."""

    structure: ClassVar[str] = "kron"


class BlockLayers(InLayers):
    """A full block per module, `hessian.block.<module>`; a file stores the root of its inverse."""

    structure: ClassVar[str] = "block"

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Self:
        """Return (H + Lambda)^{-1}. Raises NumericError if a block is not finite or not positive definite."""
        precisions = prior.diagonal(layout)
        pieces: dict[str, Full] = {}
        for module, place in module_places(layout).items():
            precision = hessian[f"hessian.block.{module}"].double().clone()
            if not torch.isfinite(precision).all():
                raise NumericError("the blocks of the Hessian are not finite", hint="check the inputs")
            precision.diagonal().add_(precisions[place].to(precision.device))
            pieces[module] = Full(*inverse_root(precision))
        stored = {f"cov.block.{module}.scale_tril": piece.scale_tril for module, piece in pieces.items()}
        jitter = max(piece.jitter for piece in pieces.values())
        return cls(tuple(pieces.values()), stored | {"cov.jitter": torch.tensor([jitter], dtype=torch.float64)})

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Self:
        """Invert to_tensors."""
        jitter = float(tensors["cov.jitter"])
        stored = {name: tensor for name, tensor in tensors.items() if name.startswith("cov.")}
        names = [f"cov.block.{module}.scale_tril" for module in module_places(layout)]
        return cls(tuple(Full(stored[name], jitter) for name in names), stored)

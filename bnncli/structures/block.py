"""The block structure: all pairs of parameters of the same output of a last layer, or of the same module of a network.

A last layer has one F x F matrix per output, H_k = sum_n p_k (1 - p_k) x x^T: K F^2 numbers, where a full covariance
has K^2 F^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout, MatrixLayout, ParamLayout
from bnncli.parameters.module import module_places
from bnncli.parameters.prior import Prior
from bnncli.structures import Covariance, Operations
from bnncli.structures.factorisation import inverse_root
from bnncli.structures.full import Full
from bnncli.structures.logits import Independent, LogitCovariance
from bnncli.structures.network_logits import BlockRoot, Blocks, PulledBlock, consecutive_places
from bnncli.structures.network_sums import weighted_rows
from bnncli.targets.grams import tiles, weighted_grams
from bnncli.targets.last_layer import scale_by_likelihood, sum_over_examples

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.network import NetworkTarget


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

    def head_logits(self, layout: HeadLayout) -> LogitCovariance:
        """Return independent logits with variances |L_k^T x|^2, O(K F^2) per example."""
        scale_tril = self.scale_tril
        num_outputs, size = scale_tril.shape[:2]

        def variance(features: Tensor) -> Tensor:
            augmented = layout.augment_features(features).to(scale_tril)
            variances = augmented.new_empty(len(augmented), num_outputs)
            for rows, outputs in tiles(augmented, num_outputs):
                roots = scale_tril[outputs].transpose(0, 1).reshape(size, -1)
                variances[rows, outputs] = (augmented[rows] @ roots).unflatten(1, (-1, size)).square().sum(dim=2)
            return variances.to(features.dtype)

        return Independent(variance)

    @staticmethod
    def network_root() -> type[BlockRoot]:
        """Return the kind of block that a layer's Jacobian is multiplied by."""
        return PulledBlock

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

    def logit_blocks(self) -> Blocks:
        """Return one block per layer."""

        def blocks(places: Sequence[slice]) -> list[tuple[slice, BlockRoot]]:
            own = consecutive_places(self.pieces)
            return [(place, self._logit_block(piece)) for place, piece in zip(own, self.pieces, strict=True)]

        return blocks

    @staticmethod
    def _logit_block(piece: Covariance) -> BlockRoot:
        return PulledBlock(piece)

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


class LastLayerBlock:
    """`hessian.block` (K, F, F)."""

    order: ClassVar[int] = 20
    about: ClassVar[str] = "all pairs of one output's parameters"
    is_exact: ClassVar[bool] = False
    is_same_in_span: ClassVar[bool] = True
    is_fitted_in_span: ClassVar[bool] = True
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: LastLayerTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.block`, (K, F, F) float64."""
        (total,) = sum_over_examples(target, theta, partial(_sum_block, target.layout.likelihood))
        return {"hessian.block": scale_by_likelihood(total, target)}

    @staticmethod
    def num_elements(layout: MatrixLayout) -> int:
        """Return K F^2."""
        return layout.num_params * (layout.num_features + layout.has_bias)

    @staticmethod
    def operations(layout: MatrixLayout, num_examples: int) -> Operations:
        """Count 2 N K F^2 for products, and a Cholesky factor and its inverse per output."""
        num_outputs, size = layout.num_outputs, layout.num_features + layout.has_bias
        factors = 4 / 3 * num_outputs * float(size) ** 3
        return Operations(products=2 * num_examples * num_outputs * size**2, factors=factors)

    @staticmethod
    def most_elements(layout: MatrixLayout, *, largest_full: int, in_span: bool) -> float:
        """Return the size whose sums cost as much as the largest full structure's, with a quarter of its products.

        In the span, which has few examples, compare the factorisations instead.
        """
        if in_span:
            return largest_full**3 // (3 * (layout.num_features + layout.has_bias))
        return largest_full**2 // 4


def _sum_block(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n p_k (1 - p_k) x x^T, (K, F, F), from features (n, F) and probabilities (K, n)."""
    weights = likelihood.hessian_diagonal(probabilities)
    return (weighted_grams(lambda rows: weights[:, rows], features, count=weights.shape[0]),)


class NetworkBlock:
    """`hessian.block.<module>`, (F, F) each, for the F parameters of the module itself."""

    order: ClassVar[int] = 20
    about: ClassVar[str] = "all pairs of one module's parameters"
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.block.<module>`, (F, F) float64 each."""
        places = module_places(target.layout)
        totals = {
            module: torch.zeros(place.stop - place.start, place.stop - place.start, dtype=torch.float64).to(
                target.device
            )
            for module, place in places.items()
        }
        for rows in weighted_rows(target, theta):
            for module, place in places.items():
                totals[module] += rows[:, place].T @ rows[:, place]
        return {f"hessian.block.{module}": total * target.likelihood_scale for module, total in totals.items()}

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return the sum of F^2."""
        return sum((place.stop - place.start) ** 2 for place in module_places(layout).values())

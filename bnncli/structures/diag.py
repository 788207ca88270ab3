"""The diagonal structure: every parameter is independent of all others.

H of a last layer is sum_n p_k (1 - p_k) x_d^2. H of a network comes from squared per-example gradients for each column
of the Hessian's root, one layer at a time. For a linear layer used once per example, that is the product of two sums,
(sum_m g_m^2) x^2, without any gradients. Other layers compute gradients (n, P_l) for a few examples at once, never
Jacobians of all outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from bnncli.errors import NumericError
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.parameters.layouts import HeadLayout, ParamLayout, ParamPart
from bnncli.parameters.prior import Prior
from bnncli.structures import Operations
from bnncli.structures.logits import Independent, LogitCovariance
from bnncli.structures.network_logits import BlockRoot, Blocks, MatrixDerivatives, Turned, build_turned, weighted_root
from bnncli.structures.network_sums import (
    Columns,
    MatrixUse,
    PatchesUse,
    Piece,
    Use,
    diagonal_of,
    find_checked,
    forward,
    gradients,
    matrices_of,
    place_of,
    scales_of,
)
from bnncli.targets.last_layer import scale_by_likelihood, sum_over_examples

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.network import NetworkTarget


@dataclass(frozen=True)
class Diag:
    """Independent parameters.

    Args:
        variances: (P,), positive.
    """

    structure: ClassVar[str] = "diag"
    variances: Tensor

    @property
    def num_params(self) -> int:
        """P."""
        return self.variances.shape[0]

    @classmethod
    def from_hessian(cls, hessian: dict[str, Tensor], prior: Prior, layout: ParamLayout) -> Diag:
        """Return 1 / (diag(H) + prior precisions). Raises NumericError if that is not finite."""
        curvature = hessian["hessian.diag"].double()
        variances = 1 / (curvature + prior.diagonal(layout, device=curvature.device))
        if not (torch.isfinite(curvature).all() and torch.isfinite(variances).all()):
            raise NumericError("the diagonal of the Hessian is not finite", hint="check the features")
        return cls(variances)

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return z.to(self.variances) * self.variances.sqrt()

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return x.to(self.variances) / self.variances.sqrt()

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self.unwhiten(gradient)

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return float(0.5 * self.variances.double().log().sum())

    def widest(self, count: int) -> Tensor:
        """Return the coordinates of the largest variances as one-hot directions (P, K); ties go to the first."""
        places = self.variances.sort(descending=True, stable=True).indices[:count]
        basis = torch.zeros(self.num_params, count, dtype=torch.float64, device=places.device)
        return basis.scatter_(0, places.unsqueeze(0), 1.0)

    def marginal_variances(self) -> Tensor:
        """Return the variances, (P,)."""
        return self.variances

    def head_logits(self, layout: HeadLayout) -> LogitCovariance:
        """Return independent logits with variances x^2 . sigma_k^2, O(K F) per example."""
        variances = self.variances

        def variance(features: Tensor) -> Tensor:
            squares = layout.augment_features(features).to(variances).square()
            return (squares @ layout.augment(variances).T).to(features.dtype)

        return Independent(variance)

    def logit_blocks(self) -> Blocks:
        """Return one diagonal block per layer: sum_p J_p^2 sigma_p^2."""

        def blocks(places: Sequence[slice]) -> list[tuple[slice, BlockRoot]]:
            return [(place, Scaled(self.variances[place])) for place in places]

        return blocks

    @staticmethod
    def network_root() -> type[BlockRoot]:
        """Return the kind of block that a layer's Jacobian is multiplied by."""
        return Scaled

    def to_tensors(self) -> dict[str, Tensor]:
        """Return `cov.diag`, (P,) float64."""
        return {"cov.diag": self.variances.double().cpu().contiguous()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], layout: ParamLayout) -> Diag:
        """Invert to_tensors."""
        return cls(tensors["cov.diag"])

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Diag:
        """Return a copy on another device or in another precision."""
        return replace(self, variances=self.variances.to(device=device, dtype=dtype))


class LastLayerDiag:
    """`hessian.diag` (P,)."""

    order: ClassVar[int] = 40
    about: ClassVar[str] = ""
    is_exact: ClassVar[bool] = False
    is_same_in_span: ClassVar[bool] = False
    is_fitted_in_span: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: LastLayerTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.diag`, (P,) float64."""
        (total,) = sum_over_examples(target, theta, partial(_sum_block, target.layout.likelihood))
        return {"hessian.diag": scale_by_likelihood(target.layout.flatten(total), target)}

    @staticmethod
    def num_elements(layout: ParamLayout) -> int:
        """Return P."""
        return layout.num_params

    @staticmethod
    def operations(layout: ParamLayout, num_examples: int) -> Operations:
        """Count 2 N P elementwise operations."""
        return Operations(elementwise=2 * num_examples * layout.num_params, factors=float(layout.num_params))

    @staticmethod
    def most_elements(layout: ParamLayout, *, largest_full: int, in_span: bool) -> float:
        """Return infinity: any size is fast enough."""
        return math.inf


def _sum_block(likelihood: Likelihood, features: Tensor, probabilities: Tensor) -> tuple[Tensor, ...]:
    """Return sum_n p_k (1 - p_k) x_d^2, (K, F), from features (n, F) and probabilities (K, n)."""
    return ((likelihood.hessian_diagonal(probabilities) @ features.square()).double(),)


_GRADIENT_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # of per-example gradients of a layer at once


class NetworkDiag:
    """`hessian.diag` (P,)."""

    order: ClassVar[int] = 70
    about: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ggn", "fisher")
    is_exact: ClassVar[bool] = False
    fixed: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def hessian(target: NetworkTarget, theta: Tensor) -> dict[str, Tensor]:
        """Return `hessian.diag`, (P,) float64."""
        layout = target.layout
        theta = theta.to(target.device, target.dtype)
        total = torch.zeros(layout.num_params, dtype=torch.float64, device=target.device)
        pieces = find_checked(
            layout, theta, target.inputs[:2].to(target.device), [*matrices_of(layout), *scales_of(layout)]
        )
        known = {part.name for piece in pieces for part in piece.parts}
        _add_pieces(total, target, theta, pieces)
        others: list[ParamPart] = [part for part in layout.parts if part.name not in known]
        columns = Columns(target, num_drawn=0, seed=0)
        for part, values in zip(others, diagonal_of(target, theta, others, columns), strict=True):
            total[part.place] = values
        return {"hessian.diag": total.mul_(target.likelihood_scale)}

    @staticmethod
    def num_elements(layout: ModuleLayout) -> int:
        """Return P."""
        return layout.num_params


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
    size = max(1, _GRADIENT_ELEMENTS.get(total.device.type, 2**20) // len(total))
    for start in range(0, use.num_examples, size):
        some = slice(start, start + size)
        parts = [one.of(some).per_example(slope[some]) for one, slope in pairs]
        whole = parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)
        total += whole.square_().sum(dim=0, dtype=torch.float64)


@dataclass(frozen=True)
class Scaled:
    """A diagonal block.

    Args:
        variances: (p,).
    """

    num_copies: ClassVar[int] = 3  # the Jacobian and its float64 image
    variances: Tensor

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return Jacobians (n, K, p) times standard deviations."""
        return rows * self.variances.sqrt().to(rows)

    def turn(self, layer: MatrixDerivatives) -> Turned:
        """Return the Jacobian as it is, with a bias as last column."""
        return build_turned(*layer.in_bases(), has_bias=layer.has_bias)

    def of_turned(self, turned: Turned) -> Tensor:
        """Return the Jacobian in a matrix (outputs, F) times standard deviations."""
        num_outputs = turned.slopes.shape[2]
        has_bias = turned.has_bias
        layout = HeadLayout(num_outputs, len(self.variances) // num_outputs - has_bias, has_bias=has_bias)
        return weighted_root(turned, layout.augment(self.variances))

    def turns_as(self, other: BlockRoot) -> bool:
        """Return whether the other block is diagonal."""
        return isinstance(other, Scaled)

    @property
    def spectrum(self) -> None:
        """None: the curvature is not known apart from the prior."""

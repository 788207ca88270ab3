"""The directions of weight space that training features reach, and those that they do not.

The logits of N training examples depend on an output's weights w (D,) only through the rows of the features. These span
a space of r <= min(N, D) dimensions. Along every direction orthogonal to it the likelihood is flat, so under a prior of
independent Gaussians the posterior there is the prior, independent of the rest and of the other outputs. With an
orthonormal basis Q (D, r) of the rows, theta = (W Q, b) in K (r + 1) numbers carries the whole target: log p(D, W, b) =
log p(D, W Q, b) + log N(W (I - Q Q^T)). Modes, Hessians and evidence are those of the features Phi Q, and nothing of
size D x D is computed. That a minimiser is in the span of the data is the representer theorem (Kimeldorf and Wahba
1971).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout, reduced_layout
from bnncli.parameters.prior import Prior
from bnncli.shapes import check_shapes
from bnncli.system.signals import interruptible
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from torch import Tensor

_OUTSIDE = 1e-4  # of a row's length; rounding to float32 leaves 1e-7, another data set half of it or more


@dataclass(frozen=True)
class RowSpace:
    """The span of the features' rows, and the split of theta into span and rest.

    Args:
        basis: Q (D, r), float64, orthonormal columns.
        layout: of all of theta, K outputs of D features.
    """

    basis: Tensor
    layout: HeadLayout

    def __post_init__(self) -> None:
        check_shapes(basis=(self.basis, f"{self.layout.num_features} R"))

    @classmethod
    def of(cls, features: Tensor, layout: HeadLayout) -> RowSpace:
        """Compute the span of features (N, D) by a Householder factorisation in float64.

        Singular values below max(N, D) times float64 epsilon times the largest count as zero, as in numpy's
        matrix_rank. A basis that is too large does no harm: in the extra directions the posterior is the prior.
        """
        rows = features.double()
        size, length = min(rows.shape), max(rows.shape)
        long = partial(interruptible, device=rows.device, name="the span of the features")
        basis, triangle = long(lambda: torch.linalg.qr(rows.T), operations=4.0 * length * size**2)
        negligible = max(rows.shape) * torch.finfo(torch.float64).eps
        diagonal = triangle.diagonal().abs()
        if bool((diagonal <= negligible * torch.linalg.norm(triangle)).any()):
            left, values, _ = long(
                lambda: torch.linalg.svd(triangle, full_matrices=False), operations=20.0 * length * size**2
            )
            rank = max(1, int((values > negligible * values[0]).sum()))
            basis = basis @ left[:, :rank]
        return cls(basis.contiguous(), layout)

    @property
    def rank(self) -> int:
        """Dimension of the span, r."""
        return self.basis.shape[1]

    @property
    def num_outside(self) -> int:
        """K (D - r): number of weight coordinates whose posterior is the prior."""
        return self.layout.num_outputs * (self.layout.num_features - self.rank)

    @property
    def reduced(self) -> HeadLayout:
        """Layout of theta inside the span: K outputs of r features."""
        return reduced_layout(self.layout, self.rank)

    def coordinates(self, features: Tensor) -> Tensor:
        """Return Phi Q, (n, r), in the basis' precision, for features (n, D)."""
        return features.to(self.basis) @ self.basis

    def outside(self, features: Tensor) -> Tensor:
        """Return the squared length, (n,), in the basis' precision, of the part of features (n, D) outside the span."""
        rows = features.to(self.basis)
        return (rows - (rows @ self.basis) @ self.basis.T).square().sum(dim=1)

    def has(self, features: Tensor) -> bool:
        """Return whether all rows of features (n, D) are in the span, up to rounding."""
        lengths = features.to(self.basis).square().sum(dim=1)
        return bool((self.outside(features) <= _OUTSIDE**2 * lengths).all())

    def reduce(self, theta: Tensor) -> Tensor:
        """Return (W Q, b), (..., K (r + 1)), for theta (..., P), in theta's precision."""
        weight, bias = self.layout.split(theta)
        return self.reduced.join(weight @ self.basis.to(weight), bias)

    def lift(self, theta: Tensor) -> Tensor:
        """Return theta (..., P), zero outside the span, from (..., K (r + 1)); reduce is its inverse."""
        weight, bias = self.reduced.split(theta)
        return self.layout.join(weight @ self.basis.T.to(weight), bias)

    def lift_about(self, theta: Tensor, prior: Prior) -> Tensor:
        """Return theta (..., P), equal to the prior's mean outside the span, from (..., K (r + 1))."""
        lifted = self.lift(theta)
        if prior.mean is None:
            return lifted
        mean = prior.mean.to(lifted)
        return lifted + mean - self.lift(self.reduce(mean))

    def prior(self, prior: Prior) -> Prior:
        """Return the prior of (W Q, b) for a prior of theta."""
        return prior if prior.mean is None else replace(prior, mean=self.reduce(prior.mean.to(self.basis)))

    def target(self, target: LastLayerTarget) -> LastLayerTarget:
        """Return the same log posterior as a function of (W Q, b), without the prior's density outside the span.

        Products use the target's own precision.
        """
        features = self.coordinates(target.features.to(self.basis.device)).to(target.device, target.dtype)
        return replace(target, features=features, layout=self.reduced, prior=self.prior(target.prior))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RowSpace:
        """Return a copy on another device or in another precision."""
        return replace(self, basis=self.basis.to(device=device, dtype=dtype))

"""The directions of weight space that training features reach, and those that they do not.

The logits of N training examples depend on an output's weights w (D,) through the features' rows alone. Those span a space
of r <= min(N, D) dimensions, and along every direction orthogonal to it the likelihood is flat: there the posterior under
a prior of independent Gaussians is the prior itself, independent of the rest and of the other outputs. With Q (D, r) an
orthonormal basis of the rows, theta = (W Q, b) in K (r + 1) numbers has the whole target: log p(D, W, b) =
log p(D, W Q, b) + log N(W (I - Q Q^T)), so that modes, Hessians and evidence are those of the features Phi Q. Nothing of
D x D is made. That a minimiser lies in the span of the data is the representer theorem (Kimeldorf and Wahba 1971).
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
    """The span of the features' rows, and how theta divides between it and the rest.

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
        """The span of features (N, D), by a Householder factorisation in float64.

        Singular values below max(N, D) times the float64 rounding times the largest count as zero, as numpy's matrix_rank
        has it. A basis that is larger than the span loses nothing: what it has too many has the prior for its posterior.
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
        """r."""
        return self.basis.shape[1]

    @property
    def num_outside(self) -> int:
        """K (D - r): the weights' coordinates whose posterior is the prior."""
        return self.layout.num_outputs * (self.layout.num_features - self.rank)

    @property
    def reduced(self) -> HeadLayout:
        """The layout of theta inside the span: K outputs of r features."""
        return reduced_layout(self.layout, self.rank)

    def coordinates(self, features: Tensor) -> Tensor:
        """Phi Q, (n, r), in the basis' precision, of features (n, D)."""
        return features.to(self.basis) @ self.basis

    def outside(self, features: Tensor) -> Tensor:
        """Squared length, (n,), in the basis' precision, of what of features (n, D) lies outside the span."""
        rows = features.to(self.basis)
        return (rows - (rows @ self.basis) @ self.basis.T).square().sum(dim=1)

    def has(self, features: Tensor) -> bool:
        """Whether all rows of features (n, D) lie in the span, but for rounding."""
        lengths = features.to(self.basis).square().sum(dim=1)
        return bool((self.outside(features) <= _OUTSIDE**2 * lengths).all())

    def reduce(self, theta: Tensor) -> Tensor:
        """(W Q, b), (..., K (r + 1)), of theta (..., P), in theta's precision."""
        weight, bias = self.layout.split(theta)
        return self.reduced.join(weight @ self.basis.to(weight), bias)

    def lift(self, theta: Tensor) -> Tensor:
        """theta (..., P) with nothing outside the span, from (..., K (r + 1)); reduce is its inverse."""
        weight, bias = self.reduced.split(theta)
        return self.layout.join(weight @ self.basis.T.to(weight), bias)

    def lift_about(self, theta: Tensor, prior: Prior) -> Tensor:
        """theta (..., P) that is the prior's mean outside the span, from (..., K (r + 1))."""
        lifted = self.lift(theta)
        if prior.mean is None:
            return lifted
        mean = prior.mean.to(lifted)
        return lifted + mean - self.lift(self.reduce(mean))

    def prior(self, prior: Prior) -> Prior:
        """The prior of (W Q, b), of one of theta."""
        return prior if prior.mean is None else replace(prior, mean=self.reduce(prior.mean.to(self.basis)))

    def target(self, target: LastLayerTarget) -> LastLayerTarget:
        """The same log posterior as a function of (W Q, b): without the prior's density outside the span.

        Products run in the precision of the target's own.
        """
        features = self.coordinates(target.features.to(self.basis.device)).to(target.device, target.dtype)
        return replace(target, features=features, layout=self.reduced, prior=self.prior(target.prior))

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> RowSpace:
        """A copy elsewhere or in another precision."""
        return replace(self, basis=self.basis.to(device=device, dtype=dtype))

"""The covariance of a posterior fitted in the row space of the features: any structure inside, the prior outside.

With a basis Q (D, r) of the rows, Sigma = Q S Q^T + (I - Q Q^T) / precision for the weights of all outputs, where S has
a structure over theta inside; biases are inside. The root Q L Q^T + (I - Q Q^T) / sqrt(precision) is applied factor by
factor, without a D x D matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from bnncli import registry
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout
from bnncli.structures import Covariance
from bnncli.structures.logits import LogitCovariance, LogitRoot, head_spread, root_of_covariances
from bnncli.targets.blocks import slices
from bnncli.targets.row_space import RowSpace

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WithinRows:
    """Sigma over all of theta, from an inner covariance over theta inside the span of the features.

    Args:
        inner: L L^T over K (r + 1) parameters.
        rows: the span.
        precision: prior precision of each weight outside the span.
    """

    inner: Covariance
    rows: RowSpace
    precision: float

    def __post_init__(self) -> None:
        if self.inner.num_params != self.rows.reduced.num_params:
            raise ValueError(
                f"the row space has {self.rows.reduced.num_params} parameters, but the covariance has "
                f"{self.inner.num_params}"
            )
        if not (math.isfinite(self.precision) and self.precision > 0):
            raise ValueError(f"the precision outside the row space must be positive and finite, got {self.precision}")

    @property
    def structure(self) -> str:
        """Structure of the inner covariance."""
        return self.inner.structure

    @property
    def jitter(self) -> float:
        """Jitter of the inner covariance."""
        return float(getattr(self.inner, "jitter", 0.0))

    @property
    def num_params(self) -> int:
        """P."""
        return self.rows.layout.num_params

    def unwhiten(self, z: Tensor) -> Tensor:
        """Return z L^T, (S, P)."""
        return self._apply(z, self.inner.unwhiten, self.precision**-0.5)

    def whiten(self, x: Tensor) -> Tensor:
        """Return L^{-1} x, (S, P)."""
        return self._apply(x, self.inner.whiten, self.precision**0.5)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """Return gradient L, (S, P)."""
        return self._apply(gradient, self.inner.pull_back, self.precision**-0.5)

    def log_det_scale(self) -> float:
        """Return log|det L|."""
        return self.inner.log_det_scale() - 0.5 * self.rows.num_outside * math.log(self.precision)

    def head_logits(self, layout: HeadLayout) -> LogitCovariance:
        """Return the inner covariance of the logits plus the prior's outside the span."""
        return SpreadInRows(head_spread(self.inner, self.rows.reduced), self.rows, self.precision)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the inner tensors, `cov.basis` (D, r) and `cov.outside_precision` (1,), float64."""
        return {
            **self.inner.to_tensors(),
            "cov.basis": self.rows.basis.double().cpu().contiguous(),
            "cov.outside_precision": torch.tensor([self.precision], dtype=torch.float64),
        }

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> WithinRows:
        """Return a copy on another device or in another precision."""
        inner = self.inner.to(device=device, dtype=dtype)
        return replace(self, inner=inner, rows=self.rows.to(device=device, dtype=dtype))

    def _apply(self, x: Tensor, inside: Callable[[Tensor], Tensor], factor: float) -> Tensor:
        """Apply `inside` to theta inside the span of x (S, P), and `factor` outside it."""
        rows, x = self.rows, x.to(self.rows.basis)
        reduced = rows.reduce(x)
        weight, bias = rows.reduced.split(inside(reduced))
        change = rows.lift(rows.reduced.join(weight - factor * rows.reduced.split(reduced)[0], bias))
        whole, biases = rows.layout.split(x)
        return change + rows.layout.join(factor * whole, None if biases is None else torch.zeros_like(biases))


def rows_of(covariance: Covariance) -> WithinRows | None:
    """Return the covariance if it was fitted in the row space of the features; None if it was fitted over all of theta."""
    return covariance if isinstance(covariance, WithinRows) else None


def read_covariance(structure: str, tensors: dict[str, Tensor], layout: HeadLayout | ModuleLayout) -> Covariance:
    """Read the covariance over theta from a posterior file's tensors, possibly in a row space."""
    kind = registry.load_class("covariances", structure)
    if "cov.basis" not in tensors:
        whole: Covariance = kind.from_tensors(tensors, layout)
        return whole
    rows = RowSpace(tensors["cov.basis"], cast(HeadLayout, layout))  # only heads have a row space
    return WithinRows(kind.from_tensors(tensors, rows.reduced), rows, float(tensors["cov.outside_precision"]))


_FEATURE_ELEMENTS = {
    "cpu": 2**25,
    "cuda": 2**27,
}  # numbers in a block of examples in float64; large, because each block costs the inner covariance a pass


@dataclass(frozen=True)
class SpreadInRows:
    """The inner covariance at Phi Q, plus the squared norm of the remainder divided by the precision, for each output.

    Args:
        inner: covariance of the logits, given coordinates in the span.
        rows: the span.
        precision: prior precision of each weight outside the span.
    """

    inner: LogitCovariance
    rows: RowSpace
    precision: float

    @property
    def is_dense(self) -> bool:
        """Return whether the inner covariance is dense."""
        return self.inner.is_dense

    def variance(self, inputs: Tensor) -> Tensor:
        """Return the variance of each logit, (n, K)."""
        parts = [self.inner.variance(at) + rest.unsqueeze(1) for at, rest in self._divided(inputs)]
        return torch.cat(parts).to(inputs.dtype)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P S P, (n, K)."""
        share = 1 - 1 / self.rows.layout.num_outputs
        parts = [self.inner.projected_variance(at) + share * rest[:, None] for at, rest in self._divided(inputs)]
        return torch.cat(parts).to(inputs.dtype)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return the covariances, (n, K, K); the remainder is independent across outputs."""
        return torch.cat(list(self._covariances(inputs))).to(inputs.dtype)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return roots in the form of the inner ones, because the added term is a multiple of the identity."""
        if self.inner.is_dense:
            return root_of_covariances(torch.cat(list(self._covariances(inputs)))).to(inputs)
        roots = [(self.inner.root(at), rest) for at, rest in self._divided(inputs)]
        scales = [(root.scale.square() + rest.unsqueeze(1)).sqrt() for root, rest in roots]
        return LogitRoot(torch.cat(scales), roots[0][0].basis).to(inputs)

    def _divided(self, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for blocks of examples, the coordinates in the span, (n, r), and the variance of the remainder, (n,)."""
        size = max(1, _FEATURE_ELEMENTS.get(features.device.type, 2**25) // self.rows.layout.num_features)
        for some in slices(0, max(1, features.shape[0]), size):
            block = features[some]
            yield self.rows.coordinates(block), self.rows.outside(block) / self.precision

    def _covariances(self, features: Tensor) -> Iterator[Tensor]:
        """Yield covariances (n, K, K) of blocks of examples, in the precision of the basis."""
        for at, rest in self._divided(features):
            covariance = self.inner.covariance(at)
            covariance.diagonal(dim1=1, dim2=2).add_(rest.unsqueeze(1))
            yield covariance

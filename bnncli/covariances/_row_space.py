"""The covariance of a posterior that was fitted in the row space of the features: any structure there, the prior outside.

With Q (D, r) a basis of the rows, Sigma = Q S Q^T + (I - Q Q^T) / precision for the weights of all outputs, S of the
structure's own kind over theta inside; biases are inside. Its root Q L Q^T + (I - Q Q^T) / sqrt(precision) is applied as
it is written: nothing of D x D is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from bnncli import registry
from bnncli.covariances import Covariance
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.module import ModuleLayout
from bnncli.targets.row_space import RowSpace

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WithinRows:
    """Sigma over all of theta, of an inner covariance over theta inside the span of the features.

    Args:
        inner: L L^T over K (r + 1) parameters.
        rows: the span.
        precision: of the prior of each weight outside it.
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
        """Of the inner covariance."""
        return self.inner.structure

    @property
    def jitter(self) -> float:
        """What the inner covariance had to add to its precision."""
        return float(getattr(self.inner, "jitter", 0.0))

    @property
    def num_params(self) -> int:
        """P."""
        return self.rows.layout.num_params

    def unwhiten(self, z: Tensor) -> Tensor:
        """z L^T, (S, P)."""
        return self._apply(z, self.inner.unwhiten, self.precision**-0.5)

    def whiten(self, x: Tensor) -> Tensor:
        """L^{-1} x, (S, P)."""
        return self._apply(x, self.inner.whiten, self.precision**0.5)

    def pull_back(self, gradient: Tensor) -> Tensor:
        """gradient L, (S, P)."""
        return self._apply(gradient, self.inner.pull_back, self.precision**-0.5)

    def log_det_scale(self) -> float:
        """log|det L|."""
        return self.inner.log_det_scale() - 0.5 * self.rows.num_outside * math.log(self.precision)

    def to_tensors(self) -> dict[str, Tensor]:
        """The inner one's, `cov.basis` (D, r) and `cov.outside_precision` (1,), float64."""
        return {
            **self.inner.to_tensors(),
            "cov.basis": self.rows.basis.double().cpu().contiguous(),
            "cov.outside_precision": torch.tensor([self.precision], dtype=torch.float64),
        }

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> WithinRows:
        """A copy elsewhere or in another precision."""
        inner = self.inner.to(device=device, dtype=dtype)
        return replace(self, inner=inner, rows=self.rows.to(device=device, dtype=dtype))

    def _apply(self, x: Tensor, inside: Callable[[Tensor], Tensor], factor: float) -> Tensor:
        """x (S, P) with a map of theta inside the span, and multiplied by the factor outside it."""
        rows, x = self.rows, x.to(self.rows.basis)
        reduced = rows.reduce(x)
        weight, bias = rows.reduced.split(inside(reduced))
        change = rows.lift(rows.reduced.join(weight - factor * rows.reduced.split(reduced)[0], bias))
        whole, biases = rows.layout.split(x)
        return change + rows.layout.join(factor * whole, None if biases is None else torch.zeros_like(biases))


def rows_of(covariance: Covariance) -> WithinRows | None:
    """The covariance as one that was fitted in the row space of the features; None where it was over all of theta."""
    return covariance if isinstance(covariance, WithinRows) else None


def read_covariance(structure: str, tensors: dict[str, Tensor], layout: HeadLayout | ModuleLayout) -> Covariance:
    """The covariance over theta in a posterior file's tensors: of the structure, or of that in a row space."""
    kind = registry.load_class("covariances", structure)
    if "cov.basis" not in tensors:
        whole: Covariance = kind.from_tensors(tensors, layout)
        return whole
    rows = RowSpace(tensors["cov.basis"], cast(HeadLayout, layout))  # nothing else has a row space
    return WithinRows(kind.from_tensors(tensors, rows.reduced), rows, float(tensors["cov.outside_precision"]))

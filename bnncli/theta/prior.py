"""The prior over theta: independent zero-mean Gaussians with one precision for the weights, one for the biases.

Biases shift the logits by themselves, weights by as much as the features are large: a precision that suits one need not
suit the other, and weight decay often leaves biases out (Bishop 2006, Pattern Recognition and Machine Learning, 5.5.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch
from bnncli.theta.layout import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prior:
    """N(0, diag(precision)^-1).

    Args:
        weight_precision: one over the variance of each weight.
        bias_precision: of each bias; None follows the weights'.
    """

    weight_precision: float
    bias_precision: float | None = None

    def __post_init__(self) -> None:
        for name in ("weight_precision", "bias_precision"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")

    def __str__(self) -> str:
        bias = "" if self.is_isotropic else f" (bias {self.bias_precision:.4g})"
        return f"{self.weight_precision:.4g}{bias}"

    @property
    def is_isotropic(self) -> bool:
        """Whether all of theta has one precision."""
        return self.bias_precision is None or self.bias_precision == self.weight_precision

    def with_weight_precision(self, value: float) -> Prior:
        """Another precision of the weights; the biases' stays, unless it follows."""
        return replace(self, weight_precision=value)

    def diagonal(
        self, layout: ParamLayout, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The precision of each parameter, (P,); float64 unless told."""
        precisions = torch.empty(layout.num_params, device=device, dtype=dtype or torch.float64)
        for rows, precision in self._places(layout):
            precisions[rows] = precision
        return precisions

    def log_density(self, theta: Tensor, layout: ParamLayout) -> Tensor:
        """log N(theta | 0, diag(precision)^-1), normalised, (S,) float64, for theta (S, P)."""
        terms = []
        for rows, precision in self._places(layout):
            part = theta[..., rows].double()
            constant = 0.5 * part.shape[-1] * math.log(precision / (2 * math.pi))
            terms.append(constant - 0.5 * precision * part.square().sum(dim=-1))
        return sum(terms[1:], start=terms[0])

    def gradient(self, theta: Tensor, layout: ParamLayout) -> Tensor:
        """The gradient of the log density, -precision * theta, (S, P) in theta's dtype, for theta (S, P)."""
        if self.is_isotropic:
            return -self.weight_precision * theta
        return theta * -self.diagonal(layout, device=theta.device, dtype=theta.dtype)

    def is_close(self, other: Prior) -> bool:
        """Whether the two are the same but for rounding."""
        return all(math.isclose(one, two, rel_tol=1e-9) for one, two in zip(self._pair(), other._pair(), strict=True))

    def to_meta(self) -> dict[str, float]:
        """As headers and metrics have it: prior_precision, the weights', and bias_precision where that differs."""
        return {"prior_precision": self.weight_precision, **self._own_bias("bias_precision")}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Prior | None:
        """The inverse of to_meta; None without a prior. Raises ValueError for what is no positive number."""
        weight, bias = meta.get("prior_precision"), meta.get("bias_precision")
        if weight is None:
            return None
        for name, value in (("prior_precision", weight), ("bias_precision", bias)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        return cls(float(weight), None if bias is None or bias == weight else float(bias))

    def to_tensors(self) -> dict[str, Tensor]:
        """As posterior files have it: `prior.precision` (1,), and `prior.bias_precision` (1,) where that differs."""
        values = {"prior.precision": self.weight_precision, **self._own_bias("prior.bias_precision")}
        return {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, prefix: str = "") -> Prior:
        """The inverse of to_tensors, of names that begin with prefix."""
        bias = tensors.get(f"{prefix}prior.bias_precision")
        return cls(float(tensors[f"{prefix}prior.precision"]), None if bias is None else float(bias))

    @classmethod
    def found_in(cls, tensors: Mapping[str, Tensor], *, prefix: str = "") -> Prior | None:
        """The inverse of to_tensors, of names that begin with prefix; None where there is none."""
        return cls.from_tensors(tensors, prefix=prefix) if f"{prefix}prior.precision" in tensors else None

    def _pair(self) -> tuple[float, float]:
        return self.weight_precision, self.bias_precision or self.weight_precision

    def _own_bias(self, name: str) -> dict[str, float]:
        """The biases' precision under a name; nothing where it is the weights'."""
        return {} if self.is_isotropic or self.bias_precision is None else {name: self.bias_precision}

    def _places(self, layout: ParamLayout) -> list[tuple[slice, float]]:
        """Slices of theta with their precision: all of it, or each part by itself."""
        if self.is_isotropic:
            return [(slice(None), self.weight_precision)]
        weight, bias = self._pair()
        return [(part.place, bias if part.is_bias else weight) for part in layout.parts]

"""The Gaussian prior over theta, and PyTorch's initialisation as a starting point."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.parameters.layouts import LogitLayout, ParamLayout

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Prior:
    """N(mean, diag(precision)^-1).

    Args:
        weight_precision: inverse variance of each weight.
        bias_precision: of each bias; None for the weights'.
        part_precisions: of each part of theta's layout, in order, replacing both; weight_precision is then their
            geometric mean over parameters.
        mean: (P,) float64; None for zero.
        mean_scale: the mean is the checkpoint's last layer times this; given with `mean`.
    """

    weight_precision: float
    bias_precision: float | None = None
    part_precisions: tuple[float, ...] | None = None
    mean: Tensor | None = field(default=None, repr=False)
    mean_scale: float | None = None

    @classmethod
    def of_parts(cls, precisions: Sequence[float], layout: ParamLayout) -> Prior:
        """Build a prior with one precision per part of a layout."""
        sizes = [part.place.stop - part.place.start for part in layout.parts]
        logs = sum(size * math.log(one) for size, one in zip(sizes, precisions, strict=True))
        return cls(math.exp(logs / sum(sizes)), None, tuple(precisions))

    def __post_init__(self) -> None:
        for value in self.part_precisions or ():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"part_precisions must be positive and finite, got {value}")
        for name in ("weight_precision", "bias_precision"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if (self.mean is None) != (self.mean_scale is None):
            raise ValueError("give mean and mean_scale together")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prior):
            return NotImplemented
        return self._numbers() == other._numbers() and (
            self.mean is None or other.mean is None or torch.equal(self.mean.cpu(), other.mean.cpu())
        )

    def __hash__(self) -> int:
        return hash(self._numbers())

    def __str__(self) -> str:
        own = "" if self.bias_precision in (None, self.weight_precision) else f" (bias {self.bias_precision:.4g})"
        if self.part_precisions is not None:
            own = f" (separate values for {len(self.part_precisions)} parts)"
        about = "" if self.mean_scale is None else f" about {self.mean_scale:.4g} times the checkpoint's last layer"
        return f"{self.weight_precision:.4g}{own}{about}"

    @property
    def is_isotropic(self) -> bool:
        """Return whether all of theta has the same precision."""
        return self.part_precisions is None and self.bias_precision in (None, self.weight_precision)

    def with_weight_precision(self, value: float) -> Prior:
        """Change the precision of the weights; a separate one of the biases stays, those of parts keep their ratios."""
        if self.part_precisions is not None:
            factor = value / self.weight_precision
            own = tuple(one * factor for one in self.part_precisions)
            return replace(self, weight_precision=value, part_precisions=own)
        return replace(self, weight_precision=value)

    def times(self, factor: float) -> Prior:
        """Multiply all precisions by a factor."""
        bias = None if self.bias_precision is None else self.bias_precision * factor
        return replace(self.with_weight_precision(self.weight_precision * factor), bias_precision=bias)

    def with_mean(self, mean: Tensor, scale: float) -> Prior:
        """Return the same precisions about a mean (P,), which is `scale` times the checkpoint's last layer."""
        return replace(self, mean=mean.double(), mean_scale=scale)

    def center(self, layout: ParamLayout, *, device: torch.device | None = None) -> Tensor:
        """Return the mean, (P,) float64; zeros if there is none."""
        if self.mean is None:
            return torch.zeros(layout.num_params, dtype=torch.float64, device=device)
        return self.mean.to(device)

    def to(self, device: torch.device | str) -> Prior:
        """Return the same prior with its mean on a device."""
        return self if self.mean is None else replace(self, mean=self.mean.to(device))

    def diagonal(
        self, layout: ParamLayout, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the precision of each parameter, (P,), by default float64."""
        precisions = torch.empty(layout.num_params, device=device, dtype=dtype or torch.float64)
        for rows, precision in self._places(layout):
            precisions[rows] = precision
        return precisions

    def log_density(self, theta: Tensor, layout: ParamLayout) -> Tensor:
        """Return log N(theta | mean, diag(precision)^-1), normalised, (S,) float64, for theta (S, P)."""
        terms, away = [], theta.double() if self.mean is None else theta.double() - self.mean
        for rows, precision in self._places(layout):
            part = away[..., rows]
            constant = 0.5 * part.shape[-1] * math.log(precision / (2 * math.pi))
            terms.append(constant - 0.5 * precision * part.square().sum(dim=-1))
        return sum(terms[1:], start=terms[0])

    def gradient(self, theta: Tensor, layout: ParamLayout) -> Tensor:
        """Return the gradient of the log density, -precision * (theta - mean), (S, P) in theta's dtype, for theta (S, P)."""
        return self.curvature_times(theta if self.mean is None else theta - self.mean.to(theta), layout)

    def curvature_times(self, vectors: Tensor, layout: ParamLayout) -> Tensor:
        """Return the Hessian of the log density, -diag(precision), times vectors (M, P), (M, P) in their dtype."""
        if self.is_isotropic:
            return -self.weight_precision * vectors
        return vectors * -self.diagonal(layout, device=vectors.device, dtype=vectors.dtype)

    def is_close(self, other: Prior) -> bool:
        """Return whether the two are equal up to rounding."""
        if self.mean is not None and other.mean is not None:
            if not torch.allclose(self.mean.cpu(), other.mean.cpu(), rtol=1e-9, atol=0.0):
                return False
        elif self.mean is not other.mean:
            return False
        ours, theirs = (prior._pair() + (prior.part_precisions or ()) for prior in (self, other))
        are_pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(math.isclose(one, two, rel_tol=1e-9) for one, two in are_pairs)

    def to_meta(self) -> dict[str, Any]:
        """Return the entries of headers and metrics: prior_precision of the weights, and bias_precision if it differs.

        With part precisions, prior_precision is their geometric mean, and part_precisions lists them. With a mean,
        prior_mean_scale describes it, and its values are in a tensor.
        """
        parts = {} if self.part_precisions is None else {"part_precisions": list(self.part_precisions)}
        scale = {} if self.mean_scale is None else {"prior_mean_scale": self.mean_scale}
        return {"prior_precision": self.weight_precision, **self._own_bias("bias_precision"), **parts, **scale}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], *, mean: Tensor | None = None) -> Prior | None:
        """Invert to_meta; None without a prior. Raises ValueError for numbers that are not positive.

        Args:
            mean: (P,), from the file's `prior.mean`, if meta has a prior_mean_scale.
        """
        weight, bias, scale = (meta.get(name) for name in ("prior_precision", "bias_precision", "prior_mean_scale"))
        if weight is None:
            return None
        for name, value in (("prior_precision", weight), ("bias_precision", bias), ("prior_mean_scale", scale)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        parts = meta.get("part_precisions")
        if parts is not None and not all(isinstance(one, int | float) and not isinstance(one, bool) for one in parts):
            raise ValueError(f"part_precisions must be numbers, got {parts!r}")
        own = None if parts is None else tuple(map(float, parts))
        return cls(float(weight), None if bias is None or bias == weight else float(bias), own, mean, scale)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of posterior files: `prior.precision` (1,), and if present `prior.bias_precision` (1,),
        `prior.part_precisions` (one per part), `prior.mean` (P,) and `prior.mean_scale` (1,).
        """
        values = {"prior.precision": self.weight_precision, **self._own_bias("prior.bias_precision")}
        found = {name: torch.tensor([value], dtype=torch.float64) for name, value in values.items()}
        if self.part_precisions is not None:
            found["prior.part_precisions"] = torch.tensor(self.part_precisions, dtype=torch.float64)
        if self.mean is not None:
            found["prior.mean"] = self.mean.double().cpu().contiguous()
            found["prior.mean_scale"] = torch.tensor([self.mean_scale], dtype=torch.float64)
        return found

    def to_constants(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the constants of sample files: the numbers of to_meta, an array each, and `prior_mean` (P,) if there is one."""
        found = {name: np.array([value]) for name, value in self.to_meta().items()}
        return found if self.mean is None else {**found, "prior_mean": self.mean.double().cpu().numpy()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], *, prefix: str = "") -> Prior:
        """Invert to_tensors, for names with a prefix."""
        bias = tensors.get(f"{prefix}prior.bias_precision")
        parts = tensors.get(f"{prefix}prior.part_precisions")
        own = None if parts is None else tuple(parts.tolist())
        mean, scale = (tensors.get(f"{prefix}prior.{name}") for name in ("mean", "mean_scale"))
        precision, own_bias = float(tensors[f"{prefix}prior.precision"]), None if bias is None else float(bias)
        return cls(precision, own_bias, own, mean, None if scale is None else float(scale))

    @classmethod
    def found_in(cls, tensors: Mapping[str, Tensor], *, prefix: str = "") -> Prior | None:
        """Invert to_tensors, for names with a prefix; None without a prior."""
        return cls.from_tensors(tensors, prefix=prefix) if f"{prefix}prior.precision" in tensors else None

    def _numbers(self) -> tuple[Any, ...]:
        return self.weight_precision, self.bias_precision, self.part_precisions, self.mean_scale

    def _pair(self) -> tuple[float, float]:
        return self.weight_precision, self.bias_precision or self.weight_precision

    def _own_bias(self, name: str) -> dict[str, float]:
        """Return the biases' precision under a name; nothing if it is the weights'."""
        return {} if self.is_isotropic or self.bias_precision is None else {name: self.bias_precision}

    def _places(self, layout: ParamLayout) -> list[tuple[slice, float]]:
        """Return slices of theta with their precision: all of it, or each part."""
        if self.is_isotropic:
            return [(slice(None), self.weight_precision)]
        if self.part_precisions is not None:
            return [(part.place, one) for part, one in zip(layout.parts, self.part_precisions, strict=True)]
        weight, bias = self._pair()
        return [(part.place, bias if part.is_bias else weight) for part in layout.parts]


_WHY = "use \0start\0 checkpoint"


def initial_theta(layout: LogitLayout, num_starts: int, seed: int) -> Tensor:
    """Return theta (S, P) float64, each from PyTorch's own initialisation of the layers, seeded.

    Raises:
        UsageError: the network has batch norm, whose statistics belong to the trained weights, or a chosen parameter
            belongs to a module without a known initialisation.
    """
    if layout.network is None:
        assert layout.head is not None
        bound = 1 / math.sqrt(layout.head.num_features)  # nn.Linear's own, for weight and bias
        generator = torch.Generator().manual_seed(seed)
        return bound * (2 * torch.rand(num_starts, layout.num_params, generator=generator, dtype=torch.float64) - 1)
    module = layout.network.module
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            raise UsageError(
                f"\0start\0 init: the network has batch norm ({name}) with statistics from the trained weights, "
                "which do not fit new weights",
                hint=_WHY,
            )
    for part in layout.parts:
        owner = module.get_submodule(part.name.rpartition(".")[0])
        if not hasattr(owner, "reset_parameters"):
            raise UsageError(
                f"\0start\0 init: {type(owner).__name__} does not define how to initialise its {part.name}", hint=_WHY
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([_initialise(layout, module) for _ in range(num_starts)])


def _initialise(layout: LogitLayout, module: nn.Module) -> Tensor:
    """Return theta (P,) of a copy of the module on the CPU with freshly initialised layers."""
    fresh = copy.deepcopy(module).cpu()
    for part in fresh.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
    found = dict(fresh.named_parameters())
    return torch.cat([found[part.name].detach().double().flatten() for part in layout.parts])

"""What each epoch of a latent binary fit gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PARTS = ("log_likelihood", "weight_divergence", "bias_divergence", "flow_divergence", "density")


@dataclass
class History:
    """What each epoch gave, CPU float64: the expected log likelihood (R,), divergences and density by layer (R, L)."""

    parts: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in _PARTS})

    @property
    def num_epochs(self) -> int:
        """Epochs done."""
        return len(self.parts["density"])

    def add(self, **parts: Tensor) -> None:
        """One more epoch."""
        for name, value in parts.items():
            self.parts[name].append(value.double().cpu())

    def tensors(self) -> dict[str, Tensor]:
        """(E, R) and (E, R, L), for a file."""
        return {f"history.{name}": torch.stack(values) for name, values in self.parts.items() if values}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> History:
        """The inverse of tensors()."""
        found = {name: tensors.get(f"history.{name}") for name in _PARTS}
        return cls({name: [] if value is None else list(value.cpu().unbind(0)) for name, value in found.items()})

    def bound(self) -> Tensor:
        """The evidence lower bound of each epoch and repeat, (E, R), nats; the likelihood's part is the epoch's average."""
        return _bound({name: torch.stack(values) for name, values in self.parts.items()})

    def last_bound(self) -> Tensor:
        """That of the last epoch, (R,), nats."""
        return _bound({name: values[-1] for name, values in self.parts.items()})


def _bound(parts: Mapping[str, Tensor]) -> Tensor:
    divergences = [parts[f"{name}_divergence"].sum(-1) for name in ("weight", "bias", "flow")]
    return parts["log_likelihood"] - torch.stack(divergences).sum(dim=0)

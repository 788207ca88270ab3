"""A network of which most weights are zero, as prune writes it. Weights are stored by compressed rows, without zeros."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.parameters.layouts import ClassifierLayout, NetworkLayout
from bnncli.posteriors import SPARSE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sparse:
    """All mass on theta (P,), whose zeros are not stored.

    Args:
        network: sizes of the layers.
    """

    type: ClassVar[str] = SPARSE
    theta: Tensor
    network: NetworkLayout

    @property
    def layout(self) -> ClassifierLayout:
        """Return the layout of theta: a head's where there is no hidden layer."""
        return self.network.head or self.network

    @property
    def center(self) -> Tensor:
        """Return theta, (P,)."""
        return self.theta

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return theta, repeated, (S, P) float32."""
        return self.theta.float().expand(num_samples or 1, -1).clone()

    def to(self, device: torch.device | str) -> Sparse:
        """Return a copy on another device."""
        return replace(self, theta=self.theta.to(device))

    def state_dict(self) -> dict[str, Tensor]:
        """Return dense float32 tensors, named as in torch.nn.Sequential(Linear, ReLU, Linear, ...): 0.weight, 0.bias, 2.weight, ..."""
        state: dict[str, Tensor] = {}
        for index, (weight, bias) in enumerate(self.network.split(self.theta.float().cpu())):
            state |= {f"{2 * index}.weight": weight.clone(), f"{2 * index}.bias": bias.clone()}
        return state

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return crow_indices (out + 1,), col_indices and values of each layer's weight, and its bias; float32 and int32."""
        tensors = {}
        for index, (weight, bias) in enumerate(self.network.split(self.theta.float().cpu())):
            rows, columns = weight.nonzero(as_tuple=True)
            ends = torch.bincount(rows, minlength=weight.shape[0]).cumsum(0)
            name = f"layers.{index}"
            tensors[f"{name}.weight.crow_indices"] = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
            tensors[f"{name}.weight.col_indices"] = columns.to(torch.int32)
            tensors[f"{name}.weight.values"] = weight[rows, columns]
            tensors[f"{name}.bias"] = bias
        return tensors, {"type": self.type, **self.network.to_meta()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Sparse:
        """Invert to_tensors."""
        network = NetworkLayout.from_meta(meta)
        parts: list[Tensor] = []
        for index, (outputs, inputs) in enumerate(network.shapes):
            name = f"layers.{index}"
            ends, columns, values = (
                tensors[f"{name}.weight.{part}"] for part in ("crow_indices", "col_indices", "values")
            )
            rows = torch.repeat_interleave(torch.arange(outputs), (ends[1:] - ends[:-1]).long())
            weight = torch.zeros(outputs, inputs)
            weight[rows, columns.long()] = values
            parts += [weight.flatten(), tensors[f"{name}.bias"]]
        return cls(torch.cat(parts), network)

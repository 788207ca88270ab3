"""Several last layers with weights: a mixture of points, whose predictive is the weighted mean of the members' predictives.

Stacking of predictive distributions: Yao, Vehtari, Simpson and Gelman (2018), Bayesian Analysis 13(3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """Mass weights[m] on members[m].

    Args:
        members: (M, P) float32.
        weights: (M,) float64, positive; they sum to one.
        layout: of a member.
    """

    type: ClassVar[str] = "stack"
    members: Tensor
    weights: Tensor
    layout: HeadLayout

    def __post_init__(self) -> None:
        check_shapes(members=(self.members, f"M {self.layout.num_params}"), weights=(self.weights, "M"))

    @property
    def num_stored(self) -> int:
        """Return M."""
        return len(self.members)

    @property
    def center(self) -> Tensor:
        """Return the weighted mean of the members, (P,) float64: a single last layer in their place."""
        return self.weights @ self.members.double()

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return draws (S, P) float32, each member with its weight as probability; M draws by default."""
        chances = self.weights.to(generator.device)
        chosen = torch.multinomial(chances, num_samples or self.num_stored, replacement=True, generator=generator)
        return self.members[chosen.to(self.members.device)].float()

    def to(self, device: torch.device | str) -> Stack:
        """Return a copy on another device."""
        return replace(self, members=self.members.to(device), weights=self.weights.to(device))

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `members` float32, `weights` float64, and the layout as JSON."""
        tensors = {"members": self.members.float().cpu().contiguous(), "weights": self.weights.double().cpu()}
        return tensors, {"type": self.type, "default_samples": self.num_stored, **self.layout.to_meta()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Stack:
        """Invert to_tensors. Raises ValueError for invalid weights."""
        weights = tensors["weights"].double()
        if not bool((weights > 0).all()) or abs(float(weights.sum()) - 1) > 1e-6:
            raise ValueError("weights must be positive and sum to one")
        return cls(tensors["members"], weights, HeadLayout.from_meta(meta))

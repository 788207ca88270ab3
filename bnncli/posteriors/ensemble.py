"""Deep ensembles: separately trained networks with equal weights.

Lakshminarayanan, Pritzel and Blundell (2017, arXiv:1612.01474): the predictive is the mean of the members' own
probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.lazy import torch
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Ensemble:
    """M networks; theta holds the parameters and the real-valued buffers (batch norm's means and variances).

    Args:
        members: (M, P) float32.
        layout: of parameters and buffers; it is not that of the parameters alone.
    """

    type: ClassVar[str] = "ensemble"
    members: Tensor
    layout: ModuleLayout

    def __post_init__(self) -> None:
        check_shapes(members=(self.members, f"M {self.layout.num_params}"))

    @property
    def num_stored(self) -> int:
        """Return M."""
        return len(self.members)

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return every member once, (M, P); fewer are a seeded choice without replacement, in their order. There are never more."""
        if num_samples is None or num_samples >= self.num_stored:
            return self.members.float()
        order = torch.randperm(self.num_stored, generator=generator, device=generator.device)
        chosen = order[:num_samples].sort().values
        return self.members[chosen.to(self.members.device)].float()

    def sample_whole(self, num_samples: int | None) -> bool:
        """Return whether this many draws are all members, so that their mean has no Monte Carlo error."""
        return num_samples is None or num_samples >= self.num_stored

    def bound_to(self, network: ModuleNetwork) -> Ensemble:
        """Return the ensemble bound to a network that computes the logits."""
        return replace(self, layout=self.layout.bound_to(network))

    def to(self, device: torch.device | str) -> Ensemble:
        """Return a copy on another device."""
        return replace(self, members=self.members.to(device))

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `members` float32, and the layout as JSON."""
        meta = {"type": self.type, "default_samples": self.num_stored, **self.layout.to_meta()}
        return {"members": self.members.float().cpu().contiguous()}, meta

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Ensemble:
        """Invert to_tensors."""
        return cls(tensors["members"], ModuleLayout.from_meta(meta))

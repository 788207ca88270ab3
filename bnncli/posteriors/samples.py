"""Draws of a sampler such as HMC, with their chain axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamLayout
from bnncli.parameters.module import ModuleNetwork, bind_layout
from bnncli.shapes import check_shapes

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 2**24  # numbers in double precision: 128 MiB


@dataclass(frozen=True)
class Samples:
    """Draws (C, T, P), float32, and the layout of theta."""

    type: ClassVar[str] = "samples"
    draws: Tensor
    layout: ParamLayout

    def __post_init__(self) -> None:
        check_shapes(draws=(self.draws, f"C T {self.layout.num_params}"))

    @property
    def center(self) -> Tensor:
        """Return the mean of the draws, (P,)."""
        width = max(1, _AT_ONCE // max(1, self.draws.shape[0] * self.draws.shape[1]))
        means = [part.double().mean(dim=(0, 1)) for part in self.draws.split(width, dim=2)]
        return torch.cat(means).to(self.draws.dtype)

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return a seeded choice of draws without replacement, (S, P) float32, in their order; all for None or where S is too large."""
        return self.sample_in_runs(num_samples, generator)[0]

    def sample_in_runs(self, num_samples: int | None, generator: torch.Generator) -> tuple[Tensor, list[int]]:
        """Return the same choice, and the index of each chain's first draw among them; chains without draws are skipped."""
        num_chains, num_each = self.draws.shape[:2]
        flat, total = self.draws.flatten(0, 1), num_chains * num_each
        if num_samples is None or num_samples >= total:
            return flat.float(), [chain * num_each for chain in range(num_chains)]
        order = torch.randperm(total, generator=generator, device=generator.device)
        chosen = order[:num_samples].sort().values.cpu()
        chains = (chosen // num_each).unique_consecutive(return_counts=True)[1]
        starts = [0, *chains.cumsum(dim=0)[:-1].tolist()]
        return flat[chosen.to(flat.device)].float(), starts

    def bound_to(self, network: ModuleNetwork) -> Samples:
        """Return the samples bound to a network that computes the logits."""
        return replace(self, layout=bind_layout(self.layout, network))

    def to(self, device: torch.device | str) -> Samples:
        """Return a copy on another device."""
        return replace(self, draws=self.draws.to(device))

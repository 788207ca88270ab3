"""Draws of a linearised network's Gaussian whose covariance is never formed, as fit-laplace --draws returns them.

They predict as the linearised network does, with logits f + J d for each draw's deviation d, and with the draws'
empirical covariance as their Gaussian. Used in the network itself they are draws of its weights. They have no density.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.shapes import check_shapes
from bnncli.structures.logit_gaussian import drawn_spread
from bnncli.structures.logits import LogitGaussian, LogitRoot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LinearDraws:
    """Independent draws mean + d.

    Args:
        mean: (P,), float64.
        deviations: d (S, P), float32.
        layout: of a network's parameters.
        prior: of the target.
    """

    type: ClassVar[str] = "linear-draws"
    mean: Tensor
    deviations: Tensor
    layout: ModuleLayout
    prior: Prior

    def __post_init__(self) -> None:
        check_shapes(
            mean=(self.mean, str(self.layout.num_params)), deviations=(self.deviations, f"S {self.layout.num_params}")
        )

    @property
    def center(self) -> Tensor:
        """Return the mean, (P,)."""
        return self.mean

    @property
    def num_stored(self) -> int:
        """Return S."""
        return len(self.deviations)

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return the first draws (S', P) float32, all for None. Raises UsageError where fewer are stored than asked for."""
        if num_samples is not None and num_samples > self.num_stored:
            raise UsageError(
                f"\0samples\0: expected at most {self.num_stored}, the number of stored draws; got {num_samples}",
                hint="for more draws, run fit-laplace with larger \0draws\0",
            )
        return (self.mean + self.deviations[:num_samples].double()).float()

    @cached_property
    def logits(self) -> LogitGaussian:
        """Return the Gaussian of the logits of inputs (n, ...): the network linearised at the mean, with the draws' covariance."""

        def mean(inputs: Tensor) -> Tensor:
            return self.layout.logits(inputs, self.mean.to(inputs.dtype).unsqueeze(0))[0]

        def push(inputs: Tensor, deviations: Tensor) -> Tensor:
            return self.layout.push(inputs, self.mean.to(inputs.dtype), deviations.to(inputs.dtype))

        return LogitGaussian(mean, drawn_spread(self.layout, self.mean, self.deviations), push)

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and variance (n, K) of each logit; minus the logits' mean if projected."""
        return self.logits.marginals(features, is_projected=is_projected)

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the logits."""
        return self.logits.moments(features)

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        """Return the mean (n, K) of the logits, and roots of their covariances."""
        return self.logits.root(features)

    def pushes(self, num_draws: int) -> bool:
        """Return True: draws of the logits are pushed draws of theta."""
        return True

    def bound_to(self, network: ModuleNetwork) -> LinearDraws:
        """Return the draws bound to a network that computes the logits."""
        return replace(self, layout=self.layout.bound_to(network))

    def to(self, device: torch.device | str) -> LinearDraws:
        """Return a copy on another device."""
        return replace(self, mean=self.mean.to(device), deviations=self.deviations.to(device))

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `mean` float64, `deviations` float32 and the prior's tensors; the layout as JSON."""
        tensors = {"mean": self.mean.double(), "deviations": self.deviations.float()}
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        meta = {"type": self.type, "default_samples": self.num_stored, **self.layout.to_meta()}
        return {**stored, **self.prior.to_tensors()}, meta

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> LinearDraws:
        """Invert to_tensors."""
        layout = ModuleLayout.from_meta(meta)
        return cls(tensors["mean"], tensors["deviations"], layout, Prior.from_tensors(tensors))

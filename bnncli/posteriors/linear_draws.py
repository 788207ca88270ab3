"""Draws of a linearised network's Gaussian whose covariance is never made: what fit-laplace --draws gives.

They predict as the linearised network does: logits f + J d of each draw's deviation d, and as their Gaussian the covariance that the
draws tell. Put into the network itself they are draws of its weights. They have no density.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from bnncli.errors import UsageError
from bnncli.lazy import torch
from bnncli.logits import LogitGaussian, LogitRoot
from bnncli.logits._drawn import drawn_spread
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.shapes import check_shapes

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
        """The mean, (P,)."""
        return self.mean

    @property
    def num_stored(self) -> int:
        """S."""
        return len(self.deviations)

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """The first draws (S', P) float32, all for None. Raises UsageError where more are asked for than there are."""
        if num_samples is not None and num_samples > self.num_stored:
            raise UsageError(
                f"\0samples\0: expected at most {self.num_stored}, the number of stored draws; got {num_samples}",
                hint="for more draws, run fit-laplace with larger \0draws\0",
            )
        return (self.mean + self.deviations[:num_samples].double()).float()

    @cached_property
    def logits(self) -> LogitGaussian:
        """The Gaussian of the logits of inputs (n, ...): the network linearised at the mean, their covariance that of the draws."""

        def mean(inputs: Tensor) -> Tensor:
            return self.layout.logits(inputs, self.mean.to(inputs.dtype).unsqueeze(0))[0]

        def push(inputs: Tensor, deviations: Tensor) -> Tensor:
            return self.layout.push(inputs, self.mean.to(inputs.dtype), deviations.to(inputs.dtype))

        return LogitGaussian(mean, drawn_spread(self.layout, self.mean, self.deviations), push)

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and variance (n, K) of each logit; minus the logits' mean if projected."""
        return self.logits.marginals(features, is_projected=is_projected)

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and covariance (n, K, K) of the logits."""
        return self.logits.moments(features)

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        """Mean (n, K) of the logits, and roots of their covariances."""
        return self.logits.root(features)

    def pushes(self, num_draws: int) -> bool:
        """True: draws of the logits are those of theta, pushed."""
        return True

    def bound_to(self, network: ModuleNetwork) -> LinearDraws:
        """The same with that network to make logits by."""
        return replace(self, layout=self.layout.bound_to(network))

    def to(self, device: torch.device | str) -> LinearDraws:
        """A copy on another device."""
        return replace(self, mean=self.mean.to(device), deviations=self.deviations.to(device))

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """`mean` float64, `deviations` float32 and the prior's tensors; the layout as JSON."""
        tensors = {"mean": self.mean.double(), "deviations": self.deviations.float()}
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        meta = {"type": self.type, "default_samples": self.num_stored, **self.layout.to_meta()}
        return {**stored, **self.prior.to_tensors()}, meta

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> LinearDraws:
        """The inverse of to_tensors."""
        layout = ModuleLayout.from_meta(meta)
        return cls(tensors["mean"], tensors["deviations"], layout, Prior.from_tensors(tensors))

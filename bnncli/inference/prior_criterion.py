"""What a prior precision is judged by: the validation loss of its posterior, or its marginal likelihood, or the loss of left-out examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from bnncli.covariances import Covariance, num_varying
from bnncli.inference.laplace import fixed_log_prior, laplace_evidence
from bnncli.inference.leave_one_out import LeftOut, left_out_losses
from bnncli.inference.linearised import linearised_losses, shared_by
from bnncli.inference.logit_losses import losses_by_logits
from bnncli.targets.target import CurvedTarget, HeldOut, HeldOutByLogits
from bnncli.theta.layout import ParamLayout
from bnncli.theta.prior import Prior

if TYPE_CHECKING:
    from torch import Tensor


class Lift(Protocol):
    """How a posterior over a part of theta says what it is over all of it."""

    @property
    def layout(self) -> ParamLayout:
        """Of all of theta."""

    def theta(self, theta: Tensor) -> Tensor:
        """All of theta (..., P), of a centre."""

    def covariance(self, covariance: Covariance, prior: Prior) -> Covariance:
        """The covariance of all of theta, under the target's prior."""


@dataclass(frozen=True)
class Criterion:
    """What is minimised, in two parts: at the centre alone, and what the covariance adds to it.

    Args:
        noise: (S, P), standard normal, common to all candidates: its noise cancels in comparisons; (S, K) where logits are
            drawn, see `inference.linearised` and by_logits.
        held_out: the examples of the validation nll; None for minus the log marginal likelihood.
        lift: from the candidates' theta to all of it, where they lie in a part; noise and held_out are of all of theta.
        by_logits: whether held_out is of a last layer whose logits are drawn.
        is_plug_in: whether the centre alone predicts held_out, and the covariance adds nothing.
    """

    noise: Tensor
    held_out: HeldOut | None
    lift: Lift | None = None
    by_logits: bool = False
    is_plug_in: bool = False

    def at_center(self, target: CurvedTarget, theta: Tensor, log_joint: float) -> float:
        """The part of theta (P,) and the log joint there."""
        if self.held_out is None:
            return -log_joint - 0.5 * target.layout.num_params * math.log(2 * math.pi)
        losses = self.plug_in_losses(theta)
        return float(losses.sum()) / len(losses)

    def plug_in_losses(self, theta: Tensor) -> Tensor:
        """The validation nll of each example under theta (P,) alone, (M,) float64, where there is validation data."""
        assert self.held_out is not None
        return self.held_out.losses(self._whole(theta).unsqueeze(0))

    def of(self, target: CurvedTarget, theta: Tensor, log_joint: float, covariance: Covariance) -> float:
        """The whole criterion of N(theta, covariance)."""
        if self.held_out is None:
            return -laplace_evidence(log_joint - fixed_log_prior(target, theta, covariance), covariance)
        return float(self.losses(target, theta, covariance).mean())

    def losses(self, target: CurvedTarget, theta: Tensor, covariance: Covariance) -> Tensor:
        """The validation nll of each example under N(theta, covariance), (M,) float64, where there is validation data."""
        assert self.held_out is not None
        if isinstance(self.held_out, LeftOut):
            return left_out_losses(self.held_out, target, theta, covariance, noise=self.noise)
        if self.lift is not None:
            covariance = self.lift.covariance(covariance, target.prior)
        if self.by_logits:
            held_out = cast(HeldOutByLogits, self.held_out)
            return losses_by_logits(held_out, target, theta, covariance, noise=self.noise)
        if self.held_out.is_linearised:
            return linearised_losses(self.held_out, target, theta, [covariance], noise=self.noise)[0]
        return self.held_out.losses(self._whole(theta) + covariance.unwhiten(self.noise[:, : num_varying(covariance)]))

    def together(self, target: CurvedTarget, theta: Tensor, covariances: Sequence[Covariance]) -> list[float]:
        """`of` for covariances about one centre whose predictions share their work."""
        assert self.held_out is not None
        return linearised_losses(self.held_out, target, theta, covariances, noise=self.noise).mean(dim=1).tolist()

    def shared_by(self, target: CurvedTarget, structure: str) -> int:
        """How many covariances about one centre `together` takes, 0 for none."""
        if self.held_out is None or not self.held_out.is_linearised or self.lift is not None:
            return 0
        return shared_by(target.layout, structure, len(self.noise))

    def _whole(self, theta: Tensor) -> Tensor:
        """All of theta (P,), of a centre."""
        return theta if self.lift is None else self.lift.theta(theta)

"""Entry point for the Gaussian of the logits; selects the method for the layout of theta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from bnncli.covariances import Covariance
from bnncli.logits import LogitCovariance, LogitGaussian, LogitRoot
from bnncli.logits._head import head_spread
from bnncli.logits._kept import logits_at
from bnncli.logits._network import network_spread
from bnncli.parameters.layouts import LogitLayout
from bnncli.parameters.module import ModuleLayout

if TYPE_CHECKING:
    from torch import Tensor


def logit_gaussian(theta: Tensor, layout: LogitLayout, covariance: Covariance | None = None) -> LogitGaussian:
    """Return the Gaussian of the logits of inputs (n, ...), for theta (P,) with this covariance; no spread for None.

    Exact for a last layer; otherwise for the network linearised at theta.
    """

    def mean(inputs: Tensor) -> Tensor:
        if layout.network is not None:
            return logits_at(cast(ModuleLayout, layout), inputs, theta.to(inputs.dtype))
        return layout.logits(inputs, theta.to(inputs.dtype).unsqueeze(0))[0]

    def push(inputs: Tensor, deviations: Tensor) -> Tensor:
        return cast(ModuleLayout, layout).push(inputs, theta.to(inputs.dtype), deviations.to(inputs.dtype))

    is_linearised = covariance is not None and layout.head is None
    return LogitGaussian(mean, _spread(theta, layout, covariance), push if is_linearised else None)


def _spread(theta: Tensor, layout: LogitLayout, covariance: Covariance | None) -> LogitCovariance:
    if covariance is None:
        return NoSpread(layout.num_outputs)
    if layout.head is not None:
        return head_spread(covariance, layout.head)
    return network_spread(covariance, layout, theta)


@dataclass(frozen=True)
class NoSpread:
    """A point estimate of theta: the logits have no variance.

    Args:
        num_outputs: K.
    """

    num_outputs: int
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Return zeros, (n, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return zeros, (n, K)."""
        return self.variance(inputs)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return zeros, (n, K, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs, self.num_outputs)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return zero standard deviations."""
        return LogitRoot(self.variance(inputs))

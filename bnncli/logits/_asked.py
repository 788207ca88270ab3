"""The one place that is asked for the Gaussian of the logits: it asks the layout of theta which way there is."""

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
    """The Gaussian of the logits of inputs (n, ...), for theta (P,) of this covariance; of no spread without one.

    It is exact for a last layer, and elsewhere that of the network linearised at theta.
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
    """Of one theta: logits are certain.

    Args:
        num_outputs: K.
    """

    num_outputs: int
    is_dense: ClassVar[bool] = False

    def variance(self, inputs: Tensor) -> Tensor:
        """Zeros, (n, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Zeros, (n, K)."""
        return self.variance(inputs)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Zeros, (n, K, K)."""
        return inputs.new_zeros(inputs.shape[0], self.num_outputs, self.num_outputs)

    def root(self, inputs: Tensor) -> LogitRoot:
        """Standard deviations, zero."""
        return LogitRoot(self.variance(inputs))

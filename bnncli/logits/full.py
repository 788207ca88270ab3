"""Logits under a full covariance: quadratic forms x^T Sigma_kl x, one per pair of outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from bnncli.covariances.full import Full
from bnncli.lazy import torch
from bnncli.logits import LogitCovariance, LogitRoot, root_of_covariances
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.signals import interruptible
from bnncli.targets.grams import quadratic_forms

if TYPE_CHECKING:
    from torch import Tensor


def of_head(covariance: Full, layout: HeadLayout) -> LogitCovariance:
    """Return quadratic forms of the blocks of Sigma, which is multiplied out once."""
    return QuadraticForms(covariance, layout)


@dataclass(frozen=True)
class QuadraticForms:
    """x^T Sigma_kl x for all outputs k, l.

    Args:
        theta_covariance: Sigma = L L^T.
        layout: of theta.
    """

    theta_covariance: Full
    layout: HeadLayout
    is_dense: ClassVar[bool] = True

    def variance(self, inputs: Tensor) -> Tensor:
        """Return x^T Sigma_kk x, (n, K)."""
        return self._forms_at(inputs, self._diagonal)

    def projected_variance(self, inputs: Tensor) -> Tensor:
        """Return the diagonal of P J Sigma J^T P, (n, K), projecting Sigma's blocks once for all examples."""
        return self._forms_at(inputs, self._projected).clamp_min(0)

    @cached_property
    def _diagonal(self) -> Tensor:
        """Sigma's diagonal blocks, one per output, (K, F, F)."""
        every = torch.arange(self.layout.num_outputs, device=self._sigma.device)
        return self._blocks(every, every)

    @cached_property
    def _projected(self) -> Tensor:
        """Matrices (K, F, F) whose forms are the variances of the logits minus their mean."""
        places = self.layout.places(self._sigma.device)
        columns = self._sigma[:, places].mean(dim=1)  # covariance of theta with the mean over outputs, (P, F)
        means = columns[places]
        # A matrix and its transpose have the same quadratic form.
        return self._diagonal - 2 * means + means.mean(dim=0)

    def covariance(self, inputs: Tensor) -> Tensor:
        """Return x^T Sigma_kl x, (n, K, K)."""
        num_outputs = self.layout.num_outputs
        first, second = torch.triu_indices(num_outputs, num_outputs, device=inputs.device)
        out = inputs.new_empty(inputs.shape[0], num_outputs, num_outputs)
        values = self._forms_at(inputs, self._blocks(first, second))
        out[:, first, second] = values
        out[:, second, first] = values
        return out

    def root(self, inputs: Tensor) -> LogitRoot:
        """Return roots (n, K, K) of the covariances, in float64: under a weak prior they are nearly singular."""
        return root_of_covariances(self.covariance(inputs.double())).to(inputs)

    def _forms_at(self, features: Tensor, matrices: Tensor) -> Tensor:
        """Return x^T M x for each of the matrices (M, F, F), (n, M), at features (n, D)."""
        return quadratic_forms(self.layout.augment_features(features), matrices).to(features.dtype)

    def _blocks(self, first: Tensor, second: Tensor) -> Tensor:
        """Return Sigma's blocks between outputs first (M,) and second (M,), (M, F, F), in augmented order."""
        places = self.layout.places(self._sigma.device)
        return self._sigma[places[first].unsqueeze(2), places[second].unsqueeze(1)]

    @cached_property
    def _sigma(self) -> Tensor:
        scale, operations = self.theta_covariance.scale_tril, 2 * float(self.layout.num_params) ** 3
        return interruptible(lambda: scale @ scale.T, operations=operations, device=scale.device, name="a covariance")

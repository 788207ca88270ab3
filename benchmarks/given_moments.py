"""Integrals alone: a posterior whose logits' moments are already there, and the sampling loop of the thesis.

The loop is that of Hobbhahn (2020), arXiv 2003.01227, and its published code: batches of examples, and for each draw one
`rsample` of a multivariate normal and one softmax, added up in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures.logits import LogitRoot


@dataclass(frozen=True)
class GivenMoments:
    """The logits' distribution at N examples, looked up: "features" (n, 1) are the numbers of the examples.

    Args:
        mean, variance, projected: (N, K) means, variances, and variances of the logits minus their mean.
        root: of the covariances.
    """

    type: ClassVar[str] = "gaussian"
    mean: Tensor
    variance: Tensor
    projected: Tensor
    root: LogitRoot

    @classmethod
    def of(cls, posterior: Gaussian, features: Tensor) -> GivenMoments:
        """Those of a posterior at features (N, D)."""
        mean, variance = posterior.logit_marginals(features)
        _, projected = posterior.logit_marginals(features, is_projected=True)
        return cls(mean, variance, projected, posterior.logit_root(features)[1])

    @property
    def layout(self) -> HeadLayout:
        """K outputs, one "feature"."""
        return HeadLayout(self.mean.shape[1], 1, has_bias=False)

    def pushes(self, num_draws: int) -> bool:
        """No: there is no theta to draw."""
        return False

    @property
    def examples(self) -> Tensor:
        """The features of all examples, (N, 1)."""
        return torch.arange(len(self.mean), dtype=torch.float32, device=self.mean.device).unsqueeze(1)

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and variance (n, K)."""
        rows = features[:, 0].long()
        if not is_projected:
            return self.mean[rows], self.variance[rows]
        mean = self.mean[rows]
        return mean - mean.mean(dim=1, keepdim=True), self.projected[rows]

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and covariance (n, K, K), multiplied out."""
        rows = features[:, 0].long()
        return self.mean[rows], self.covariance(rows)

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        """Mean (n, K) and roots of the covariances."""
        rows = features[:, 0].long()
        return self.mean[rows], LogitRoot(self.root.scale[rows], self.root.basis)

    def covariance(self, rows: Tensor) -> Tensor:
        """(n, K, K) at the examples with these numbers (n,)."""
        scale = self.root.scale[rows]
        if scale.ndim == 2:
            scale = scale.diag_embed() if self.root.basis is None else self.root.basis * scale.unsqueeze(1)
        return scale @ scale.mT


def loop_over_draws(mean: Tensor, covariance: Tensor, *, num_samples: int, batch_size: int = 128) -> Tensor:
    """Mean softmax (N, K) of draws from N(mean (N, K), covariance (N, K, K)), a batch and a draw at a time."""
    parts = []
    for means, covariances in zip(mean.split(batch_size), covariance.split(batch_size), strict=True):
        jitter = 1e-6 * torch.eye(mean.shape[1], device=mean.device)
        normal = torch.distributions.MultivariateNormal(means, covariances + jitter)
        total = torch.zeros_like(means)
        for _ in range(num_samples):
            total += torch.softmax(normal.rsample(), dim=1)
        parts.append(total / num_samples)
    return torch.cat(parts)

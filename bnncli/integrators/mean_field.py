"""Mean-field prediction: a closed form from pairwise differences of logits, without draws.

Lu, Ie and Sha (2020), arXiv 2006.07584. A softmax is made of sigmoids of differences,

    softmax_k(z) = 1 / (2 - K + sum_{i != k} 1 / sigma(z_k - z_i)),

and each sigmoid is replaced by its mean, E sigma(d) = sigma(E d / sqrt(1 + pi/8 var d)) (MacKay, 1992), which gives
p_k = 1 / sum_i exp(-(m_k - m_i) / sqrt(1 + pi/8 v_ki)); then the K values are divided by their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.integrators import Integrator, Prediction, check_features, require_support
from bnncli.integrators._moments import HasLogitMoments, check_choice, example_blocks
from bnncli.integrators.probit import binary_probit_probs, difference_of_projected, label_probit_probs
from bnncli.lazy import torch
from bnncli.options.declaration import PROJECTION, Setting
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

_LAMBDA = math.pi / 8
_PASSES = 8  # over arrays of all pairs, which should stay in the cache
SETTINGS = {
    "order": Setting(
        "Order of the approximation: {default} (the default), 1 or 2; higher orders use more of the covariances",
        int,
        0,
        choices=(0, 1, 2),
        minimum=0,
        place=30,
    ),
    "projection": PROJECTION.of(
        default="sum-zero", own="{default} (the default) or none", choices=("sum-zero", "none")
    ),
}


@dataclass(frozen=True)
class MeanField(Integrator):
    """Mean sigmoids of all pairs of logits, combined and normalised.

    A single logit, and each label of multi-label data, is always the binary probit.

    Args:
        order: how much of the variance v_ki of a difference is used. 0: S_kk. 1: S_kk + S_ii. 2: S_kk + S_ii - 2 S_ki,
          all of it, at the cost of the covariances: K^3 an example from a Kronecker-factored posterior, where the
          others cost K^2. More of the variance is not nearer to the integral, because the mean of a quotient is not
          the quotient of means: on twelve pairs of a Laplace posterior (full, kron, diag; Fashion-MNIST, CIFAR-10) and
          familiar or unfamiliar data 0 had the least error, a quarter to 85 % of that of 2. For three classes with
          random covariances 1 and 2 had about half the error of 0.
        projection: sum-zero, logits minus their mean, P m and P S P; two logits are then one difference, the binary
          probit. none, as published: orders 0 and 1 then change when an uncertain constant is added to all logits,
          which the softmax and order 2 do not. On the posteriors above it had up to four times the error.
    """

    needs: ClassVar[str] = "logit_moments"
    order: int = SETTINGS["order"].default
    projection: str = SETTINGS["projection"].default

    def __post_init__(self) -> None:
        check_choice("mean-field", "projection", self.projection, SETTINGS["projection"].choices)
        check_choice("mean-field", "order", self.order, SETTINGS["order"].choices)

    def predict(
        self,
        posterior: HasLogitMoments,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities from the posterior's logit means, variances and, for order 2, covariances.

        Args:
            posterior: one with logit moments (gaussian, point).
            features: (N, D).
            num_samples: not used, there are no draws.
            generator: not used.
            progress: advances once per example.

        Raises:
            UsageError: the posterior has no logit moments.
        """
        require_support("mean-field", posterior)
        layout = posterior.layout
        check_features(layout, features)
        probs = features.new_empty(features.shape[0], layout.num_classes, dtype=torch.float32)
        for rows in example_blocks(features, progress, elements=_PASSES * layout.num_outputs**2):
            probs[rows] = self._probs(posterior, features[rows]).float()
        return Prediction.from_probs(probs, is_exclusive=layout.likelihood.is_exclusive)

    def _probs(self, posterior: HasLogitMoments, features: Tensor) -> Tensor:
        """Return class probabilities (n, C) of a block of features (n, D)."""
        likelihood, is_projected = posterior.layout.likelihood, self.projection == "sum-zero"
        if not likelihood.is_exclusive:
            return label_probit_probs(*posterior.logit_marginals(features))
        if not likelihood.is_shift_invariant:
            return binary_probit_probs(*posterior.logit_marginals(features))
        if likelihood.num_classes == 2 and is_projected:
            difference = difference_of_projected(*posterior.logit_marginals(features, is_projected=True))
            return binary_probit_probs(*difference)
        if self.order == 2:  # a projection would change no difference; float32 would lose those of large variances
            mean, covariance = posterior.logit_moments(features.double())
            return mean_field_probs(mean, pair_variance(covariance))
        mean, variance = posterior.logit_marginals(features, is_projected=is_projected)
        if self.order == 0:
            return own_variance_probs(mean, variance)
        return mean_field_probs(mean, variance.unsqueeze(2) + variance.unsqueeze(1))


def own_variance_probs(mean: Tensor, variance: Tensor) -> Tensor:
    """Return class probabilities (n, K) of order 0, where v_ki = S_kk for all i: one largest exponent serves every k.

    Args:
        mean, variance: (n, K).
    """
    below = mean - mean.amax(dim=1, keepdim=True)
    scale = (1 + _LAMBDA * variance).rsqrt()
    sums = (below.unsqueeze(1) * scale.unsqueeze(2)).exp_().sum(dim=2)
    return torch.softmax(below * scale - sums.log(), dim=1)


def mean_field_probs(mean: Tensor, pair_variance: Tensor) -> Tensor:
    """Return class probabilities (n, K) for logits of mean (n, K), from the variance v_ki of their differences (n, K, K)."""
    scale = pair_variance.mul(_LAMBDA).add_(1).rsqrt_()
    log_probs = -((mean.unsqueeze(1) - mean.unsqueeze(2)) * scale).logsumexp(dim=2)
    return torch.softmax(log_probs, dim=1)


def pair_variance(covariance: Tensor) -> Tensor:
    """Return the variance of each difference of two logits, S_kk + S_ii - 2 S_ki, (n, K, K), from the covariance (n, K, K)."""
    variance = covariance.diagonal(dim1=1, dim2=2)
    # For nearly equal logits only rounding is left, perhaps below zero.
    return torch.sub(variance.unsqueeze(2) + variance.unsqueeze(1), covariance, alpha=2).clamp_min_(0)

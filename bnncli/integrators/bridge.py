"""The Laplace bridge: a Dirichlet over the class probabilities from the mean and variance of the logits, without draws.

Hobbhahn (2020), arXiv 2003.01227, eq. (2.7); the formula is `bnncli.numerics.dirichlet.from_gaussian`. Its mean does
not depend on the scale of the variances (all of them times c divide every alpha by c): it neither tends to the softmax
for small variances nor to equal probabilities for large ones. The scale determines only how concentrated the Dirichlet
is.

Each label of multi-label data has a Beta of its own, that of two classes: for a logit with mean m and variance v the
label has (1 + e^m) / v and its absence (1 + e^-m) / v, and the mean is sigma(m).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bnncli.integrators import Integrator, Prediction, check_features, entropy, join, require_support
from bnncli.integrators._moments import HasLogitMoments, check_choice, example_blocks
from bnncli.lazy import torch
from bnncli.numerics import dirichlet
from bnncli.options.declaration import PROJECTION, Setting
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = {
    "projection": PROJECTION.of(
        default="marginal",
        own="{default} (subtract their mean, the default), none or conditional (condition on a zero sum)",
        choices=("marginal", "none", "conditional"),
    ),
    "normalize": Setting("Shrink logits with large variance before the Laplace bridge", bool, False, place=40),
}


@dataclass(frozen=True)
class Bridge(Integrator):
    """The Dirichlet whose Laplace approximation in the softmax basis has the logits' means and variances.

    Args:
        projection: how the Gaussian is brought to logits that sum to zero, where the bridge is defined.
          marginal: logits minus their mean, P m and diag(P S P): the same distribution of the probabilities.
          none: variances as they are, as published; too large by what all logits have in common.
          conditional: the Gaussian given that the sum is zero, as laplace-torch has it; another distribution unless
          all rows of the covariance have the same sum. Needs the covariances, K^3 an example.
          A single logit f is always taken as (-f/2, f/2), which sums to zero; so is each label of multi-label data.
        normalize: shrink the Gaussian where c = mean variance / sqrt(K / 2) is above 1 (means by sqrt(c), variances by
          c), where the bridge is far from its Gaussian: probabilities then tend to equal ones as variances grow. The
          published form divides by c below 1, too, which makes small variances sure of one class; this does not.
    """

    needs: ClassVar[str] = "logit_moments"
    gives_dirichlet: ClassVar[bool] = True
    projection: str = SETTINGS["projection"].default
    normalize: bool = SETTINGS["normalize"].default

    def __post_init__(self) -> None:
        check_choice("bridge", "projection", self.projection, SETTINGS["projection"].choices)

    def predict(
        self,
        posterior: HasLogitMoments,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return the Dirichlet's mean, mutual information and log concentration, and an interval for the predicted class or each label.

        Args:
            posterior: one with logit moments (gaussian, point). Without any variance the probabilities are the limit of
              the bridge for small equal variances, which is not the softmax.
            features: (N, D).
            num_samples: not used, there are no draws.
            generator: not used.
            progress: advances once per example.

        Raises:
            UsageError: the posterior has no logit moments.
        """
        require_support("bridge", posterior)
        layout, num_examples = posterior.layout, features.shape[0]
        check_features(layout, features)
        if not layout.likelihood.is_exclusive:
            blocks = example_blocks(features, progress, elements=layout.num_outputs)
            return join([self._of_labels(*posterior.logit_marginals(features[rows])) for rows in blocks])
        log_concentration = features.new_empty(num_examples, layout.num_classes, dtype=torch.float32)
        probs = torch.empty_like(log_concentration)
        statistics = features.new_empty(4, num_examples, dtype=torch.float64)
        elements = layout.num_outputs ** (2 if self.projection == "conditional" else 1)
        for rows in example_blocks(features, progress, elements=elements):
            block = dirichlet.from_gaussian(*self._logits(posterior, features[rows]))
            log_concentration[rows] = block.float()
            mean = dirichlet.mean(block)
            probs[rows] = mean.float()
            log_a, log_b = dirichlet.beta_marginals(block, mean.argmax(dim=1, keepdim=True))
            values = (entropy(mean), dirichlet.mutual_information(block), log_a[:, 0], log_b[:, 0])
            statistics[:, rows] = torch.stack(values)
        entropies, mutual_info, log_a, log_b = statistics
        return Prediction(
            probs=probs,
            entropy=entropies.float(),
            mutual_info=mutual_info.float(),
            interval=dirichlet.central_interval(log_a, log_b).float(),
            log_concentration=log_concentration,
        )

    def _of_labels(self, mean: Tensor, variance: Tensor) -> Prediction:
        """Return the prediction of labels with logits of mean (n, L) and variance (n, L): a Beta for each label."""
        half = mean.double().flatten() / 2
        moments = torch.stack([-half, half], dim=1), (variance.double() / 4).reshape(-1, 1).expand(-1, 2)
        betas = dirichlet.from_gaussian(*(shrink(*moments) if self.normalize else moments))
        probs = dirichlet.mean(betas)[:, 1].view_as(mean)
        return Prediction(
            probs=probs.float(),
            entropy=entropy(probs, is_exclusive=False).float(),
            mutual_info=dirichlet.mutual_information(betas).view_as(mean).sum(dim=1).float(),
            interval=dirichlet.central_interval(betas[:, 1], betas[:, 0]).view(*mean.shape, 2).float(),
            log_concentration=betas.view(*mean.shape, 2).float(),
        )

    def _logits(self, posterior: HasLogitMoments, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance (n, C) float64 of the logits that the bridge starts from."""
        likelihood = posterior.layout.likelihood
        if not likelihood.is_shift_invariant:
            mean, variance = posterior.logit_marginals(features)
            mean, variance = likelihood.balanced_class_logits(mean, dim=1), (variance / 4).expand(-1, 2)
        elif self.projection == "conditional":
            # What all logits share cancels, and would take the digits of float32 covariances with it.
            mean, variance = condition_on_zero_sum(*posterior.logit_moments(features.double()))
        else:
            mean, variance = posterior.logit_marginals(features, is_projected=self.projection == "marginal")
        return shrink(mean.double(), variance.double()) if self.normalize else (mean.double(), variance.double())


def condition_on_zero_sum(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (n, K) and variance (n, K) of logits given that they sum to zero, from mean (n, K) and covariance (n, K, K).

    m - S 1 (1^T m) / (1^T S 1) and the diagonal of S - S 1 1^T S / (1^T S 1). Where the sum has no variance there is
    nothing to condition on, and only the mean is shifted.
    """
    row_sums, variance = covariance.sum(dim=2), covariance.diagonal(dim1=1, dim2=2)
    total = row_sums.sum(dim=1, keepdim=True)
    has_variance = total > 1e-12 * variance.sum(dim=1, keepdim=True)
    gain = torch.where(has_variance, row_sums / total, 1 / mean.shape[1])
    reduced = (variance - gain * row_sums).clamp_min(0)
    return mean - gain * mean.sum(dim=1, keepdim=True), torch.where(has_variance, reduced, variance)


def shrink(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return means / sqrt(c) and variances / c, both (n, K), with c = mean variance / sqrt(K / 2) where that is above 1."""
    excess = (variance.mean(dim=1, keepdim=True) / math.sqrt(mean.shape[1] / 2)).clamp_min(1)
    return mean / excess.sqrt(), variance / excess

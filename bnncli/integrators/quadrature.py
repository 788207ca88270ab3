"""Quadrature: exact class probabilities for two classes, or for independent labels, under Gaussian logits, to 1e-13.

I(m, s) = E sigma(f), f ~ N(m, s^2), is the integral that the others approximate: of one logit, or of the difference of
two. The trapezoid rule converges exponentially for functions that are analytic around the real line (Trefethen and
Weideman 2014, "The exponentially convergent trapezoidal rule", SIAM Review 56(3), theorem 5.1). sigma has poles at
+-i pi, so two forms of the integral share the work, each where its strip is wide:

    s <= 1.5:   I = integral of sigma(m + s z) phi(z) dz, the Gaussian's variable;
    s >  1.5:   I = integral of sigma'(u) Phi((m - u) / s) du, the logistic's, by parts.

Small probabilities keep their digits: sigma(f) = e^f sigma(-f) gives I(m, s) = e^{m + s^2/2} I(-m - s^2, s), which
takes any m < -s^2/2 to one where the integral is not small, and the larger probability is one minus the smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from bnncli.errors import UsageError
from bnncli.integrators import (
    Integrator,
    Prediction,
    check_features,
    chunk_budget,
    entropy,
    join,
    require_support,
    settings_of,
    slices,
)
from bnncli.integrators._moments import HasLogitMoments, check_choice
from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood
from bnncli.options.declaration import Setting
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

MAX_POINTS = 1000
_CHUNK_EXAMPLES = 4096  # at most: covariances need further memory per example
_SWITCH = 1.5  # standard deviation of the logit at which both forms need equally many points
_GAUSSIAN_WINDOW = (-9.0, 9.0)  # beyond it lies 2e-19 of the mass
_LOGISTIC_WINDOW = (-75.0, 38.0)  # outside, integrands are below 1e-16 of their sum for every m >= -s^2 / 2
_NORMAL_97_5 = 1.959963984540054  # quantile of the standard normal
SETTINGS = {
    "rule": Setting(
        "Quadrature rule: {default} (the default) or gauss-hermite",
        default="trapezoid",
        choices=("trapezoid", "gauss-hermite"),
        place=50,
    ),
    "points": Setting("Number of quadrature points, 8 to 1000; {default} by default", int, 250, minimum=1, place=60),
}


@dataclass(frozen=True)
class Quadrature(Integrator):
    """Exact probabilities of two classes, or of each label of multi-label data, by a sum over fixed nodes.

    Args:
        rule: trapezoid; or gauss-hermite, whose error grows with the logit's standard deviation s: with 250 points
            1e-15 at s = 1, 1e-10 at 4, 1e-5 at 10 and 0.02 at 100, where its nodes are too far apart for the
            sigmoid's step.
        points: nodes. With 250 the trapezoid rule's error is below 1e-13 for every mean and variance, relative to the
          smaller probability; with 150 it is 1e-9, with 100 1e-5. Of its two forms the one in z takes a quarter of
          them.
    """

    rule: str = SETTINGS["rule"].default
    points: int = SETTINGS["points"].default

    needs: ClassVar[str] = "logit_moments"
    max_classes: ClassVar[float] = 2

    def __post_init__(self) -> None:
        check_choice("quadrature", "rule", self.rule, SETTINGS["rule"].choices)
        if not 8 <= self.points <= MAX_POINTS:
            raise UsageError(f"quadrature, points: expected 8 to {MAX_POINTS}; got {self.points}")

    def predict(
        self,
        posterior: HasLogitMoments,
        features: Tensor,
        *,
        num_samples: int | None,
        generator: torch.Generator,
        progress: Progress = SILENT,
    ) -> Prediction:
        """Return class probabilities with mutual information and the interval of the predicted class's probability, or each label's.

        Args:
            posterior: one with logit moments (gaussian, point) and two classes, of one logit or two, or labels.
            features: (N, D).
            num_samples: not used, there are no draws.
            generator: not used.
            progress: advances once per example.

        Raises:
            UsageError: the posterior has no logit moments, or more than two classes.
        """
        require_support("quadrature", posterior)
        check_features(posterior.layout, features)
        num_examples = features.shape[0]
        task = progress.task("predict", num_examples)
        if not posterior.layout.likelihood.is_exclusive:
            parts = []
            for rows in slices(num_examples, _CHUNK_EXAMPLES):
                parts.append(label_prediction(*posterior.logit_marginals(features[rows].double()), **settings_of(self)))
                task.advance(rows.stop - rows.start)
            return join(parts)
        mean = features.new_empty(num_examples, dtype=torch.float64)
        variance = torch.empty_like(mean)
        for rows in slices(num_examples, _CHUNK_EXAMPLES):
            # Under a weak prior the logits share most of their variance: float32 would lose the difference's.
            moments = posterior.logit_moments(features[rows].double())
            mean[rows], variance[rows] = binary_moments(*moments, posterior.layout.likelihood)
            task.advance(rows.stop - rows.start)
        return binary_prediction(mean, variance, rule=self.rule, points=self.points)


class BinaryIntegral(NamedTuple):
    """Result of a quadrature: the smaller class probability and the expected entropy in nats, (n,) float64."""

    smaller: Tensor
    expected_entropy: Tensor


def binary_moments(mean: Tensor, covariance: Tensor, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    """Return mean (n,) and variance (n,), float64, of the logit of class 1 against class 0.

    Args:
        mean: (n, K) of one logit, or of two, whose difference counts.
        covariance: (n, K, K).
        likelihood: of two classes, which says what the logits are.
    """
    mean, covariance = mean.double(), covariance.double()
    if not likelihood.is_shift_invariant:
        return mean[:, 0], covariance[:, 0, 0].clamp_min(0)
    variance = covariance[:, 0, 0] + covariance[:, 1, 1] - covariance[:, 0, 1] - covariance[:, 1, 0]
    return mean[:, 1] - mean[:, 0], variance.clamp_min(0)


def binary_prediction(mean: Tensor, variance: Tensor, *, rule: str = "trapezoid", points: int = 250) -> Prediction:
    """Return the prediction for logits of mean (n,) and variance (n,), columns [1 - p, p]."""
    probs, expected_entropy = binary_probs(mean, variance, rule=rule, points=points)
    total = entropy(probs)
    size, spread = mean.double().abs(), _NORMAL_97_5 * variance.double().sqrt()
    # The predicted class is the one on the mean's side; its logit has mean |m|, and sigma is monotone.
    interval = torch.sigmoid(torch.stack([size - spread, size + spread], dim=1))
    return Prediction(
        probs=probs.float(),
        entropy=total.float(),
        mutual_info=(total - expected_entropy).clamp_min(0).float(),
        interval=interval.float(),
    )


def label_prediction(mean: Tensor, variance: Tensor, *, rule: str = "trapezoid", points: int = 250) -> Prediction:
    """Return the prediction for labels whose logits have means (n, L) and variances (n, L), with intervals (n, L, 2)."""
    pairs, expected_entropy = binary_probs(mean.flatten(), variance.flatten(), rule=rule, points=points)
    total = entropy(pairs).view_as(mean).sum(dim=1)
    spread = _NORMAL_97_5 * variance.double().sqrt()
    interval = torch.sigmoid(torch.stack([mean - spread, mean + spread], dim=2))
    return Prediction(
        probs=pairs[:, 1].view_as(mean).float(),
        entropy=total.float(),
        mutual_info=(total - expected_entropy.view_as(mean).sum(dim=1)).clamp_min(0).float(),
        interval=interval.float(),
    )


def binary_probs(
    mean: Tensor, variance: Tensor, *, rule: str = "trapezoid", points: int = 250
) -> tuple[Tensor, Tensor]:
    """Return probabilities [1 - p, p] (n, 2) and expected entropy (n,), nats, for logits of mean (n,) and variance (n,); float64."""
    integrate = _trapezoid if rule == "trapezoid" else _gauss_hermite
    mean, scale = mean.double(), variance.double().sqrt()
    smaller, expected_entropy = torch.empty_like(mean), torch.empty_like(mean)
    for rows in slices(len(mean), max(1, chunk_budget(mean) // points)):
        smaller[rows], expected_entropy[rows] = integrate(mean[rows].abs(), scale[rows], points)
    # The larger is exact as one minus the smaller, which is at most a half.
    pair = torch.stack([smaller, 1 - smaller], dim=1)
    return torch.where((mean > 0).unsqueeze(1), pair, pair.flip(1)), expected_entropy


def _trapezoid(size: Tensor, scale: Tensor, points: int) -> BinaryIntegral:
    """Integrate for logits of mean -size (n,) <= 0; both forms for all rows, so that nothing waits for a GPU."""
    tilted = torch.maximum(-size, size - scale.square()).unsqueeze(1)
    factor = torch.exp((scale.square() / 2 - size).clamp_max(0))
    size, column = size.unsqueeze(1), scale.unsqueeze(1)

    narrow, wide = column.clamp_max(_SWITCH), column.clamp_min(_SWITCH)
    nodes, step = _grid(_GAUSSIAN_WINDOW, max(2, points // 4), scale)
    weights = step * torch.exp(-nodes.square() / 2) / math.sqrt(2 * math.pi)
    small = BinaryIntegral(
        torch.sigmoid(tilted + narrow * nodes) @ weights, _binary_entropy(narrow * nodes - size) @ weights
    )

    nodes, step = _grid(_LOGISTIC_WINDOW, points, scale)
    weights = step * torch.sigmoid(nodes) * torch.sigmoid(-nodes)
    density = torch.exp(-((nodes + size) / wide).square() / 2) / (wide * math.sqrt(2 * math.pi))
    large = BinaryIntegral(_normal_cdf((tilted - nodes) / wide) @ weights, density @ (step * _binary_entropy(nodes)))
    is_narrow = scale <= _SWITCH
    return BinaryIntegral(
        factor * torch.where(is_narrow, small.smaller, large.smaller),
        torch.where(is_narrow, small.expected_entropy, large.expected_entropy),
    )


def _gauss_hermite(size: Tensor, scale: Tensor, points: int) -> BinaryIntegral:
    """Integrate for logits of mean -size (n,) <= 0."""
    nodes, weights = (part.to(size.device) for part in hermite_nodes(points))
    logits = scale.unsqueeze(1) * nodes - size.unsqueeze(1)
    return BinaryIntegral(torch.sigmoid(logits) @ weights, _binary_entropy(logits) @ weights)


def _grid(window: tuple[float, float], points: int, like: Tensor) -> tuple[Tensor, float]:
    """Return equidistant nodes (points,) over a window, and their step."""
    nodes = torch.linspace(*window, points, dtype=torch.float64, device=like.device)
    return nodes, (window[1] - window[0]) / (points - 1)


@lru_cache(maxsize=8)
def hermite_nodes(points: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights (points,) of the standard normal, float64 on the CPU."""
    from scipy.special import roots_hermitenorm

    nodes, weights = roots_hermitenorm(points)
    return torch.from_numpy(np.asarray(nodes)), torch.from_numpy(np.asarray(weights / weights.sum()))


def _normal_cdf(x: Tensor) -> Tensor:
    """Return Phi with all digits where it is small: torch.special.ndtr loses them from -5 on."""
    return 0.5 * torch.erfc(-x / math.sqrt(2))


def _binary_entropy(logits: Tensor) -> Tensor:
    """Return the entropy in nats of the Bernoulli with these logits f: log(1 + e^-|f|) + |f| sigma(-|f|)."""
    size = logits.abs()
    return torch.nn.functional.softplus(-size) + size * torch.sigmoid(-size)

"""Criteria for a prior precision: validation loss, leave-one-out loss, marginal likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from bnncli import registry
from bnncli.inference.laplace import fixed_log_prior, laplace_evidence
from bnncli.lazy import torch
from bnncli.numerics.random import row_shifts, shifted_normal, uniform_points
from bnncli.parameters.layouts import ClassifierLayout, LogitLayout, ParamLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.structures import Covariance, num_varying
from bnncli.structures.logit_gaussian import covariances_together, is_by_layer, is_turned, logit_gaussian
from bnncli.structures.logits import root_of_covariances
from bnncli.targets.last_layer import HeldOutFeatures, row_blocks
from bnncli.targets.target import CurvedTarget, HeldOut, HeldOutByLogits

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.likelihoods import Likelihood
    from bnncli.structures.network_logits import CovariancePath
    from bnncli.targets.last_layer import LastLayerTarget
    from bnncli.targets.target import LinearisedHeldOut


_TOGETHER = 2**24  # values in all covariances judged together


def noise_size(layout: ParamLayout, structure: str, num_draws: int) -> int:
    """Return the number of normals per draw: K for the logits of an example, P for theta."""
    return layout.num_params if _draws_theta(layout, structure, num_draws) else cast(LogitLayout, layout).num_outputs


def linearised_losses(
    held_out: HeldOut, target: CurvedTarget, theta: Tensor, covariances: Sequence[Covariance], *, noise: Tensor
) -> Tensor:
    """Return the loss of each example under each N(theta, covariance), (C, M) float64 nats; see HeldOut.losses.

    Args:
        covariances: C of one structure that share one Jacobian if `shared_by` allows several, else a single one.
        noise: standard normal, (S, K), shifted by each example (`numerics.random`), or (S, P); see `noise_size`.
    """
    layout, num_draws = cast(ClassifierLayout, target.layout), len(noise)
    examples = cast("LinearisedHeldOut", held_out)
    first = Gaussian(theta, covariances[0], cast(LogitLayout, layout), target.prior).logits
    if _draws_theta(layout, covariances[0].structure, num_draws):
        (covariance,) = covariances
        deviations = covariance.unwhiten(noise[:, : num_varying(covariance)]).to(target.dtype)

        def pushed(inputs: Tensor) -> Iterator[Tensor]:
            assert first.push is not None
            yield (first.mean(inputs) + first.push(inputs, deviations)).permute(2, 0, 1)

        return examples.losses_of(pushed, num_draws=num_draws, width=2 * layout.widest)
    together = covariances_together(covariances, cast(LogitLayout, layout), theta)
    return _losses_of_logits(examples, first.mean, together, count=len(covariances), noise=noise)


def _losses_of_logits(
    examples: LinearisedHeldOut,
    mean_of: Callable[[Tensor], Tensor],
    covariances_of: Callable[[Tensor], Tensor],
    *,
    count: int,
    noise: Tensor,
) -> Tensor:
    """Return the losses, (C, M), for draws of the logits from their means (n, K) and C covariances (C, n, K, K)."""
    points, (num_draws, num_outputs) = uniform_points(noise), noise.shape

    def drawn(inputs: Tensor) -> Iterator[Tensor]:
        mean = mean_of(inputs)
        normals = shifted_normal(points, row_shifts(inputs, mean.shape[1]), mean)
        for covariance in covariances_of(inputs):
            root = root_of_covariances(covariance).to(inputs)
            yield root.apply(normals).transpose(0, 1) + mean.T.unsqueeze(1)

    width = num_outputs + 2 * count * num_outputs**2 // num_draws
    return examples.losses_of(drawn, num_draws=num_draws, width=width)


def covariances_at_once(layout: ParamLayout, structure: str, num_draws: int) -> int:
    """Return how many covariances of a structure to judge together: 1 if this saves no work or takes much memory."""
    if _draws_theta(layout, structure, num_draws):
        return 1
    if is_turned(structure):  # the bases are shared
        return max(1, _TOGETHER // layout.num_params)
    return max(1, _TOGETHER // int(registry.load_class("network_curvature", structure).num_elements(layout)))


def _draws_theta(layout: ParamLayout, structure: str, num_draws: int) -> bool:
    return num_draws < cast(LogitLayout, layout).num_outputs or not is_by_layer(structure)


_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits computed at once


def losses_by_logits(
    held_out: HeldOutByLogits, target: CurvedTarget, theta: Tensor, covariance: Covariance, *, noise: Tensor
) -> Tensor:
    """Return the loss of each example under N(theta, covariance), (M,) float64 nats; see HeldOut.losses.

    Args:
        noise: (S, K), standard normal, shifted by each example (`numerics.random`).
    """
    gaussian = Gaussian(theta, covariance, cast("LogitLayout", target.layout), target.prior)
    points = uniform_points(noise)

    def drawn(features: Tensor) -> Iterator[Tensor]:
        mean, root = gaussian.logit_root(features)
        size = max(1, _ELEMENTS.get(features.device.type, 2**20) // mean.numel())
        shifts = row_shifts(features, mean.shape[1])
        for some in points.split(size):
            yield root.apply(shifted_normal(some, shifts, mean)).transpose(0, 1) + mean.T.unsqueeze(1)

    return held_out.losses_by(drawn, num_draws=len(noise))


MOST_ROWS = 10_000  # examples, enough for a mean loss
_OPERATIONS = 1e10  # over all examples: K^3 each
_MOST_LEVERAGE = 1 - 1e-6  # with a rough structure an example may seem to be more informative than all together


@dataclass(frozen=True)
class LeftOutExamples(HeldOutFeatures):
    """Examples of the target itself, each to be predicted by the posterior of all others.

    Args:
        scale: of the target's log likelihood.
    """

    scale: float

    @classmethod
    def of(cls, target: LastLayerTarget, generator: torch.Generator) -> LeftOutExamples:
        """Choose all examples of a target, or a random subset whose losses are quick to compute."""
        count = min(target.num_examples, MOST_ROWS, int(_OPERATIONS / target.layout.num_outputs**3))
        order = torch.randperm(target.num_examples, generator=generator, device=generator.device)
        index = order[:count].sort().values
        labels = target.labels[index.to(target.device)]
        return cls(target.rows(index.to(target.features.device)), labels, target.layout, target.likelihood_scale)


def left_out_losses(
    held_out: LeftOutExamples, target: CurvedTarget, theta: Tensor, covariance: Covariance, *, noise: Tensor
) -> Tensor:
    """Return the loss of each example under the Gaussian without it, (M,) float64 nats; see HeldOut.losses.

    Args:
        theta: (P,), the mode.
        covariance: there, of all examples.
        noise: (S, K), standard normal, shifted by each example (`numerics.random`).
    """
    gaussian = Gaussian(theta, covariance, cast("LogitLayout", target.layout), target.prior)
    points, likelihood = uniform_points(noise), held_out.layout.likelihood
    losses = torch.empty(len(held_out.features), dtype=torch.float64, device=held_out.features.device)
    columns = noise.numel() + 4 * noise.shape[1] ** 2
    for rows in row_blocks(len(losses), columns, losses.device):
        features, labels = held_out.features[rows], held_out.labels[rows]
        moments = gaussian.logit_moments(features.double())
        mean, without = leave_one_out_logits(*moments, labels, likelihood, scale=held_out.scale)
        normal = shifted_normal(points, row_shifts(features, mean.shape[1]), mean)
        drawn = root_of_covariances(without).apply(normal).transpose(0, 1) + mean.T.unsqueeze(1)
        logs = likelihood.decision_logs(drawn, labels).logsumexp(dim=1)
        losses[rows] = math.log(len(noise)) - logs.mean(dim=0)
    return losses


def leave_one_out_logits(
    mean: Tensor, covariance: Tensor, labels: Tensor, likelihood: Likelihood, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return mean (n, K) and covariance (n, K, K) of the logits of examples, each without its own label.

    Args:
        mean, covariance: of the posterior of all examples, float64.
        labels: (n,), or (n, C) for multi-label.
        scale: of the log likelihood.
    """
    _, probabilities = likelihood.normalize_(mean.T.unsqueeze(1).clone())
    probabilities = probabilities[:, 0]
    root = likelihood.hessian_root(probabilities).permute(2, 0, 1) * scale**0.5  # R with Lambda = R R^T
    spread = covariance @ root
    values, vectors = torch.linalg.eigh(root.mT @ spread)
    part = spread @ vectors / (1 - values.clamp(0, _MOST_LEVERAGE)).sqrt().unsqueeze(1)
    without = covariance + part @ part.mT  # (S^-1 - R R^T)^-1 = S + S R (1 - R^T S R)^-1 R^T S
    gradient = (probabilities - likelihood.indicators(labels, mean.dtype)).T * scale
    return mean + (without @ gradient.unsqueeze(2)).squeeze(2), without


class Lift(Protocol):
    """Maps a posterior over part of theta to all of theta."""

    @property
    def layout(self) -> ParamLayout:
        """Layout of all of theta."""

    def theta(self, theta: Tensor) -> Tensor:
        """Return all of theta (..., P) for a centre."""

    def covariance(self, covariance: Covariance, prior: Prior) -> Covariance:
        """Return the covariance of all of theta, under the target's prior."""


@dataclass(frozen=True)
class Criterion:
    """The criterion to minimise, in two parts: at the centre, and what the covariance adds.

    Args:
        noise: (S, P), standard normal, common to all candidates so that it cancels in comparisons; (S, K) if logits are
            drawn, see `linearised_losses` and by_logits.
        held_out: examples of the validation NLL; None for minus the log marginal likelihood.
        lift: from the candidates' theta to all of it, if they cover a part; noise and held_out are of all of theta.
        by_logits: whether held_out belongs to a last layer whose logits are drawn.
        is_plug_in: predict held_out with the centre only; the covariance adds nothing.
    """

    noise: Tensor
    held_out: HeldOut | None
    lift: Lift | None = None
    by_logits: bool = False
    is_plug_in: bool = False

    def at_center(self, target: CurvedTarget, theta: Tensor, log_joint: float) -> float:
        """Return the part at the centre theta (P,), given its log joint."""
        if self.held_out is None:
            return -log_joint - 0.5 * target.layout.num_params * math.log(2 * math.pi)
        losses = self.plug_in_losses(theta)
        return float(losses.sum()) / len(losses)

    def plug_in_losses(self, theta: Tensor) -> Tensor:
        """Return the validation NLL of each example under theta (P,), (M,) float64; needs validation data."""
        assert self.held_out is not None
        return self.held_out.losses(self._whole(theta).unsqueeze(0))

    def of(self, target: CurvedTarget, theta: Tensor, log_joint: float, covariance: Covariance) -> float:
        """Return the whole criterion of N(theta, covariance)."""
        if self.held_out is None:
            return -laplace_evidence(log_joint - fixed_log_prior(target, theta, covariance), covariance)
        return float(self.losses(target, theta, covariance).mean())

    def losses(self, target: CurvedTarget, theta: Tensor, covariance: Covariance) -> Tensor:
        """Return the validation NLL of each example under N(theta, covariance), (M,) float64; needs validation data."""
        assert self.held_out is not None
        if isinstance(self.held_out, LeftOutExamples):
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
        """Return `of` for covariances about one centre whose predictions share their work."""
        assert self.held_out is not None
        return linearised_losses(self.held_out, target, theta, covariances, noise=self.noise).mean(dim=1).tolist()

    def along(
        self, target: CurvedTarget, theta: Tensor, path: CovariancePath, log_precisions: Sequence[float]
    ) -> list[float]:
        """Return `of` for covariances on a path about theta (P,)."""
        losses = _losses_of_logits(
            cast("LinearisedHeldOut", self.held_out),
            logit_gaussian(theta, cast(LogitLayout, target.layout)).mean,
            lambda inputs: path.at(inputs, log_precisions),
            count=len(log_precisions),
            noise=self.noise,
        )
        return cast("list[float]", losses.mean(dim=1).tolist())

    def shared_by(self, target: CurvedTarget, structure: str) -> int:
        """Return how many covariances about one centre `together` takes, 0 for none."""
        if self.held_out is None or not self.held_out.is_linearised or self.lift is not None:
            return 0
        return covariances_at_once(target.layout, structure, len(self.noise))

    def _whole(self, theta: Tensor) -> Tensor:
        """Return all of theta (P,) for a centre."""
        return theta if self.lift is None else self.lift.theta(theta)

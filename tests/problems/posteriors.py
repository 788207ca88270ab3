"""Posteriors over a head, written by hand for integrators: draws, and a Gaussian with a dense covariance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from bnncli.integrators import Prediction, load_integrator
from bnncli.parameters.layouts import HeadLayout
from bnncli.structures.logits import LogitRoot, root_of_covariances


@dataclass(frozen=True)
class Draws:
    """A posterior that can only sample, as a flow can."""

    layout: HeadLayout
    mean: Tensor
    scale: Tensor
    type: ClassVar[str] = "flow"
    center: None = field(default=None, init=False)

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        noise = torch.randn(num_samples or 1, len(self.mean), generator=generator, dtype=torch.float64)
        return self.mean + noise @ self.scale.T


@dataclass(frozen=True)
class Full:
    """A Gaussian with every capability, its moments from the Jacobian of the logits."""

    draws: Draws
    type: ClassVar[str] = "gaussian"

    @property
    def layout(self) -> HeadLayout:
        return self.draws.layout

    @property
    def center(self) -> Tensor:
        return self.draws.mean

    @property
    def mean_theta(self) -> Tensor:
        return self.draws.mean

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        return self.draws.sample(num_samples, generator)

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        basis = torch.eye(self.layout.num_params, dtype=features.dtype)
        jacobian = self.layout.logits(features, basis).permute(1, 2, 0)
        return jacobian @ self.center, jacobian @ self.draws.scale @ self.draws.scale.T @ jacobian.mT

    def logit_root(self, features: Tensor) -> tuple[Tensor, LogitRoot]:
        mean, covariance = self.logit_moments(features)
        return mean, root_of_covariances(covariance)

    def pushes(self, num_draws: int) -> bool:
        return False

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return torch.randn(num_samples, len(self.center), generator=generator, dtype=torch.float64)

    def from_noise(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        theta = self.center + noise @ self.draws.scale.T
        return theta, self.log_density(theta)

    def log_density(self, theta: Tensor) -> Tensor:
        return theta.new_zeros(len(theta))  # up to a constant where it is flat: what log_joint below is, too

    def log_joint(self, theta: Tensor) -> Tensor:
        return self.log_density(theta)

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        mean, covariance = self.logit_moments(features)
        if is_projected:
            projection = torch.eye(self.layout.num_outputs, dtype=features.dtype) - 1 / self.layout.num_outputs
            mean, covariance = mean @ projection, projection @ covariance @ projection
        return mean, covariance.diagonal(dim1=1, dim2=2)


def gaussian(layout: HeadLayout, *, scale: float = 0.7, seed: int = 0) -> Full:
    generator = torch.Generator().manual_seed(seed)
    size = layout.num_params
    mean = torch.randn(size, generator=generator, dtype=torch.float64)
    factor = torch.randn(size, size, generator=generator, dtype=torch.float64) * scale / math.sqrt(size)
    return Full(Draws(layout, mean, factor))


def inputs(layout: HeadLayout, *, count: int = 7, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, layout.num_features, generator=generator, dtype=torch.float64)


def predict(name: str, posterior: object, features: Tensor, *, num_samples: int | None = 50) -> Prediction:
    generator = torch.Generator().manual_seed(2)
    ready = load_integrator(name).prepare(
        posterior, num_samples=num_samples, generator=generator, target=posterior
    )  # a posterior that is its own target has equal importance weights
    return ready.predict(posterior, features, num_samples=num_samples, generator=generator)

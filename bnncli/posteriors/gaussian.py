"""A Gaussian over theta: the result of the Laplace approximation and the start of refinement."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.numerics.random import quasi_normal
from bnncli.parameters.layouts import HeadLayout, LogitLayout, ParamLayout
from bnncli.parameters.module import ModuleLayout, ModuleNetwork, bind_layout, recorded_layout
from bnncli.parameters.prior import Prior
from bnncli.posteriors import move, sample_from_noise, standard_normal
from bnncli.shapes import check_shapes
from bnncli.structures import Covariance, num_varying
from bnncli.structures.logit_gaussian import logit_gaussian
from bnncli.structures.logits import LogitGaussian, LogitRoot
from bnncli.structures.row_space import read_covariance, rows_of

if TYPE_CHECKING:
    from torch import Tensor

Layout = TypeVar("Layout", bound=ParamLayout, covariant=True)


@dataclass(frozen=True)
class Gaussian(Generic[Layout]):
    """N(mean, Sigma), Sigma = L L^T of any structure.

    Args:
        mean: (P,), float64.
        covariance: Sigma.
        layout: of theta.
        prior: of the target of the fit; None where the target's prior is not one of ours.
    """

    type: ClassVar[str] = "gaussian"
    mean: Tensor
    covariance: Covariance
    layout: Layout
    prior: Prior | None = None

    def __post_init__(self) -> None:
        check_shapes(mean=(self.mean, str(self.layout.num_params)))
        if self.covariance.num_params != self.layout.num_params:
            raise ValueError(
                f"the covariance has {self.covariance.num_params} parameters, but the head has {self.layout.num_params}"
            )

    def require_prior(self) -> Prior:
        """Return the prior of the target of the fit. Raises DataError where there is none."""
        if self.prior is None:
            raise DataError("the Gaussian has no prior, which this command needs", hint="give the prior of its target")
        return self.prior

    @property
    def center(self) -> Tensor:
        """Return the mean, (P,)."""
        return self.mean

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Return standard normal draws (S, N) float64, for from_noise; N is P minus the number of fixed parameters."""
        return standard_normal(num_samples, num_varying(self.covariance), generator, self.mean.device)

    def quasi_noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Return standard normal draws (S, N) float64 from scrambled Sobol points."""
        return move(quasi_normal(num_samples, num_varying(self.covariance), generator), self.mean.device)

    def from_noise(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return theta = mean + L z (S, P) and its log density (S,), both float64, for noise z (S, N).

        The density is that of the varying parameters, given the fixed ones.
        """
        constant = 0.5 * num_varying(self.covariance) * math.log(2 * math.pi) + self.covariance.log_det_scale()
        return self.mean + self.covariance.unwhiten(noise), -0.5 * noise.square().sum(dim=1) - constant

    def sample(self, num_samples: int | None, generator: torch.Generator) -> Tensor:
        """Return draws (S, P), float32."""
        return sample_from_noise(self, num_samples or 1, generator)

    def log_density(self, theta: Tensor) -> Tensor:
        """Return log N(theta | mean, Sigma), (S,) float64, for theta (S, P)."""
        return self.from_noise(self.covariance.whiten(theta.to(self.mean) - self.mean))[1]

    @property
    def entropy(self) -> float:
        """Return the entropy in nats."""
        return 0.5 * num_varying(self.covariance) * math.log(2 * math.pi * math.e) + self.covariance.log_det_scale()

    @cached_property
    def logits(self: Gaussian[LogitLayout]) -> LogitGaussian:
        """Return the Gaussian of the logits of inputs (n, ...): exact for a head, else of the network linearised at the mean."""
        return logit_gaussian(self.mean, self.layout, self.covariance)

    def logit_marginals(
        self: Gaussian[LogitLayout], features: Tensor, *, is_projected: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and variance (n, K) of each logit at features (n, D); minus the logits' mean if projected."""
        return self.logits.marginals(features, is_projected=is_projected)

    def logit_moments(self: Gaussian[LogitLayout], features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the logits at features (n, D)."""
        return self.logits.moments(features)

    def logit_root(self: Gaussian[LogitLayout], features: Tensor) -> tuple[Tensor, LogitRoot]:
        """Return the mean (n, K) of the logits at features (n, D), and roots of their covariances, to draw logits with."""
        return self.logits.root(features)

    def pushes(self: Gaussian[LogitLayout], num_draws: int) -> bool:
        """Return whether this many draws of logits are cheaper as draws of theta times the logits' Jacobian.

        Their covariance takes K products with its transpose, which on ResNet-20 take no less each.
        """
        return self.logits.push is not None and num_draws < self.layout.num_outputs

    def bound_to(self, network: ModuleNetwork) -> Gaussian:
        """Return the Gaussian bound to a network that computes the logits."""
        return replace(self, layout=bind_layout(self.layout, network))

    def to(self, device: torch.device | str) -> Gaussian:
        """Return a copy on another device."""
        prior = None if self.prior is None else self.prior.to(device)
        return replace(self, mean=self.mean.to(device), covariance=self.covariance.to(device=device), prior=prior)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return `mean`, the prior's and the structure's tensors, float64; structure and layout as JSON."""
        tensors = {"mean": self.mean.double().cpu().contiguous()}
        tensors |= self.prior.to_tensors() if self.prior else {}
        meta = {"type": self.type, "structure": self.covariance.structure, **self.layout.to_meta()}
        within = rows_of(self.covariance)
        if within is not None:
            meta["row_space_rank"] = within.rows.rank
        if num_varying(self.covariance) < self.layout.num_params:
            meta["num_varying"] = num_varying(self.covariance)
        return {**tensors, **self.covariance.to_tensors()}, meta

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Gaussian[HeadLayout | ModuleLayout]:
        """Invert to_tensors."""
        layout = recorded_layout(meta)
        covariance = read_covariance(meta["structure"], tensors, layout)
        return Gaussian(tensors["mean"], covariance, layout, Prior.found_in(tensors))

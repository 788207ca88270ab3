"""Gaussians over logits in the form that integrators take: a posterior over the head, and features.

The head's weights are the logits: features are rows of the identity, so that the posterior's mean and covariance are
those of the logits. An integrator runs on them exactly as it does in predict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnncli.covariances.diag import Diag
from bnncli.covariances.full import Full
from bnncli.errors import UsageError
from bnncli.integrators import Integrator, Prediction, load_integrator, supports, variant
from bnncli.lazy import torch
from bnncli.options.declaration import declaration
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.gaussian import Gaussian
from bnncli.registry import names

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ConfiguredIntegrator:
    """An integrator with settings, under the name of its predictions."""

    name: str
    settings: dict[str, Any]

    @property
    def variant(self) -> str:
        """Such as probit-sum-zero."""
        return variant(self.name, self.settings)

    @property
    def integrator(self) -> Integrator:
        """The integrator itself."""
        return load_integrator(self.name, **self.settings)


def integrators_for(posterior: Gaussian, wanted: Sequence[str]) -> list[ConfiguredIntegrator]:
    """Every integrator (or those wanted) that fits the posterior and needs no training data, with every setting once.

    Raises:
        UsageError: one that was wanted does not fit.
    """
    integrators = []
    for name in wanted or names("integrators"):
        needs_target = load_integrator(name).needs_target
        if needs_target or not supports(name, posterior):
            why = (
                "needs training data" if needs_target else f"does not work with {posterior.layout.num_classes} classes"
            )
            if wanted:
                raise UsageError(f"--integrator {name} {why}, so it cannot be compared on a Gaussian")
            continue
        integrators += [
            configured
            for settings in _settings(name)
            if _works(configured := ConfiguredIntegrator(name, settings), posterior)
        ]
    return integrators


def _settings(name: str) -> Iterator[dict[str, Any]]:
    """The defaults, then each setting in turn away from its default."""
    yield {}
    for setting, spec in (declaration("integrators", name, "SETTINGS") or {}).items():
        choices = (True,) if spec.type is bool else spec.choices
        yield from ({setting: value} for value in choices if value != spec.default)


def _works(configured: ConfiguredIntegrator, posterior: Gaussian) -> bool:
    """Whether the integrator takes these settings, and this number of classes with them."""
    try:
        predict(configured, posterior, num_samples=1, generator=torch.Generator().manual_seed(0))
    except UsageError:
        return False
    return True


def predict(
    configured: ConfiguredIntegrator, posterior: Gaussian, *, num_samples: int, generator: torch.Generator
) -> Prediction:
    """The prediction at every row of the identity, in float64 as far as the integrator keeps it."""
    features = torch.eye(posterior.layout.num_features, dtype=torch.float64, device=posterior.mean.device)
    integrator = configured.integrator
    draws = num_samples if integrator.is_sampling else None
    ready = integrator.prepare(posterior, num_samples=draws, generator=generator)
    return ready.predict(posterior, features, num_samples=draws, generator=generator)


def softmax_posterior(mean: Tensor, covariance: Tensor) -> Gaussian:
    """One example whose K logits are N(mean (K,), covariance (K, K)). Raises UsageError when that is not a covariance."""
    layout = HeadLayout(len(mean), 1, has_bias=False)
    variances = covariance.diagonal()
    if torch.equal(covariance, variances.diag()):
        return Gaussian(mean, Diag(variances), layout)
    values, vectors = torch.linalg.eigh(covariance)
    if values.min() < -1e-10 * values.abs().max():
        raise UsageError(
            f"--covariance: expected no negative eigenvalue; got {values.min().item():.4g}", hint="check its entries"
        )
    # A root of any shape becomes a triangular one, also where the covariance is singular.
    upper = torch.linalg.qr((vectors * values.clamp_min(0).sqrt()).T).R
    return Gaussian(mean, Full(upper.T.contiguous()), layout)


def sigmoid_posterior(means: Tensor, variances: Tensor) -> Gaussian:
    """N examples with a single logit each, independent, of these means (N,) and variances (N,)."""
    return Gaussian(means, Diag(variances), HeadLayout(1, len(means), has_bias=False))

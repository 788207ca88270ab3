"""Blocks of examples for integrators that use the moments of the logits, and scores of the mean logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from bnncli.integrators import HasLayout, check_features, chunk_budget, examples_at_once, slices
from bnncli.integrators.mc import affordable_draws
from bnncli.lazy import torch
from bnncli.names import unknown_value_error
from bnncli.parameters.layouts import ClassifierLayout
from bnncli.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor


_MOST_EXAMPLES = 4096  # posteriors need further memory per example for the variances
_ARRAYS = 8  # arrays of a chunk's size; measured best for additions and multiplications


class HasLogitMarginals(HasLayout, Protocol):
    """A posterior under which each logit has a known mean and variance."""

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and variance (n, K) of the logits of features (n, D); minus the logits' mean if projected."""


class HasLogitMoments(HasLogitMarginals, Protocol):
    """A posterior under which the logits have a known mean and covariance."""

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean (n, K) and covariance (n, K, K) of the logits of features (n, D)."""


def example_blocks(features: Tensor, progress: Progress, *, elements: int) -> Iterator[slice]:
    """Yield slices of examples whose largest intermediate, of `elements` numbers an example, fits; advance the progress."""
    task = progress.task("predict", features.shape[0])
    for rows in slices(features.shape[0], min(_MOST_EXAMPLES, max(1, _ARRAYS * chunk_budget(features) // elements))):
        yield rows
        task.advance(rows.stop - rows.start)


def check_choice(integrator: str, setting: str, value: object, choices: tuple[object, ...]) -> None:
    """Check that a setting has one of its values. Raises UsageError with the choices otherwise."""
    if value not in choices:
        raise unknown_value_error(f"{integrator}, {setting}", value, choices)


MEAN_DRAWS = 256  # for the mean of a posterior without a center, which then errs by a sixteenth of a standard deviation
NETWORK_MEAN_DRAWS = 64  # for a network, each draw a pass of all its layers: an eighth
_DRAWN_ELEMENTS = 2**24  # of theta drawn at once


def mean_theta(posterior: Any, generator: torch.Generator) -> Tensor:
    """Return theta (P,) that represents the posterior: its mean or center, or the mean of MEAN_DRAWS draws where it has none."""
    center: Tensor | None = getattr(posterior, "mean_theta", getattr(posterior, "center", None))
    if center is not None:
        return center
    size = max(1, _DRAWN_ELEMENTS // posterior.layout.num_params)
    parts = [
        posterior.sample(rows.stop - rows.start, generator).sum(dim=0, dtype=torch.float64)
        for rows in slices(MEAN_DRAWS, size)
    ]
    return torch.stack(parts).sum(dim=0) / MEAN_DRAWS


def representative_draws(posterior: Any, generator: torch.Generator) -> Tensor:
    """Return draws of a network's theta (S, P) whose mean logits represent the posterior: NETWORK_MEAN_DRAWS, or fewer of many parameters.

    A posterior with several centers returns these.
    """
    if hasattr(posterior, "centers"):
        centers: Tensor = posterior.centers
        return centers
    draws: Tensor = posterior.sample(affordable_draws(NETWORK_MEAN_DRAWS, posterior.layout.num_params), generator)
    return draws


def energy_and_max_logit(features: Tensor, theta: Tensor, layout: ClassifierLayout) -> tuple[Tensor, Tensor]:
    """Return -log sum exp of the mean logits (N,) and the largest of them (N,), float32.

    Uses the classes' balanced logits: with a single logit f both scores then grow with |f|. In multi-label data the
    energy is the joint one, the sum of -log(1 + exp f) over the labels (Wang et al. 2021, arXiv 2109.14162).

    Args:
        features: (N, D).
        theta: (P,), or draws (S, P).
    """
    check_features(layout, features)
    energy = features.new_empty(features.shape[0], dtype=torch.float32)
    largest = torch.empty_like(energy)
    stacked = theta.to(features).reshape(-1, layout.num_params)
    budget = examples_at_once(features, layout.widest)
    for rows in slices(features.shape[0], budget):
        some = stacked.split(max(1, budget // (rows.stop - rows.start)))
        sums = [layout.logits(features[rows], draws).sum(dim=0) for draws in some]
        logits = torch.stack(sums).sum(dim=0) / len(stacked)
        energy[rows] = -layout.likelihood.log_partitions(logits)
        largest[rows] = layout.likelihood.balanced_class_logits(logits, dim=1).amax(dim=1)
    return energy, largest

"""Blocks of examples for integrators without draws, which work from the moments of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from bnncli.integrators import HasLayout, chunk_budget, slices
from bnncli.names import not_one_of
from bnncli.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

_MOST_EXAMPLES = 4096  # posteriors need further memory per example for the variances
_ARRAYS = 8  # of a chunk's size measured best for what is only added and multiplied


class HasLogitMarginals(HasLayout, Protocol):
    """A posterior under which each logit has a known mean and variance."""

    def logit_marginals(self, features: Tensor, *, is_projected: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and variance (n, K) of the logits of features (n, D); minus the logits' mean if projected."""


class HasLogitMoments(HasLogitMarginals, Protocol):
    """A posterior under which the logits have a known mean and covariance."""

    def logit_moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, K) and covariance (n, K, K) of the logits of features (n, D)."""


def example_blocks(features: Tensor, progress: Progress, *, elements: int) -> Iterator[slice]:
    """Slices of examples whose largest intermediate, so many `elements` an example, fits; progress advances with them."""
    task = progress.task("predict", features.shape[0])
    for rows in slices(features.shape[0], min(_MOST_EXAMPLES, max(1, _ARRAYS * chunk_budget(features) // elements))):
        yield rows
        task.advance(rows.stop - rows.start)


def check_choice(integrator: str, setting: str, value: object, choices: tuple[object, ...]) -> None:
    """Pass when a setting has one of its values. Raises UsageError with the choices otherwise."""
    if value not in choices:
        raise not_one_of(f"{integrator}, {setting}", value, choices)

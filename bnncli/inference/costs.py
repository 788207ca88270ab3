"""How long a Laplace fit takes, estimated from sizes before it starts: operations over the speed of the device.

Each structure counts its own operations (`curvature`). Right to a factor of about three (tests/inference/test_costs.py): enough to
tell seconds from hours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bnncli import registry
from bnncli.machine.speed import Speed, speed_of
from bnncli.theta.layout import MatrixLayout

if TYPE_CHECKING:
    import torch

SEARCH_FITS, SEARCH_MODES = 10, 16  # of a search for the prior precision: Hessians that are made, modes that are found
NUM_DRAWS = 128  # of each candidate, common to all: their noise cancels in comparisons
MOST_LEFT_OUT = 300  # outputs of a head whose examples are left out: the cubes of their number, for hundreds of examples, take seconds
NUM_FOLDS = 5  # of a cross-validation over the rows of val
QUICK_SECONDS = (
    6.0  # that the factors of a structure may take which is fitted unasked: of 6,000 parameters on two cores
)
QUICK_ANYWHERE = (
    4762  # parameters of the largest full covariance whose factors take no longer on one core; all devices are faster
)
_MODE_OPERATIONS = 150.0  # for each example and parameter: 30 to 120 of easy heads, up to 450 under weak priors
_GRADIENTS = 4  # of a transition of a chain, about


def fit_seconds(
    structure: str, layout: MatrixLayout, *, num_examples: int, speed: Speed, num_fits: int = 1, num_modes: int = 1
) -> float:
    """Seconds of so many covariances of a structure, and of so many modes, on a device of that speed.

    Raises:
        ValueError: there is no such structure.
    """
    choices = registry.in_order("curvature")
    if structure not in choices:
        raise ValueError(f"structure: expected one of {', '.join(choices)}, got {structure!r}")
    curvature = registry.load_class("curvature", structure)
    needed = curvature.operations(layout, num_examples)
    once = min(num_fits, 1)
    fit = needed.products / speed.products + needed.elementwise / speed.elementwise + needed.factors / speed.factors
    fixed = needed.products_once / speed.products + needed.factors_once / speed.factors
    return (
        num_fits * fit + once * fixed + num_modes * _MODE_OPERATIONS * num_examples * layout.num_params / speed.products
    )


def largest_full(device: torch.device | str) -> int:
    """Parameters of the largest full covariance that is quick there: whose factor and inverse take QUICK_SECONDS."""
    return round((1.5 * QUICK_SECONDS * speed_of(device).factors) ** (1 / 3))


def transition_seconds(layout: MatrixLayout, *, num_examples: int, speed: Speed) -> float:
    """Seconds of a transition of one chain of hmc: two products with the features for each gradient."""
    return _GRADIENTS * 4 * num_examples * layout.num_params / speed.products

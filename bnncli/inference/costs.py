"""How long a Laplace fit takes, estimated from sizes before it starts: operations over speeds measured on one CPU core.

Each structure counts its own operations (`curvature`). Right to a factor of about three (tests/inference/test_costs.py): enough to
tell seconds from hours.
"""

from __future__ import annotations

from bnncli import registry
from bnncli.theta.layout import MatrixLayout

SEARCH_FITS, SEARCH_MODES = 10, 16  # of a search for the prior precision: Hessians that are made, modes that are found
NUM_DRAWS = 128  # of each candidate, common to all: their noise cancels in comparisons
_PRODUCTS = 3e10  # operations a second of products over the examples, float32
_FACTORS = 1.2e10  # of float64 factors
_MODE_SECONDS = 1e-7  # for each example and parameter
_ELEMENTWISE = 3e9
_GRADIENTS = 4  # of a transition of a chain, about


def fit_seconds(
    structure: str, layout: MatrixLayout, *, num_examples: int, num_fits: int = 1, num_modes: int = 1, threads: int = 1
) -> float:
    """Seconds on a CPU of so many covariances of a structure, and of so many modes.

    Raises:
        ValueError: there is no such structure.
    """
    choices = registry.in_order("curvature")
    if structure not in choices:
        raise ValueError(f"structure: expected one of {', '.join(choices)}, got {structure!r}")
    curvature = registry.load_class("curvature", structure)
    needed = curvature.operations(layout, num_examples)
    if curvature.fixed:  # the features' factor, which no theta changes, is made and decomposed once
        num_fits = min(num_fits, 1)
    fit = needed.products / _PRODUCTS + needed.elementwise / _ELEMENTWISE + needed.factors / _FACTORS
    modes = num_modes * _MODE_SECONDS * num_examples * layout.num_params
    return (num_fits * fit + modes) / threads


def transition_seconds(layout: MatrixLayout, *, num_examples: int) -> float:
    """Seconds on one CPU core of a transition of one chain of hmc: two products with the features for each gradient."""
    return _GRADIENTS * 4 * num_examples * layout.num_params / _PRODUCTS

"""How long a Laplace fit takes, estimated from sizes before it starts: operations over speeds measured on one CPU core.

Counts of operations as in Golub and Van Loan (2013), Matrix Computations: 4.2 for Cholesky factors and their inverses, 8.3
for eigenvectors. Right to a factor of about three (tests/inference/test_costs.py): enough to tell seconds from hours.
"""

from __future__ import annotations

from bnncli.theta.head import HeadLayout

SEARCH_FITS, SEARCH_MODES = 10, 16  # of a search for the prior precision: Hessians that are made, modes that are found
_PRODUCTS = 3e10  # operations a second of products over the examples, float32
_FACTORS = 1.2e10  # of float64 factors
_MODE_SECONDS = 1e-7  # for each example and parameter
_ELEMENTWISE = 3e9


def fit_seconds(
    structure: str, layout: HeadLayout, *, num_examples: int, num_fits: int = 1, num_modes: int = 1, threads: int = 1
) -> float:
    """Seconds on a CPU of so many covariances of a structure, and of so many modes.

    Raises:
        ValueError: the structure is not one of full, block, kron, diag.
    """
    num_outputs, size = layout.num_outputs, layout.num_features + layout.has_bias
    num_pairs = max(1, num_outputs * (num_outputs - 1) // 2)
    operations = {
        "full": (2 * num_examples * num_pairs * size**2 / _PRODUCTS, 4 / 3 * float(layout.num_params) ** 3),
        "block": (2 * num_examples * num_outputs * size**2 / _PRODUCTS, 4 / 3 * num_outputs * float(size) ** 3),
        "kron": (2 * num_examples * size**2 / _PRODUCTS, 10 * float(size) ** 3),
        "diag": (2 * num_examples * layout.num_params / _ELEMENTWISE, float(layout.num_params)),
    }
    if structure not in operations:
        raise ValueError(f"structure: expected one of {', '.join(operations)}, got {structure!r}")
    sums, factors = operations[structure]
    if structure == "kron":  # the features' factor, which no theta changes, is made and decomposed once
        num_fits = min(num_fits, 1)
    modes = num_modes * _MODE_SECONDS * num_examples * layout.num_params
    return (num_fits * (sums + factors / _FACTORS) + modes) / threads

"""Size of the layers of an affine flow, computed without building one."""

from __future__ import annotations

from bnncli.options.declaration import RANK
from bnncli.parameters.layouts import MatrixLayout


def num_elements(layout: MatrixLayout, scale: str) -> int:
    """Return how many numbers one layer has, with the default rank."""
    size = layout.num_params
    if scale == "diag":
        return 2 * size
    if scale == "low-rank":
        rank = min(RANK.default, size)
        return 2 * size + rank * size + rank**2
    columns, outputs = layout.num_features + layout.has_bias, layout.num_outputs
    return 2 * size + columns**2 * (outputs if scale == "block" else 1) + outputs**2

"""Layers for the tests of flows: every flow with settings, as a fit starts with it and far from the identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bnncli.flows import build_layers
from bnncli.parameters.layouts import HeadLayout
from problems.seeds import seeded

LAYOUTS = {
    1: HeadLayout(1, 1, has_bias=False), 2: HeadLayout(1, 1), 5: HeadLayout(1, 4), 30: HeadLayout(3, 9),
    850: HeadLayout(10, 84),
}  # fmt: skip
# Every flow with the settings that its tests run with; a flow that is not here fails test_every_flow_has_an_example.
EXAMPLES: list[tuple[str, dict[str, Any]]] = [
    ("affine", {"scale": "kron"}), ("affine", {"scale": "block"}), ("affine", {"scale": "low-rank"}),
    ("affine", {"scale": "diag"}), ("householder", {}), ("iaf", {"hidden": 7}), ("planar", {}), ("radial", {}),
    ("realnvp", {"hidden": 7}), ("spline", {"hidden": 7}), ("sylvester", {}),
]  # fmt: skip
every_flow = pytest.mark.parametrize(("kind", "settings"), EXAMPLES, ids=lambda value: str(value))
exact_start = pytest.mark.parametrize(
    ("kind", "settings"), [case for case in EXAMPLES if case[0] not in ("planar", "radial")], ids=str
)


def start_layer(kind: str, dim: int, seed: int = 0, **settings: Any) -> Any:
    """One layer of two, as a fit starts with it: the first for an even seed, the second for an odd one."""
    return build_layers(kind, LAYOUTS[dim], seeded(seed), length=2, **settings)[seed % 2]


def make_layer(kind: str, dim: int, seed: int = 0, *, spread: float = 1.0, **settings: Any) -> Any:
    """A layer far from the identity: each row of each parameter moved by a vector of length about `spread`.

    One number alone is a row; vectors move by `spread` a coordinate.
    """
    layer, generator = start_layer(kind, dim, seed, **settings), seeded(seed + 100)
    with torch.no_grad():
        for parameter in layer.parameters():
            size = parameter.shape[-1] if parameter.ndim > 1 else 1
            step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += spread * step / max(size, 1) ** 0.5
    return layer


def draw_points(dim: int, num_points: int = 6) -> Tensor:
    return 2 * torch.randn(num_points, dim, generator=seeded(9), dtype=torch.float64)

"""Rows of a full Hessian: those of the whole one, bit for bit, whichever are asked for together."""

from __future__ import annotations

import pytest
import torch
from problems.heads import at_random, head_target
from torch import Tensor

from bnncli.parameters.layouts import HeadLayout
from bnncli.structures.full import LastLayerFull

LAYOUTS = [
    HeadLayout(4, 3),
    HeadLayout(3, 30),
    HeadLayout(5, 4, has_bias=False),
    HeadLayout(1, 6),
    HeadLayout(3, 5, likelihood_name="multilabel"),
]


def labels(features: Tensor, layout: HeadLayout, generator: torch.Generator) -> Tensor:
    if layout.likelihood_name == "multilabel":
        return torch.randint(2, (len(features), layout.num_outputs), generator=generator)
    return at_random(features, layout, generator)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("step", [1, 4, 7, 1000])
def test_rows_are_those_of_the_whole(layout: HeadLayout, step: int) -> None:
    target = head_target(layout, 50, labels=labels, prior=1.0)
    theta = torch.linspace(-1, 1, layout.num_params, dtype=torch.float64)
    whole, rows = LastLayerFull.hessian(target, theta)["hessian.full"], LastLayerFull.rows(target, theta)
    for start in range(0, layout.num_params, step):
        stop = min(start + step, layout.num_params)
        assert torch.equal(rows(start, stop), whole[start:stop])

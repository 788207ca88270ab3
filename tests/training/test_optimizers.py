"""Every optimizer against torch's own of that name, whole and resumed in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bnncli.training.loop import Course
from bnncli.training.optimizers import Adam, Optimizer, Sgd, load_optimizer, optimizer_tensors

CPU = torch.device("cpu")
DECAY = 0.3
PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "adam": (lambda p: Adam([p], CPU, weight_decay=DECAY), lambda p: torch.optim.Adam(p, weight_decay=DECAY)),
    "adamw": (
        lambda p: Adam([p], CPU, weight_decay=DECAY, is_decoupled=True),
        lambda p: torch.optim.AdamW(p, weight_decay=DECAY),
    ),
    "sgd": (lambda p: Sgd([p], CPU), lambda p: torch.optim.SGD(p)),
    "momentum": (
        lambda p: Sgd([p], CPU, momentum=0.9, weight_decay=DECAY),
        lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=DECAY),
    ),
    "nesterov": (
        lambda p: Sgd([p], CPU, momentum=0.9, is_nesterov=True, weight_decay=DECAY),
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=DECAY),
    ),
}


def run(optimizer: Any, steps: range) -> None:
    """Steps down a quartic, at a rate that changes and that float32 has; one parameter has no gradient in the first."""
    for step in steps:
        (group,) = optimizer.param_groups
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_((step + 1) / 64)
        else:
            group["lr"] = (step + 1) / 64
        optimizer.zero_grad()
        used = group["params"] if step else group["params"][:1]
        sum((one**4).sum() for one in used).backward()
        optimizer.step()


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_torchs_and_go_on_after_a_resume(name: str) -> None:
    ours, theirs = PAIRS[name]
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 2), (4,))]
    mine, other, third = ([start.clone().requires_grad_() for start in starts] for _ in range(3))
    optimizer: Optimizer = ours(mine)
    run(optimizer, range(3))
    again: Optimizer = ours(third)
    load_optimizer(again, optimizer_tensors(optimizer))
    run(optimizer, range(3, 6))
    run(again, range(3, 6))
    run(theirs(other), range(6))
    for one, two, resumed in zip(mine, other, third, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
        assert torch.equal(one, resumed)
    assert optimizer.state[mine[0]]["step"] == 6


def test_a_schedule_in_steps_divides_the_rate_by_ten_twice() -> None:
    course = Course(epochs=8, num_batches=5, schedule="step")
    rates = [course.rate(2.0, step) for step in range(40)]
    assert rates == pytest.approx([2.0] * 20 + [0.2] * 10 + [0.02] * 10, rel=1e-12)

"""Optimizers against torch's, one tensor or several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import run_python, start
from torch import Tensor

from bnncli.training.loop import LearningRateSchedule
from bnncli.training.optimizers import Adam, Optimizer, Sgd, load_optimizer, optimizer_tensors

CPU = torch.device("cpu")
DECAY = 0.3
PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "adam": (lambda p: Adam([p], CPU, weight_decay=DECAY), lambda p: torch.optim.Adam(p, weight_decay=DECAY)),
    "adamw": (lambda p: Adam([p], CPU, weight_decay=DECAY, is_decoupled=True), lambda p: torch.optim.AdamW(p, weight_decay=DECAY)),
    "sgd": (lambda p: Sgd([p], CPU), lambda p: torch.optim.SGD(p)),
    "momentum": (lambda p: Sgd([p], CPU, momentum=0.9, weight_decay=DECAY), lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=DECAY)),
    "nesterov": (
        lambda p: Sgd([p], CPU, momentum=0.9, is_nesterov=True, weight_decay=DECAY),
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=DECAY),
    ),
}  # fmt: skip


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
    course = LearningRateSchedule(epochs=8, num_batches=5, schedule="step")
    rates = [course.rate(2.0, step) for step in range(40)]
    assert rates == pytest.approx([2.0] * 20 + [0.2] * 10 + [0.02] * 10, rel=1e-12)


RATES = (0.1, 3e-4)


def parameters(dtype: torch.dtype) -> list[list[Tensor]]:
    """Two groups, of two and of one."""
    generator = torch.Generator().manual_seed(0)
    shapes = (((3, 2), (5,)), ((40, 7),))
    return [[torch.randn(*shape, generator=generator, dtype=dtype) for shape in group] for group in shapes]


def gradients(step: int, parameter: Tensor) -> Tensor:
    """What some loss gives in a step, of sizes that differ much."""
    generator = torch.Generator().manual_seed(step)
    return 10.0 ** (3 * step - 6) * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def adam_run(optimizer: Adam | torch.optim.Adam, steps: range) -> None:
    for step in steps:
        for group, rate in zip(optimizer.param_groups, RATES, strict=True):
            group["lr"].fill_(rate)
            for parameter in group["params"]:
                parameter.grad = gradients(step, parameter)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_are_those_of_torchs_fused_adam(dtype: torch.dtype) -> None:
    ours, theirs, resumed = parameters(dtype), parameters(dtype), parameters(dtype)
    mine = Adam(ours, torch.device("cpu"))
    adam_run(mine, range(3))
    again = Adam(resumed, torch.device("cpu"))
    load_optimizer(again, optimizer_tensors(mine))
    adam_run(mine, range(3, 5))
    adam_run(again, range(3, 5))
    groups = [{"params": group, "lr": torch.zeros(())} for group in theirs]
    adam_run(torch.optim.Adam(groups, fused=True), range(5))
    for group, other, third in zip(ours, theirs, resumed, strict=True):
        for one, two, three in zip(group, other, third, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)


def test_a_parameter_without_a_gradient_stays() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = Adam([[one, other]], torch.device("cpu"))
    optimizer.param_groups[0]["lr"].fill_(0.5)
    one.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert one.grad is None
    torch.testing.assert_close(one.detach(), torch.full((2,), 0.5))  # the first step is the rate
    assert torch.equal(other.detach(), torch.ones(2))
    assert [*optimizer.state] == [one]


TRAINED = """
import io, sys
from bnncli.cli.execute import run_command_line
for words in (["refine", sys.argv[1], "--epochs", "1", "--name", "r"], ["fit-lbbnn", sys.argv[1], "--epochs", "1"]):
    assert run_command_line([*words, "-q", "--threads", "1"], io.StringIO()) == 0
assert "torch._dynamo" not in sys.modules
"""


def test_training_does_not_import_the_compiler(small_run: Path) -> None:
    process = start(run_python, ["-c", TRAINED, str(small_run)])
    process.join(timeout=60)
    assert process.exitcode == 0

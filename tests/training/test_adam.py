"""Our Adam is torch's own to the bit, and no training imports the compiler that torch's optimizers import."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kills import run_python, start
from torch import Tensor

from bnncli.training.optimizers import Adam, load_optimizer, optimizer_tensors

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


def run(optimizer: Adam | torch.optim.Adam, steps: range) -> None:
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
    run(mine, range(3))
    again = Adam(resumed, torch.device("cpu"))
    load_optimizer(again, optimizer_tensors(mine))
    run(mine, range(3, 5))
    run(again, range(3, 5))
    groups = [{"params": group, "lr": torch.zeros(())} for group in theirs]
    run(torch.optim.Adam(groups, fused=True), range(5))
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

"""The mixture of last layers: its mean, its draws, and what a file may hold."""

from __future__ import annotations

import pytest
import torch
from problems.seeds import seeded

from bnncli.integrators import load_integrator
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.stack import Stack

LAYOUT = HeadLayout(3, 4)
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def make_stack() -> Stack:
    return Stack(torch.randn(3, LAYOUT.num_params, generator=seeded()), WEIGHTS, LAYOUT)


@pytest.mark.parametrize("samples", [None, 3, 1000])
def test_mc_is_the_weighted_mean_of_the_members(samples: int | None) -> None:
    stack, features = make_stack(), torch.randn(9, 4, generator=seeded(1))
    got = load_integrator("mc").predict(stack, features, num_samples=samples, generator=seeded(2))
    members = [load_integrator("mc").predict(
        Stack(one[None], torch.ones(1, dtype=torch.float64), LAYOUT), features, num_samples=None, generator=seeded()
    ) for one in stack.members]  # fmt: skip
    expected = sum(weight * one.probs.double() for weight, one in zip(WEIGHTS, members, strict=True))
    torch.testing.assert_close(got.probs.double(), expected, rtol=0, atol=1e-6)
    spread = got.entropy.double() - sum(
        weight * one.entropy.double() for weight, one in zip(WEIGHTS, members, strict=True)
    )
    assert got.mutual_info is not None
    torch.testing.assert_close(got.mutual_info.double(), spread, rtol=0, atol=1e-5)


def test_draws_are_as_often_a_member_as_its_weight_says() -> None:
    stack = make_stack()
    draws = stack.sample(20_000, seeded())
    shares = torch.stack([(draws == one).all(dim=1).double().mean() for one in stack.members])
    assert float(shares.sum()) == pytest.approx(1)
    errors = (WEIGHTS * (1 - WEIGHTS) / 20_000).sqrt()
    assert bool(((shares - WEIGHTS).abs() < 4 * errors).all())
    torch.testing.assert_close(stack.center, WEIGHTS @ stack.members.double())


def test_a_file_gives_the_same_mixture_or_is_refused() -> None:
    tensors, meta = make_stack().to_tensors()
    again = Stack.from_tensors(tensors, meta)
    assert torch.equal(again.members, make_stack().members)
    assert torch.equal(again.weights, WEIGHTS)
    for bad in ([0.5, 0.5, 0.5], [1.2, -0.1, -0.1], [1.0, 0.0, 0.0]):
        with pytest.raises(ValueError, match="sum to one"):
            Stack.from_tensors({**tensors, "weights": torch.tensor(bad, dtype=torch.float64)}, meta)

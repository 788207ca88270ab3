"""How far apart draws of stochastic-gradient chains are to be: by the eigenvalues of their motion."""

from __future__ import annotations

import math

import pytest
import torch

from bnncli.inference.sghmc import SghmcPlan, num_apart

N = 100
PLAN = SghmcPlan(1000, 1, 700, 300, N, 17.0, 0.2, is_cyclical=False)


def left_after(num_epochs: int, decay: float, reach: float, num_batches: int = 1) -> float:
    """What is left of where a chain was in a direction, by the motion of position and momentum itself."""
    motion = torch.tensor([[1 - reach, 1 - decay], [-reach, 1 - decay]], dtype=torch.float64)
    return float(torch.linalg.eigvals(motion).abs().max() ** (num_epochs * num_batches))


@pytest.mark.parametrize(("decay", "curvature"), [(0.2, 1.0), (0.2, 0.02), (1.0, 1.0), (0.05, 0.004)])
def test_draws_are_apart_where_a_tenth_is_left(decay: float, curvature: float) -> None:
    plan = SghmcPlan(1000, 1, 700, 300, N, 17.0, decay, is_cyclical=False)
    found, in_turn = num_apart(plan, curvature, N)
    spacing = 700 // found
    assert in_turn == 1
    assert (
        left_after(spacing, decay, 0.17 * curvature)
        <= 0.1
        < left_after(700 // (found + 1) - 1, decay, 0.17 * curvature)
    )


def test_an_epoch_of_more_steps_forgets_more() -> None:
    plan = SghmcPlan(1000, 1, 700, 300, N // 4, 17.0, 0.2, is_cyclical=False)
    assert num_apart(plan, 1.0, N)[0] == pytest.approx(4 * num_apart(PLAN, 1.0, N)[0], rel=0.2)


def test_draws_are_of_those_that_the_plan_keeps() -> None:
    """Of 700 epochs the last 600."""
    plan = SghmcPlan(1000, 1, 200, 300, N, 17.0, 0.2, is_cyclical=False)
    assert num_apart(PLAN, 1.0, N)[0] == 700 // 21
    assert num_apart(plan, 1.0, N)[0] == 600 // 21


@pytest.mark.parametrize("curvature", [0.0, 1e-4])
def test_of_chains_that_do_not_forget_one_draw_is_kept(curvature: float) -> None:
    assert num_apart(PLAN, curvature, N) == (1, 1)


def test_the_end_of_a_cycle_forgets_less_than_its_start_and_short_cycles_are_taken_in_turn() -> None:
    cyclical = SghmcPlan(1000, 4, 50, 0, N, 17.0, 1.0)
    steady = SghmcPlan(1000, 4, 50, 0, N, 17.0, 1.0, is_cyclical=False)
    assert 1 <= num_apart(cyclical, 1.0, N)[0] < num_apart(steady, 1.0, N)[0]
    rate = math.log(10) / 0.17 / 0.5 / 10  # of cycles of 10 epochs one forgets a tenth of the way in e-foldings
    short = SghmcPlan(1000, 100, 1, 5, N, 17.0, 1.0)
    found, in_turn = num_apart(short, rate / 3, N)
    assert found == 1
    assert in_turn in (3, 4)
    assert num_apart(short, 0.0, N) == (1, 100)

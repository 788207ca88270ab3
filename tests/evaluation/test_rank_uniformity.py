"""Uniform ranks: the exact law of the whole distribution function against enumeration, simulation, and its own bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bnncli.evaluation.convergence import RankLaw

SMALL = RankLaw(num_simulations=5, num_draws=3)


def p_values(law: RankLaw, num: int, *, seed: int = 0) -> np.ndarray:
    ranks = np.random.default_rng(seed).integers(0, law.num_draws + 1, size=(num, law.num_simulations))
    return np.array([law.p_value(one) for one in ranks])


def test_the_p_value_is_the_share_of_all_outcomes_that_are_as_odd() -> None:
    every = [np.array(ranks) for ranks in product(range(4), repeat=5)]
    values = np.array([SMALL.p_value(ranks) for ranks in every])
    for value in np.unique(values.round(12)):
        assert value == pytest.approx((values <= value + 1e-9).mean(), abs=1e-9)


def test_ranks_leave_the_bounds_exactly_where_their_p_value_is_at_most_the_level() -> None:
    law, level = RankLaw(40, 19), 0.2
    lowest, highest = law.bounds(level)
    ranks = np.random.default_rng(1).integers(0, 20, size=(200, 40))
    is_out = [bool(((law.counts(one) < lowest) | (law.counts(one) > highest)).any()) for one in ranks]
    assert is_out == [law.p_value(one) <= level for one in ranks]
    assert 0 < sum(is_out) < 200


def test_uniform_ranks_are_doubted_no_more_often_than_the_level_says() -> None:
    values = p_values(RankLaw(30, 9), 1000)
    for level in (0.01, 0.05, 0.2):
        assert (values <= level).mean() < level + 4 * (level * (1 - level) / len(values)) ** 0.5
    assert (values <= 0.2).mean() > 0.15  # and not much less often


@pytest.mark.parametrize("shape", [(2.0, 2.0), (0.6, 0.6), (1.5, 1.0)], ids=["wide", "narrow", "shifted"])
def test_ranks_that_are_off_are_found(shape: tuple[float, float]) -> None:
    ranks = (np.random.default_rng(0).beta(*shape, size=300) * 101).astype(int)
    assert RankLaw(300, 100).p_value(ranks) < 1e-3


@pytest.mark.parametrize("sizes", [(1, 9), (20, 0)], ids=str)
def test_too_few_to_judge_by_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 2 simulations and 1 draw"):
        RankLaw(*sizes)

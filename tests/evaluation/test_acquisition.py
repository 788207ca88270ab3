"""Scores of single examples against SciPy and by hand; BatchBALD against the mutual information summed over all labellings."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy.stats import entropy
from torch import Tensor

from bnncli.errors import UsageError
from bnncli.evaluation.acquisition import SCORES, batch_bald, highest_scores


def make_probs(draws: int, rows: int, classes: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(draws, rows, classes, generator=seeded(seed), dtype=torch.float64)).softmax(dim=2)


def joint_information(probs: Tensor, batch: tuple[int, ...]) -> float:
    """I(y_batch; w) over equally likely draws, every labelling enumerated."""
    total = 0.0
    for labels in itertools.product(range(probs.shape[2]), repeat=len(batch)):
        of_draws = torch.stack([probs[:, row, label] for row, label in zip(batch, labels, strict=True)]).prod(dim=0)
        mean = float(of_draws.mean())
        total += float((of_draws * (of_draws / mean).log()).mean())
    return total


def test_entropy_margin_and_bald_by_hand() -> None:
    draws = make_probs(7, 20, 4).numpy()
    probs = draws.mean(axis=0)
    assert np.allclose(SCORES["entropy"](probs, None), entropy(probs, axis=1))
    ordered = np.sort(probs, axis=1)
    assert np.allclose(SCORES["margin"](probs, None), -(ordered[:, -1] - ordered[:, -2]))
    information = entropy(probs, axis=1) - entropy(draws, axis=2).mean(axis=0)
    assert np.array_equal(SCORES["bald"](probs, information), information)
    with pytest.raises(UsageError, match="has none"):
        SCORES["bald"](probs, None)
    certain = np.array([[1.0, 0.0], [0.5, 0.5]], dtype=np.float32)
    assert np.allclose(SCORES["entropy"](certain, None), [0, math.log(2)])


def test_the_highest_come_first_and_of_equal_ones_the_first_row() -> None:
    assert highest_scores(np.array([0.1, 0.5, 0.3, 0.5]), 3).tolist() == [1, 3, 2]


@pytest.mark.parametrize(
    ("draws", "rows", "classes", "count"), [(3, 6, 2, 4), (11, 9, 3, 3), (5, 7, 4, 2), (6, 500, 2, 3)]
)
def test_batch_bald_is_the_greedy_choice_by_every_labelling(draws: int, rows: int, classes: int, count: int) -> None:
    probs = make_probs(draws, rows, classes)
    chosen = batch_bald(probs, count, generator=seeded())
    batch: list[int] = []
    for row, gain in zip(chosen.rows.tolist(), chosen.gains.tolist(), strict=True):
        before = joint_information(probs, tuple(batch)) if batch else 0.0
        gains = {n: joint_information(probs, (*batch, n)) - before for n in range(rows) if n not in batch}
        assert gain == pytest.approx(gains[row], abs=2e-6)
        assert gains[row] >= max(gains.values()) - 2e-6
        batch.append(row)


@pytest.mark.parametrize("place", [0, 127, 128, 300, 383, 384, 899])
def test_batch_bald_finds_the_example_that_tells_most_wherever_it_stands(place: int) -> None:
    probs = make_probs(6, 900, 2, scale=0.1)
    probs[:, place] = torch.tensor([[0.99, 0.01]] * 3 + [[0.01, 0.99]] * 3)
    assert batch_bald(probs, 1, generator=seeded()).rows.tolist() == [place]


def test_batch_bald_looks_beyond_the_first_examples_where_a_bound_allows_it() -> None:
    """300 near copies of the example that tells most add next to nothing once it is taken; what adds most lies behind them."""
    probs = torch.full((4, 400, 2), 0.5)
    draws = torch.tensor([0.95, 0.95, 0.05, 0.05])
    probs[:, :300, 0] = draws[:, None]
    probs[:, 300:, 0] = torch.tensor([0.9, 0.1, 0.9, 0.1])[:, None] * torch.linspace(0.2, 0.9, 100)
    probs[..., 1] = 1 - probs[..., 0]
    first, second = batch_bald(probs, 2, generator=seeded()).rows.tolist()
    assert first < 300
    gains = {n: joint_information(probs, (first, n)) for n in range(300, 400)}
    assert joint_information(probs, (first, second)) == pytest.approx(max(gains.values()), abs=1e-6)
    assert second >= 300


def test_drawn_labellings_estimate_what_all_of_them_give() -> None:
    probs = make_probs(20, 12, 3, scale=1.0)
    exact = batch_bald(probs, 6, generator=seeded())  # 3^5 labellings at most
    found = [batch_bald(probs, 6, generator=seeded(seed), num_labellings=64) for seed in range(40)]
    same = [one for one in found if torch.equal(one.rows, exact.rows)]
    totals = torch.tensor([float(one.gains.sum()) for one in (same if len(same) > 20 else found)])
    error = float(totals.std()) / math.sqrt(len(totals))
    assert float(totals.mean()) == pytest.approx(float(exact.gains.sum()), abs=4 * error + 1e-3)
    assert (exact.gains.diff() <= 1e-9).all()


def test_copies_of_one_example_are_not_chosen_together() -> None:
    probs = make_probs(30, 10, 3)
    single = joint_information
    best = max(range(10), key=lambda n: single(probs, (n,)))
    copied = torch.cat(
        [probs[:, best : best + 1].expand(-1, 5, -1), probs[:, [n for n in range(10) if n != best]]], dim=1
    )
    rows = batch_bald(copied, 3, generator=seeded()).rows.tolist()
    by_bald = highest_scores(np.array([single(copied, (n,)) for n in range(14)]), 3).tolist()
    assert set(by_bald) <= set(range(5))
    assert len(set(rows) & set(range(5))) < 3


def test_a_large_batch_of_certain_examples_has_finite_gains() -> None:
    probs = make_probs(10, 300, 10, scale=30.0)
    found = batch_bald(probs.half(), 60, generator=seeded(), num_labellings=50)
    assert torch.isfinite(found.gains).all()
    assert len(set(found.rows.tolist())) == 60
    assert float(found.gains.sum()) <= math.log(10) + 0.05  # ten draws have no more to tell


def test_a_batch_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 4"):
        batch_bald(make_probs(2, 4, 2), 5, generator=seeded())

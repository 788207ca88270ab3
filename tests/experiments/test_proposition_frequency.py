"""The condition of proposition 1 against the variance of scipy's Dirichlet at a slightly larger concentration."""

from __future__ import annotations

import numpy as np
import torch
from problems.seeds import seeded
from scipy import stats

from bnncli.experiments.proposition_frequency import condition


def test_the_condition_says_where_the_variance_falls_with_the_concentration() -> None:
    log_alpha = torch.randn(400, 5, generator=seeded(0), dtype=torch.float64)
    falls = []
    for alpha in log_alpha.exp().numpy():
        top = alpha.argmax()
        more = alpha.copy()
        more[top] *= 1 + 1e-6
        falls.append(stats.dirichlet(more).var()[top] < stats.dirichlet(alpha).var()[top])
    assert 20 < sum(falls) < 380
    np.testing.assert_array_equal(condition(log_alpha).numpy(), falls)


def test_of_huge_concentrations_more_than_a_third_is_enough() -> None:
    shares = torch.tensor([[0.33, 0.25, 0.21, 0.21], [0.34, 0.24, 0.21, 0.21], [0.25, 0.25, 0.25, 0.25]]).double()
    assert condition(shares.log() + 500).tolist() == [False, True, False]

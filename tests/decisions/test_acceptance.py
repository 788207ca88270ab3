"""Accepted predictions: the risk that is guaranteed holds in simulation, and more is accepted than a plain correction would."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from bnncli.evaluation.decisions import doubts, fit_acceptance, least_accepted

REPEATS = 400


def drawn(generator: np.random.Generator, count: int, kind: str) -> tuple[NDArray, NDArray]:
    """Confidences and whether the prediction is right: by what it says, by half of that, or alike everywhere and just too seldom."""
    doubt = np.clip(10.0 ** -generator.gamma(2.0, 0.8, size=count), 1e-7, 0.9)
    wrong = {"calibrated": doubt, "overconfident": np.minimum(1, 2 * doubt), "flat": np.full(count, 0.0205)}
    return 1 - doubt, generator.random(count) >= wrong[kind]


def true_risks(kind: str) -> NDArray:
    """The share of wrong ones among what each threshold accepts, of a million examples."""
    if kind == "flat":
        return np.full(len(doubts()), 0.0205)
    confidence, is_right = drawn(np.random.default_rng(99), 1_000_000, kind)
    doubt = 1 - confidence
    accepted = np.searchsorted(np.sort(doubt), doubts(), side="right")
    return np.searchsorted(np.sort(doubt[~is_right]), doubts(), side="right") / np.maximum(accepted, 1)


@pytest.mark.parametrize("kind", ["calibrated", "overconfident", "flat"])
@pytest.mark.parametrize("certainty", [0.95, 0.8])
def test_the_risk_is_exceeded_no_more_often_than_is_said(kind: str, certainty: float) -> None:
    generator, risks = np.random.default_rng(4), dict(zip(doubts().tolist(), true_risks(kind), strict=True))
    exceeded = 0
    for _ in range(REPEATS):
        rule = fit_acceptance(*drawn(generator, 1500, kind), 0.02, certainty)
        exceeded += rule.most_doubt is not None and risks[rule.most_doubt] > 0.02
    allowed = 1 - certainty
    assert exceeded / REPEATS <= allowed + 3 * (allowed * (1 - allowed) / REPEATS) ** 0.5


def test_more_is_accepted_than_where_every_threshold_has_the_same_level() -> None:
    """Handing levels on is what the procedure is for."""
    generator, handed, alone = np.random.default_rng(5), [], []
    for _ in range(50):
        confidence, is_right = drawn(generator, 2000, "calibrated")
        rule = fit_acceptance(confidence, is_right, 0.05, 0.95)
        handed.append(rule.accepts(confidence).mean())
        doubt = 1 - confidence
        accepted = np.array([(doubt <= most).sum() for most in doubts()])
        errors = np.array([((doubt <= most) & ~is_right).sum() for most in doubts()])
        passed = np.flatnonzero(stats.binom.cdf(errors, accepted, 0.05) <= 0.05 / len(doubts()))
        alone.append(accepted[passed[-1]] / 2000)
    assert np.mean(handed) > np.mean(alone) + 0.02


def test_the_test_is_the_exact_binomial_one() -> None:
    confidence, is_right = drawn(np.random.default_rng(6), 3000, "calibrated")
    rule = fit_acceptance(confidence, is_right, 0.05, 0.9)
    accepted = rule.accepts(confidence)
    assert rule.num_accepted == accepted.sum()
    assert rule.num_wrong == (~is_right[accepted]).sum()
    assert rule.p_value == pytest.approx(stats.binom.cdf(rule.num_wrong, rule.num_accepted, 0.05), rel=1e-9)
    assert rule.p_value <= rule.level <= 0.1


def test_what_cannot_be_shown_accepts_nothing() -> None:
    confidence = np.linspace(0.5, 1, 500)
    rule = fit_acceptance(confidence, np.arange(500) % 3 > 0, 0.02, 0.95)
    assert rule.most_doubt is None
    assert not rule.accepts(confidence).any()


def test_the_least_number_is_the_first_that_can_show_it() -> None:
    least = least_accepted(0.02, 0.95)
    accepted = [fit_acceptance(np.ones(count), np.ones(count), 0.02, 0.95).most_doubt for count in (least - 1, least)]
    assert accepted[0] is None or accepted[0] < 1  # levels are handed on from stricter thresholds
    assert accepted[1] == 1.0

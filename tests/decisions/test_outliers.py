"""Outliers: the false-alarm rate that the law of order statistics says, on average or for most calibration sets."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bnncli.evaluation.decisions import fit_outliers


def test_false_alarms_are_as_often_as_is_said() -> None:
    """Of 59 scores the third smallest: a rate of Beta(3, 57), 0.05 on average."""
    generator = np.random.default_rng(7)
    rates = [stats.norm.cdf(fit_outliers(generator.normal(size=59), 0.05).threshold) for _ in range(400)]
    law = stats.beta(3, 57)
    assert abs(np.mean(rates) - 0.05) < 3.3 * law.std() / 20
    assert stats.kstest(rates, law.cdf).pvalue > 0.001


def test_with_a_confidence_most_calibration_sets_keep_the_rate() -> None:
    generator = np.random.default_rng(8)
    rates = [stats.norm.cdf(fit_outliers(generator.normal(size=200), 0.05, 0.9).threshold) for _ in range(1000)]
    assert np.mean(np.array(rates) <= 0.05) > 0.85
    assert np.mean(rates) > 0.02  # and no lower than it must be


def test_an_outlier_is_what_has_a_small_conformal_p_value() -> None:
    generator = np.random.default_rng(9)
    scores, others = generator.integers(0, 30, size=99), generator.integers(0, 30, size=500)
    p_values = (1 + (scores[:, None] <= others).sum(axis=0)) / 100
    assert fit_outliers(scores, 0.1).is_outlier(others).tolist() == (p_values <= 0.1).tolist()


def test_too_few_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="18 examples are too few for a false-alarm rate"):
        fit_outliers(np.arange(18.0), 0.05)

"""The logistic simulation study of Skaaret-Lund (2022), section 5.2: what its data are; skipped where they are absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.targets.last_layer import LastLayerTarget

DATA = Path(__file__).parents[2] / "shared" / "data"
LISTED = {1: -4.0, 3: 1.0, 7: 1.0, 11: 1.2, 13: 37.1, 16: 50.0, 17: -0.00005, 18: 10.0, 19: 3.0}  # by column, from 1

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not (DATA / "sim3-X.txt").is_file(), reason="the simulation study's data are not here"),
]


@pytest.fixture(scope="module")
def columns() -> np.ndarray:
    return np.loadtxt(DATA / "sim3-X.txt", delimiter=",")


def log_likelihood(columns: np.ndarray, coefficients: dict[int, float], intercept: float) -> float:
    """By the target, whose log joint is that and a normalised prior."""
    labels = torch.from_numpy(np.loadtxt(DATA / "sim3-Y.txt").astype(np.int64))
    target = LastLayerTarget(torch.from_numpy(columns), labels, HeadLayout(1, 20), Prior(1.0))
    theta = torch.zeros(1, 21, dtype=torch.float64)
    for place, value in coefficients.items():
        theta[0, place - 1] = value
    theta[0, 20] = intercept
    log_prior = torch.distributions.Normal(0.0, 1.0).log_prob(theta).sum()
    return float(target.log_joint(theta)[0] - log_prior)


def test_the_listed_coefficients_did_not_make_the_data_and_those_with_one_sign_changed_did(columns: np.ndarray) -> None:
    assert log_likelihood(columns, LISTED | {13: -37.1}, 99.4) == pytest.approx(-36.4, abs=0.1)
    best = max(log_likelihood(columns, LISTED, intercept) for intercept in np.linspace(-200, 200, 401))
    assert best == pytest.approx(-3856, abs=15)


def test_columns_are_made_of_each_other(columns: np.ndarray) -> None:
    v = dict(enumerate(columns.T, start=1))
    contrast = v[1] - 4 * v[2] + 2 * v[3]
    for got, expected in (
        (v[1] + v[2] + v[3], np.ones(2000)),
        (v[4] + v[5] + v[6], np.ones(2000)),
        (v[18], v[2] * v[10]),
        (v[19], v[15] * contrast),
        (v[20], v[11] * contrast),
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    time = np.sqrt(v[17])
    np.testing.assert_allclose(v[16], np.sin(3.14 * time / 360), atol=1e-9)

"""Calibration errors of a calibrated model: against the script's own loop, a plain one, and the model's probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bnncli.experiments import Measurements
from bnncli.experiments.published_ece import calibrated, draw, errors_of, measure
from bnncli.progress import SILENT

SETTINGS = {"percentages": [0, 80, 95], "examples": 4000, "repeats": 10}


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return measure(SETTINGS, {}, generator=torch.Generator().manual_seed(2), progress=SILENT)


def by_loop(confidence: np.ndarray, is_right: np.ndarray, num_bins: int, *, leaves_out: bool) -> float:
    """The mean gap of bins, as the script's loop over `range(num_bins)` of digits from 1 on has it, or over all."""
    digits = np.digitize(confidence, np.linspace(0, 1, num_bins + 1))
    gaps, sizes = [], []
    for digit in range(num_bins if leaves_out else num_bins + 2):
        inside = digits == digit
        if inside.any():
            gaps.append(abs(confidence[inside].mean() - is_right[inside].mean()))
            sizes.append(inside.sum())
    return float(np.average(gaps, weights=sizes))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_errors_are_those_of_the_loops(share: float) -> None:
    probs, labels = calibrated(3000, share, np.random.default_rng(1))
    found, confidence = errors_of((probs, labels)), probs[:, 0]
    assert found["published"] == pytest.approx(by_loop(confidence, labels == 0, 100, leaves_out=True), abs=1e-9)
    assert found["real"] == pytest.approx(by_loop(confidence, labels == 0, 100, leaves_out=False), abs=1e-9)
    assert found["usual"] == pytest.approx(by_loop(confidence, labels == 0, 15, leaves_out=False), abs=1e-9)


def test_the_model_is_calibrated_and_as_sure_as_it_should_be() -> None:
    probs, labels = calibrated(200_000, 0.3, np.random.default_rng(0))
    confidence = probs.max(axis=1)
    assert (confidence >= 0.99).mean() == pytest.approx(0.3)
    for low, high in ((0.5, 0.6), (0.8, 0.9), (0.99, 1.0)):
        inside = (confidence >= low) & (confidence < high)
        gap = (labels[inside] == 0).mean() - confidence[inside].mean()
        assert abs(gap) < 4 * (0.25 / inside.sum()) ** 0.5


def test_the_published_error_grows_with_what_it_leaves_out(measured: Measurements) -> None:
    values = {name: one.value for name, one in measured.values.items()}
    assert values["published_0"] == pytest.approx(values["real_0"])
    # Of the 20 % that it counts, chance is sqrt(5) times as large.
    assert values["published_80"] / values["published_0"] == pytest.approx(5**0.5, rel=0.1)
    assert values["real_80"] < values["real_0"]


def test_the_figure_has_its_three_lines(measured: Measurements) -> None:
    axes = draw(measured, SETTINGS)["calibrated"].axes[0]
    assert len(axes.containers) == 3

"""Variances on unseen digits: the Dirichlet's against scipy, means by hand, and a network of a few images from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from problems.seeds import seeded
from scipy import stats

from bnncli.experiments.digit_variance import draw, measure, predicted_variance, summary
from bnncli.progress import SILENT


def test_the_variance_is_that_of_the_most_probable_class() -> None:
    alpha = torch.tensor([[2.0, 5.0, 1.0], [9.0, 1.0, 3.0]]).double()
    expected = [stats.dirichlet(alpha[0].numpy()).var()[1], stats.dirichlet(alpha[1].numpy()).var()[0]]
    np.testing.assert_allclose(predicted_variance(alpha.log()), expected)


def test_means_are_of_the_digits_seen_and_unseen() -> None:
    digits = np.repeat(np.arange(10), 2)
    found = summary(np.arange(20) / 10, digits)
    assert found["variance_4"].value == pytest.approx(0.85)
    assert found["variance_4"].standard_error == pytest.approx(0.05)
    assert found["variance_seen"].value == pytest.approx(0.25)
    assert (found["highest_seen"].value, found["lowest_unseen"].value) == (pytest.approx(0.45), pytest.approx(0.65))


@pytest.mark.long
def test_a_network_of_a_few_images_gives_every_digit_a_variance(tmp_path: Path) -> None:
    labels = np.arange(60) % 10
    pixels = np.random.default_rng(0).integers(0, 60, (60, 28, 28), dtype=np.uint8)
    for row, label in enumerate(labels):
        pixels[row, 2 * label : 2 * label + 5] += 180
    np.savez(tmp_path / "a.npz", x=pixels, y=labels)
    inputs = {"train": tmp_path / "a.npz", "test": tmp_path / "a.npz"}
    settings = {"train": 18, "epochs": 40, "curvature": 6, "images": 60}
    measured = measure(settings, inputs, generator=seeded(0), progress=SILENT)
    assert all(0 <= measured.values[f"variance_{digit}"].value < 0.25 for digit in range(10))
    assert measured.values["variance_seen"].value < measured.values["variance_unseen"].value
    assert all(measured.values[f"auroc{one}"].standard_error for one in ("_map", "", "_published"))
    figures = draw(measured, settings)
    assert len(figures["densities"].axes) == 2 * 6

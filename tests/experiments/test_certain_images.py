"""Images that a network is most and least certain of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.experiments import Measurements
from bnncli.experiments.certain_images import apart, draw, ends, measure
from bnncli.lazy import torch
from bnncli.progress import SILENT

SETTINGS = {"posterior": "a", "images": 40}


@pytest.fixture
def measured(tmp_path: Path) -> Measurements:
    """Two classes in turn; the first half of the images is certain, bright and all the same, the other half dark and noisy."""
    generator, count = np.random.default_rng(1), 40
    pixels = np.full((count, 28, 28), 200, np.uint8)
    pixels[count // 2 :] = generator.integers(0, 100, (count // 2, 28, 28))
    np.savez(tmp_path / "images.npz", x=pixels, y=np.arange(count, dtype=np.int64) % 2)
    text = {name: np.full(count, value) for name, value in (("posterior", "a"), ("variant", "mc"), ("split", "test"))}
    entropy = np.concatenate([np.linspace(0, 0.1, count // 2), np.linspace(1, 2, count // 2)])
    np.savez(tmp_path / "table.npz", **text, sample_id=np.arange(count), entropy=entropy)  # type: ignore[arg-type]
    files = {
        "digits": tmp_path / "table.npz",
        "digits_images": tmp_path / "images.npz",
        "no_images": tmp_path / "x.npz",
    }
    return measure(SETTINGS, files, generator=torch.Generator(), progress=SILENT)


def test_the_looks_of_both_ends_are_measured(measured: Measurements) -> None:
    assert set(measured.values) == {"thicker_digits", "alike_digits"}
    assert measured.values["thicker_digits"].value == pytest.approx((200 - 49.5) / 255, abs=0.01)
    assert measured.values["thicker_digits"].count == 2
    noise = np.sqrt(2 * (100**2 - 1) / 12) / 255  # of the difference of two uniform pixels
    assert measured.values["alike_digits"].value == pytest.approx(noise, rel=0.02)


def test_rows_of_a_class_are_its_five_lowest_and_its_five_highest() -> None:
    entropy = np.arange(30.0)[::-1]
    assert ends(entropy, np.arange(0, 30, 2)).tolist() == [28, 26, 24, 22, 20, 8, 6, 4, 2, 0]
    assert ends(entropy, np.arange(9)).tolist() == []


def test_the_distance_is_the_mean_over_pairs() -> None:
    shown = np.zeros((3, 2, 2), np.float32)
    shown[1] += 1
    assert apart(shown) == pytest.approx(2 / 3)


def test_the_figure_has_every_image_and_the_line_between_the_ends(measured: Measurements) -> None:
    axes = draw(measured, SETTINGS)["digits"].axes[0]
    assert measured.arrays["digits"].shape == (2, 10, 28, 28)
    assert np.asarray(axes.images[0].get_array()).shape == (2 * 32, 10 * 32)
    assert list(axes.lines[0].get_xdata()) == [5 * 32 - 0.5] * 2

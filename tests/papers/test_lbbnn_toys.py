"""Entropies of latent binary networks, and their images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bnncli.errors import DataError
from bnncli.evaluation.comparison import Estimate
from bnncli.lazy import torch
from bnncli.papers.lbbnn_toys import (
    draw_certain_images,
    draw_entropy_curves,
    measure_certain_images,
    measure_distance,
    measure_entropy_curves,
    read_entropies,
    select_ends,
)
from bnncli.papers.recipe import Measurements
from bnncli.progress import SILENT

ENTROPIES = {"methods": {"one": "a", "two": "b"}, "hundredths": [10, 100]}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows of two posteriors and two splits, not in order, beside those of another integrator."""
    generator, parts = np.random.default_rng(0), []
    for posterior in "ab":
        for split, low in (("test", 0.0), ("other", 0.5)):
            for variant in ("mean", "mc"):
                for row in generator.permutation(200):
                    entropy = low + row / 200 + (variant == "mean") * 5 + (posterior == "b") * 0.01
                    parts.append((posterior, variant, split, row, entropy))
    columns = [np.array(one) for one in zip(*parts, strict=True)]
    names = ("posterior", "variant", "split", "sample_id", "entropy")
    np.savez(tmp_path / "t.npz", **dict(zip(names, columns, strict=True)))  # type: ignore[arg-type]
    return tmp_path / "t.npz"


def measured_entropy_curves(table: Path) -> Measurements:
    return measure_entropy_curves(ENTROPIES, {"mnist": table}, generator=torch.Generator(), progress=SILENT)


def test_entropies_are_those_of_the_posterior_integrator_and_split_in_the_order_of_rows(table: Path) -> None:
    np.testing.assert_allclose(read_entropies(table, "a", "other"), 0.5 + np.arange(200) / 200)
    with pytest.raises(DataError, match="no rows of c, mc, split 'test'"):
        read_entropies(table, "c", "test")
    np.savez(table, x=np.zeros(3))
    with pytest.raises(DataError, match="expected a table written by predict"):
        read_entropies(table, "a", "test")


def test_shares_and_medians_are_those_of_the_images(table: Path) -> None:
    values = measured_entropy_curves(table).values
    assert values["below_mnist_test_one_10"] == Estimate.of_share(21 / 200, 200)
    assert values["below_mnist_other_one_10"].value == 0
    assert values["below_mnist_other_one_100"].value == 101 / 200
    assert values["median_mnist_test_two"].value == pytest.approx(0.01 + 99.5 / 200)


def test_curves_rise_from_zero_to_one(table: Path) -> None:
    figures = draw_entropy_curves(measured_entropy_curves(table), ENTROPIES)
    assert list(figures) == ["ecdf-test", "ecdf-other", "histograms"]
    for line in figures["ecdf-test"].axes[0].lines:
        heights, places = np.asarray(line.get_ydata()), np.asarray(line.get_xdata())
        assert (heights[0], heights[-1]) == (0, 1)
        assert (np.diff(heights) >= 0).all()
        assert (np.diff(places) >= 0).all()
    density = figures["histograms"].axes[0].lines[0]
    widths = np.diff(np.asarray(density.get_xdata()))
    assert float((widths * np.asarray(density.get_ydata())[:-1]).sum()) == pytest.approx(1)


IMAGES = {"posterior": "a", "images": 40}


@pytest.fixture
def measured_certain_images(tmp_path: Path) -> Measurements:
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
    return measure_certain_images(IMAGES, files, generator=torch.Generator(), progress=SILENT)


def test_the_looks_of_both_ends_are_measured(measured_certain_images: Measurements) -> None:
    assert set(measured_certain_images.values) == {"thicker_digits", "alike_digits"}
    assert measured_certain_images.values["thicker_digits"].value == pytest.approx((200 - 49.5) / 255, abs=0.01)
    assert measured_certain_images.values["thicker_digits"].count == 2
    noise = np.sqrt(2 * (100**2 - 1) / 12) / 255  # of the difference of two uniform pixels
    assert measured_certain_images.values["alike_digits"].value == pytest.approx(noise, rel=0.02)


def test_rows_of_a_class_are_its_five_lowest_and_its_five_highest() -> None:
    entropy = np.arange(30.0)[::-1]
    assert select_ends(entropy, np.arange(0, 30, 2)).tolist() == [28, 26, 24, 22, 20, 8, 6, 4, 2, 0]
    assert select_ends(entropy, np.arange(9)).tolist() == []


def test_the_distance_is_the_mean_over_pairs() -> None:
    shown = np.zeros((3, 2, 2), np.float32)
    shown[1] += 1
    assert measure_distance(shown) == pytest.approx(2 / 3)


def test_the_figure_has_every_image_and_the_line_between_the_ends(measured_certain_images: Measurements) -> None:
    axes = draw_certain_images(measured_certain_images, IMAGES)["digits"].axes[0]
    assert measured_certain_images.arrays["digits"].shape == (2, 10, 28, 28)
    assert np.asarray(axes.images[0].get_array()).shape == (2 * 32, 10 * 32)
    assert list(axes.lines[0].get_xdata()) == [5 * 32 - 0.5] * 2

"""Shifted images against numpy's quarter turns and Pillow's rotation; noise that belongs to a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bnncli.data.shift import Shift
from bnncli.data.splits import InputSplit, load_split
from bnncli.errors import DataError, UsageError


@pytest.fixture
def images() -> np.ndarray:
    """Smooth, so that interpolation errs little."""
    coarse = np.random.default_rng(0).integers(256, size=(5, 4, 4, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(one).resize((28, 28), Image.Resampling.BICUBIC)) for one in coarse])


def split_of(path: Path, images: np.ndarray, shift: Shift | None) -> InputSplit:
    np.savez(path / "x.npz", x=images, y=np.arange(len(images)))
    return replace(load_split(f"npz:{path}/x.npz"), shift=shift)


def inputs_of(split: InputSplit, batch_size: int = 2, num_workers: int = 0) -> np.ndarray:
    batches: list[Any] = [one.inputs for one in split.batches(batch_size, num_workers=num_workers)]
    return np.concatenate([one.numpy() for one in batches])


@pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 4])
@pytest.mark.parametrize("size", [28, 27])
def test_quarter_turns_are_counter_clockwise_and_exact(images: np.ndarray, quarters: int, size: int) -> None:
    image = images[0][:size, :size]
    assert np.array_equal(Shift(rotate=90.0 * quarters).apply(image, 0), np.rot90(image, quarters))


@pytest.mark.parametrize("degrees", [15.0, -40.0, 130.0])
def test_other_turns_are_pillows_inside(images: np.ndarray, degrees: float) -> None:
    found = Shift(rotate=degrees).apply(images[1], 0).astype(int)
    expected = np.asarray(Image.fromarray(images[1]).rotate(degrees, Image.Resampling.BILINEAR)).astype(int)
    rows, columns = np.mgrid[:28, :28] - 13.5
    inside = np.hypot(rows, columns) < 12
    assert np.abs(found - expected)[inside].max() <= 1
    assert not Shift(rotate=45.0).apply(images[1], 0)[0, 0].any()


def test_noise_belongs_to_the_row_whatever_the_batches(tmp_path: Path, images: np.ndarray) -> None:
    split = split_of(tmp_path, images, Shift(corrupt="gaussian-noise:3", seed=7))
    whole = inputs_of(split)
    assert np.array_equal(whole, inputs_of(split, batch_size=5))
    assert np.array_equal(whole, inputs_of(split, num_workers=2))
    assert np.array_equal(whole[[1, 4]], inputs_of(split.take(np.array([1, 4]))))
    assert not np.array_equal(whole, inputs_of(replace(split, shift=Shift(corrupt="gaussian-noise:3", seed=8))))


def test_rows_have_noise_of_their_own_and_the_same_at_every_severity(tmp_path: Path) -> None:
    grey = np.full((2, 30, 30), 128, np.uint8)
    first, second = (
        inputs_of(split_of(tmp_path, grey, Shift(corrupt=f"gaussian-noise:{severity}"))) - 128 / 255
        for severity in (1, 2)
    )
    assert abs(np.corrcoef(first[0].ravel(), first[1].ravel())[0, 1]) < 5 / 30
    assert np.corrcoef(first[0].ravel(), second[0].ravel())[0, 1] > 0.98


def test_channels_first_and_last_are_shifted_alike(tmp_path: Path, images: np.ndarray) -> None:
    shift = Shift(rotate=20.0, corrupt="impulse-noise:2")
    last = inputs_of(split_of(tmp_path, images, shift))
    assert np.array_equal(last, inputs_of(split_of(tmp_path, np.moveaxis(images, 3, 1), shift)))


def test_it_rotates_before_it_corrupts(images: np.ndarray) -> None:
    turned = Shift(rotate=45.0).apply(images[0], 3)
    both = Shift(rotate=45.0, corrupt="brightness:1").apply(images[0], 3)
    assert np.array_equal(both, Shift(corrupt="brightness:1").apply(turned, 3))
    assert both[0, 0].all()


def test_images_for_a_transform_are_shifted_too(images: np.ndarray) -> None:
    shift = Shift(rotate=90.0)
    found = shift.of_stored([Image.fromarray(one) for one in images], np.arange(len(images)), "x")
    assert all(np.array_equal(np.asarray(one), np.rot90(image)) for one, image in zip(found, images, strict=True))


@pytest.mark.parametrize(
    ("stored", "what"),
    [
        (np.zeros((2, 4, 4), np.float32), "float32"),
        (np.zeros((2, 4), np.uint8), r"\(4,\)"),
        (["a", "b"], "texts"),
        ({"ids": np.zeros((2, 3))}, "ids"),
    ],
)
def test_anything_but_images_of_bytes_is_refused(stored: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"uint8 images.*{what}"):
        Shift(rotate=5.0).of_stored(stored, np.arange(2), "x")


def test_the_digest_is_that_of_the_data(tmp_path: Path, images: np.ndarray) -> None:
    split = split_of(tmp_path, images, Shift(rotate=5.0))
    assert split.order_digest == replace(split, shift=None).order_digest


@pytest.mark.parametrize("text", ["fog:1", "jpeg", "jpeg:0", "jpeg:6", "jpeg:two"])
def test_unknown_corruptions_are_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"KIND:SEVERITY, such as gaussian-noise:3, with KIND one of gaussian-noise.*jpeg"
    ):
        Shift(corrupt=text)

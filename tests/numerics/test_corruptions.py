"""Corruptions against what their amounts say: variances, shares, an explicit kernel, and the order of severities."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import zoom

from bnncli.numerics.corruptions import CORRUPTIONS, NUM_SEVERITIES

SEVERITIES = range(1, NUM_SEVERITIES + 1)
GREY = np.full((200, 200), 0.5)
SCENE = np.random.default_rng(3).random((8, 8, 3)).repeat(4, axis=0).repeat(4, axis=1)


def corrupted(image: np.ndarray, kind: str, severity: int, seed: int = 0) -> np.ndarray:
    corruption = CORRUPTIONS[kind]
    return corruption.apply(image, corruption.amounts[severity - 1], np.random.default_rng(seed))


def relative_error(found: float, expected: float) -> float:
    return abs(found / expected - 1)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_noise_has_its_variance(severity: int) -> None:
    variance = CORRUPTIONS["gaussian-noise"].amounts[severity - 1] ** 2
    noise = corrupted(GREY, "gaussian-noise", severity) - GREY
    # 40,000 values: the standard error of a variance is sqrt(2 / 40000) of it, .7 %; five of these.
    assert relative_error(noise.var(), variance) < 0.036


@pytest.mark.parametrize("severity", SEVERITIES)
def test_shot_noise_has_the_variance_of_photons(severity: int) -> None:
    photons = CORRUPTIONS["shot-noise"].amounts[severity - 1]
    noise = corrupted(GREY, "shot-noise", severity) - GREY
    assert relative_error(noise.var(), 0.5 / photons) < 0.04
    assert abs(noise.mean()) < 5 * (0.5 / photons / GREY.size) ** 0.5


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_hits_its_share_and_black_as_often_as_white(severity: int) -> None:
    share = CORRUPTIONS["impulse-noise"].amounts[severity - 1]
    found = corrupted(GREY, "impulse-noise", severity)
    error = 5 * (share / GREY.size) ** 0.5
    assert {*np.unique(found)} == {0.0, 0.5, 1.0}
    assert abs((found == 0).mean() - share / 2) < error
    assert abs((found == 1).mean() - share / 2) < error


@pytest.mark.parametrize("severity", SEVERITIES)
def test_blur_is_a_normalised_gaussian_kernel(severity: int) -> None:
    deviation = CORRUPTIONS["gaussian-blur"].amounts[severity - 1]
    point = np.zeros((41, 41, 2))
    point[20, 20, 0] = 1
    offsets = np.arange(-20, 21)
    kernel = np.exp(-0.5 * (offsets / deviation) ** 2)
    found = corrupted(point, "gaussian-blur", severity)
    assert np.abs(found[..., 0] - np.outer(kernel, kernel) / kernel.sum() ** 2).max() < 2e-4  # cut at four deviations
    assert not found[..., 1].any()


def test_brightness_adds_and_contrast_shrinks_towards_the_mean_of_a_channel() -> None:
    assert np.allclose(corrupted(SCENE, "brightness", 2) - SCENE, CORRUPTIONS["brightness"].amounts[1])
    found = corrupted(SCENE, "contrast", 2)
    assert np.allclose(found.mean((0, 1)), SCENE.mean((0, 1)))
    assert np.allclose(found.std((0, 1)), SCENE.std((0, 1)) * CORRUPTIONS["contrast"].amounts[1])


def test_pixelate_has_few_values_and_keeps_the_mean() -> None:
    scene = np.random.default_rng(5).random((20, 20))
    found = corrupted(scene, "pixelate", 3)
    blocks = scene.reshape(10, 2, 10, 2).mean((1, 3))
    assert np.abs(found - blocks.repeat(2, axis=0).repeat(2, axis=1)).max() <= 1.5 / 255


def test_jpeg_is_pillows_own() -> None:
    buffer = BytesIO()
    Image.fromarray(np.rint(SCENE * 255).astype(np.uint8)).save(buffer, "JPEG", quality=40)
    assert np.array_equal(corrupted(SCENE, "jpeg", 2), np.asarray(Image.open(buffer)) / 255)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(32, 32), (32, 32, 1), (32, 32, 3), (32, 32, 4)])
def test_a_higher_severity_is_further_from_the_image(kind: str, shape: tuple[int, ...]) -> None:
    image = 0.8 * zoom(np.random.default_rng(1).random((8, 8, *shape[2:])), (4, 4) + (1,) * len(shape[2:]), order=1)
    found = [np.clip(corrupted(image, kind, severity), 0, 1) for severity in SEVERITIES]
    distances = [float(np.sqrt(((one - image) ** 2).mean())) for one in found]
    assert all(one.shape == shape for one in found)
    assert distances[0] > 0
    assert distances == sorted(distances)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_only_random_ones_draw(kind: str) -> None:
    differs = not np.array_equal(corrupted(SCENE, kind, 3, seed=0), corrupted(SCENE, kind, 3, seed=1))
    assert differs == CORRUPTIONS[kind].is_random

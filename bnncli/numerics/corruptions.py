"""Corruptions of small images by name, each at severities 1 to 5: noise, blur, light, and loss of detail.

The eight kinds are from Hendrycks and Dietterich (2019, arXiv:1903.12261); the strengths are our own, chosen for images
of about 32 pixels. The corrupted images are generated and are not their released data (CIFAR-10-C).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Corrupted = Callable[["NDArray[np.float64]", float, "np.random.Generator"], "NDArray[np.float64]"]

NUM_SEVERITIES = 5


@dataclass(frozen=True)
class Corruption:
    """A kind of corruption.

    Attributes:
        amounts: for severities 1 to 5.
        apply: corrupts an image (H, W) or (H, W, C) in [0, 1] by an amount with a random generator; the result may
            leave [0, 1].
        is_random: whether it uses the generator.
    """

    amounts: tuple[float, float, float, float, float]
    apply: Corrupted
    is_random: bool = False


def _gaussian_noise(image: NDArray, standard_deviation: float, stream: np.random.Generator) -> NDArray:
    return image + stream.normal(0.0, standard_deviation, image.shape)


def _shot_noise(image: NDArray, photons: float, stream: np.random.Generator) -> NDArray:
    """Poisson counts; `photons` is the count of white."""
    return stream.poisson(image * photons) / photons


def _impulse_noise(image: NDArray, share: float, stream: np.random.Generator) -> NDArray:
    """Set a share of the values to 0 or 1, equally often."""
    drawn = stream.random(image.shape)
    is_hit, is_white = drawn < share, drawn < share / 2
    return image * ~is_hit + is_white


def _gaussian_blur(image: NDArray, standard_deviation: float, stream: np.random.Generator) -> NDArray:
    """Blur with a kernel in pixels, repeating edges."""
    from scipy.ndimage import gaussian_filter  # slow import

    blurred: NDArray = gaussian_filter(image, standard_deviation, mode="nearest", axes=(0, 1))
    return blurred


def _brightness(image: NDArray, added: float, stream: np.random.Generator) -> NDArray:
    return image + added


def _contrast(image: NDArray, kept: float, stream: np.random.Generator) -> NDArray:
    """Scale each channel's distance from its mean."""
    mean: NDArray = image.mean((0, 1))
    return mean + (image - mean) * kept


def _pixelate(image: NDArray, scale: float, stream: np.random.Generator) -> NDArray:
    """Average down to a share of each side, and enlarge without smoothing."""
    from PIL import Image  # slow import

    height, width = image.shape[:2]
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    return _by_channels(
        image, lambda one: one.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.NEAREST)
    )


def _jpeg(image: NDArray, quality: float, stream: np.random.Generator) -> NDArray:
    """Compress and decode with Pillow; colours together, other numbers of channels separately."""
    from PIL import Image  # slow import

    def coded(one: Image.Image) -> Image.Image:
        buffer = BytesIO()
        one.save(buffer, "JPEG", quality=int(quality))
        return Image.open(buffer).convert(one.mode)

    return _by_channels(image, coded, keeps_colours=True)


def _by_channels(image: NDArray, change: Callable, *, keeps_colours: bool = False) -> NDArray:
    """Apply a Pillow operation on 8-bit grey or colour images to an image (H, W) or (H, W, C)."""
    import numpy as np  # slow import
    from PIL import Image

    pixels = np.rint(image * 255).astype(np.uint8)
    if pixels.ndim == 2 or (keeps_colours and pixels.shape[2] == 3):
        return np.asarray(change(Image.fromarray(pixels))) / 255
    channels = [np.asarray(change(Image.fromarray(pixels[..., place].copy()))) for place in range(pixels.shape[2])]
    return np.stack(channels, axis=2) / 255


# Gaussian noise in units of white, shot noise in photons of white, blur in pixels, brightness in units of white.
CORRUPTIONS: Mapping[str, Corruption] = {
    "gaussian-noise": Corruption((0.04, 0.08, 0.12, 0.16, 0.2), _gaussian_noise, is_random=True),
    "shot-noise": Corruption((200, 100, 60, 40, 25), _shot_noise, is_random=True),
    "impulse-noise": Corruption((0.02, 0.04, 0.08, 0.12, 0.2), _impulse_noise, is_random=True),
    "gaussian-blur": Corruption((0.5, 0.75, 1.0, 1.5, 2.0), _gaussian_blur),
    "brightness": Corruption((0.1, 0.2, 0.3, 0.4, 0.5), _brightness),
    "contrast": Corruption((0.75, 0.5, 0.4, 0.3, 0.2), _contrast),
    "pixelate": Corruption((0.8, 0.65, 0.5, 0.4, 0.3), _pixelate),
    "jpeg": Corruption((60, 40, 25, 15, 8), _jpeg),
}

"""From encoded images to arrays of one size: decoded without losing colour or depth, resized, cropped."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from bnncli.data._preprocess import ImageCounts, Preprocess
from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.system.input_files import is_failure

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"}
_GREY = {"L", "1", "LA"}
_DAMAGE = (
    UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, OverflowError,
    Image.DecompressionBombError,
)  # fmt: skip

_counts: ContextVar[list[ImageCounts] | None] = ContextVar("_counts", default=None)


@contextmanager
def counting_images() -> Iterator[list[ImageCounts]]:
    """Give a list to which every image that is decoded inside the block is added."""
    found: list[ImageCounts] = []
    token = _counts.set(found)
    try:
        yield found
    finally:
        _counts.reset(token)


@contextmanager
def opened_image(stream: IO[bytes], where: str, path: Path | None = None) -> Iterator[Image.Image]:
    """An image, opened: what cannot be decoded, here or inside the block, is a DataError.

    Args:
        where: what to call it, its file too.

    Raises:
        DataError: it is no image, is damaged, or has more pixels than any camera's (PIL's own limit).
    """
    try:
        with Image.open(stream) as image:
            yield image
    except _DAMAGE as error:
        if is_failure(error):
            raise
        why = "unknown image format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"cannot decode {where}: {why}", path=path) from error


def mode_of(modes: set[str]) -> str:
    """L when every image is grey, else RGB."""
    return "L" if modes <= _GREY else "RGB"


def check_mode(image: Image.Image, mode: str, name: str) -> None:
    """Nothing, when the image can be decoded to the mode without losing colour or depth. Raises DataError."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{quoted(name)} has more than 8 bits per channel ({image.mode}), expected 8")
    if mode == "L" and image.mode not in _GREY:
        raise DataError(f"{quoted(name)} is a colour image ({image.mode}), but the first images are greyscale")


def decoded_image(image: Image.Image, mode: str, preprocess: Preprocess, name: str) -> Image.Image:
    """An image in the mode, upright and on a background as the preprocessing says. Raises DataError as `check_mode` does."""
    check_mode(image, mode, name)
    is_turned = not preprocess.no_exif and 1 < _orientation(image) <= 8
    is_transparent = _is_transparent(image)
    if is_turned:
        image = ImageOps.exif_transpose(image)
    if is_transparent and preprocess.transform is None:
        whole = Image.new("RGBA", image.size, preprocess.background or "white")
        whole.alpha_composite(image.convert("RGBA"))
        image = whole
    found = image.convert(mode)
    if preprocess.no_exif:
        found.info = {}  # for a transform that turns images itself
    if (counts := _counts.get()) is not None:
        counts.append(ImageCounts(is_turned, is_transparent))
    return found


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1, upright, where there is none or it cannot be read."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _DAMAGE:
        return 1
    return found if isinstance(found, int) else 1


def _is_transparent(image: Image.Image) -> bool:
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return False
    return int(image.convert("RGBA").getchannel("A").getextrema()[0]) < 255  # type: ignore[arg-type]


def sized(image: Image.Image, preprocess: Preprocess, name: str) -> np.ndarray:
    """A decoded image (H, W, C), resized and cropped. Raises DataError when it is smaller than the crop."""
    width, height = image.size
    new_height, new_width = preprocess.resized_shape(height, width)
    if (new_height, new_width) != (height, width):
        image = image.resize((new_width, new_height), Image.Resampling.BILINEAR)
    if crop := preprocess.crop:
        try:
            top, left = preprocess.crop_corner(new_height, new_width)
        except DataError as error:
            raise DataError(f"{quoted(name)}: {error.message}", hint=error.hint) from error
        image = image.crop((left, top, left + crop, top + crop))
    array = np.array(image)
    return array[:, :, None] if array.ndim == 2 else array


def check_same_size(array: np.ndarray, first: np.ndarray, name: str, first_name: str) -> None:
    """Nothing, when two images have one size. Raises DataError."""
    if array.shape != first.shape:
        raise DataError(
            f"images have different sizes: {quoted(name)} is {_size(array)}, {quoted(first_name)} is {_size(first)}",
            hint="use \0resize\0 N \0crop\0 N to make them the same size",
        )


def _size(array: np.ndarray) -> str:
    return f"{array.shape[0]} x {array.shape[1]}"

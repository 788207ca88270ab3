"""From stored images to network inputs: decoding, channel order, size, scaling, normalisation, augmentation."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from bnncli.errors import UNREADABLE, DataError, UsageError
from bnncli.lazy import torch
from bnncli.names import format_names, quote_name
from bnncli.system.input_files import is_failure

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.data.transform import Transform


# Grey and RGB before RGBA: a width or height of 4 is more likely than four channels.
_CHANNEL_COUNTS = ((1, 3), (4,))


def channels_axis(shape: tuple[int, ...]) -> int | None:
    """Return the channel axis of uint8 images (n, ...): 3, 1, or None without one.

    Raises:
        DataError: the shape is not that of images or rows.
    """
    if len(shape) in (2, 3):
        return None
    for counts in _CHANNEL_COUNTS if len(shape) == 4 else ():
        for axis in (3, 1):
            if shape[axis] in counts:
                return axis
    raise DataError(
        f"expected uint8 images (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels, got {tuple(shape)}"
    )


class ImageCounts(NamedTuple):
    """Number of images rotated to match their EXIF orientation, and of images with transparent pixels."""

    num_turned: int = 0
    num_transparent: int = 0

    def plus(self, other: ImageCounts) -> ImageCounts:
        """Return the sum of both counts."""
        return ImageCounts(*(one + its for one, its in zip(self, other, strict=True)))

    def notes(self, split: str, num_images: int, preprocess: Preprocess) -> list[str]:
        """Return notes about the images of a split, one line each."""
        found = []
        if self.num_turned:
            how = "were rotated to match their EXIF orientation (turn this off with \0no_exif\0)"
            found.append(f"{split}: {self.num_turned:,} of {num_images:,} images {how}")
        if self.num_transparent:
            how = f"are shown on {preprocess.background or 'white'} (see \0background\0)"
            if preprocess.transform is not None:
                how = "lose their transparency, because the model's preprocessing does not support it"
            found.append(f"{split}: {self.num_transparent:,} of {num_images:,} images with transparent pixels {how}")
        return found


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of inputs, the same for every split of a run.

    uint8 arrays are scaled to [0, 1], get a channel axis if they lack one, and become channels-first. Floating-point
    arrays are used unchanged.

    Attributes:
        mean, std: one value, or one per channel, in units of the scaled input.
        resize: pixels of the shorter side, bilinear with antialiasing; None keeps the size.
        crop: pixels of the centre square cut out after resizing; None keeps all.
        transform: the model's own, which replaces all of this for images and texts; floating-point arrays and token ids
            are still used unchanged.
        no_exif: keep images as stored, regardless of their EXIF orientation.
        background: colour behind transparent pixels; None for white. A transform drops alpha, as the libraries of such
            models do.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: int | None = None
    crop: int | None = None
    transform: Transform | None = None
    no_exif: bool = False
    background: str | None = None

    def __post_init__(self) -> None:
        if self.transform is not None:
            for option, value in self._of_arrays().items():
                if value is not None:
                    raise UsageError(f"{option}: the model has its own preprocessing; omit {option}")
        if self.std is not None and min(self.std) <= 0:
            raise UsageError(f"\0std\0: expected numbers above 0, got {self.std}")
        if self.mean and self.std and len(self.mean) != len(self.std):
            raise UsageError(
                f"\0mean\0 has {len(self.mean)} values, but \0std\0 has {len(self.std)}; expected the same number"
            )

    @classmethod
    def parse(
        cls,
        *,
        mean: str | None = None,
        std: str | None = None,
        resize: int | None = None,
        crop: int | None = None,
        transform: Transform | None = None,
        no_exif: bool = False,
        background: str | None = None,
    ) -> Preprocess:
        """Parse preprocessing from option texts; means and deviations are comma-separated numbers.

        Raises:
            UsageError: they are not numbers, differ in number, or a deviation is not positive.
        """
        return cls(_numbers(mean, "\0mean\0"), _numbers(std, "\0std\0"), resize, crop, transform, no_exif, background)

    def _of_arrays(self) -> dict[str, object]:
        """Return the settings that apply to arrays and images without a transform, by option."""
        names = ("mean", "std", "resize", "crop", "background")
        return {f"\0{name}\0": getattr(self, name) for name in names}

    def check_named(self, names: Iterable[str]) -> None:
        """Raise UsageError if options for images are set, since named inputs are used unchanged."""
        for option, value in self._of_arrays().items():
            if value is not None:
                raise UsageError(
                    f"{option} applies to images, but the inputs are {format_names(names)}, which are used unchanged"
                )

    def apply(self, raw: Tensor, *, is_sized: bool = False) -> Tensor:
        """Return float32 inputs (n, ...) from stored ones (n, ...), on the same device; token ids stay integers.

        Args:
            raw: uint8 images (n, H, W), (n, H, W, C) or (n, C, H, W), uint8 rows (n, D), any floating-point array, or
                token ids in int32 or int64.
            is_sized: whether images were resized and cropped when read.

        Raises:
            DataError: type or shape is not supported, or images are smaller than the crop.
            UsageError: the number of channels differs from that of mean and std.
        """
        inputs = _scale(raw)
        if not inputs.is_floating_point() and (self.mean or self.std):
            raise UsageError(
                "\0mean\0 and \0std\0 normalise pixels and real numbers, but the inputs are integers (token ids?)"
            )
        if not is_sized and (self.resize or self.crop):
            if inputs.ndim != 4:
                raise UsageError(f"\0resize\0 and \0crop\0 need images (N, C, H, W), got {tuple(inputs.shape)}")
            inputs = self._size(inputs)
        return self._normalise(inputs)

    def to_json(self) -> dict[str, object]:
        """Return what feature files record."""
        return {
            "scale": "uint8 to [0, 1]",
            "mean": list(self.mean) if self.mean else None,
            "std": list(self.std) if self.std else None,
            "resize": self.resize,
            "crop": self.crop,
            "interpolation": "bilinear, antialiased" if self.resize else None,
            "augment": "none",
        }

    def resized_shape(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after resizing: the shorter side is `resize`, the other keeps the ratio, rounded down."""
        if self.resize is None:
            return height, width
        short = min(height, width)
        return height * self.resize // short, width * self.resize // short

    def crop_corner(self, height: int, width: int) -> tuple[int, int]:
        """Return top and left of the centre square. Raises DataError if the image is smaller."""
        if self.crop is None:
            return 0, 0
        if min(height, width) < self.crop:
            raise DataError(f"\0crop\0 {self.crop}: the image is only {height} x {width}", hint="add \0resize\0")
        return (height - self.crop) // 2, (width - self.crop) // 2

    def _size(self, images: Tensor) -> Tensor:
        height, width = self.resized_shape(*images.shape[-2:])
        if self.resize is not None:
            images = torch.nn.functional.interpolate(images, (height, width), mode="bilinear", antialias=True)
        if self.crop is None:
            return images
        top, left = self.crop_corner(height, width)
        return images[..., top : top + self.crop, left : left + self.crop]

    def _normalise(self, inputs: Tensor) -> Tensor:
        for values, option in ((self.mean, "\0mean\0"), (self.std, "\0std\0")):
            if values is None:
                continue
            if len(values) != 1 and (inputs.ndim < 3 or inputs.shape[1] != len(values)):
                raise UsageError(f"{option} has {len(values)} values, but the inputs have shape {tuple(inputs.shape)}")
            shape = (1, -1) + (1,) * (inputs.ndim - 2)
            scale = torch.tensor(values, dtype=inputs.dtype, device=inputs.device).reshape(shape)
            inputs = inputs - scale if option == "\0mean\0" else inputs / scale
        return inputs


def _scale(raw: Tensor) -> Tensor:
    """Return floats channels first, uint8 scaled to [0, 1], and token ids unchanged."""
    if raw.is_floating_point():
        return raw.float()
    if raw.dtype in (torch.int32, torch.int64):
        return raw
    if raw.dtype != torch.uint8:
        dtype = str(raw.dtype).removeprefix("torch.")
        raise DataError(
            f"expected inputs of type uint8 or floating point, got {dtype}", hint="save them as uint8 or float32"
        )
    axis = channels_axis(tuple(raw.shape))
    if raw.ndim == 3:
        raw = raw.unsqueeze(1)
    elif axis == 3:
        raw = raw.movedim(3, 1)
    return raw.contiguous().float().div_(255)


def _numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option}: expected numbers such as 0.5 or 0.485,0.456,0.406; got {text!r}") from None


SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"}
_GREY = {"L", "1", "LA"}
_DAMAGE = (
    UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, OverflowError,
    Image.DecompressionBombError,
)  # fmt: skip

_counts: ContextVar[list[ImageCounts] | None] = ContextVar("_counts", default=None)


@contextmanager
def count_images() -> Iterator[list[ImageCounts]]:
    """Yield a list that collects a count for every image decoded inside the block."""
    found: list[ImageCounts] = []
    token = _counts.set(found)
    try:
        yield found
    finally:
        _counts.reset(token)


@contextmanager
def open_image(stream: IO[bytes], where: str, path: Path | None = None) -> Iterator[Image.Image]:
    """Open an image; anything that cannot be decoded, here or inside the block, raises DataError.

    Args:
        where: name for messages, including its file.

    Raises:
        DataError: it is not an image, is damaged, or exceeds PIL's pixel limit.
    """
    try:
        with Image.open(stream) as image:
            yield image
    except _DAMAGE as error:
        if is_failure(error):
            raise
        why = "unknown image format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"cannot decode {where}: {why}", code=UNREADABLE, path=path) from error


def common_mode(modes: set[str]) -> str:
    """Return L if every image is grey, else RGB."""
    return "L" if modes <= _GREY else "RGB"


def check_mode(image: Image.Image, mode: str, name: str) -> None:
    """Raise DataError if decoding the image to the mode would lose colour or depth."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{quote_name(name)} has more than 8 bits per channel ({image.mode}), expected 8")
    if mode == "L" and image.mode not in _GREY:
        raise DataError(f"{quote_name(name)} is a colour image ({image.mode}), but the first images are greyscale")


def decode_image(image: Image.Image, mode: str, preprocess: Preprocess, name: str) -> Image.Image:
    """Decode an image to the mode, upright and on the background. Raises DataError as `check_mode` does."""
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
        found.info = {}  # so that a transform does not rotate the image again
    if (counts := _counts.get()) is not None:
        counts.append(ImageCounts(is_turned, is_transparent))
    return found


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1, upright, if there is none or it is unreadable."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _DAMAGE:
        return 1
    return found if isinstance(found, int) else 1


def _is_transparent(image: Image.Image) -> bool:
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return False
    return int(image.convert("RGBA").getchannel("A").getextrema()[0]) < 255  # type: ignore[arg-type]


def resize_and_crop(image: Image.Image, preprocess: Preprocess, name: str) -> np.ndarray:
    """Resize and crop a decoded image to (H, W, C). Raises DataError if it is smaller than the crop."""
    width, height = image.size
    new_height, new_width = preprocess.resized_shape(height, width)
    if (new_height, new_width) != (height, width):
        image = image.resize((new_width, new_height), Image.Resampling.BILINEAR)
    if crop := preprocess.crop:
        try:
            top, left = preprocess.crop_corner(new_height, new_width)
        except DataError as error:
            raise DataError(f"{quote_name(name)}: {error.message}", hint=error.hint) from error
        image = image.crop((left, top, left + crop, top + crop))
    array = np.array(image)
    return array[:, :, None] if array.ndim == 2 else array


def check_same_size(array: np.ndarray, first: np.ndarray, name: str, first_name: str) -> None:
    """Raise DataError if two images differ in size."""
    if array.shape != first.shape:
        raise DataError(
            f"images have different sizes: {quote_name(name)} is {_size(array)}, {quote_name(first_name)} is {_size(first)}",
            hint="use \0resize\0 N \0crop\0 N to make them the same size",
        )


def _size(array: np.ndarray) -> str:
    return f"{array.shape[0]} x {array.shape[1]}"


@dataclass(frozen=True, eq=False)
class Augmentation:
    """Random augmentation of images.

    Args:
        padding: largest shift in pixels along each axis; 0 for no shifts.
        flips: mirror half of the images, left to right.
        fill: (C,) values outside an image, as the network takes them: black, normalised.
    """

    padding: int
    flips: bool
    fill: Tensor

    def draw(self, num_images: int, generator: torch.Generator) -> Tensor:
        """Draw an index (n,) int64 per image that encodes its augmentation, all equally likely."""
        return torch.randint(self._shifts**2 * (1 + self.flips), (num_images,), generator=generator)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Shift and mirror images (n, C, H, W) as encoded by `drawn` (n,)."""
        (height, width), shifts = images.shape[-2:], self._shifts
        down, right = drawn // shifts % shifts - self.padding, drawn % shifts - self.padding
        rows = torch.arange(height, device=images.device) + down.unsqueeze(1)
        columns = torch.arange(width, device=images.device).expand(len(images), width)
        if self.flips:
            is_mirrored = (drawn >= shifts**2).unsqueeze(1)
            columns = torch.where(is_mirrored, width - 1 - columns, columns)
        columns = columns + right.unsqueeze(1)
        first = torch.arange(len(images), device=images.device).view(-1, 1, 1)
        found = images.movedim(1, 3)[
            first, rows.clamp(0, height - 1).unsqueeze(2), columns.clamp(0, width - 1).unsqueeze(1)
        ]
        is_inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
        return torch.where(is_inside.unsqueeze(3), found, self.fill).movedim(3, 1)

    @property
    def _shifts(self) -> int:
        """Number of shifts along one axis."""
        return 2 * self.padding + 1

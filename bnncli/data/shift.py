"""Rotated and corrupted copies of images, to measure predictions under distribution shift.

Images change as they are read, before a network's preprocessing: arrays of pixels before they are resized, image files
after, when only the pixels of a split are resized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.data.pixels import channels_axis
from bnncli.errors import DataError
from bnncli.numerics.corruptions import CORRUPTIONS
from bnncli.options.shared import parse_corruption
from bnncli.progress import Progress

if TYPE_CHECKING:
    from bnncli.data.splits import Dataset, Stored


@dataclass(frozen=True)
class Shift:
    """The shift applied to every image of a split.

    Attributes:
        rotate: degrees counter-clockwise about the centre, bilinear, black outside; None for no rotation.
        corrupt: KIND:SEVERITY, applied after the rotation; None for no corruption.
        seed: of the noise. Each row of the data has its own stream, so the noise depends on neither batches nor
            processes and is the same at every severity.
    """

    rotate: float | None = None
    corrupt: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.corrupt is not None:
            parse_corruption(self.corrupt)

    @property
    def is_random(self) -> bool:
        """Return whether the seed matters."""
        return self.corrupt is not None and CORRUPTIONS[parse_corruption(self.corrupt)[0]].is_random

    def apply(self, image: np.ndarray, row: int) -> np.ndarray:
        """Shift an image (H, W) or (H, W, C) of uint8; the shape stays.

        Args:
            row: of the data, which seeds the noise.
        """
        if self.rotate is not None:
            image = rotate_image(image, self.rotate)
        if self.corrupt is not None:
            kind, severity = parse_corruption(self.corrupt)
            corruption, stream = CORRUPTIONS[kind], np.random.default_rng([self.seed, row])
            image = _bytes(corruption.apply(image / 255, corruption.amounts[severity - 1], stream))
        return image

    def of_stored(self, raw: Stored, rows: np.ndarray, where: str) -> Stored:
        """Shift what a data set's `read` returned for rows (n,).

        Raises:
            DataError: the inputs are not uint8 images.
        """
        if isinstance(raw, list):
            return [self._of_item(item, int(row), where) for item, row in zip(raw, rows, strict=True)]
        if isinstance(raw, Mapping):
            raise _not_images_error(where, f"named inputs ({', '.join(raw)})")
        array = np.asarray(raw)
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise _not_images_error(where, f"arrays of type {array.dtype} and shape {array.shape[1:]}")
        is_first = array.ndim == 4 and channels_axis(array.shape) == 1
        images = np.moveaxis(array, 1, 3) if is_first else array
        shifted = np.stack([self.apply(image, int(row)) for image, row in zip(images, rows, strict=True)])
        return np.ascontiguousarray(np.moveaxis(shifted, 3, 1) if is_first else shifted)

    def _of_item(self, item: Any, row: int, where: str) -> Any:
        from PIL import Image  # slow import

        if not isinstance(item, Image.Image):
            raise _not_images_error(where, "texts" if isinstance(item, (str, tuple)) else "other items")
        if item.mode not in ("L", "RGB"):
            raise _not_images_error(where, f"images in mode {item.mode}")
        return Image.fromarray(self.apply(np.asarray(item), row))


@dataclass(frozen=True)
class ShiftedDataset:
    """A data set whose images are shifted when read; everything else is delegated."""

    dataset: Dataset
    shift: Shift
    where: str

    @property
    def labels(self) -> np.ndarray | None:
        """As in the data set."""
        return self.dataset.labels

    @property
    def is_labeled(self) -> bool:
        """As in the data set."""
        return self.dataset.is_labeled

    @property
    def classes(self) -> tuple[str, ...] | None:
        """As in the data set."""
        return self.dataset.classes

    @property
    def is_sized(self) -> bool:
        """As in the data set."""
        return self.dataset.is_sized

    @property
    def names(self) -> tuple[str, ...] | None:
        """As in the data set."""
        return self.dataset.names

    @property
    def items(self) -> str:
        """As in the data set."""
        return self.dataset.items

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """Return shifted images and labels."""
        raw, labels = self.dataset.read(rows)
        return self.shift.of_stored(raw, rows, self.where), labels

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, Any] | None:
        """Return the identity of the unshifted data."""
        return self.dataset.identity(rows, progress)


def rotate_image(image: np.ndarray, degrees: float) -> np.ndarray:
    """Rotate an image (H, W) or (H, W, C) of uint8 counter-clockwise about its centre: bilinear, black outside, same size."""
    from scipy.ndimage import rotate  # slow import

    turned = rotate(image / 255, degrees, axes=(1, 0), reshape=False, order=1, mode="grid-constant", prefilter=False)
    return _bytes(turned)


def _bytes(image: np.ndarray) -> np.ndarray:
    """Convert an image, clipped to [0, 1], to uint8."""
    return np.rint(np.clip(image, 0.0, 1.0) * 255).astype(np.uint8)


def _not_images_error(where: str, what: str) -> DataError:
    return DataError(
        f"{where}: \0rotate\0 and \0corrupt\0 apply to uint8 images, got {what}",
        code="wrong_inputs",
        hint="save the pixels as uint8, from 0 to 255, and normalise with \0mean\0 and \0std\0",
    )

"""Stored inputs as small pictures and short texts, for people to look at."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_SIDES = (64, 48, 32, 24)  # the most pixels along a side, until the file is small enough
_MOST_LETTERS = 300
_WIDE = ("I", "F")  # modes of more than 8 bits, which PIL cuts at 255 where arrays are scaled


def png_of(item: Any, *, most_bytes: int = 1 << 14) -> bytes | None:
    """A small PNG of an image: an array (H, W), (H, W, C) or (C, H, W) of one or three channels, or a PIL image; None of what is none.

    Args:
        most_bytes: of the file, where that can be had by fewer pixels.
    """
    if isinstance(item, Image.Image) and item.mode.startswith(_WIDE):
        item = np.asarray(item)
    image = item if isinstance(item, Image.Image) else _image_of(np.asarray(item)) if _is_array(item) else None
    if image is None:
        return None
    image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    found = b""
    for side in _SIDES:
        if max(image.size) > side:
            image.thumbnail((side, side))
        content = io.BytesIO()
        image.save(content, "PNG", optimize=True)
        found = content.getvalue()
        if len(found) <= most_bytes:
            break
    return found


def text_of(item: Any) -> str | None:
    """The beginning of a text, or of a pair of them, on one line; None of what is none."""
    parts = [item] if isinstance(item, str) else item if isinstance(item, tuple | list) else []
    if not parts or not all(isinstance(part, str) for part in parts):
        return None
    text = " / ".join(" ".join(part.split()) for part in parts)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def _is_array(item: Any) -> bool:
    return isinstance(item, np.ndarray) or hasattr(item, "__array__")


def _image_of(array: NDArray[Any]) -> Image.Image | None:
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if not is_image or min(array.shape[:2]) < 2 or not np.issubdtype(array.dtype, np.number):
        return None
    if array.dtype != np.uint8:
        values = np.nan_to_num(array.astype(np.float64))
        low, high = float(values.min()), float(values.max())
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
        array = np.round(255 * (values - low) / ((high - low) or 1.0)).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))

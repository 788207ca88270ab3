"""Where the channels of stored images are."""

from __future__ import annotations

from bnncli.errors import DataError

# Grey and RGB before RGBA: a width or height of 4 is likelier than four channels.
_CHANNEL_COUNTS = ((1, 3), (4,))


def channels_axis(shape: tuple[int, ...]) -> int | None:
    """Which axis of uint8 images (n, ...) holds the channels: 3, 1, or None where there is none.

    Raises:
        DataError: the shape is not that of images or of rows.
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

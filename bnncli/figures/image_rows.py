"""Rows of small grey images, divided by a dashed line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = 0.46  # inches of an image
_EDGE = 2  # white pixels around each


def draw(images: NDArray[np.uint8], *, after: int, title: str) -> Figure:
    """The images, black on white.

    Args:
        images: (rows, columns, height, width).
        after: how many columns stand left of the line.
    """
    from matplotlib.figure import Figure

    rows, columns, _, _ = images.shape
    figure = Figure(figsize=(_SIZE * columns + 0.3, _SIZE * rows + 0.6), layout="constrained")
    axes = figure.add_subplot()
    framed = np.pad(images, ((0, 0), (0, 0), (_EDGE, _EDGE), (_EDGE, _EDGE)))
    height, width = framed.shape[2:]
    axes.imshow(framed.transpose(0, 2, 1, 3).reshape(rows * height, columns * width), cmap="gray_r", vmin=0, vmax=255)
    axes.axvline(after * width - 0.5, color="black", linewidth=1.0, linestyle="--")
    axes.set_axis_off()
    axes.set_title(title, fontsize="medium")
    return figure

"""How confident classifiers of two inputs are over a square: a map for each, one colour scale, the examples in all.

After figure 5 of Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P")
_LEVELS = (0.7, 0.9)


def draw(
    maps: Mapping[str, NDArray[np.float64]],
    limit: float,
    examples: tuple[NDArray[np.float64], NDArray[np.int64]],
    *,
    title: str,
) -> Figure:
    """The maps side by side, with contours at .7 and .9; a class has a marker of its own.

    Args:
        maps: title to confidence, (rows, columns), rows rising with the second input, from -limit to limit.
        examples: inputs (N, 2) and labels (N,).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.8 * len(maps) + 1.0, 3.2), layout="constrained")
    axes = figure.subplots(1, len(maps), sharex=True, sharey=True, squeeze=False)[0]
    inputs, labels = examples
    for place, (name, confidence) in zip(axes, maps.items(), strict=True):
        extent = (-limit, limit, -limit, limit)
        image = place.imshow(
            confidence,
            origin="lower",
            extent=extent,
            vmin=1 / (labels.max() + 1),
            vmax=1,
            cmap="Blues",
            interpolation="bilinear",
        )
        steps = np.linspace(-limit, limit, len(confidence))
        lines = place.contour(steps, steps, confidence, levels=_LEVELS, colors="#444444", linewidths=0.8)
        place.clabel(lines, fontsize="x-small")
        for label in np.unique(labels):
            place.plot(
                *inputs[labels == label].T, marker=_MARKERS[label % len(_MARKERS)], markersize=3.5, linestyle="none",
                color="#d55e00", markeredgecolor="white", markeredgewidth=0.4,
            )  # fmt: skip
        place.set_title(name, fontsize="medium")
        place.set_xlabel("input 1")
    axes[0].set_ylabel("input 2")
    figure.colorbar(image, ax=axes, shrink=0.9).set_label("confidence")
    figure.suptitle(title, fontsize="large")
    return figure

"""Images of each class of whose predictions a network is most, and least, certain, and what these have in common.

Skaaret-Lund (2022), section 5.4, figures 5.9 to 5.11: of the first 1,000 images, ten of each class, the five with the lowest entropy and the five
with the highest. What the text says of their looks is measured: lines are thicker where the mean intensity of an image is higher, and
images are alike where their mean distance to each other is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.experiments._predicted import entropies
from bnncli.experiments.digit_network import images
from bnncli.lazy import torch
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 5  # at each end


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """thicker_SET, by how much the mean intensity of the most certain images is above that of the least certain, in [-1, 1], and
    alike_SET, by how much the mean distance of the least certain to each other is above that of the most certain: means over classes.

    Args:
        settings: images, at most, and posterior.
        inputs: for each SET its table of predict, and SET_images, an NPZ file of x (N, 28, 28) uint8 and y.
    """
    values: dict[str, Estimate] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for data_set in (name for name in inputs if f"{name}_images" in inputs):
        found = entropies(inputs[data_set], settings["posterior"], "test")[: settings["images"]]
        pixels, labels = images(inputs[f"{data_set}_images"], count=len(found))
        rows = [ends(found, np.flatnonzero(labels.numpy() == label)) for label in range(int(labels.max()) + 1)]
        shown = np.stack(
            [pixels.squeeze(1).numpy()[row] for row in rows if len(row)]
        )  # classes, both ends, height, width
        thicker = [row[:_SHOWN].mean() - row[_SHOWN:].mean() for row in shown]
        alike = [apart(row[_SHOWN:]) - apart(row[:_SHOWN]) for row in shown]
        values |= {f"thicker_{data_set}": Estimate.of_repeats(thicker), f"alike_{data_set}": Estimate.of_repeats(alike)}
        arrays[data_set] = np.round(255 * shown).astype(np.uint8)
    return Measurements(values, arrays)


def ends(entropy: NDArray[np.float64], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of some rows the five of the lowest entropy and the five of the highest, by entropy; none where there are fewer than ten."""
    order = rows[np.argsort(entropy[rows], kind="stable")]
    return np.concatenate([order[:_SHOWN], order[-_SHOWN:]]) if len(rows) >= 2 * _SHOWN else order[:0]


def apart(shown: NDArray[np.float32]) -> float:
    """The mean distance of images (n, height, width) to each other: root mean square over pixels."""
    flat = shown.reshape(len(shown), -1).astype(np.float64)
    distances = np.sqrt(np.square(flat[:, None] - flat[None]).mean(axis=2))
    return float(distances.sum() / (len(shown) * (len(shown) - 1)))


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """A figure for each data set: a row for each class."""
    from bnncli.figures.image_rows import draw as draw_rows

    return {
        name: draw_rows(shown, after=_SHOWN, title=f"{name}: lowest entropy per class, and highest")
        for name, shown in measured.arrays.items()
    }

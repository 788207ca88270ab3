"""What the recipes of latent binary networks measure out of tables of predictions: entropies, and the images behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.comparison import Estimate
from bnncli.figures.fits import LinePanel, LinePanels, Series
from bnncli.papers.bridge_digits import read_images
from bnncli.papers.figures import draw_rows
from bnncli.papers.recipe import Files, Measurements, Settings
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Generator

# Entropies out of the table that `bnncli predict --table FILE.npz` writes.

_COLUMNS = ("posterior", "variant", "split", "sample_id", "entropy")


def read_entropies(path: Path, posterior: str, split: str, *, variant: str = "mc") -> NDArray[np.float64]:
    """Return entropies (N,) of the class probabilities of a split by one posterior, nats, in the split's order.

    Raises:
        DataError: the file is no such table, or has none of them.
    """
    try:
        with np.load(path) as table:
            columns = {name: table[name] for name in _COLUMNS}
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: expected a table written by predict: {error}") from None
    wanted = {"posterior": posterior, "variant": variant, "split": split}
    chosen = np.all([columns[name] == value for name, value in wanted.items()], axis=0)
    if not chosen.any():
        raise DataError(f"{path}: no rows of {posterior}, {variant}, split {split!r}")
    order = np.argsort(columns["sample_id"][chosen], kind="stable")
    return np.asarray(columns["entropy"][chosen][order], dtype=np.float64)


# How the entropies of predictions, -sum_k p_k log p_k of the mean probabilities of ten draws, are distributed in and out of distribution.
#
# Skaaret-Lund (2022), section 5.4.

_SIDES = {"test": "in distribution", "other": "out of distribution"}  # splits
_BINS = 30


def measure_entropy_curves(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure below_SET_SPLIT_METHOD_P, the share of entropies of at most P hundredths of a nat, and median_SET_SPLIT_METHOD."""
    values: dict[str, Estimate] = {}
    arrays: dict[str, NDArray[np.float64]] = {}
    for data_set, path in files.items():
        for split in _SIDES:
            for method, posterior in settings["methods"].items():
                found = np.sort(read_entropies(path, posterior, split))
                arrays[f"{data_set} {split} {method}"] = found
                key = f"{data_set}_{split}_{method}"
                values[f"median_{key}"] = Estimate(float(np.median(found)))
                for hundredths in settings["hundredths"]:
                    share = float(np.searchsorted(found, hundredths / 100, side="right")) / len(found)
                    values[f"below_{key}_{hundredths}"] = Estimate.of_share(share, len(found))
    return Measurements(values, arrays)


def draw_entropy_curves(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw the distribution functions of both splits, and histograms of the other one's."""
    sets = list(dict.fromkeys(name.split(" ")[0] for name in measured.arrays))

    def draw(
        name: str, title: str, label: str, split: str, line_of: Callable[[str, NDArray[np.float64]], Series]
    ) -> Figure:
        panels = [
            LinePanel(f"trained on {one}", "entropy, nats", label, [
                line_of(method, measured.arrays[f"{one} {split} {method}"]) for method in settings["methods"]
            ])
            for one in sets
        ]  # fmt: skip
        return LinePanels(name, title, "", panels).draw()

    figures = {
        f"ecdf-{split}": draw(f"ecdf-{split}", f"Entropies {side}", "share of images", split, _steps)
        for split, side in _SIDES.items()
    }
    histograms = draw("histograms", "Entropies out of distribution", "density", "other", _histogram)
    return figures | {"histograms": histograms}


def _steps(name: str, values: NDArray[np.float64]) -> Series:
    """Return the empirical distribution function, which rises by 1/N at each image."""
    heights = np.repeat(np.arange(len(values) + 1), 2)[1:-1] / len(values)
    return Series(name, np.repeat(values, 2).tolist(), heights.tolist())


def _histogram(name: str, values: NDArray[np.float64]) -> Series:
    """Return densities over bins up to the largest entropy that ten classes have."""
    density, edges = np.histogram(values, _BINS, (0, math.log(10)), density=True)
    return Series(name, np.repeat(edges, 2)[1:-1].tolist(), np.repeat(density, 2).tolist())


# Images of each class of whose predictions a network is most, and least, certain, and what these have in common.
#
# Skaaret-Lund (2022), section 5.4, figures 5.9 to 5.11. What the text says of their looks is measured: lines are thicker where the mean
# intensity of an image is higher, and images are alike where their mean distance to each other is small.

_SHOWN = 5  # at each end


def measure_certain_images(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure how the most and the least certain images of each class look; means over classes.

    thicker_SET, by how much the mean intensity of the most certain images exceeds that of the least certain, in [-1, 1]; alike_SET, by
    how much the mean distance between the least certain exceeds that between the most certain.
    """
    values: dict[str, Estimate] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for data_set in (name for name in files if f"{name}_images" in files):
        found = read_entropies(files[data_set], settings["posterior"], "test")[: settings["images"]]
        pixels, labels = read_images(files[f"{data_set}_images"], count=len(found))
        rows = [select_ends(found, np.flatnonzero(labels.numpy() == label)) for label in range(int(labels.max()) + 1)]
        shown = np.stack([pixels[:, 0].numpy()[row] for row in rows if len(row)])  # classes, both ends, height, width
        thicker = [row[:_SHOWN].mean() - row[_SHOWN:].mean() for row in shown]
        alike = [measure_distance(row[_SHOWN:]) - measure_distance(row[:_SHOWN]) for row in shown]
        values |= {f"thicker_{data_set}": Estimate.of_repeats(thicker), f"alike_{data_set}": Estimate.of_repeats(alike)}
        arrays[data_set] = np.round(255 * shown).astype(np.uint8)
    return Measurements(values, arrays)


def select_ends(entropy: NDArray[np.float64], rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the five rows of the lowest entropy and the five of the highest, by entropy; none if there are fewer than ten."""
    order = rows[np.argsort(entropy[rows], kind="stable")]
    return np.concatenate([order[:_SHOWN], order[-_SHOWN:]]) if len(rows) >= 2 * _SHOWN else order[:0]


def measure_distance(shown: NDArray[np.float32]) -> float:
    """Return the mean distance of images (n, height, width) to each other: root mean square over pixels."""
    from scipy.spatial.distance import pdist  # slow to import

    return float(pdist(shown.reshape(len(shown), -1)).mean()) / math.sqrt(shown[0].size)


def draw_certain_images(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw a figure for each data set: a row for each class."""
    title = "lowest entropy per class, and highest"
    return {name: draw_rows(one, after=_SHOWN, title=f"{name}: {title}") for name, one in measured.arrays.items()}

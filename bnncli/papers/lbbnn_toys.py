"""What the recipes of latent binary networks measure out of tables of predictions: entropies, and the images behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.comparison import Estimate
from bnncli.lazy import torch
from bnncli.papers.digit_network import read_images
from bnncli.papers.recipe import Files, Measurements, Settings
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bnncli.figures.fits import Series

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


# How the entropies of predictions are distributed, in and out of distribution: empirical distribution functions and
# histograms.
#
# Skaaret-Lund (2022), section 5.4: the entropy -sum_k p_k log p_k of the mean probabilities of ten draws; the
# empirical distribution function rises by 1/N at each image, so that curves to the lower right are of less certain
# predictions.

_SIDES = {"test": "in distribution", "other": "out of distribution"}  # splits
_BINS = 30


def measure_entropy_curves(
    settings: Settings, inputs: Files, *, generator: torch.Generator, progress: Progress
) -> Measurements:
    """Measure the distribution of entropies in and out of distribution.

    Args:
        settings: methods, names of posteriors by what they are called; hundredths of a nat.
        inputs: a table of predict for each data set that networks were trained on.

    Returns:
        below_SET_SPLIT_METHOD_P, the share of images whose entropy is at most P hundredths of a nat, and median_SET_SPLIT_METHOD.
    """
    values: dict[str, Estimate] = {}
    arrays: dict[str, NDArray[np.float64]] = {}
    for data_set, path in inputs.items():
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
    from bnncli.figures.fits import LinePanel, LinePanels

    sets = list(dict.fromkeys(name.split(" ")[0] for name in measured.arrays))
    figures = {}
    for split, side in _SIDES.items():
        panels = [
            LinePanel(f"trained on {one}", "entropy, nats", "share of images", _curves(measured, one, split, settings))
            for one in sets
        ]
        figures[f"ecdf-{split}"] = LinePanels(f"ecdf-{split}", f"Entropies {side}", "", panels).draw()
    panels = [
        LinePanel(f"trained on {one}", "entropy, nats", "density", _histograms(measured, one, "other", settings))
        for one in sets
    ]
    figures["histograms"] = LinePanels("histograms", "Entropies out of distribution", "", panels).draw()
    return figures


def _curves(measured: Measurements, data_set: str, split: str, settings: Settings) -> list[Series]:
    """Return the steps of each method."""
    from bnncli.figures.fits import Series

    found = {method: measured.arrays[f"{data_set} {split} {method}"] for method in settings["methods"]}
    return [
        Series(method, np.repeat(values, 2).tolist(), np.repeat(np.arange(len(values) + 1), 2)[1:-1] / len(values))  # type: ignore[arg-type]
        for method, values in found.items()
    ]


def _histograms(measured: Measurements, data_set: str, split: str, settings: Settings) -> list[Series]:
    """Return densities over bins up to the largest entropy that ten classes have."""
    from bnncli.figures.fits import Series

    series = []
    for method in settings["methods"]:
        values = measured.arrays[f"{data_set} {split} {method}"]
        density, edges = np.histogram(values, _BINS, (0, math.log(10)), density=True)
        series.append(Series(method, np.repeat(edges, 2)[1:-1].tolist(), np.repeat(density, 2).tolist()))
    return series


# Images of each class of whose predictions a network is most, and least, certain, and what these have in common.
#
# Skaaret-Lund (2022), section 5.4, figures 5.9 to 5.11: of the first 1,000 images, ten of each class, the five with
# the lowest entropy and the five with the highest. What the text says of their looks is measured: lines are thicker
# where the mean intensity of an image is higher, and images are alike where their mean distance to each other is
# small.

_SHOWN = 5  # at each end


def measure_certain_images(
    settings: Settings, inputs: Files, *, generator: torch.Generator, progress: Progress
) -> Measurements:
    """Measure how the most and the least certain images of each class look.

    Args:
        settings: images, at most, and posterior.
        inputs: for each SET its table of predict, and SET_images, an NPZ file of x (N, 28, 28) uint8 and y.

    Returns:
        Means over classes. thicker_SET, by how much the mean intensity of the most certain images exceeds that of the least certain,
        in [-1, 1]; alike_SET, by how much the mean distance between the least certain exceeds that between the most certain.
    """
    values: dict[str, Estimate] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for data_set in (name for name in inputs if f"{name}_images" in inputs):
        found = read_entropies(inputs[data_set], settings["posterior"], "test")[: settings["images"]]
        pixels, labels = read_images(inputs[f"{data_set}_images"], count=len(found))
        rows = [select_ends(found, np.flatnonzero(labels.numpy() == label)) for label in range(int(labels.max()) + 1)]
        shown = np.stack(
            [pixels.squeeze(1).numpy()[row] for row in rows if len(row)]
        )  # classes, both ends, height, width
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
    flat = shown.reshape(len(shown), -1).astype(np.float64)
    distances = np.sqrt(np.square(flat[:, None] - flat[None]).mean(axis=2))
    return float(distances.sum() / (len(shown) * (len(shown) - 1)))


def draw_certain_images(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw a figure for each data set: a row for each class."""
    from bnncli.papers.figures import draw_rows

    return {
        name: draw_rows(shown, after=_SHOWN, title=f"{name}: lowest entropy per class, and highest")
        for name, shown in measured.arrays.items()
    }

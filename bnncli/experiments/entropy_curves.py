"""How the entropies of predictions are distributed, in and out of distribution: empirical distribution functions and histograms.

Skaaret-Lund (2022), section 5.4: the entropy -sum_k p_k log p_k of the mean probabilities of ten draws; the empirical distribution function
rises by 1/N at each image, so that curves to the lower right are of less certain predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.experiments._predicted import entropies
from bnncli.lazy import torch
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bnncli.figures.fits import Series

_SIDES = {"test": "in distribution", "other": "out of distribution"}  # splits
_BINS = 30


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """below_SET_SPLIT_METHOD_P, the share of images whose entropy is at most P hundredths of a nat, and median_SET_SPLIT_METHOD.

    Args:
        settings: methods, the name of a posterior by what it is called; hundredths, of nats.
        inputs: a table of predict for each data set that networks were trained on.
    """
    values: dict[str, Estimate] = {}
    arrays: dict[str, NDArray[np.float64]] = {}
    for data_set, path in inputs.items():
        for split in _SIDES:
            for method, posterior in settings["methods"].items():
                found = np.sort(entropies(path, posterior, split))
                arrays[f"{data_set} {split} {method}"] = found
                key = f"{data_set}_{split}_{method}"
                values[f"median_{key}"] = Estimate(float(np.median(found)))
                for hundredths in settings["hundredths"]:
                    share = float(np.searchsorted(found, hundredths / 100, side="right")) / len(found)
                    values[f"below_{key}_{hundredths}"] = Estimate.of_share(share, len(found))
    return Measurements(values, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """The distribution functions of both splits, and histograms of the other one's."""
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
    """Steps of each method."""
    from bnncli.figures.fits import Series

    found = {method: measured.arrays[f"{data_set} {split} {method}"] for method in settings["methods"]}
    return [
        Series(method, np.repeat(values, 2).tolist(), np.repeat(np.arange(len(values) + 1), 2)[1:-1] / len(values))  # type: ignore[arg-type]
        for method, values in found.items()
    ]


def _histograms(measured: Measurements, data_set: str, split: str, settings: Settings) -> list[Series]:
    """Densities over bins up to the largest entropy that ten classes have."""
    from bnncli.figures.fits import Series

    series = []
    for method in settings["methods"]:
        values = measured.arrays[f"{data_set} {split} {method}"]
        density, edges = np.histogram(values, _BINS, (0, math.log(10)), density=True)
        series.append(Series(method, np.repeat(edges, 2)[1:-1].tolist(), np.repeat(density, 2).tolist()))
    return series

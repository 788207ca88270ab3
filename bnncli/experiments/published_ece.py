"""The calibration error that the refinement paper's script computes, of a model that is calibrated exactly.

The script leaves out its last bin, confidences of 0.99 and more, and counts the rest as if it were all (Kristiadi, Eschenhagen and
Hennig 2022, arXiv 2205.10041). Here the largest of two probabilities is uniform on [0.99, 1) for a share of the examples and on
[0.5, 0.99) for the others, and the likelier class is right with just that probability: what is measured is chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.agreement import Estimate
from bnncli.evaluation.calibration import NUM_BINS, PUBLISHED_BINS, calibration_scores
from bnncli.evaluation.example_statistics import ExampleStatistics, examples_of
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.lazy import torch
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EDGE = 0.99
_NAMED = {"published": "published, 100 bins", "real": "every bin, 100 bins", "usual": "every bin, 15 bins"}


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """published_P, real_P (100 bins of equal width) and usual_P (15) of each percentage P of confidences above 0.99.

    Args:
        settings: percentages; examples of a data set; repeats, over which means and standard errors are.
    """
    random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    values: dict[str, Estimate] = {}
    task = progress.task("data sets", len(settings["percentages"]) * settings["repeats"])
    for percentage in settings["percentages"]:
        found = []
        for _ in range(settings["repeats"]):
            found.append(errors_of(calibrated(settings["examples"], percentage / 100, random)))
            task.advance()
        for name in _NAMED:
            values[f"{name}_{percentage}"] = Estimate.of_repeats([one[name] for one in found])
    return Measurements(values)


def calibrated(count: int, share: float, random: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Probabilities (N, 2) of an exactly calibrated model, and labels (N,); `share` of its confidences is above 0.99."""
    is_sure = np.arange(count) < round(share * count)
    low, high = np.where(is_sure, _EDGE, 0.5), np.where(is_sure, 1.0, _EDGE)
    confidence = low + (high - low) * random.random(count)
    labels = (random.random(count) >= confidence).astype(np.int64)
    return np.stack([confidence, 1 - confidence], axis=1), labels


def errors_of(sample: tuple[NDArray, NDArray]) -> dict[str, float]:
    """The calibration errors of probabilities and labels, by the names of `measure`."""
    examples = examples_of(*sample)
    wide, usual = (_by_strategy(examples, bins) for bins in (PUBLISHED_BINS, NUM_BINS))
    return {"published": wide["published"], "real": wide["equal-width"], "usual": usual["equal-width"]}


def _by_strategy(examples: ExampleStatistics, num_bins: int) -> dict[str, float]:
    found = {}
    for group in calibration_scores(examples, num_bins=num_bins):
        assert group.statistic is not None
        scores = group.statistic(np.ones((1, len(examples))))[0]
        for member, score in zip(group.members, scores, strict=True):
            if member.name == "ece" and member.choices["norm"] == "l1":
                found[str(member.choices["strategy"])] = float(score)
    return found


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """The three against the share of confidences above 0.99."""
    from bnncli.figures.fits import MeasuredLine
    from bnncli.figures.fits import draw_measured_lines as draw_lines

    lines = {}
    for name, label in _NAMED.items():
        found = [measured.values[f"{name}_{one}"] for one in settings["percentages"]]
        values, errors = [one.value for one in found], [one.standard_error for one in found]
        lines[label] = MeasuredLine([float(one) for one in settings["percentages"]], values, errors)
    title = "A perfectly calibrated model"
    x_label = "confidences of 0.99 or more, %"
    return {"calibrated": draw_lines(lines, title=title, x_label=x_label, y_label="calibration error")}

"""What a step of training a refinement takes by the length of its flow, on a last layer with the sizes of the published one.

Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 6.3 and figure 7: LeNet-5's last layer, 84 features and 10 classes, radial
layers, batches of 128 examples, one draw a step. Time depends on sizes alone: the features are noise. It is that of the processor, which other
programs change little; lengths take turns.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bnncli.covariances.diag import Diag
from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.inference.refine import fit_flow
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import Progress
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEATURES, _CLASSES, _BATCH = 84, 10, 128
_PRIOR = 510.0  # the published precision
_clock = time.process_time


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """seconds_L of a step with each length L, and increase_K_L, % more of each length than of the one before.

    Args:
        settings: lengths, rising; steps of a training that is timed; repeats of all.
    """
    lengths, steps = list(settings["lengths"]), int(settings["steps"])
    layout = HeadLayout(_CLASSES, _FEATURES)
    features = torch.randn(steps * _BATCH, _FEATURES, generator=generator)
    labels = torch.randint(_CLASSES, (len(features),), generator=generator)
    target = LastLayerTarget(features, labels, layout, Prior(_PRIOR))
    size = layout.num_params
    base = Gaussian(torch.zeros(size).double(), Diag(torch.full((size,), 1 / _PRIOR).double()), layout, target.prior)
    found: dict[int, list[float]] = {length: [] for length in lengths}
    repeats = int(settings["repeats"])
    task = progress.task("refine", (repeats + 1) * len(lengths))
    for repeat in range(repeats + 1):
        for length in lengths:
            begun = _clock()
            fit_flow(
                target, base, generator=generator, flow="radial", length=length, space="weight", epochs=1, batch_size=_BATCH
            )  # fmt: skip
            seconds = _clock() - begun
            if repeat:  # the first one finds nothing in any cache
                found[length].append(seconds / steps)
            task.advance()
    values = {f"seconds_{length}": Estimate.of_repeats(each) for length, each in found.items()}
    for shorter, longer in itertools.pairwise(lengths):
        more = [100 * (b / a - 1) for a, b in zip(found[shorter], found[longer], strict=True)]
        values[f"increase_{shorter}_{longer}"] = Estimate.of_repeats(more)
    return Measurements(values)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Time against length."""
    from bnncli.figures.fits import MeasuredLine
    from bnncli.figures.fits import draw_measured_lines as draw_lines

    lengths = list(settings["lengths"])
    times = [measured.values[f"seconds_{length}"] for length in lengths]
    line = MeasuredLine(lengths, [1e3 * one.value for one in times], [1e3 * (one.standard_error or 0) for one in times])
    title = "Time per step (batch of 128, 850 parameters)"
    return {"time": draw_lines({"radial": line}, title=title, x_label="radial layers", y_label="milliseconds")}

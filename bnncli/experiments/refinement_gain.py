"""What refinement gains over the Gaussian at the mode, against prior precision, data-set size and structure of the covariance.

The target is a network's last layer with its features as they are; the Gaussian of every target stands at that target's own mode,
so that what a flow gains is shape, and not the place or the prior of another Gaussian. Pareto k of the Gaussian's importance
weights is the warning that costs no refinement: Yao et al. (2018), arXiv 1802.02538.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from bnncli import registry
from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.inference.elbo import diagnose_importance, measure_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.lazy import torch
from bnncli.models.checkpoints import load_checkpoint
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import Progress
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor


_AT_ONCE = 1000  # images
_HIGHEST_K = 0.7  # Yao et al. (2018), section 3


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """gain_FLOW_N_L_S, nats that the refined ELBO is above the Gaussian's, elbo_N_L_S, that of the Gaussian, and k_N_L_S, its
    Pareto k: of each flow, number of examples N, prior precision L and structure S; what is not finite is left out.

    Args:
        settings: sizes, precisions, structures; flows, each with its epochs; draws, for ELBO and Pareto k.
        inputs: net, a state dict of lenet5, and train, an NPZ file of x (N, 28, 28) uint8 and y.
    """
    features, labels = last_features(inputs, max(settings["sizes"]))
    layout = HeadLayout(10, features.shape[1])
    values: dict[str, Estimate] = {}
    axes = (settings["sizes"], settings["precisions"], settings["structures"])
    task = progress.task("targets", math.prod(map(len, axes)))
    for size, precision, structure in product(*axes):
        target = LastLayerTarget(features[:size], labels[:size], layout, Prior(float(precision)))
        found = of_target(target, structure, settings, generator=generator)
        values |= {_name(quantity, size, precision, structure): one for quantity, one in found.items()}
        task.advance()
    return Measurements(values)


def of_target(
    target: LastLayerTarget, structure: str, settings: Settings, *, generator: torch.Generator
) -> dict[str, Estimate]:
    """elbo and k of the Gaussian at the mode, and gain_FLOW of each flow over it."""
    gaussian = fit_gaussian(target, start=torch.zeros(target.layout.num_params), structure=structure).gaussian
    told = diagnose_importance(target, gaussian, generator=generator, num_draws=settings["draws"])
    found = {"elbo": (told.elbo, told.elbo_error), "k": (told.pareto_k, None)}
    for flow, epochs in settings["flows"].items():
        refined = fit_flow(target, gaussian, generator=generator, flow=flow, epochs=epochs, patience=5).posterior
        gain = measure_gain(target, gaussian, refined, generator=generator, num_samples=settings["draws"])
        found[f"gain_{flow}"] = (gain.value, gain.standard_error)
    return {
        name: Estimate(value, error)
        for name, (value, error) in found.items()
        if value is not None and math.isfinite(value)
    }


def _name(quantity: str, size: int, precision: float, structure: str) -> str:
    return f"{quantity}_{size}_{precision}_{structure}"


def last_features(inputs: Inputs, count: int) -> tuple[Tensor, Tensor]:
    """What the last layer takes of the first images (n, 84), and their labels (n,)."""
    with np.load(inputs["train"]) as arrays:
        images, labels = arrays["x"][:count], arrays["y"][:count]
    network = registry.load_module("networks", "lenet5").build()
    network.load_state_dict(load_checkpoint(inputs["net"]).state)
    pixels = torch.from_numpy(images).unsqueeze(1).float() / 255
    with torch.no_grad():
        found = torch.cat([network.features(block) for block in pixels.split(_AT_ONCE)])
    return found, torch.from_numpy(labels).long()


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Gain of each flow, and Pareto k, against the prior precision: a line for each size and structure."""
    from bnncli.figures.fits import MeasuredLine
    from bnncli.figures.fits import draw_measured_lines as draw_lines

    gains = {f"gain_{flow}": (f"ELBO gain of {flow} layers", "ELBO gain, nats") for flow in settings["flows"]}
    figures = {}
    for quantity, (title, label) in {**gains, "k": ("Gaussian at the mode", "Pareto k")}.items():
        lines = {}
        for structure, size in product(settings["structures"], settings["sizes"]):
            names = {one: _name(quantity, size, one, structure) for one in settings["precisions"]}
            found = {float(one): measured.values[name] for one, name in names.items() if name in measured.values}
            if found:
                errors = [one.standard_error for one in found.values()]
                values = [one.value for one in found.values()]
                lines[f"{structure}, N = {size:,}"] = MeasuredLine([*found], values, errors)
        if not lines:
            continue
        if quantity == "k":
            ends = [min(settings["precisions"]), max(settings["precisions"])]
            lines[f"k = {_HIGHEST_K}"] = MeasuredLine(ends, [_HIGHEST_K] * 2, [None, None])
        figures[quantity] = draw_lines(lines, title=title, x_label="prior precision", y_label=label, log="xy")
        if quantity != "k":  # a gain may be nothing, or below it by chance
            figures[quantity].axes[0].set_yscale("symlog", linthresh=0.1)
    return figures

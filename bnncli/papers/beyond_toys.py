"""What bnncli's own recipes measure beyond commands: published calibration errors, a reference's scores, gains of refinement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnncli import registry
from bnncli.errors import DataError
from bnncli.evaluation.calibration import NUM_BINS, PUBLISHED_BINS, calibration_scores
from bnncli.evaluation.comparison import Estimate
from bnncli.evaluation.statistics import ExampleStatistics, compute_example_statistics
from bnncli.figures.fits import draw_measured_lines
from bnncli.inference.elbo import diagnose_importance, measure_gain
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.lazy import special, torch
from bnncli.models.checkpoints import load_checkpoint
from bnncli.papers.figures import build_line
from bnncli.papers.recipe import Files, Measurements, Settings
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import Progress
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Generator, Tensor

# The calibration error that the refinement paper's script computes, of a model that is calibrated exactly.
#
# The script leaves out confidences of 0.99 and more, and counts the rest as if it were all (Kristiadi, Eschenhagen and Hennig 2022, arXiv
# 2205.10041). Here the largest of two probabilities is uniform on [0.99, 1) for a share of the examples and on [0.5, 0.99) for the
# others, and the likelier class is right with just that probability: what is measured is chance.

_EDGE = 0.99
_NAMED = {"published": "published, 100 bins", "real": "every bin, 100 bins", "usual": "every bin, 15 bins"}


def measure_published_ece(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure calibration errors of calibrated models, by the percentage P of their confidences above 0.99.

    published_P and real_P, in 100 bins of equal width, and usual_P, in 15.
    """
    random = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
    values: dict[str, Estimate] = {}
    task = progress.task("data sets", len(settings["percentages"]) * settings["repeats"])
    for percentage in settings["percentages"]:
        found = []
        for _ in range(settings["repeats"]):
            found.append(compute_errors(simulate_calibrated(settings["examples"], percentage / 100, random)))
            task.advance()
        for name in _NAMED:
            values[f"{name}_{percentage}"] = Estimate.of_repeats([one[name] for one in found])
    return Measurements(values)


def simulate_calibrated(count: int, share: float, random: np.random.Generator) -> tuple[NDArray, NDArray]:
    """Return probabilities (N, 2) of an exactly calibrated model, and labels (N,); `share` of its confidences is above 0.99."""
    is_sure = np.arange(count) < round(share * count)
    low, high = np.where(is_sure, _EDGE, 0.5), np.where(is_sure, 1.0, _EDGE)
    confidence = low + (high - low) * random.random(count)
    labels = (random.random(count) >= confidence).astype(np.int64)
    return np.stack([confidence, 1 - confidence], axis=1), labels


def compute_errors(sample: tuple[NDArray, NDArray]) -> dict[str, float]:
    """Return the calibration errors of probabilities and labels, by the names of `measure_published_ece`."""
    examples = compute_example_statistics(*sample)
    wide, usual = (_compute_by_strategy(examples, bins) for bins in (PUBLISHED_BINS, NUM_BINS))
    return {"published": wide["published"], "real": wide["equal-width"], "usual": usual["equal-width"]}


def _compute_by_strategy(examples: ExampleStatistics, num_bins: int) -> dict[str, float]:
    found = {}
    for group in calibration_scores(examples, num_bins=num_bins):
        assert group.statistic is not None
        for member, score in zip(group.members, group.statistic(np.ones((1, len(examples))))[0], strict=True):
            if member.name == "ece" and member.choices["norm"] == "l1":
                found[str(member.choices["strategy"])] = float(score)
    return found


def draw_published_ece(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw the three against the share of confidences above 0.99."""
    lines = {
        label: build_line({one: measured.values[f"{name}_{one}"] for one in settings["percentages"]})
        for name, label in _NAMED.items()
    }
    title = "A perfectly calibrated model"
    x_label = "confidences of 0.99 or more, %"
    return {"calibrated": draw_measured_lines(lines, title=title, x_label=x_label, y_label="calibration error")}


# How good a reference is itself: accuracy and NLL of its class probabilities, as they are and sharpened by a
# temperature.
#
# The reference is the full-batch HMC of Izmailov, Vikram, Hoffman and Wilson (2021), arXiv 2104.14421. Probabilities
# p at a temperature T are p^(1/T), normalised; the same for everybody, and nothing is fitted.

_LEAST = float(np.finfo(np.float32).tiny)  # of a probability


def measure_reference_scores(
    settings: Settings, files: Files, generator: Generator, progress: Progress
) -> Measurements:
    """Score the reference: its accuracy, confidence, nll, and gain_P, by which a temperature of P per cent lowers the NLL.

    Raises:
        DataError: the files have different numbers of rows.
    """
    with np.load(files["reference"]) as arrays:
        probs = arrays["hmc"].astype(np.float64)
    with np.load(files["test"]) as arrays:
        labels = arrays["y"]
    if len(probs) != len(labels):
        raise DataError(f"{files['reference']} has {len(probs)} rows, but there are {len(labels)} labels")
    losses = _losses(probs, labels, 1.0)
    scores = {
        "reference_accuracy": (probs.argmax(axis=1) == labels).astype(np.float64),
        "reference_confidence": probs.max(axis=1),
        "reference_nll": losses,
    }
    scores |= {f"gain_{one}": losses - _losses(probs, labels, one / 100) for one in settings["percents"]}
    return Measurements({name: Estimate.of_repeats(one) for name, one in scores.items()})


def _losses(probs: NDArray, labels: NDArray, temperature: float) -> NDArray:
    """Return the loss of each example (N,), in nats."""
    logits = np.log(np.maximum(probs, _LEAST)) / temperature
    found: NDArray = special.logsumexp(logits, axis=1) - logits[np.arange(len(labels)), labels]
    return found


# What refinement gains over the Gaussian at the mode, against prior precision, data-set size and structure of the covariance.
#
# The target is a network's last layer; the Gaussian of every target stands at that target's own mode, so that what a flow gains is shape.
# Pareto k of the Gaussian's importance weights is the warning that costs no refinement: Yao et al. (2018), arXiv 1802.02538.

_AT_ONCE = 1000  # images
_HIGHEST_K = 0.7  # Yao et al. (2018), section 3


def measure_refinement_gain(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure what flows gain over the Gaussian at the mode, for each number of examples N, prior precision L and structure S.

    gain_FLOW_N_L_S, nats by which the refined ELBO exceeds the Gaussian's; elbo_N_L_S and k_N_L_S, the Gaussian's ELBO and Pareto k.
    Values that are not finite are left out.
    """
    features, labels = compute_last_features(files, max(settings["sizes"]))
    layout = HeadLayout(10, features.shape[1])
    values: dict[str, Estimate] = {}
    axes = (settings["sizes"], settings["precisions"], settings["structures"])
    task = progress.task("targets", math.prod(map(len, axes)))
    for size, precision, structure in product(*axes):
        target = LastLayerTarget(features[:size], labels[:size], layout, Prior(float(precision)))
        found = measure_target(target, structure, settings, generator=generator)
        values |= {_name(quantity, size, precision, structure): one for quantity, one in found.items()}
        task.advance()
    return Measurements(values)


def measure_target(
    target: LastLayerTarget, structure: str, settings: Settings, *, generator: Generator
) -> dict[str, Estimate]:
    """Return elbo and k of the Gaussian at the mode, and gain_FLOW of each flow over it."""
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


def compute_last_features(files: Files, count: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of the last layer for the first images (n, 84), and their labels (n,)."""
    with np.load(files["train"]) as arrays:
        images, labels = arrays["x"][:count], arrays["y"][:count]
    network = registry.load_module("networks", "lenet5").build()
    network.load_state_dict(load_checkpoint(files["net"]).state)
    pixels = torch.from_numpy(images).unsqueeze(1).float() / 255
    with torch.no_grad():
        found = torch.cat([network.features(block) for block in pixels.split(_AT_ONCE)])
    return found, torch.from_numpy(labels).long()


def draw_refinement_gain(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw gain of each flow, and Pareto k, against the prior precision: a line for each size and structure."""
    gains = {f"gain_{flow}": (f"ELBO gain of {flow} layers", "ELBO gain, nats") for flow in settings["flows"]}
    figures = {}
    for quantity, (title, label) in {**gains, "k": ("Gaussian at the mode", "Pareto k")}.items():
        lines = {}
        for structure, size in product(settings["structures"], settings["sizes"]):
            names = {one: _name(quantity, size, one, structure) for one in settings["precisions"]}
            found = {float(one): measured.values[name] for one, name in names.items() if name in measured.values}
            if found:
                lines[f"{structure}, N = {size:,}"] = build_line(found)
        if not lines:
            continue
        if quantity == "k":
            ends = [min(settings["precisions"]), max(settings["precisions"])]
            lines[f"k = {_HIGHEST_K}"] = build_line(dict.fromkeys(ends, Estimate(_HIGHEST_K)))
        figures[quantity] = draw_measured_lines(lines, title=title, x_label="prior precision", y_label=label, log="xy")
        if quantity != "k":  # a gain may be nothing, or below it by chance
            figures[quantity].axes[0].set_yscale("symlog", linthresh=0.1)
    return figures

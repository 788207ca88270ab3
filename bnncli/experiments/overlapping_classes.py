"""Uncertainty-aware top-k by the Laplace bridge with the released covariance, which has no factor N, and with the right one.

Hobbhahn (2020), arXiv 2003.01227, section 5.5: a diagonal Gaussian over the last layer, of the Gauss-Newton matrix. The released notebook adds the
inverse of a prior variance to the matrix's mean over images, in the place of its sum: nearly the prior again, as the mean is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.experiments.refinement_gain import last_features
from bnncli.lazy import torch
from bnncli.models.checkpoints import load_checkpoint
from bnncli.numerics import dirichlet
from bnncli.numerics.dirichlet import RULES, cumulative_lengths, ranked_lengths
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_CAP = 10  # classes, as published


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """length_V_RULE, rescued_V_RULE, gain_V_RULE and longer_V_RULE: the mean number of classes kept with V thousandths of prior variance, how
    many more labels are among them than are first, and than a plain rule with as many classes keeps, and the share of images with several.

    With the suffix _right, of the covariance with the factor N. confidence_V is the bridge's mean confidence over the network's.

    Args:
        settings: variances, of the prior; images to test.
        inputs: net, a state dict of lenet5; train and test, NPZ files of x (N, 28, 28) uint8 and y.
    """
    state = load_checkpoint(inputs["net"]).state
    head = torch.cat([state["ll.weight"], state["ll.bias"].unsqueeze(1)], dim=1).double()
    with np.load(inputs["train"]) as stored:
        num_train = len(stored["y"])
    curvature = mean_curvature(with_one(last_features(inputs, num_train)[0]), head)
    features, labels = last_features({**inputs, "train": inputs["test"]}, settings["images"])
    inner = with_one(features)
    logits = inner @ head.T
    values: dict[str, Estimate] = {}
    arrays = {}
    for variance in settings["variances"]:
        thousandths = round(1000 * variance)
        for suffix, factor in (("", 1), ("_right", num_train)):
            spread = inner.square() @ (factor * curvature + 1 / variance).reciprocal().T
            alpha = dirichlet.from_gaussian(logits, spread)
            share = dirichlet.mean(alpha).amax(dim=1).mean() / logits.softmax(dim=1).amax(dim=1).mean()
            values[f"confidence_{thousandths}{suffix}"] = Estimate(float(share))
            for rule in RULES:
                lengths = ranked_lengths(alpha, rule=rule, cap=_CAP)
                found = of_lengths(alpha, logits, lengths, labels)
                values |= {f"{name}_{thousandths}_{rule}{suffix}": one for name, one in found.items()}
                arrays[f"{thousandths} {rule}{suffix}"] = torch.bincount(lengths, minlength=_CAP + 1)[1:].numpy() / len(
                    lengths
                )
    return Measurements(values, arrays)


def with_one(features: Tensor) -> Tensor:
    """Features (N, D) and a one for the bias, (N, D + 1) float64."""
    return torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], dim=1)


def mean_curvature(inner: Tensor, head: Tensor) -> Tensor:
    """The diagonal of the mean over images of the Gauss-Newton matrix, (K, D + 1): of the weight from j to k p_k (1 - p_k) x_j^2."""
    probs = (inner @ head.T).softmax(dim=1)
    return (probs * (1 - probs)).T @ inner.square() / len(inner)


def of_lengths(alpha: Tensor, logits: Tensor, lengths: Tensor, labels: Tensor) -> dict[str, Estimate]:
    """length, rescued, gain and longer, each with the standard error of images."""
    order = alpha.argsort(dim=1, descending=True)
    rank = (order == labels.unsqueeze(1)).int().argmax(dim=1)
    plain = cumulative_lengths(
        logits.softmax(dim=1).sort(dim=1, descending=True).values, mean_length=float(lengths.double().mean())
    )
    first = logits.argmax(dim=1) == labels
    place = (logits.argsort(dim=1, descending=True) == labels.unsqueeze(1)).int().argmax(dim=1)
    kept = (rank < lengths).double()
    parts = {"length": lengths.double(), "rescued": kept - first.double(), "gain": kept - (place < plain).double()}
    means = {name: Estimate(float(one.mean()), float(one.std()) / len(one) ** 0.5) for name, one in parts.items()}
    return means | {"longer": Estimate.of_share(float((lengths > 1).double().mean()), len(lengths))}


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """How many images keep how many classes, as figure 5.6."""
    from bnncli.figures.fits import LinePanel, LinePanels, Series

    lengths = list(range(1, _CAP + 1))
    panels = []
    for variance in settings["variances"]:
        key = round(1000 * variance)
        names = [f"{key} {rule}{suffix}" for suffix in ("", "_right") for rule in RULES]
        series = [
            Series(name.replace("_", ", ").partition(" ")[2], lengths, measured.arrays[name].tolist()) for name in names
        ]
        panels.append(LinePanel(f"prior variance {variance:g}", "classes kept", "share of images", series))
    return {"lengths": LinePanels("lengths", "Classes kept", "", panels).draw()}

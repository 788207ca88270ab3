"""Variance of the bridge's Dirichlet for all ten digits, of a network that has seen the first three.

Hobbhahn (2020), arXiv 2003.01227, section 5.1, figures 5.1 and 5.2. Published is the released covariance, the inverse of H + 1/2 with H the
mean over images and no factor N, and variances of the logits as they are; right that of `digit_bridge`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings, digit_network
from bnncli.experiments.digit_bridge import area, bootstrap_of, prior_precision
from bnncli.experiments.simplex_densities import dirichlet_shares
from bnncli.experiments.simplex_kl import vertices
from bnncli.lazy import torch
from bnncli.numerics import dirichlet
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

SEEN, DIGITS = 3, 10
_VARIANCE = 2.0  # var0 of the released notebook
_SHOWN = (0, 1, 2, 4, 5, 9)  # digits; of each the image whose variance is nearest the digit's mean is drawn
_HALVINGS, _SAMPLES = 5, 100_000


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """variance_D of each digit D, of the predicted class; variance_seen and _unseen, their means; highest_seen and lowest_unseen of the
    digits; auroc, of the variance, and auroc_map, of the network's own confidence. Names end in _published for that definition.

    Args:
        settings: train, images of the three digits; epochs; curvature, images for H; images of the test set.
    """
    train = digit_network.images(inputs["train"], classes=SEEN, count=settings["train"])
    test, labels = digit_network.images(inputs["test"], count=settings["images"])
    target = digit_network.trained(*train, classes=SEEN, epochs=settings["epochs"], generator=generator)
    curvature = digit_network.curvature(target, settings["curvature"])
    few = target.inputs[: settings["curvature"]]
    tau = prior_precision(target, curvature, few, generator, draws=500)
    digits, values, arrays = labels.numpy(), {"prior_precision": Estimate(tau)}, {}
    logits = target.layout.logits(test, digit_network.weights(target).unsqueeze(0))[0]
    confidence = logits.softmax(dim=1).amax(dim=1).numpy()
    rng = bootstrap_of(generator)
    values["auroc_map"] = _area(confidence, digits, rng)
    task = progress.task("definitions", 2)
    for suffix, variances in (
        ("", 1 / (target.num_examples * curvature + tau)),
        ("_published", 1 / (curvature + 1 / _VARIANCE)),
    ):
        spread = digit_network.gaussian(target, variances).logits.spread
        marginal = (spread.variance(test) if suffix else spread.projected_variance(test)).double()
        log_alpha = dirichlet.from_gaussian(logits, marginal)
        variance = predicted_variance(log_alpha)
        values |= {f"{name}{suffix}": value for name, value in summary(variance, digits).items()}
        values[f"auroc{suffix}"] = _area(-variance, digits, rng)
        points = vertices(_HALVINGS)
        for digit in _SHOWN:
            own = np.flatnonzero(digits == digit)
            first = own[np.abs(variance[own] - variance[own].mean()).argmin()]
            arrays[f"density{suffix} {digit}"] = dirichlet_shares(
                log_alpha[first].exp().numpy(), points, _SAMPLES, generator
            )
        task.advance()
    return Measurements(values, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Figure 5.1 as a line over the digits, and the densities of figure 5.2."""
    from bnncli.figures.fits import MeasuredLine
    from bnncli.figures.fits import draw_measured_lines as draw_lines
    from bnncli.figures.simplex import draw as draw_triangles

    lines = {}
    for name, suffix in (("published", "_published"), ("right", "")):
        each = [measured.values[f"variance_{digit}{suffix}"] for digit in range(DIGITS)]
        lines[name] = MeasuredLine(range(DIGITS), [one.value for one in each], [one.standard_error for one in each])
    title = "The network was trained on the digits 0, 1 and 2"
    variance = draw_lines(lines, title=title, x_label="digit", y_label="mean variance, predicted class")
    rows = {
        name: [measured.arrays[f"density{suffix} {digit}"] for digit in _SHOWN]
        for name, suffix in (("published", "_published"), ("right", ""))
    }
    titles = [f"a {digit}, mean variance,\n{'trained on' if digit < SEEN else 'not trained on'}" for digit in _SHOWN]
    return {
        "variance": variance,
        "densities": draw_triangles(
            rows, titles, vertices(_HALVINGS), title="Densities over 0, 1 and 2 (corners 1, 2, 3)"
        ),
    }


def predicted_variance(log_alpha: Tensor) -> NDArray[np.float64]:
    """Variance (n,) of the probability of the most probable class under Dirichlets (n, K)."""
    first = log_alpha.argmax(dim=1, keepdim=True)
    found: NDArray[np.float64] = dirichlet.variance(log_alpha).gather(1, first)[:, 0].numpy()
    return found


def summary(variance: NDArray[np.float64], digits: NDArray[Any]) -> dict[str, Estimate]:
    """Means (over images, with standard errors) of variances (n,) of each digit, of those seen and unseen, and the extremes of the digits."""
    each = {digit: _mean(variance[digits == digit]) for digit in range(DIGITS)}
    return {
        **{f"variance_{digit}": value for digit, value in each.items()},
        "variance_seen": _mean(variance[digits < SEEN]),
        "variance_unseen": _mean(variance[digits >= SEEN]),
        "highest_seen": max((each[digit] for digit in range(SEEN)), key=lambda one: one.value),
        "lowest_unseen": min((each[digit] for digit in range(SEEN, DIGITS)), key=lambda one: one.value),
    }


def _mean(values: NDArray[np.float64]) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))


def _area(scores: NDArray[Any], digits: NDArray[Any], rng: np.random.Generator) -> Estimate:
    return Estimate(*area(scores[digits < SEEN], scores[digits >= SEEN], rng))

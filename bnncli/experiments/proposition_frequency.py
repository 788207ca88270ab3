"""How often the condition of proposition 1 holds: the variance of the bridge's most probable class grows with that class's logit variance.

Hobbhahn (2020), arXiv 2003.01227, proposition 1 and table 7.1, the rows of MNIST, which are empty there. The network and its Gaussians
are those of `digit_bridge`, by the published definition and by the right one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings, digit_network
from bnncli.experiments.digit_bridge import CLASSES, PUBLISHED_VARIANCE, prior_precision
from bnncli.lazy import torch
from bnncli.numerics import dirichlet
from bnncli.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """frequency_S of each set S, over its images; _published by that definition.

    Args:
        settings: train, images of the network's training set; epochs; curvature, images for H; tuned, images for the prior's precision; images of each set.
    """
    train = digit_network.images(inputs["train"], count=settings["train"])
    sets = {
        name: digit_network.images(path, count=settings["images"])[0]
        for name, path in inputs.items()
        if name != "train"
    }
    target = digit_network.trained(*train, classes=CLASSES, epochs=settings["epochs"], generator=generator)
    curvature = digit_network.curvature(target, settings["curvature"])
    tau = prior_precision(target, curvature, target.inputs[: settings["tuned"]], generator, draws=500)
    right = digit_network.gaussian(target, 1 / (target.num_examples * curvature + tau)).logits
    published = digit_network.gaussian(target, curvature + 1 / PUBLISHED_VARIANCE).logits
    values, task = {}, progress.task("sets", len(sets))
    for name, images in sets.items():
        logits = target.layout.logits(images, digit_network.weights(target).unsqueeze(0))[0]
        for suffix, variance in (
            ("", right.spread.projected_variance(images)),
            ("_published", published.spread.variance(images)),
        ):
            values[f"frequency_{name}{suffix}"] = _share(condition(dirichlet.from_gaussian(logits, variance.double())))
        task.advance()
    return Measurements(values)


def condition(log_alpha: Tensor) -> Tensor:
    """Whether proposition 1's condition holds of the most probable class, (N,) bool, of log alpha (N, K).

    alpha_k > (sqrt(9 b^2 + 10 b + 1) - b - 1) / 4 with b the sum of the others, both divided by b: no concentration overflows.
    """
    top = log_alpha.argmax(dim=1, keepdim=True)
    log_a, log_b = (one[:, 0] for one in dirichlet.beta_marginals(log_alpha, top))
    inverse = (-log_b).exp()
    return (log_a - log_b).exp() > ((9 + 10 * inverse + inverse**2).sqrt() - 1 - inverse) / 4


def _share(holds: Tensor) -> Estimate:
    """With the standard error of a binomial share."""
    share = float(holds.double().mean())
    return Estimate(share, math.sqrt(share * (1 - share) / len(holds)))

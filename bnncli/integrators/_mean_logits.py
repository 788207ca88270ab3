"""Scores of the mean logits of a posterior, for out-of-distribution detection: energy and the largest logit.

Of a last layer, and of a linearised network, the mean logits are the logits at the mean of theta. Draws of a network's theta
may lie in several modes, between which no network is meant: there the logits of draws are averaged.

Energy: Liu, Wang, Owens and Li (2020), arXiv 2010.03759, eq. (4) at temperature 1. Largest logit: Hendrycks et al.
(2022), arXiv 1911.11132.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnncli.integrators import check_features, examples_at_once, slices
from bnncli.integrators.mc import affordable_draws
from bnncli.lazy import torch
from bnncli.theta.layout import ClassifierLayout

if TYPE_CHECKING:
    from torch import Tensor

MEAN_DRAWS = 256  # for the mean of a posterior without a center: it is then a sixteenth of a standard deviation off
NETWORK_MEAN_DRAWS = 64  # the same of a network, each a pass of all its layers: an eighth
_DRAWN_ELEMENTS = 2**24  # of theta that are drawn at once


def mean_theta(posterior: Any, generator: torch.Generator) -> Tensor:
    """theta (P,) that stands for the posterior: its mean or center, or the mean of MEAN_DRAWS draws where it has none."""
    center: Tensor | None = getattr(posterior, "mean_theta", getattr(posterior, "center", None))
    if center is not None:
        return center
    size = max(1, _DRAWN_ELEMENTS // posterior.layout.num_params)
    parts = [
        posterior.sample(rows.stop - rows.start, generator).sum(dim=0, dtype=torch.float64)
        for rows in slices(MEAN_DRAWS, size)
    ]
    return torch.stack(parts).sum(dim=0) / MEAN_DRAWS


def drawn_theta(posterior: Any, generator: torch.Generator) -> Tensor:
    """Draws of a network's theta (S, P) whose mean logits stand for the posterior: NETWORK_MEAN_DRAWS, or fewer of many parameters.

    In their place the centers of a posterior that has several.
    """
    if hasattr(posterior, "centers"):
        centers: Tensor = posterior.centers
        return centers
    draws: Tensor = posterior.sample(affordable_draws(NETWORK_MEAN_DRAWS, posterior.layout.num_params), generator)
    return draws


def energy_and_max_logit(features: Tensor, theta: Tensor, layout: ClassifierLayout) -> tuple[Tensor, Tensor]:
    """-log sum exp of the mean logits (N,) and the largest of them (N,), float32.

    Of balanced logits of the classes: with a single logit f both scores then grow with |f|. Of several labels the energy is
    the joint one, the sum of -log(1 + exp f) over them (Wang et al. 2021, arXiv 2109.14162).

    Args:
        features: (N, D).
        theta: (P,), or draws (S, P).
    """
    check_features(layout, features)
    energy = features.new_empty(features.shape[0], dtype=torch.float32)
    largest = torch.empty_like(energy)
    stacked = theta.to(features).reshape(-1, layout.num_params)
    budget = examples_at_once(features, layout.widest)
    for rows in slices(features.shape[0], budget):
        some = stacked.split(max(1, budget // (rows.stop - rows.start)))
        sums = [layout.logits(features[rows], draws).sum(dim=0) for draws in some]
        logits = torch.stack(sums).sum(dim=0) / len(stacked)
        energy[rows] = -layout.likelihood.log_partitions(logits)
        largest[rows] = layout.likelihood.balanced_class_logits(logits, dim=1).amax(dim=1)
    return energy, largest

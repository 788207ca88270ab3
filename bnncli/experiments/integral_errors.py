"""Errors of Monte Carlo and of the probit approximation for the probability of two classes, over a grid of Gaussians of one logit.

I(m, s) = E sigma(f), f ~ N(m, s^2): Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 3.1 and figure 2. Every cell of
the grid has draws of its own, as the published largest error must have: with draws that cells share it is a third of that. The
largest of many errors grows with the grid, which is not given; ours is stated in the recipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.integrators.quadrature import binary_probs
from bnncli.lazy import torch
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_DRAWS_AT_ONCE = 2**22


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """Largest and mean absolute errors: mc_max_S and mc_mean_S for each number of draws S, probit_max and probit_mean.

    Args:
        settings: limit, of |m| and s; cells, of a side of the grid; samples, numbers of draws; repeats of every draw, over which
            standard errors are.
    """
    means, sds = _grid(settings)
    exact = torch.stack([binary_probs(means, torch.full_like(means, sd**2))[0][:, 1] for sd in sds.tolist()])
    probit = (torch.sigmoid(means / torch.sqrt(1 + math.pi / 8 * sds[:, None] ** 2)) - exact).abs()
    values = {"probit_max": Estimate(float(probit.max())), "probit_mean": Estimate(float(probit.mean()))}
    arrays = {"means": means.numpy(), "sds": sds.numpy(), "probit": probit.numpy()}
    repeats = settings["repeats"]
    task = progress.task("Monte Carlo", len(settings["samples"]) * repeats)
    for count in settings["samples"]:
        found = []
        for _ in range(repeats):
            errors = (_monte_carlo(means, sds, count, generator) - exact).abs()
            found.append((float(errors.max()), float(errors.mean())))
            arrays.setdefault(f"mc {count}", errors.numpy())
            task.advance()
        for name, each in zip(("max", "mean"), zip(*found, strict=True), strict=True):
            values[f"mc_{name}_{count}"] = Estimate.of_repeats(each)
    return Measurements(values, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """The error maps of figure 2, of the first repeat."""
    from bnncli.figures.integrals import ErrorPanel
    from bnncli.figures.integrals import draw as draw_maps

    means, sds = measured.arrays["means"], measured.arrays["sds"]
    panels = []
    for name, errors in measured.arrays.items():
        if name not in ("means", "sds"):
            row, column = divmod(int(errors.argmax()), errors.shape[1])
            panels.append(ErrorPanel([name], errors, (float(means[column]), float(sds[row]))))
    return {"errors": draw_maps(panels, means, sds, title="Distance from the exact probability of two classes")}


def _grid(settings: Settings) -> tuple[Tensor, Tensor]:
    """Means (cells + 1,) and standard deviations (cells,), float64."""
    limit, cells = float(settings["limit"]), int(settings["cells"])
    means = torch.linspace(-limit, limit, cells + 1, dtype=torch.float64)
    return means, torch.linspace(limit / cells, limit, cells, dtype=torch.float64)


def _monte_carlo(means: Tensor, sds: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Means of sigma over draws of every cell, (sds, means)."""
    found = torch.zeros(len(sds), len(means), dtype=torch.float64)
    block = max(1, _DRAWS_AT_ONCE // found.numel())
    for begin in range(0, count, block):
        num = min(block, count - begin)
        draws = torch.randn(num, *found.shape, generator=generator)
        found += torch.sigmoid(draws.mul_(sds[:, None].float()).add_(means.float())).sum(dim=0, dtype=torch.float64)
    return found / count

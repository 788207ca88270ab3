"""How many samples of a softmax of Gaussian logits say as much of its density on the simplex as the Laplace bridge's Dirichlet does.

Hobbhahn (2020), arXiv 2003.01227, section 5.3 and figure 5.3. Densities are compared on the vertices of a triangle that is halved five
times (561 points, coordinates clipped to [1e-3, 1 - 1e-3]): samples as shares of vertices to which they are nearest, the truth being
100,000 of them, the Dirichlet as its density at the vertices, normalised. KL(truth || approximation) with shares of at least 1e-20.
The published bridge takes the Gaussian's variances as they are; the right one those of the logits minus their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.lazy import torch
from bnncli.numerics import dirichlet
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

# The three Gaussians, by mean and covariance.
GAUSSIANS = (
    ((0.0, 0.0, 0.0), ((0.1, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 0.1))),
    ((2.0, -1.0, -1.0), ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))),
    ((1.0, 1.0, -2.0), ((1.0, 0.0, 0.5), (0.0, 2.0, 0.3), (0.5, 0.3, 0.5))),
)
_LEAST_SHARE, _CLIP, _HALVINGS = 1e-20, 1e-3, 5
_NEAREST_AT_ONCE = 2**14


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """Of each Gaussian i: kl_i and kl_projected_i of the bridges, and samples_i, how many samples have the first's KL.

    Args:
        settings: truth, samples of it; sizes, of fewer; repeats of all draws.
    """
    points, values, arrays = vertices(_HALVINGS), {}, {}
    sizes, repeats = list(settings["sizes"]), int(settings["repeats"])
    arrays["sizes"] = np.array(sizes, dtype=float)
    task = progress.task("simplex", len(GAUSSIANS) * repeats)
    for number, (mean, covariance) in enumerate(GAUSSIANS, start=1):
        gaussian = torch.tensor(mean, dtype=torch.float64), torch.tensor(covariance, dtype=torch.float64)
        bridges = {"kl": bridge_shares(*gaussian, points), "kl_projected": bridge_shares(*projected(*gaussian), points)}
        found: dict[str, list[float]] = {name: [] for name in (*bridges, "samples")}
        curves = []
        for _ in range(repeats):
            truth = sample_shares(*gaussian, points, settings["truth"], generator)
            for name, shares in bridges.items():
                found[name].append(divergence(truth, shares))
            curves.append([divergence(truth, sample_shares(*gaussian, points, size, generator)) for size in sizes])
            found["samples"].append(crossing(sizes, curves[-1], found["kl"][-1]))
            task.advance()
        arrays[f"curve {number}"] = np.array(curves)
        for name, each in found.items():
            values[f"{name}_{number}"] = Estimate.of_repeats(each)
    return Measurements(values, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """KL divergence against samples, of each Gaussian with the level of its bridge."""
    from bnncli.figures.fits import MeasuredLine
    from bnncli.figures.fits import draw_measured_lines as draw_lines

    sizes, lines = measured.arrays["sizes"].tolist(), {}
    for number in range(1, len(GAUSSIANS) + 1):
        curves = measured.arrays[f"curve {number}"]
        errors = (curves.std(axis=0, ddof=1) / math.sqrt(len(curves))).tolist()
        lines[f"samples, Gaussian {number}"] = MeasuredLine(sizes, curves.mean(axis=0).tolist(), errors)
        level = measured.values[f"kl_{number}"]
        ends = [sizes[0], sizes[-1]]
        lines[f"bridge, Gaussian {number}"] = MeasuredLine(ends, [level.value] * 2, [level.standard_error] * 2)
    figure = draw_lines(
        lines,
        title="Density on the simplex",
        x_label="samples",
        y_label="KL divergence from the truth, nats",
        log="xy",
    )
    return {"divergence": figure}


def vertices(halvings: int) -> NDArray[np.float64]:
    """Points of the simplex (n, 3): corners of a triangle that is halved so often, n = (2^h + 1)(2^h + 2) / 2, clipped."""
    side = 2**halvings
    whole = [(i, j, side - i - j) for i in range(side + 1) for j in range(side + 1 - i)]
    return np.clip(np.array(whole) / side, _CLIP, 1 - _CLIP)


def sample_shares(
    mean: Tensor, covariance: Tensor, points: NDArray[np.float64], count: int, generator: torch.Generator
) -> NDArray[np.float64]:
    """Shares (n,) of samples of softmax(N(mean (3,), covariance (3, 3))) that are nearest to each of points (n, 3)."""
    root = torch.linalg.cholesky(covariance)
    draws = mean + torch.randn(count, len(mean), dtype=torch.float64, generator=generator) @ root.T
    found = torch.zeros(len(points), dtype=torch.float64)
    places = torch.from_numpy(points)
    half_norms = -places.square().sum(dim=1) / 2
    for block in draws.softmax(dim=1).split(_NEAREST_AT_ONCE):
        nearest = torch.addmm(half_norms, block, places.T).argmax(dim=1)  # p.q - |q|^2 / 2 falls with the distance
        found += torch.bincount(nearest, minlength=len(points)).double()
    return (found / count).numpy()


def bridge_shares(mean: Tensor, covariance: Tensor, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The density of the bridge's Dirichlet at points (n, 3), normalised to shares (n,)."""
    log_alpha = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None])
    log_density = ((log_alpha.exp() - 1) * torch.from_numpy(points).log()).sum(dim=1)
    return log_density.softmax(dim=0).numpy()


def projected(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the logits minus their mean: P m and P S P with P = I - 1 1^T / K."""
    center = torch.eye(len(mean), dtype=torch.float64) - 1 / len(mean)
    return center @ mean, center @ covariance @ center


def divergence(truth: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    """KL(truth || shares), nats, both floored at 1e-20 and normalised."""
    p, q = (np.maximum(one, _LEAST_SHARE) / np.maximum(one, _LEAST_SHARE).sum() for one in (truth, shares))
    return float((p * np.log(p / q)).sum())


def crossing(sizes: Sequence[int], curve: Sequence[float], level: float) -> float:
    """The number of samples at which a falling curve reaches a level, between its sizes on logarithmic scales; the largest where it does not."""
    for place, value in enumerate(curve):
        if value <= level:
            if place == 0:
                return float(sizes[0])
            above, below = math.log(curve[place - 1] / level), math.log(level / max(value, _LEAST_SHARE))
            step = above / (above + below) if above + below > 0 else 1.0
            return float(sizes[place - 1] * (sizes[place] / sizes[place - 1]) ** step)
    return float(sizes[-1])

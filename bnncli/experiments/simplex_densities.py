"""Densities on the simplex: a softmax of Gaussian logits beside the Dirichlet that the Laplace bridge makes of it, and both bases of a Beta.

Hobbhahn (2020), arXiv 2003.01227, chapters 1 and 2, figures 1.1 and 2.1 to 2.3. Distances are total variations: of shares of samples at the
561 vertices of `simplex_kl` on the triangle, of densities on the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.agreement import Estimate
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.experiments.simplex_kl import GAUSSIANS, projected, sample_shares, vertices
from bnncli.lazy import special, torch
from bnncli.numerics import dirichlet
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

CONCENTRATIONS = ((2.0, 2.0, 6.0), (11.0, 11.0, 51.0))  # of figure 1.1
BETAS = ((0.8, 0.7), (2.0, 3.0), (6.0, 2.0))  # the first is bounded by nothing: figure 2.1, whose own are not given
SCALES = (0.25, 1.0, 4.0)  # of the covariance of the second Gaussian of section 5.3
_HALVINGS, _POINTS, _WIDEST = 5, 40001, 40.0
_Floats = NDArray[np.float64]


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """Distances of densities, and what the text says of them.

    mean_shift and mode_shift, the largest difference between the two Dirichlets of figure 1.1; tv_N and tv_projected_N, of the published
    bridge and that of the logits minus their mean, N being 1 and 2 of figure 1.1 and 3 to 5 of section 5.3; spread_truth_S and
    spread_bridge_S, summed variances for each scale S of a covariance (in percent); and of the Betas what `of_beta` says, with their number.

    Args:
        settings: samples on the triangle.
    """
    first, second = (np.array(alpha) for alpha in CONCENTRATIONS)
    values = {
        "mean_shift": float(np.abs(first / first.sum() - second / second.sum()).max()),
        "mode_shift": float(np.abs(_mode(first) - _mode(second)).max()),
    }
    points, arrays = vertices(_HALVINGS), {}
    gaussians = [to_gaussian(alpha) for alpha in CONCENTRATIONS]
    gaussians += [(torch.tensor(mean).double(), torch.tensor(covariance).double()) for mean, covariance in GAUSSIANS]
    task = progress.task("densities", len(gaussians))
    for number, gaussian in enumerate(gaussians, start=1):
        # 1 1^T more, which every logit has alike and no softmax sees: a Dirichlet's own covariance is singular.
        truth = sample_shares(gaussian[0], gaussian[1] + 1, points, settings["samples"], generator)
        arrays[f"truth {number}"] = truth
        for name, moments in (("bridge", gaussian), ("projected", projected(*gaussian))):
            shares = dirichlet_shares(_concentration(*moments), points, settings["samples"], generator)
            arrays[f"{name} {number}"] = shares
            key = f"tv_{number}" if name == "bridge" else f"tv_{name}_{number}"
            values[key] = float(np.abs(truth - shares).sum() / 2)
        task.advance()
    mean, covariance = gaussians[3]
    for scale in SCALES:
        probs = _draws(mean, scale * covariance, settings["samples"], generator).softmax(dim=1)
        values[f"spread_truth_{round(100 * scale)}"] = float(probs.var(dim=0).sum())
        log_alpha = dirichlet.from_gaussian(mean[None], scale * covariance.diagonal()[None])
        values[f"spread_bridge_{round(100 * scale)}"] = float(dirichlet.total_variance(log_alpha))
    for number, (a, b) in enumerate(BETAS, start=1):
        values |= {f"{name}_{number}": value for name, value in of_beta(a, b).items()}
    return Measurements({name: Estimate(value) for name, value in values.items()}, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """The triangles of figures 1.1, 2.2 and 2.3, and the three bases of figure 2.1."""
    from bnncli.figures.bases import BetaCurves
    from bnncli.figures.bases import draw as draw_bases
    from bnncli.figures.simplex import draw as draw_triangles

    titles = [f"figure 1.1: alpha = {', '.join(f'{one:.0f}' for one in alpha)}" for alpha in CONCENTRATIONS]
    titles += [f"Gaussian {number} of section 5.3" for number in range(1, len(GAUSSIANS) + 1)]
    rows = {
        name: [measured.arrays[f"{key} {number}"] for number in range(1, len(titles) + 1)]
        for name, key in (
            ("samples", "truth"),
            ("bridge, published", "bridge"),
            ("bridge, logits\nminus their mean", "projected"),
        )
    }
    triangles = draw_triangles(rows, titles, vertices(_HALVINGS), title="Densities over three classes")
    curves = [BetaCurves(f"Beta({a:g}, {b:g})", *curves_of(a, b)) for a, b in BETAS]
    return {"triangles": triangles, "bases": draw_bases(curves)}


def to_gaussian(alpha: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Mean (K,) and covariance (K, K) of a Dirichlet's Laplace approximation in the softmax basis; eq. (2.5) and (2.6)."""
    log_alpha = torch.tensor(alpha, dtype=torch.float64).log()
    center = torch.eye(len(log_alpha), dtype=torch.float64) - 1 / len(log_alpha)
    return log_alpha - log_alpha.mean(), center @ torch.diag((-log_alpha).exp()) @ center


def dirichlet_shares(alpha: _Floats, points: _Floats, count: int, generator: torch.Generator) -> _Floats:
    """Shares (n,) of samples of a Dirichlet (3,) that are nearest to each of points (n, 3)."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    draws = np.random.default_rng(seed).dirichlet(alpha, size=count)
    nearest = np.concatenate(
        [(block @ points.T - np.square(points).sum(axis=1) / 2).argmax(axis=1) for block in np.array_split(draws, 32)]
    )
    return np.bincount(nearest, minlength=len(points)) / count


def of_beta(a: float, b: float) -> dict[str, float]:
    """What figure 2.1 says of a Beta: how its Laplace approximations in the standard and the softmax basis do.

    curvature, of log p at its stationary point: negative at a maximum; where there is one tv_standard, the distance of the
    Gaussian there, and outside, its mass outside (0, 1); tv_softmax, and integral, the mass of that one's transform on (0, 1).
    """
    stationary = (a - 1) / (a + b - 2)
    found = {"curvature": -(a - 1) / stationary**2 - (b - 1) / (1 - stationary) ** 2}
    if found["curvature"] < 0:
        deviation = (-found["curvature"]) ** -0.5
        x = np.linspace(stationary - 12 * deviation, stationary + 12 * deviation, _POINTS)
        x = np.union1d(x, np.linspace(0, 1, _POINTS))
        gap = np.abs(_normal(x, stationary, deviation) - _beta(x, a, b))
        found["tv_standard"] = float(np.trapezoid(gap, x)) / 2
        found["outside"] = float(special.ndtr(-stationary / deviation) + special.ndtr((stationary - 1) / deviation))
    z = np.linspace(-_WIDEST, _WIDEST, _POINTS)
    own, approximation = _beta_of_logit(z, a, b), _normal(z, math.log(a / b), (1 / a + 1 / b) ** 0.5)
    found["tv_softmax"] = float(np.trapezoid(np.abs(own - approximation), z)) / 2
    # Of the density on (0, 1) itself, whose argument is the logistic function of z.
    x, log_slope = special.expit(z), special.log_expit(z) + special.log_expit(-z)
    density = approximation / np.exp(log_slope)
    found["integral"] = float(np.trapezoid(density, x))
    return found


def curves_of(a: float, b: float) -> tuple[dict[str, Any], ...]:
    """Curves of the three panels of figure 2.1: x, the Beta's density, its approximation's, None where there is none."""
    found, x = of_beta(a, b), np.linspace(0.001, 0.999, 999)
    stationary = (a - 1) / (a + b - 2)
    standard = _normal(x, stationary, (-found["curvature"]) ** -0.5) if found["curvature"] < 0 else None
    z = np.linspace(-6, 6, 601)
    gaussian = math.log(a / b), (1 / a + 1 / b) ** 0.5
    back = _normal(special.logit(x), *gaussian) / (x * (1 - x))
    return (
        {"x": x, "own": _beta(x, a, b), "approximation": standard},
        {"x": z, "own": _beta_of_logit(z, a, b), "approximation": _normal(z, *gaussian)},
        {"x": x, "own": _beta(x, a, b), "approximation": back},
    )


def _mode(alpha: _Floats) -> _Floats:
    return (alpha - 1) / (alpha.sum() - len(alpha))


def _concentration(mean: Tensor, covariance: Tensor) -> _Floats:
    alpha: _Floats = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None]).exp()[0].numpy()
    return alpha


def _draws(mean: Tensor, covariance: Tensor, count: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(count, len(mean), dtype=torch.float64, generator=generator)
    return mean + noise @ torch.linalg.cholesky(covariance).T


def _normal(x: _Floats, mean: float, deviation: float) -> _Floats:
    return np.exp(-(((x - mean) / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))


def _beta(x: _Floats, a: float, b: float) -> _Floats:
    """The density of Beta(a, b), 0 outside (0, 1)."""
    inside = np.clip(x, 1e-12, 1 - 1e-12)
    log_density = (a - 1) * np.log(inside) + (b - 1) * np.log1p(-inside) - special.betaln(a, b)
    return np.where((x > 0) & (x < 1), np.exp(log_density), 0.0)


def _beta_of_logit(z: _Floats, a: float, b: float) -> _Floats:
    """The density of the logit of a Beta(a, b)."""
    density: _Floats = np.exp(a * special.log_expit(z) + b * special.log_expit(-z) - special.betaln(a, b))
    return density

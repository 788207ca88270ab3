"""How confident a small classifier is near its data and away from them: Monte Carlo, the multi-class probit approximation, HMC.

Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 3.3 and figure 5: three layers with tanh, the Laplace approximation over
all weights with the exact Hessian. The probit approximation stands on the linearised network, Monte Carlo on the network itself; what the
first two differ by is told apart by Monte Carlo on the linearised logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bnncli.evaluation.agreement import Estimate
from bnncli.evaluation.convergence import convergence
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.experiments._repeats import repeated
from bnncli.experiments._toy_networks import TanhLayout, ToyTarget, draw_chains, fit_laplace, linearised
from bnncli.integrators.probit import probit_probs
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.parameters.prior import Prior
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_CLASSES, _RADIUS = 3, 2.0  # classes, and how far their centres are from the middle
_LIMIT, _SIDE = 6.0, 41  # of the map
_SHOWN = {"mc": "Monte Carlo", "mpa": "multi-class probit", "hmc": "HMC"}


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """Means over data sets: near_X and far_X, the mean confidence at the examples and on the rim of the map, X being plug (the network itself),
    mc, mpa, linear (Monte Carlo on the linearised logits) and hmc; gap_X_Y = near_X - near_Y; error_X, the mean distance of confidence
    from HMC's over the map; gap_error = error_mc - error_mpa; r_hat of HMC's probabilities at the examples, the largest.

    Args:
        settings: examples, spread, hidden, prior, draws, chains, hmc_draws, repeats.
    """
    repeats = int(settings["repeats"])
    task = progress.task("classification", repeats)
    found, arrays = repeated(lambda: _measure_one(settings, generator), repeats, task)
    estimates = {name: Estimate.of_repeats(each) for name, each in found.items()}
    return Measurements(estimates | {"r_hat": Estimate(max(found["r_hat"]))}, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Figure 5, of the first data set."""
    from bnncli.figures.confidence_maps import draw as draw_maps

    maps = {
        f"{title}\n{measured.arrays[f'near {name}']:.2f} at the examples": measured.arrays[f"map {name}"]
        for name, title in _SHOWN.items()
    }
    x, labels = measured.arrays["x"], measured.arrays["labels"]
    return {"confidence": draw_maps(maps, _LIMIT, (x, labels), title="Confidence: the largest class probability")}


def examples(count: int, spread: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (N, 2), normal around a centre for each class, and labels (N,)."""
    labels = torch.arange(count) % _CLASSES
    angles = 2 * math.pi * labels.double() / _CLASSES
    centers = _RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)
    return centers + spread * torch.randn(count, 2, generator=generator, dtype=torch.float64), labels


def _measure_one(settings: Settings, generator: torch.Generator) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers and arrays of one data set."""
    x, labels = examples(int(settings["examples"]), float(settings["spread"]), generator)
    hidden, likelihood = int(settings["hidden"]), likelihood_of(_CLASSES)
    target = ToyTarget(
        x,
        TanhLayout((2, hidden, hidden, _CLASSES)),
        Prior(float(settings["prior"])),
        lambda outputs: likelihood.log_likelihoods(outputs, labels).sum(dim=1),
    )
    layout = target.layout
    gaussian = fit_laplace(target, generator)
    axis = torch.linspace(-_LIMIT, _LIMIT, _SIDE).double()
    grid = torch.cartesian_prod(axis, axis).flip(1)
    both = torch.cat([x, grid])
    chains = draw_chains(
        target, gaussian, generator, num_chains=int(settings["chains"]), num_draws=int(settings["hmc_draws"])
    )
    mean, covariance = linearised(gaussian, both)
    count = int(settings["draws"])
    probs = {
        "plug": mean.softmax(dim=1),
        "mc": mean_probs(layout, both, gaussian.sample(count, generator).double()),
        "mpa": probit_probs(mean, covariance.diagonal(dim1=1, dim2=2)),
        "linear": linear_probs(mean, covariance, count, generator),
        "hmc": mean_probs(layout, both, chains.flatten(0, 1)),
    }
    confidence = {name: part.max(dim=1).values for name, part in probs.items()}
    rim = torch.cat([torch.zeros(len(x), dtype=torch.bool), grid.abs().max(dim=1).values == _LIMIT])
    values = {f"near_{name}": float(part[: len(x)].mean()) for name, part in confidence.items()}
    pairs = (("mc", "mpa"), ("linear", "mpa"), ("hmc", "mpa"), ("hmc", "mc"))
    values |= {f"gap_{one}_{other}": values[f"near_{one}"] - values[f"near_{other}"] for one, other in pairs}
    values |= {f"far_{name}": float(part[rim].mean()) for name, part in confidence.items()}
    distances = {name: float((part - confidence["hmc"])[len(x) :].abs().mean()) for name, part in confidence.items()}
    values |= {f"error_{name}": distances[name] for name in ("plug", "mc", "mpa", "linear")}
    values["gap_error"] = values["error_mc"] - values["error_mpa"]
    chain_probs = torch.stack([layout.outputs(x, chain).softmax(dim=2).flatten(1) for chain in chains])
    values["r_hat"] = convergence(chain_probs.numpy()).r_hat or math.inf
    arrays: dict[str, Any] = {"x": x.numpy(), "labels": labels.numpy()}
    for name, part in confidence.items():
        arrays |= {f"map {name}": part[len(x) :].reshape(_SIDE, _SIDE).numpy(), f"near {name}": values[f"near_{name}"]}
    return values, arrays


def mean_probs(layout: TanhLayout, inputs: Tensor, theta: Tensor) -> Tensor:
    """Class probabilities (N, K) of inputs (N, D), the mean over theta (S, P)."""
    total = torch.stack([block.softmax(dim=2).sum(dim=0) for block in layout.output_blocks(inputs, theta)]).sum(dim=0)
    return total / len(theta)


def linear_probs(mean: Tensor, covariance: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Class probabilities (N, K), the mean over count draws of logits with this mean (N, K) and covariance (N, K, K)."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    noise = torch.randn(count, len(mean), _CLASSES, generator=generator, dtype=torch.float64)
    return (mean + torch.einsum("nkj,snj->snk", root, noise)).softmax(dim=2).mean(dim=0)

"""Uncertainty of a small network on four Gaussians in the plane, near them and far away: Laplace's against the bridge's.

Hobbhahn (2020), arXiv 2003.01227, section 5.4 and figure 5.4, of which neither data nor settings nor code are given. Four layers of 100
ReLU units; the posterior is that of all weights, by the Gauss-Newton matrix: its diagonal, Kronecker factors, and the whole of it, which
is inverted in the space of the data's logits. The bridge takes the diagonal's logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bnncli.evaluation.agreement import Estimate
from bnncli.evaluation.detection import Ranking, auroc
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.inference.laplace import fit_gaussian
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.logits import root_of_covariances
from bnncli.models.architectures.mlp import build
from bnncli.numerics import dirichlet
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.progress import Progress
from bnncli.targets.network import NetworkTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch import Tensor, nn

CENTERS = ((2.0, 2.0), (2.0, -2.0), (-2.0, 2.0), (-2.0, -2.0))
_DEVIATION = 0.7  # of each Gaussian
_LIMIT, _SIDE = 12.0, 29  # of the grid
_FAR = 6.0  # standard deviations from every centre
_BLOCK = 256  # of grid points whose derivatives are held together
# What is said to be better than what, in the text.
_COMPARED = (
    ("diag", "map"),
    ("kron", "diag"),
    ("exact", "kron"),
    ("bridge_entropy", "map"),
    ("bridge_variance", "map"),
    ("bridge_weighted", "map"),
    ("bridge_weighted", "bridge_entropy"),
    ("kron", "bridge_weighted"),
    ("exact", "bridge_weighted"),
    ("exact_bridge_weighted", "map"),
)


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """auroc_X, of new points near the Gaussians against grid points far from them, for each X; far_X, the mean entropy of these.

    `gain_X_over_Y` are differences of the first, of the same networks.

    Args:
        settings: per_class, points to train on; steps of training; precision, of the prior; draws of the logits; repeats, networks.
    """
    found: dict[str, list[float]] = {}
    arrays: dict[str, NDArray[Any]] = {}
    task = progress.task("networks", settings["repeats"])
    grid = plane()
    far = (torch.cdist(grid, torch.tensor(CENTERS)).min(dim=1).values > _FAR * _DEVIATION).numpy()
    for _ in range(settings["repeats"]):
        train, labels = points(settings["per_class"], generator)
        near, _ = points(settings["per_class"], generator)
        target = trained(train, labels, settings, generator)
        doubts = uncertainties(target, torch.cat([near, grid]), settings["draws"], generator)
        scores = {name: value.numpy() for name, value in doubts.items()}
        areas = {}
        for name, value in scores.items():
            (areas[name],) = Ranking(-value[: len(near)], -value[len(near) :][far]).estimate([auroc])
            found.setdefault(f"auroc_{name}", []).append(areas[name])
            if not name.endswith(("variance", "weighted")):
                found.setdefault(f"far_{name}", []).append(float(value[len(near) :][far].mean()))
        for better, other in _COMPARED:
            found.setdefault(f"gain_{better}_over_{other}", []).append(areas[better] - areas[other])
        if not arrays:
            arrays = {f"map {name}": value[len(near) :].reshape(_SIDE, _SIDE) for name, value in scores.items()}
            arrays |= {"points": train.numpy(), "labels": labels.numpy()}
        task.advance()
    return Measurements({name: Estimate.of_repeats(each) for name, each in found.items()}, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """The maps of figure 5.4, of the first network, with the points that it was trained on."""
    from bnncli.figures.planes import Plane
    from bnncli.figures.planes import draw as draw_planes

    titles = {
        "map": "network: entropy",
        "diag": "diagonal: entropy",
        "kron": "Kronecker: entropy",
        "exact": "whole: entropy",
        "bridge_entropy": "bridge: entropy",
        "bridge_variance": "bridge: variance",
        "bridge_weighted": "bridge: weighted mean, doubt",
        "exact_bridge_weighted": "bridge of whole: weighted, doubt",
    }
    planes = [
        Plane(
            f"{title}\nAUROC {measured.values[f'auroc_{name}'].value:.3f}",
            measured.arrays[f"map {name}"],
            math.log(len(CENTERS)) if "entropy" in title else None,
        )
        for name, title in titles.items()
    ]
    title = "Uncertainty of four classes (dark: certain)"
    where = (measured.arrays["points"], measured.arrays["labels"])
    return {"uncertainty": draw_planes(planes, limit=_LIMIT, points=where, title=title)}


def plane() -> Tensor:
    """Points of the grid (G, 2), row by row from below."""
    line = torch.linspace(-_LIMIT, _LIMIT, _SIDE)
    return torch.stack([line.repeat(_SIDE), line.repeat_interleave(_SIDE)], dim=1)


def points(per_class: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points (N, 2) of the four Gaussians, and their labels (N,)."""
    labels = torch.arange(len(CENTERS)).repeat_interleave(per_class)
    noise = torch.randn(len(labels), 2, generator=generator)
    return torch.tensor(CENTERS)[labels] + _DEVIATION * noise, labels


def trained(train: Tensor, labels: Tensor, settings: Settings, generator: torch.Generator) -> NetworkTarget:
    """The log posterior of a network that was trained for it, at its own weights."""
    module, likelihood = _network(generator), likelihood_of(len(CENTERS))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings["steps"])
    for _ in range(settings["steps"]):
        optimizer.zero_grad()
        squares = sum(value.square().sum() for value in module.parameters())
        loss = -likelihood.log_likelihoods(module(train).unsqueeze(0), labels).sum()
        (loss + settings["precision"] / 2 * squares).backward()
        optimizer.step()
        schedule.step()
    module.requires_grad_(False)
    layout = ModuleLayout.of(ModuleNetwork(module.eval()), num_outputs=len(CENTERS), input_shape=(2,))
    return NetworkTarget(train, labels, layout, Prior(settings["precision"]))


def uncertainties(target: NetworkTarget, inputs: Tensor, draws: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Doubts (n,) at inputs (n, 2), higher where less is certain, by each way of the figure."""
    theta = parameters(target)
    mean = target.layout.logits(inputs, theta.unsqueeze(0))[0].double()
    moments = {
        name: fit_gaussian(target, start=theta, structure=name, center="checkpoint")
        .gaussian.logits.spread.covariance(inputs)
        .double()
        for name in ("diag", "kron")
    }
    moments["exact"] = whole_covariances(target, inputs)
    doubts = {"map": _entropy(mean.softmax(dim=1))}
    for name, covariances in moments.items():
        noise = torch.randn(draws, mean.shape[1], dtype=torch.float64, generator=generator)
        logits = root_of_covariances(covariances).apply(noise).permute(0, 2, 1) + mean
        doubts[name] = _entropy(logits.softmax(dim=2).mean(dim=0))
    doubts |= _of_bridge(mean, moments["diag"])
    doubts["exact_bridge_weighted"] = _of_bridge(mean, moments["exact"])["bridge_weighted"]
    return doubts


def parameters(target: NetworkTarget) -> Tensor:
    """The network's own weights (P,), as they lie in theta."""
    network = target.layout.network
    assert network is not None
    return torch.nn.utils.parameters_to_vector(network.module.parameters()).detach()


def whole_covariances(target: NetworkTarget, inputs: Tensor) -> Tensor:
    """J (A^T A + lambda)^-1 J^T (n, K, K) float64, with the rows of A those of R_n^T J_n of the data, R R^T their Fisher information.

    (J J^T - J A^T (A A^T + lambda)^-1 A J^T) / lambda: as large as the data's logits, not as theta.
    """
    theta, precision = parameters(target), target.prior.weight_precision
    jacobian = _jacobians(target, theta, target.inputs)
    probs = target.layout.logits(target.inputs, theta.unsqueeze(0))[0].double().softmax(dim=1)
    roots = torch.diag_embed(probs.sqrt()) - probs.unsqueeze(2) * probs.sqrt().unsqueeze(1)
    rows = torch.bmm(roots.transpose(1, 2), jacobian).flatten(0, 1)
    gram = rows @ rows.T
    factor = torch.linalg.cholesky(gram + precision * torch.eye(len(gram), dtype=torch.float64))
    found = []
    for block in inputs.split(_BLOCK):
        own = _jacobians(target, theta, block)
        white = torch.linalg.solve_triangular(factor, rows @ own.flatten(0, 1).T, upper=False)
        white = white.view(len(rows), len(own), -1).permute(1, 0, 2)
        found.append((torch.bmm(own, own.transpose(1, 2)) - torch.bmm(white.transpose(1, 2), white)) / precision)
    return torch.cat(found)


def _of_bridge(mean: Tensor, covariances: Tensor) -> dict[str, Tensor]:
    """Doubts of the Dirichlet that the bridge gives, with variances as they are: entropy of the mean, variance, and the weighted mean.

    The weighted one is the predicted class's probability times 1 - 4 Var, which lies between 0 and 1, for it is not given either.
    """
    log_alpha = dirichlet.from_gaussian(mean, covariances.diagonal(dim1=1, dim2=2))
    probs, variance = dirichlet.mean(log_alpha), dirichlet.variance(log_alpha)
    first = probs.argmax(dim=1, keepdim=True)
    weighted = (probs * (1 - 4 * variance)).gather(1, first)[:, 0]
    return {
        "bridge_entropy": _entropy(probs),
        "bridge_variance": variance.gather(1, first)[:, 0],
        "bridge_weighted": 1 - weighted,
    }


def _network(generator: torch.Generator) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        return build(inputs=2, hidden=(100, 100, 100), classes=len(CENTERS))


def _jacobians(target: NetworkTarget, theta: Tensor, inputs: Tensor) -> Tensor:
    """Derivatives of the logits by theta, (n, K, P) float64."""

    def of_one(one: Tensor) -> Tensor:
        return torch.func.jacrev(lambda at: target.layout.logits(one.unsqueeze(0), at.unsqueeze(0))[0, 0])(theta)

    return torch.vmap(of_one)(inputs).double()


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(dim=1)

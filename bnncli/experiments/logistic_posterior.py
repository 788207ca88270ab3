"""Approximations of the posterior of a logistic regression with two weights, and how far each is from HMC and from the exact posterior.

Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 6.2 and figure 6: Laplace, variational Bayes, refinement by radial
layers, HMC. With two weights the posterior is known on a grid, which HMC is itself held to. Several data sets: what is compared are
differences within one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.evaluation.agreement import Estimate
from bnncli.evaluation.mmd import median_bandwidth, mmd2
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.experiments._repeats import repeated
from bnncli.inference.elbo import elbo
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.inference.vi import ViPlan, fit_vi
from bnncli.lazy import torch
from bnncli.parameters.layouts import HeadLayout
from bnncli.parameters.prior import Prior
from bnncli.progress import SILENT, Progress
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_SIDE = 161  # points of a side of the grid
_CHAINS = 6
_WARMUP = 200
_THINNED = 4  # of so many draws of a chain one is kept: the distance takes them as independent


class GridPosterior(NamedTuple):
    """The posterior on a grid: its axes (_SIDE,) each, its log density less log_evidence (_SIDE, _SIDE), the second weight's rows first."""

    x: Tensor
    y: Tensor
    log_density: Tensor
    log_evidence: float

    @property
    def points(self) -> Tensor:
        """Every place of the grid, (_SIDE^2, 2)."""
        return torch.cartesian_prod(self.y, self.x).flip(1)

    @property
    def shares(self) -> Tensor:
        """What each place has of the probability, (_SIDE^2,)."""
        return self.log_density.flatten().softmax(dim=0)


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """Of each approximation, means over the data sets: mmd_X to HMC, kl_X from it to the posterior, skew_X; gap_X_Y = mmd_X - mmd_Y.

    X and Y: la, vb (the best Gaussian), factorised (the best without correlation), r1 and so on by length, again (a second run of HMC).
    kl_gap_X_Y are differences of divergences, skew_short_X what X lacks of half the exact skewness. Beside them skew_exact, mean_la (the distance of Laplace's
    mean from the posterior's), mean_hmc and evidence_error, what a box of half the grid's points says less of the log evidence.

    Args:
        settings: examples, center and prior, of the data; lengths of the flows, epochs, num_draws and learning_rate of their training;
            draws of each approximation; repeats of all, over data sets.
    """
    repeats = int(settings["repeats"])
    task = progress.task("logistic regression", repeats)
    found, arrays = repeated(lambda: _measure_one(toy_target(settings, generator), settings, generator), repeats, task)
    return Measurements({name: Estimate.of_repeats(each) for name, each in found.items()}, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Figure 6: draws of each approximation over the posterior's contours, of the first data set."""
    from bnncli.figures.contours import ContourPanel
    from bnncli.figures.contours import draw as draw_contours

    titles = {"la": "Laplace", "factorised": "factorised Gaussian", "vb": "best Gaussian"}
    titles |= {f"r{length}": f"refined, {length} layer{'s' * (length > 1)}" for length in settings["lengths"][-2:]}
    distances = dict(zip(measured.arrays["names"], measured.arrays["mmd"], strict=True))
    panels = [
        ContourPanel(f"{title}\nMMD² {distances[name]:.4f}", measured.arrays[f"draws {name}"])
        for name, title in titles.items()
    ]
    panels.append(ContourPanel(f"HMC\nMMD² to a second run {distances['again']:.4f}", measured.arrays["draws hmc"]))
    exact = tuple(measured.arrays[part] for part in ("x", "y", "density"))
    return {
        "contours": draw_contours(panels, *exact, title="Posterior of two weights: exact (black), density of draws")
    }


def toy_target(settings: Settings, generator: torch.Generator) -> LastLayerTarget:
    """Logistic regression without bias, of examples that are normal around center (class 1) and -center (class 0), half of them each."""
    count = int(settings["examples"])
    labels = torch.arange(count) % 2
    signs = (2 * labels - 1).double().unsqueeze(1)
    center = torch.tensor(settings["center"], dtype=torch.float64)
    features = signs * center + torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return LastLayerTarget(features, labels, HeadLayout(1, 2, has_bias=False), Prior(float(settings["prior"])))


def exact_posterior(target: LastLayerTarget, around: Tensor, side: int = _SIDE) -> GridPosterior:
    """The posterior on a grid that holds the draws around (S, 2) and as much again on every side."""
    low, high = around.min(dim=0).values.double(), around.max(dim=0).values.double()
    x, y = (
        torch.linspace(float(a - (b - a)), float(b + (b - a)), side).double() for a, b in zip(low, high, strict=True)
    )
    log_joint = target.log_joint(torch.cartesian_prod(y, x).flip(1)).reshape(side, side)
    cell = math.log(float((x[1] - x[0]) * (y[1] - y[0])))
    log_evidence = float(torch.logsumexp(log_joint.flatten(), dim=0)) + cell
    return GridPosterior(x, y, log_joint - log_evidence, log_evidence)


def skewness(points: Tensor, shares: Tensor, direction: Tensor) -> float:
    """The third standardised moment along a direction (2,) of points (n, 2) that have shares (n,)."""
    along = points.double() @ direction
    centred = along - shares @ along
    return float((shares @ centred**3) / (shares @ centred**2) ** 1.5)


def _measure_one(
    target: LastLayerTarget, settings: Settings, generator: torch.Generator
) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers and arrays of one data set."""
    count = int(settings["draws"])
    la = fit_gaussian(target, start=torch.zeros(2).double()).gaussian
    training = {name: settings[name] for name in ("epochs", "num_draws", "learning_rate")}
    training |= {"batch_size": target.num_examples, "generator": generator}
    fits: dict[str, Any] = {"la": la, "vb": fit_flow(target, la, flow="affine", length=1, **training).posterior}
    plan = ViPlan(settings["epochs"], target.num_examples, settings["learning_rate"], num_draws=settings["num_draws"])
    fits["factorised"] = fit_vi(target, plan, start=la.mean, generator=generator).gaussian
    for length in settings["lengths"]:
        fits[f"r{length}"] = fit_flow(target, la, flow="radial", length=length, space="weight", **training).posterior
    draws = {name: fit.sample(count, generator).double() for name, fit in fits.items()}
    hmc, draws["again"] = (_hmc(target, la, count, generator) for _ in range(2))
    exact = exact_posterior(target, hmc)
    points, shares = exact.points, exact.shares
    mean = shares @ points
    covariance = (points - mean).T @ ((points - mean) * shares[:, None])
    width, directions = torch.linalg.eigh(covariance)
    direction = directions[:, 1] * torch.sign(directions[:, 1] @ mean)  # the widest, away from the origin

    bandwidth, equal = median_bandwidth(hmc), torch.full((count,), 1 / count, dtype=torch.float64)
    values = {f"mmd_{name}": mmd2(each, hmc, bandwidth).unbiased for name, each in draws.items()}
    refined = [(one, f"r{length}") for length in settings["lengths"] for one in ("la", "vb", "factorised")]
    pairs = [("la", "vb"), ("la", "factorised"), *refined]
    values |= {f"gap_{one}_{other}": values[f"mmd_{one}"] - values[f"mmd_{other}"] for one, other in pairs}
    values |= {f"kl_{name}": _divergence(target, fit, exact, generator) for name, fit in fits.items()}
    values |= {f"kl_gap_{one}_{other}": values[f"kl_{one}"] - values[f"kl_{other}"] for one, other in pairs}
    values |= {f"skew_{name}": skewness(each, equal, direction) for name, each in {**draws, "hmc": hmc}.items()}
    values["skew_exact"] = skewness(points, shares, direction)
    values |= {f"skew_short_{name}": 0.5 * values["skew_exact"] - values[f"skew_{name}"] for name in draws}
    for name, center in (("la", la.mean), ("hmc", hmc.mean(dim=0))):
        values[f"mean_{name}"] = float((directions.T @ (center - mean) / width.sqrt()).norm())
    values["evidence_error"] = abs(exact.log_evidence - exact_posterior(target, hmc, _SIDE // 2 + 1).log_evidence)
    arrays = {f"draws {name}": each.numpy() for name, each in {**draws, "hmc": hmc}.items()}
    arrays |= {"x": exact.x.numpy(), "y": exact.y.numpy(), "density": exact.log_density.exp().numpy()}
    arrays |= {"names": list(draws), "mmd": [values[f"mmd_{name}"] for name in draws]}
    return values, arrays


def _hmc(target: LastLayerTarget, base: Any, count: int, generator: torch.Generator) -> Tensor:
    """Draws (count, 2) float64 of six chains, thinned."""
    run = sample_hmc(
        target, mode=base.mean, covariance=base.covariance, generator=generator,
        num_chains=_CHAINS, num_warmup=_WARMUP, num_draws=_THINNED * -(-count // _CHAINS), progress=SILENT,
    )  # fmt: skip
    return run.draws[:, ::_THINNED].flatten(0, 1)[:count].double()


def _divergence(target: LastLayerTarget, fit: Any, exact: GridPosterior, generator: torch.Generator) -> float:
    """KL(q || posterior), nats: the log evidence less the ELBO."""
    return exact.log_evidence - elbo(target, fit, generator=generator, num_samples=4096).value

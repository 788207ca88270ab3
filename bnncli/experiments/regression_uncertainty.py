"""How uncertain a regression network is: Monte Carlo over a Gaussian posterior of its weights, the network linearised, and HMC.

Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 3.3 and figure 4: one hidden layer, the Laplace approximation over all
weights with the exact Hessian, 10,000 draws. The likelihood is Gaussian. What the two ways are to be held against is the posterior
itself, which HMC draws from; the text holds linearisation against Monte Carlo.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from bnncli.evaluation.agreement import Estimate
from bnncli.evaluation.convergence import convergence
from bnncli.experiments import Inputs, Measurements, Settings
from bnncli.experiments._repeats import repeated
from bnncli.experiments._toy_networks import TanhLayout, ToyTarget, draw_chains, fit_laplace, linearised
from bnncli.lazy import torch
from bnncli.parameters.prior import Prior
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

_LIMIT, _PLACES = 5.0, 101  # of the inputs that are predicted
_CLUSTERS = ((-3.0, -1.0), (1.0, 3.0))  # where inputs of the data lie
_TESTS = 500


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """Means over data sets. sd_X of the function, over all places, X being mc, linear or hmc; error_X, the mean distance of its logarithm from
    HMC's, and difference, from linear's of mc's; nll_X on new examples; gap and gap_nll, of mc less that of linear; r_hat of HMC's
    function, the largest.

    Args:
        settings: examples, noise, hidden, prior, draws, chains, hmc_draws, repeats.
    """
    repeats = int(settings["repeats"])
    task = progress.task("regression", repeats)
    found, arrays = repeated(lambda: _measure_one(settings, generator), repeats, task)
    estimates = {name: Estimate.of_repeats(each) for name, each in found.items()}
    return Measurements(estimates | {"r_hat": Estimate(max(found["r_hat"]))}, arrays)


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Figure 4, of the first data set."""
    from bnncli.figures.bands import BandPanel
    from bnncli.figures.bands import draw as draw_bands

    titles = {"mc": f"Monte Carlo, {settings['draws']:,} draws", "linear": "linearised", "hmc": "HMC"}
    panels = [
        BandPanel(title, measured.arrays[f"mean {name}"], measured.arrays[f"sd {name}"])
        for name, title in titles.items()
    ]
    places, x, y = (measured.arrays[name] for name in ("places", "x", "y"))
    return {
        "functions": draw_bands(panels, places, (x, y), title="Function of a network: mean and two standard deviations")
    }


def examples(count: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs (N, 1), half of them in each cluster, and sin(2 x) of them with normal noise, (N,)."""
    low, high = (torch.tensor(part).double()[torch.arange(count) % 2] for part in zip(*_CLUSTERS, strict=True))
    x = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
    return x.unsqueeze(1), torch.sin(2 * x) + noise * torch.randn(count, generator=generator, dtype=torch.float64)


def log_density(outputs: Tensor, labels: Tensor, noise: float) -> Tensor:
    """log N(label | output, noise^2) of outputs (S, N, 1) and labels (N,), (S, N)."""
    return -0.5 * ((outputs[..., 0] - labels) / noise).square() - math.log(noise) - 0.5 * math.log(2 * math.pi)


def regression_target(x: Tensor, y: Tensor, settings: Settings) -> ToyTarget:
    """The posterior of a network with one hidden layer, of inputs (N, 1) and labels (N,)."""
    layout = TanhLayout((1, int(settings["hidden"]), 1))
    density = partial(log_density, labels=y, noise=float(settings["noise"]))
    return ToyTarget(x, layout, Prior(float(settings["prior"])), lambda outputs: density(outputs).sum(dim=1))


def _measure_one(settings: Settings, generator: torch.Generator) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers and arrays of one data set."""
    noise = float(settings["noise"])
    x, y = examples(int(settings["examples"]), noise, generator)
    target = regression_target(x, y, settings)
    layout = target.layout
    gaussian = fit_laplace(target, generator)
    places = torch.linspace(-_LIMIT, _LIMIT, _PLACES).double().unsqueeze(1)
    tests, labels = examples(_TESTS, noise, generator)
    both = torch.cat([places, tests])
    chains = draw_chains(
        target, gaussian, generator, num_chains=int(settings["chains"]), num_draws=int(settings["hmc_draws"])
    )
    drawn = {"mc": gaussian.sample(int(settings["draws"]), generator).double(), "hmc": chains.flatten(0, 1)}
    values, means, sds = {}, {}, {}
    for name, theta in drawn.items():
        outputs = torch.cat(list(layout.output_blocks(both, theta)))
        means[name], sds[name] = outputs[:, :_PLACES, 0].mean(dim=0), outputs[:, :_PLACES, 0].std(dim=0)
        densities = log_density(outputs[:, _PLACES:], labels, noise)
        values[f"nll_{name}"] = -float((densities.logsumexp(dim=0) - math.log(len(theta))).mean())
        if name == "hmc":
            functions = outputs[:, :_PLACES, 0].unflatten(0, chains.shape[:2])
            values["r_hat"] = convergence(functions.numpy()).r_hat or math.inf
    mean, covariance = linearised(gaussian, both)
    means["linear"], sds["linear"] = mean[:_PLACES, 0], covariance[:_PLACES, 0, 0].sqrt()
    spread = torch.sqrt(covariance[_PLACES:, 0, 0] + noise**2)
    standard = (labels - mean[_PLACES:, 0]) / spread
    values["nll_linear"] = float((0.5 * standard.square() + spread.log()).mean()) + 0.5 * math.log(2 * math.pi)
    values |= {f"sd_{name}": float(sd.mean()) for name, sd in sds.items()}
    values |= {f"error_{name}": _apart(sds[name], sds["hmc"]) for name in ("mc", "linear")}
    values["difference"] = _apart(sds["mc"], sds["linear"])
    values["gap"] = values["error_mc"] - values["error_linear"]
    values["gap_nll"] = values["nll_mc"] - values["nll_linear"]
    arrays = {f"mean {name}": part.numpy() for name, part in means.items()}
    arrays |= {f"sd {name}": part.numpy() for name, part in sds.items()}
    return values, arrays | {"places": places[:, 0].numpy(), "x": x[:, 0].numpy(), "y": y.numpy()}


def _apart(one: Tensor, other: Tensor) -> float:
    """The mean distance of the logarithms of standard deviations."""
    return float((one / other).log().abs().mean())

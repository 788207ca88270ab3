"""Toy experiments of the refinement paper, figures 2, 4, 5, 6 and 7: integrals, small networks, two weights, and time by length."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import NumericError
from bnncli.evaluation.comparison import Estimate
from bnncli.evaluation.convergence import convergence
from bnncli.evaluation.distances import median_bandwidth, mmd2
from bnncli.figures.fits import draw_measured_lines
from bnncli.figures.integrals import ErrorPanel
from bnncli.figures.integrals import draw as draw_error_maps
from bnncli.inference.elbo import elbo
from bnncli.inference.hmc import sample_hmc
from bnncli.inference.laplace import fit_gaussian
from bnncli.inference.refine import fit_flow
from bnncli.inference.vi import ViPlan, fit_vi
from bnncli.integrators.probit import probit_probs
from bnncli.integrators.quadrature import binary_probs
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.papers.figures import build_line, draw_bands, draw_contours, draw_maps
from bnncli.papers.recipe import Files, Measurements, Settings
from bnncli.parameters.layouts import HeadLayout, ParamPart, consecutive_parts, parts_to_json
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import SILENT, Progress, Task
from bnncli.structures.diag import Diag
from bnncli.structures.full import inverse
from bnncli.targets.last_layer import LastLayerTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Generator, Tensor

One = tuple[Mapping[str, float], Mapping[str, Any]]  # numbers of a data set, and what is drawn of the first


def measure_repeats(
    measure_one: Callable[[], One], repeats: int, task: Task
) -> tuple[dict[str, Estimate], Mapping[str, Any]]:
    """Measure several data sets: return means of their numbers, and the arrays of the first; of `r_hat` the largest."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    arrays: Mapping[str, Any] = {}
    for _ in range(repeats):
        values, drawn = measure_one()
        for name, value in values.items():
            found[name].append(value)
        arrays = arrays or drawn
        task.advance()
    means = {name: Estimate.of_repeats(each) for name, each in found.items()}
    return means | {name: Estimate(max(found[name])) for name in ("r_hat",) if name in found}, arrays


# Small tanh networks with a posterior over all weights for any likelihood of the outputs, so for regression as well: the exact
# Hessian, HMC.

_AT_ONCE = 2**23  # numbers of a layer that are held at once
_MOST_NEWTON_STEPS = 100
_TOLERANCE = 1e-6  # posterior standard deviations, all parameters together


@dataclass(frozen=True)
class TanhLayout:
    """Weights and biases of linear layers with tanh between them, in order; widths are of inputs, hidden layers and outputs."""

    widths: tuple[int, ...]

    @cached_property
    def parts(self) -> tuple[ParamPart, ...]:
        """A weight (out, in) and a bias (out,) of each layer."""
        found: list[tuple[str, tuple[int, ...], bool]] = []
        for layer, (before, after) in enumerate(pairwise(self.widths)):
            found += [(f"{layer}.weight", (after, before), False), (f"{layer}.bias", (after,), True)]
        return consecutive_parts(found)

    @property
    def num_params(self) -> int:
        """P."""
        return self.parts[-1].place.stop

    def to_json(self) -> list[dict[str, object]]:
        """Name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """Return the widths."""
        return {"widths": list(self.widths)}

    def outputs(self, inputs: Tensor, theta: Tensor) -> Tensor:
        """Return outputs (S, N, K) of inputs (N, D) under theta (S, P)."""
        return self.layers(inputs, theta)[-1]

    def layers(self, inputs: Tensor, theta: Tensor) -> list[Tensor]:
        """Return the inputs of each linear layer, (S, N, D) each, and the outputs (S, N, K)."""
        found = [inputs.expand(len(theta), *inputs.shape)]
        for weight, bias in zip(self.parts[::2], self.parts[1::2], strict=True):
            if len(found) > 1:
                found[-1] = found[-1].tanh()
            matrix = theta[:, weight.place].unflatten(1, weight.shape)
            found.append(torch.baddbmm(theta[:, bias.place].unsqueeze(1), found[-1], matrix.mT))
        return found

    def pull_back(self, layers: Sequence[Tensor], theta: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient by theta (S, P) from the slope by the outputs (S, N, K)."""
        found = torch.empty_like(theta)
        for place in reversed(range(0, len(self.parts), 2)):
            (weight, bias), taken = self.parts[place : place + 2], layers[place // 2]
            found[:, bias.place] = slope.sum(dim=1)
            found[:, weight.place] = (slope.mT @ taken).flatten(1)
            if place:
                matrix = theta[:, weight.place].unflatten(1, weight.shape)
                slope = (slope @ matrix) * (1 - taken.square())
        return found

    def output_blocks(self, inputs: Tensor, theta: Tensor) -> Iterator[Tensor]:
        """Yield the outputs (s, N, K) of some draws at a time."""
        for block in theta.split(max(1, _AT_ONCE // (len(inputs) * max(self.widths)))):
            yield self.outputs(inputs, block)


@dataclass(frozen=True)
class ToyTarget:
    """The log posterior of a network's weights, all data at once, as samplers see it.

    Args:
        inputs: (N, D) float64.
        log_likelihood: of all examples, (S,), given outputs (S, N, K).
    """

    inputs: Tensor
    layout: TanhLayout
    prior: Prior
    log_likelihood: Callable[[Tensor], Tensor]
    is_resident = True
    is_capturable = False

    @property
    def num_examples(self) -> int:
        """N."""
        return len(self.inputs)

    @property
    def device(self) -> torch.device:
        """That of the inputs."""
        return self.inputs.device

    @property
    def dtype(self) -> torch.dtype:
        """That of the inputs."""
        return self.inputs.dtype

    def log_joint(self, theta: Tensor) -> Tensor:
        """Return log likelihood plus log prior, (S,) nats, for theta (S, P)."""
        theta = theta.to(self.inputs)
        return self.log_likelihood(self.layout.outputs(self.inputs, theta)) + self.prior.log_density(theta, self.layout)

    def log_joint_and_grad(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log joint and its gradient (S, P), by hand but for the likelihood's: networks this small are all overhead."""
        theta = theta.detach().to(self.inputs)
        *taken, outputs = self.layout.layers(self.inputs, theta)
        with torch.enable_grad():
            free = outputs.detach().requires_grad_()
            value = self.log_likelihood(free)
            (slope,) = torch.autograd.grad(value.sum(), free)
        gradient = self.layout.pull_back(taken, theta, slope) + self.prior.gradient(theta, self.layout)
        return value.detach() + self.prior.log_density(theta, self.layout), gradient

    def precision(self, theta: Tensor) -> Tensor:
        """Return minus the Hessian of the log joint at theta (P,), exact, (P, P)."""
        hessian: Tensor = torch.autograd.functional.hessian(
            lambda one: -self.log_joint(one.unsqueeze(0))[0], theta, vectorize=True
        )
        return (hessian + hessian.T) / 2


def fit_laplace(target: ToyTarget, generator: Generator) -> Gaussian[TanhLayout]:
    """Fit a Gaussian at a mode, from random weights, with the inverse of the exact Hessian. Raises NumericError without a mode."""
    layout = target.layout
    theta = torch.zeros(layout.num_params, dtype=torch.float64)
    for part in layout.parts:
        if not part.is_bias:
            scale = 1 / math.sqrt(part.shape[1])
            theta[part.place] = scale * torch.randn(math.prod(part.shape), generator=generator, dtype=torch.float64)
    theta.requires_grad_()
    limits: dict[str, Any] = {"max_iter": 3000, "history_size": 50, "tolerance_grad": 1e-9, "tolerance_change": 0.0}
    climber = torch.optim.LBFGS([theta], **limits, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        climber.zero_grad()
        value = -target.log_joint(theta.unsqueeze(0))[0]
        value.backward()
        return value

    climber.step(loss)
    mode = theta.detach()
    for _ in range(_MOST_NEWTON_STEPS):
        gradient = target.log_joint_and_grad(mode.unsqueeze(0))[1][0]
        covariance = inverse(target.precision(mode))
        white = covariance.pull_back(gradient.unsqueeze(0))
        if covariance.jitter == 0 and float(white.norm()) < _TOLERANCE:
            return Gaussian(mode, covariance, layout, target.prior)
        mode = mode + covariance.unwhiten(white)[0]
    raise NumericError(f"no mode after {_MOST_NEWTON_STEPS} Newton steps", hint="use a larger \0prior_precision\0")


def linearise(gaussian: Gaussian[TanhLayout], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (N, K) and covariance (N, K, K) of the outputs, linearised at the Gaussian's mean."""
    layout = gaussian.layout
    jacobian: Tensor = torch.func.jacrev(lambda theta: layout.outputs(inputs, theta.unsqueeze(0))[0])(gaussian.mean)
    white = gaussian.covariance.pull_back(jacobian.flatten(0, 1)).unflatten(0, jacobian.shape[:2])
    return layout.outputs(inputs, gaussian.mean.unsqueeze(0))[0], white @ white.mT


def draw_chains(
    target: ToyTarget, gaussian: Gaussian[TanhLayout], generator: Generator, *, num_chains: int, num_draws: int
) -> Tensor:
    """Return HMC's draws (C, T, P) float64, from around the Gaussian."""
    run = sample_hmc(
        target, mode=gaussian.mean, covariance=gaussian.covariance, generator=generator,
        num_chains=num_chains, num_warmup=num_draws // 2, num_draws=num_draws,
    )  # fmt: skip
    return run.draws.double()


# Errors of Monte Carlo and of the probit approximation of I(m, s) = E sigma(f), f ~ N(m, s^2), over a grid of m and s.
#
# Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 3.1 and figure 2. Every cell has draws of its own, as the
# published largest error must have: with draws that cells share it is a third of that.

_DRAWS_AT_ONCE = 2**22


def measure_integral_errors(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure the largest and the mean absolute error over the grid: probit_max, probit_mean, mc_max_S and mc_mean_S for S draws."""
    limit, cells = settings["limit"], settings["cells"]
    means = torch.linspace(-limit, limit, cells + 1, dtype=torch.float64)
    sds = torch.linspace(limit / cells, limit, cells, dtype=torch.float64)
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


def draw_integral_errors(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw the error maps of figure 2, of the first repeat."""
    means, sds = measured.arrays["means"], measured.arrays["sds"]
    panels = []
    for name, errors in measured.arrays.items():
        if name not in ("means", "sds"):
            row, column = divmod(int(errors.argmax()), errors.shape[1])
            panels.append(ErrorPanel([name], errors, (float(means[column]), float(sds[row]))))
    title = "Distance from the exact probability of two classes"
    return {"errors": draw_error_maps(panels, means, sds, title=title)}


def _monte_carlo(means: Tensor, sds: Tensor, count: int, generator: Generator) -> Tensor:
    """Return means of sigma over draws of every cell, (sds, means)."""
    found = torch.zeros(len(sds), len(means), dtype=torch.float64)
    block = max(1, _DRAWS_AT_ONCE // found.numel())
    for begin in range(0, count, block):
        num = min(block, count - begin)
        draws = torch.randn(num, *found.shape, generator=generator)
        found += torch.sigmoid(draws.mul_(sds[:, None].float()).add_(means.float())).sum(dim=0, dtype=torch.float64)
    return found / count


# How uncertain a regression network is: Monte Carlo over a Gaussian posterior of its weights, the network linearised, and HMC.
#
# Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 3.3 and figure 4: one hidden layer, the Laplace approximation
# over all weights with the exact Hessian, 10,000 draws. The text holds linearisation against Monte Carlo; here HMC judges both.

_LIMIT, _PLACES = 5.0, 101  # of the inputs that are predicted
_CLUSTERS = ((-3.0, -1.0), (1.0, 3.0))  # where inputs of the data lie
_TESTS = 500


def measure_regression_uncertainty(
    settings: Settings, files: Files, generator: Generator, progress: Progress
) -> Measurements:
    """Compare Monte Carlo and linearisation with HMC; means over data sets.

    For X of mc, linear and hmc: sd_X, the mean standard deviation of the function; error_X, the mean distance of its logarithm from
    HMC's; nll_X on new examples. difference, between the logarithms of mc and linear; gap and gap_nll, mc less linear; r_hat of HMC's
    function.
    """
    task = progress.task("regression", settings["repeats"])
    return Measurements(*measure_repeats(lambda: _measure_regression(settings, generator), settings["repeats"], task))


def draw_regression_uncertainty(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw Figure 4, of the first data set."""
    titles = {"mc": f"Monte Carlo, {settings['draws']:,} draws", "linear": "linearised", "hmc": "HMC"}
    arrays = measured.arrays
    panels = {title: (arrays[f"mean {name}"], arrays[f"sd {name}"]) for name, title in titles.items()}
    title, examples = "Function of a network: mean and two standard deviations", (arrays["x"], arrays["y"])
    return {"functions": draw_bands(panels, arrays["places"], examples, title=title)}


def regression_examples(count: int, noise: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs (N, 1), half of them in each cluster, and sin(2 x) with normal noise (N,)."""
    low, high = (torch.tensor(part).double()[torch.arange(count) % 2] for part in zip(*_CLUSTERS, strict=True))
    x = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
    return x.unsqueeze(1), torch.sin(2 * x) + noise * torch.randn(count, generator=generator, dtype=torch.float64)


def log_density(outputs: Tensor, labels: Tensor, noise: float) -> Tensor:
    """Return log N(label | output, noise^2) of outputs (S, N, 1) and labels (N,), (S, N)."""
    return -0.5 * ((outputs[..., 0] - labels) / noise).square() - math.log(noise) - 0.5 * math.log(2 * math.pi)


def regression_target(x: Tensor, y: Tensor, settings: Settings) -> ToyTarget:
    """Build the posterior of a network with one hidden layer on inputs (N, 1) and labels (N,)."""
    layout = TanhLayout((1, settings["hidden"], 1))
    density = partial(log_density, labels=y, noise=settings["noise"])
    return ToyTarget(x, layout, Prior(settings["prior"]), lambda outputs: density(outputs).sum(dim=1))


def _measure_regression(settings: Settings, generator: Generator) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure one data set; return its numbers and arrays."""
    noise = settings["noise"]
    x, y = regression_examples(settings["examples"], noise, generator)
    target = regression_target(x, y, settings)
    layout = target.layout
    gaussian = fit_laplace(target, generator)
    places = torch.linspace(-_LIMIT, _LIMIT, _PLACES).double().unsqueeze(1)
    tests, labels = regression_examples(_TESTS, noise, generator)
    both = torch.cat([places, tests])
    chains = draw_chains(target, gaussian, generator, num_chains=settings["chains"], num_draws=settings["hmc_draws"])
    drawn = {"mc": gaussian.sample(settings["draws"], generator).double(), "hmc": chains.flatten(0, 1)}
    values, means, sds = {}, {}, {}
    for name, theta in drawn.items():
        outputs = torch.cat(list(layout.output_blocks(both, theta)))
        means[name], sds[name] = outputs[:, :_PLACES, 0].mean(dim=0), outputs[:, :_PLACES, 0].std(dim=0)
        densities = log_density(outputs[:, _PLACES:], labels, noise)
        values[f"nll_{name}"] = -float((densities.logsumexp(dim=0) - math.log(len(theta))).mean())
        if name == "hmc":
            functions = outputs[:, :_PLACES, 0].unflatten(0, chains.shape[:2])
            values["r_hat"] = convergence(functions.numpy()).r_hat or math.inf
    mean, covariance = linearise(gaussian, both)
    means["linear"], sds["linear"] = mean[:_PLACES, 0], covariance[:_PLACES, 0, 0].sqrt()
    spread = torch.sqrt(covariance[_PLACES:, 0, 0] + noise**2)
    standard = (labels - mean[_PLACES:, 0]) / spread
    values["nll_linear"] = float((0.5 * standard.square() + spread.log()).mean()) + 0.5 * math.log(2 * math.pi)
    values |= {f"sd_{name}": float(sd.mean()) for name, sd in sds.items()}
    values |= {f"error_{name}": _measure_distance(sds[name], sds["hmc"]) for name in ("mc", "linear")}
    values["difference"] = _measure_distance(sds["mc"], sds["linear"])
    values["gap"] = values["error_mc"] - values["error_linear"]
    values["gap_nll"] = values["nll_mc"] - values["nll_linear"]
    arrays = {f"mean {name}": part.numpy() for name, part in means.items()}
    arrays |= {f"sd {name}": part.numpy() for name, part in sds.items()}
    return values, arrays | {"places": places[:, 0].numpy(), "x": x[:, 0].numpy(), "y": y.numpy()}


def _measure_distance(one: Tensor, other: Tensor) -> float:
    """Return the mean distance of the logarithms of standard deviations."""
    return float((one / other).log().abs().mean())


# How confident a small classifier is near its data and away from them: Monte Carlo, the multi-class probit approximation, HMC.
#
# Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 3.3 and figure 5: three layers with tanh, the Laplace
# approximation over all weights with the exact Hessian. The probit approximation stands on the linearised network; Monte Carlo on the
# linearised logits tells apart what is due to that.

_MAP_CLASSES, _RADIUS = 3, 2.0  # classes, and how far their centres are from the middle
_MAP_LIMIT, _MAP_SIDE = 6.0, 41  # of the map
_SHOWN = {"mc": "Monte Carlo", "mpa": "multi-class probit", "hmc": "HMC"}


def measure_confidence_map(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Compare confidences of each approximation X with HMC's; means over data sets.

    For X of plug (the network itself), mc, mpa, linear (Monte Carlo on the linearised logits) and hmc: near_X and far_X, the mean
    confidence at the examples and on the rim of the map; error_X, its mean distance from HMC's. gap_X_Y, near_X less near_Y; gap_error,
    error_mc less error_mpa; r_hat of HMC's probabilities at the examples.
    """
    task = progress.task("classification", settings["repeats"])
    return Measurements(*measure_repeats(lambda: _measure_map(settings, generator), settings["repeats"], task))


def draw_confidence_map(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw Figure 5, of the first data set."""
    maps = {
        f"{title}\n{measured.arrays[f'near {name}']:.2f} at the examples": measured.arrays[f"map {name}"]
        for name, title in _SHOWN.items()
    }
    x, labels = measured.arrays["x"], measured.arrays["labels"]
    return {"confidence": draw_maps(maps, _MAP_LIMIT, (x, labels), title="Confidence: the largest class probability")}


def map_examples(count: int, spread: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw inputs (N, 2), normal around a centre for each class, and labels (N,)."""
    labels = torch.arange(count) % _MAP_CLASSES
    angles = 2 * math.pi * labels.double() / _MAP_CLASSES
    centers = _RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)
    return centers + spread * torch.randn(count, 2, generator=generator, dtype=torch.float64), labels


def _measure_map(settings: Settings, generator: Generator) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure one data set; return its numbers and arrays."""
    x, labels = map_examples(settings["examples"], settings["spread"], generator)
    hidden, likelihood = settings["hidden"], likelihood_of(_MAP_CLASSES)
    target = ToyTarget(
        x,
        TanhLayout((2, hidden, hidden, _MAP_CLASSES)),
        Prior(settings["prior"]),
        lambda outputs: likelihood.log_likelihoods(outputs, labels).sum(dim=1),
    )
    layout = target.layout
    gaussian = fit_laplace(target, generator)
    axis = torch.linspace(-_MAP_LIMIT, _MAP_LIMIT, _MAP_SIDE).double()
    grid = torch.cartesian_prod(axis, axis).flip(1)
    both = torch.cat([x, grid])
    chains = draw_chains(target, gaussian, generator, num_chains=settings["chains"], num_draws=settings["hmc_draws"])
    mean, covariance = linearise(gaussian, both)
    count = settings["draws"]
    probs = {
        "plug": mean.softmax(dim=1),
        "mc": mean_probs(layout, both, gaussian.sample(count, generator).double()),
        "mpa": probit_probs(mean, covariance.diagonal(dim1=1, dim2=2)),
        "linear": linear_probs(mean, covariance, count, generator),
        "hmc": mean_probs(layout, both, chains.flatten(0, 1)),
    }
    confidence = {name: part.max(dim=1).values for name, part in probs.items()}
    rim = torch.cat([torch.zeros(len(x), dtype=torch.bool), grid.abs().max(dim=1).values == _MAP_LIMIT])
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
        arrays |= {
            f"map {name}": part[len(x) :].reshape(_MAP_SIDE, _MAP_SIDE).numpy(),
            f"near {name}": values[f"near_{name}"],
        }
    return values, arrays


def mean_probs(layout: TanhLayout, inputs: Tensor, theta: Tensor) -> Tensor:
    """Return class probabilities (N, K) of inputs (N, D), the mean over theta (S, P)."""
    total = torch.stack([block.softmax(dim=2).sum(dim=0) for block in layout.output_blocks(inputs, theta)]).sum(dim=0)
    return total / len(theta)


def linear_probs(mean: Tensor, covariance: Tensor, count: int, generator: Generator) -> Tensor:
    """Return class probabilities (N, K), the mean over count draws of logits with this mean (N, K) and covariance (N, K, K)."""
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    noise = torch.randn(count, len(mean), _MAP_CLASSES, generator=generator, dtype=torch.float64)
    return (mean + torch.einsum("nkj,snj->snk", root, noise)).softmax(dim=2).mean(dim=0)


# Approximations of the posterior of a logistic regression with two weights, and how far each is from HMC and from the exact posterior.
#
# Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 6.2 and figure 6. With two weights the posterior is known on a
# grid, which HMC is itself held to. Compared are differences within each of several data sets.

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


def measure_logistic_posterior(
    settings: Settings, files: Files, generator: Generator, progress: Progress
) -> Measurements:
    """Measure the distance of each approximation from the posterior; means over data sets.

    For X of la, vb (the best Gaussian), factorised (the best without correlation), r1 and so on by length, and again (a second run of
    HMC): mmd_X to HMC, kl_X to the posterior, skew_X, and skew_short_X, what it lacks of half the exact skewness. gap_X_Y and
    kl_gap_X_Y, differences of distances and divergences. skew_exact; mean_la and mean_hmc, distances of their means from the
    posterior's; evidence_error, what a box of half the grid's points lacks of the log evidence.
    """
    task = progress.task("logistic regression", settings["repeats"])

    def measure_one() -> One:
        return _measure_logistic(toy_target(settings, generator), settings, generator)

    return Measurements(*measure_repeats(measure_one, settings["repeats"], task))


def draw_logistic_posterior(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw Figure 6: draws of each approximation over the posterior's contours, of the first data set."""
    titles = {"la": "Laplace", "factorised": "factorised Gaussian", "vb": "best Gaussian"}
    titles |= {f"r{length}": f"refined, {length} layer{'s' * (length > 1)}" for length in settings["lengths"][-2:]}
    distances = dict(zip(measured.arrays["names"], measured.arrays["mmd"], strict=True))
    arrays = measured.arrays
    panels = {f"{title}\nMMD² {distances[name]:.4f}": arrays[f"draws {name}"] for name, title in titles.items()}
    panels |= {f"HMC\nMMD² to a second run {distances['again']:.4f}": arrays["draws hmc"]}
    title = "Posterior of two weights: exact (black), density of draws"
    return {"contours": draw_contours(panels, arrays["x"], arrays["y"], arrays["density"], title=title)}


def toy_target(settings: Settings, generator: Generator) -> LastLayerTarget:
    """Build a logistic regression without bias on examples around `center` (class 1) and `-center` (class 0), half of each."""
    count = settings["examples"]
    labels = torch.arange(count) % 2
    signs = (2 * labels - 1).double().unsqueeze(1)
    center = torch.tensor(settings["center"], dtype=torch.float64)
    features = signs * center + torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return LastLayerTarget(features, labels, HeadLayout(1, 2, has_bias=False), Prior(settings["prior"]))


def exact_posterior(target: LastLayerTarget, around: Tensor, side: int = _SIDE) -> GridPosterior:
    """Return the posterior on a grid that holds the draws (S, 2) and as much again on every side."""
    low, high = around.min(dim=0).values.double(), around.max(dim=0).values.double()
    x, y = (
        torch.linspace(float(a - (b - a)), float(b + (b - a)), side).double() for a, b in zip(low, high, strict=True)
    )
    log_joint = target.log_joint(torch.cartesian_prod(y, x).flip(1)).reshape(side, side)
    cell = math.log(float((x[1] - x[0]) * (y[1] - y[0])))
    log_evidence = float(torch.logsumexp(log_joint.flatten(), dim=0)) + cell
    return GridPosterior(x, y, log_joint - log_evidence, log_evidence)


def skewness(points: Tensor, shares: Tensor, direction: Tensor) -> float:
    """Return the third standardised moment of points (n, 2) with shares (n,), along a direction (2,)."""
    along = points.double() @ direction
    centred = along - shares @ along
    return float((shares @ centred**3) / (shares @ centred**2) ** 1.5)


def _measure_logistic(
    target: LastLayerTarget, settings: Settings, generator: Generator
) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure one data set; return its numbers and arrays."""
    count = settings["draws"]
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


def _hmc(target: LastLayerTarget, base: Any, count: int, generator: Generator) -> Tensor:
    """Draw from six chains, thinned, (count, 2) float64."""
    run = sample_hmc(
        target, mode=base.mean, covariance=base.covariance, generator=generator,
        num_chains=_CHAINS, num_warmup=_WARMUP, num_draws=_THINNED * -(-count // _CHAINS), progress=SILENT,
    )  # fmt: skip
    return run.draws[:, ::_THINNED].flatten(0, 1)[:count].double()


def _divergence(target: LastLayerTarget, fit: Any, exact: GridPosterior, generator: Generator) -> float:
    """Return KL(q || posterior) in nats: the log evidence less the ELBO."""
    return exact.log_evidence - elbo(target, fit, generator=generator, num_samples=4096).value


# What a step of training a refinement takes by the length of its flow, on a last layer with the sizes of the published one.
#
# Kristiadi, Eschenhagen and Hennig (2022), arXiv 2205.10041, section 6.3 and figure 7: LeNet-5's last layer, 84 features and 10
# classes, radial layers, batches of 128 examples, one draw a step. Time depends on sizes alone: the features are noise. It is that of
# the processor, which other programs change little; lengths take turns.

_FEATURES, _CLASSES, _BATCH = 84, 10, 128
_PRIOR = 510.0  # the published precision


def measure_flow_time(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure seconds_L of a training step with length L, and increase_K_L, by how many per cent L takes longer than the K before it."""
    steps, layout, repeats = settings["steps"], HeadLayout(_CLASSES, _FEATURES), settings["repeats"]
    features = torch.randn(steps * _BATCH, _FEATURES, generator=generator)
    labels = torch.randint(_CLASSES, (len(features),), generator=generator)
    target = LastLayerTarget(features, labels, layout, Prior(_PRIOR))
    variances = torch.full((layout.num_params,), 1 / _PRIOR).double()
    base = Gaussian(torch.zeros_like(variances), Diag(variances), layout, target.prior)
    flow: dict[str, Any] = {"flow": "radial", "space": "weight", "epochs": 1, "batch_size": _BATCH}
    found: dict[int, list[float]] = {length: [] for length in settings["lengths"]}
    task = progress.task("refine", (repeats + 1) * len(found))
    for repeat in range(repeats + 1):
        for length, seconds in found.items():
            begun = time.process_time()
            fit_flow(target, base, generator=generator, length=length, **flow)
            if repeat:  # the first one finds nothing in any cache
                seconds.append((time.process_time() - begun) / steps)
            task.advance()
    return Measurements(summarize_times(found))


def summarize_times(found: Mapping[int, Sequence[float]]) -> dict[str, Estimate]:
    """Return means of the seconds of each repeat by rising length, and of the increases within repeats."""
    values = {f"seconds_{length}": Estimate.of_repeats(each) for length, each in found.items()}
    for shorter, longer in pairwise(found):
        more = [100 * (b / a - 1) for a, b in zip(found[shorter], found[longer], strict=True)]
        values[f"increase_{shorter}_{longer}"] = Estimate.of_repeats(more)
    return values


def draw_flow_time(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw time against length."""
    times = {length: measured.values[f"seconds_{length}"] for length in settings["lengths"]}
    line = build_line(
        {length: Estimate(1e3 * one.value, 1e3 * (one.standard_error or 0)) for length, one in times.items()}
    )
    title = "Time per step (batch of 128, 850 parameters)"
    return {"time": draw_measured_lines({"radial": line}, title=title, x_label="radial layers", y_label="milliseconds")}

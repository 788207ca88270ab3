"""Toy experiments of the Laplace bridge: densities on the simplex, four Gaussians, and classes that cannot be told apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.comparison import Estimate
from bnncli.evaluation.detection import Ranking, auroc
from bnncli.figures.fits import LinePanel, LinePanels, MeasuredLine, Series, draw_measured_lines
from bnncli.inference.laplace import fit_gaussian
from bnncli.lazy import special, torch
from bnncli.likelihoods import likelihood_of
from bnncli.models.architectures.mlp import build
from bnncli.models.checkpoints import load_checkpoint
from bnncli.numerics import dirichlet
from bnncli.numerics.dirichlet import RULES, cumulative_lengths, ranked_lengths
from bnncli.papers.beyond_toys import compute_last_features
from bnncli.papers.figures import draw_bases, draw_planes, draw_triangles
from bnncli.papers.recipe import Files, Measurements, Settings
from bnncli.papers.refinement_toys import One, measure_repeats
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.progress import Progress
from bnncli.structures.logits import root_of_covariances
from bnncli.targets.network import NetworkTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Generator, Tensor, nn

# How many samples of a softmax of Gaussian logits say as much of its density on the simplex as the Laplace bridge's Dirichlet does.
#
# Hobbhahn (2020), arXiv 2003.01227, section 5.3 and figure 5.3. Densities are compared on 561 vertices of a triangle that is halved
# five times, coordinates clipped to [1e-3, 1 - 1e-3]: samples as shares of vertices to which they are nearest, the Dirichlet as its
# normalised density at the vertices, by KL(truth || approximation) with shares of at least 1e-20.

# The three Gaussians, by mean and covariance.
GAUSSIANS = (
    ((0.0, 0.0, 0.0), ((0.1, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 0.1))),
    ((2.0, -1.0, -1.0), ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))),
    ((1.0, 1.0, -2.0), ((1.0, 0.0, 0.5), (0.0, 2.0, 0.3), (0.5, 0.3, 0.5))),
)
_LEAST_SHARE, _CLIP, _HALVINGS = 1e-20, 1e-3, 5
_NEAREST_AT_ONCE = 2**14


def measure_simplex_kl(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure kl_i and kl_projected_i of both bridges from each Gaussian i, and samples_i that have the divergence of the first.

    `truth` samples stand for the truth; `sizes` are numbers of samples to try.
    """
    points, values, arrays = build_vertices(_HALVINGS), dict[str, Estimate](), {}
    sizes, repeats = settings["sizes"], settings["repeats"]
    arrays["sizes"] = np.array(sizes, dtype=float)
    task = progress.task("simplex", len(GAUSSIANS) * repeats)
    for number, (mean, covariance) in enumerate(GAUSSIANS, start=1):
        gaussian = torch.tensor(mean, dtype=torch.float64), torch.tensor(covariance, dtype=torch.float64)
        projected = bridge_shares(*project_moments(*gaussian), points)
        bridges = {"kl": bridge_shares(*gaussian, points), "kl_projected": projected}
        found: dict[str, list[float]] = {name: [] for name in (*bridges, "samples")}
        curves = []
        for _ in range(repeats):
            truth = sample_shares(*gaussian, points, settings["truth"], generator)
            for name, shares in bridges.items():
                found[name].append(compute_kl(truth, shares))
            curves.append([compute_kl(truth, sample_shares(*gaussian, points, size, generator)) for size in sizes])
            found["samples"].append(find_crossing(sizes, curves[-1], found["kl"][-1]))
            task.advance()
        arrays[f"curve {number}"] = np.array(curves)
        values |= {f"{name}_{number}": Estimate.of_repeats(each) for name, each in found.items()}
    return Measurements(values, arrays)


def draw_simplex_kl(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw KL divergence against samples, of each Gaussian with the level of its bridge."""
    sizes, lines = measured.arrays["sizes"].tolist(), {}
    for number in range(1, len(GAUSSIANS) + 1):
        curves = measured.arrays[f"curve {number}"]
        errors = (curves.std(axis=0, ddof=1) / math.sqrt(len(curves))).tolist()
        lines[f"samples, Gaussian {number}"] = MeasuredLine(sizes, curves.mean(axis=0).tolist(), errors)
        level = measured.values[f"kl_{number}"]
        ends = [sizes[0], sizes[-1]]
        lines[f"bridge, Gaussian {number}"] = MeasuredLine(ends, [level.value] * 2, [level.standard_error] * 2)
    labels = {"x_label": "samples", "y_label": "KL divergence from the truth, nats"}
    return {"divergence": draw_measured_lines(lines, title="Density on the simplex", **labels, log="xy")}


def build_vertices(halvings: int) -> NDArray[np.float64]:
    """Return points of the simplex (n, 3): a triangle that is halved so often, n = (2^h + 1)(2^h + 2) / 2, clipped."""
    side = 2**halvings
    whole = [(i, j, side - i - j) for i in range(side + 1) for j in range(side + 1 - i)]
    return np.clip(np.array(whole) / side, _CLIP, 1 - _CLIP)


def sample_shares(
    mean: Tensor, covariance: Tensor, points: NDArray[np.float64], count: int, generator: Generator
) -> NDArray[np.float64]:
    """Return shares (n,) of samples of softmax(N(mean (3,), covariance (3, 3))) that are nearest to each of points (n, 3)."""
    draws = _draws(mean, covariance, count, generator).softmax(dim=1)
    return _count_nearest(draws, points)


def _count_nearest(draws: Tensor, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return shares (n,) of draws (S, 3) that are nearest to each of points (n, 3)."""
    found, places = torch.zeros(len(points), dtype=torch.float64), torch.from_numpy(points)
    half_norms = -places.square().sum(dim=1) / 2
    for block in draws.split(_NEAREST_AT_ONCE):
        nearest = torch.addmm(half_norms, block, places.T).argmax(dim=1)  # p.q - |q|^2 / 2 falls with the distance
        found += torch.bincount(nearest, minlength=len(points)).double()
    return (found / len(draws)).numpy()


def bridge_shares(mean: Tensor, covariance: Tensor, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the density of the bridge's Dirichlet at points (n, 3), normalised to shares (n,)."""
    log_alpha = dirichlet.from_gaussian(mean[None], covariance.diagonal()[None])
    log_density = ((log_alpha.exp() - 1) * torch.from_numpy(points).log()).sum(dim=1)
    return log_density.softmax(dim=0).numpy()


def project_moments(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return moments of the logits minus their mean: P m and P S P with P = I - 1 1^T / K."""
    center = torch.eye(len(mean), dtype=torch.float64) - 1 / len(mean)
    return center @ mean, center @ covariance @ center


def compute_kl(truth: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    """Return KL(truth || shares), nats, both floored at 1e-20 and normalised."""
    p, q = (np.maximum(one, _LEAST_SHARE) / np.maximum(one, _LEAST_SHARE).sum() for one in (truth, shares))
    return float((p * np.log(p / q)).sum())


def find_crossing(sizes: Sequence[int], curve: Sequence[float], level: float) -> float:
    """Return where a falling curve reaches a level, interpolated on logarithmic scales; the largest size if it never does."""
    for place, value in enumerate(curve):
        if value <= level:
            if place == 0:
                return float(sizes[0])
            above, below = math.log(curve[place - 1] / level), math.log(level / max(value, _LEAST_SHARE))
            step = above / (above + below) if above + below > 0 else 1.0
            return float(sizes[place - 1] * (sizes[place] / sizes[place - 1]) ** step)
    return float(sizes[-1])


# Densities on the simplex: a softmax of Gaussian logits beside the Dirichlet that the Laplace bridge makes of it, and both bases of a
# Beta.
#
# Hobbhahn (2020), arXiv 2003.01227, chapters 1 and 2, figures 1.1 and 2.1 to 2.3. Distances are total variations: of shares of samples
# at the vertices above, of densities on the interval.

CONCENTRATIONS = ((2.0, 2.0, 6.0), (11.0, 11.0, 51.0))  # of figure 1.1
BETAS = ((0.8, 0.7), (2.0, 3.0), (6.0, 2.0))  # the first is bounded by nothing: figure 2.1, whose own are not given
SCALES = (0.25, 1.0, 4.0)  # of the covariance of the second Gaussian of section 5.3
_POINTS, _WIDEST = 40001, 40.0
_Floats = NDArray[np.float64]


def measure_simplex_densities(
    settings: Settings, files: Files, generator: Generator, progress: Progress
) -> Measurements:
    """Measure distances of densities on the simplex.

    mean_shift and mode_shift, the largest differences between the two Dirichlets of figure 1.1. tv_N and tv_projected_N, of the published
    bridge and of the one of logits minus their mean; N is 1 and 2 of figure 1.1 and 3 to 5 of section 5.3. spread_truth_S and
    spread_bridge_S, summed variances for each scale S of a covariance, in percent. And what `measure_beta` says of each Beta.
    """
    alphas = [np.array(alpha) for alpha in CONCENTRATIONS]
    means, modes = ([(alpha - less) / (alpha - less).sum() for alpha in alphas] for less in (0, 1))
    shifts = {"mean_shift": np.abs(means[0] - means[1]), "mode_shift": np.abs(modes[0] - modes[1])}
    values = {name: float(shift.max()) for name, shift in shifts.items()}
    points, arrays = build_vertices(_HALVINGS), {}
    gaussians = [to_gaussian(alpha) for alpha in CONCENTRATIONS]
    gaussians += [(torch.tensor(mean).double(), torch.tensor(covariance).double()) for mean, covariance in GAUSSIANS]
    task = progress.task("densities", len(gaussians))
    for number, gaussian in enumerate(gaussians, start=1):
        # 1 1^T more, which every logit has alike and no softmax sees: a Dirichlet's own covariance is singular.
        truth = sample_shares(gaussian[0], gaussian[1] + 1, points, settings["samples"], generator)
        arrays[f"truth {number}"] = truth
        for name, moments in (("bridge", gaussian), ("projected", project_moments(*gaussian))):
            alpha = dirichlet.from_gaussian(moments[0][None], moments[1].diagonal()[None]).exp()[0].numpy()
            shares = dirichlet_shares(alpha, points, settings["samples"], generator)
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
        values |= {f"{name}_{number}": value for name, value in measure_beta(a, b).items()}
    return Measurements({name: Estimate(value) for name, value in values.items()}, arrays)


def draw_simplex_densities(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw the triangles of figures 1.1, 2.2 and 2.3, and the three bases of figure 2.1."""
    titles = [f"figure 1.1: alpha = {', '.join(f'{one:.0f}' for one in alpha)}" for alpha in CONCENTRATIONS]
    titles += [f"Gaussian {number} of section 5.3" for number in range(1, len(GAUSSIANS) + 1)]
    names = {"truth": "samples", "bridge": "bridge, published", "projected": "bridge, logits\nminus their mean"}
    numbers = range(1, len(titles) + 1)
    rows = {name: [measured.arrays[f"{key} {number}"] for number in numbers] for key, name in names.items()}
    triangles = draw_triangles(rows, titles, build_vertices(_HALVINGS), title="Densities over three classes")
    bases = draw_bases({f"Beta({a:g}, {b:g})": compute_curves(a, b) for a, b in BETAS})
    return {"triangles": triangles, "bases": bases}


def to_gaussian(alpha: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return mean (K,) and covariance (K, K) of a Dirichlet's Laplace approximation in the softmax basis, eq. (2.5) and (2.6)."""
    log_alpha = torch.tensor(alpha, dtype=torch.float64).log()
    center = torch.eye(len(log_alpha), dtype=torch.float64) - 1 / len(log_alpha)
    return log_alpha - log_alpha.mean(), center @ torch.diag((-log_alpha).exp()) @ center


def dirichlet_shares(alpha: _Floats, points: _Floats, count: int, generator: Generator) -> _Floats:
    """Return shares (n,) of samples of a Dirichlet (3,) that are nearest to each of points (n, 3)."""
    seed = int(torch.randint(2**31, (1,), generator=generator))
    return _count_nearest(torch.from_numpy(np.random.default_rng(seed).dirichlet(alpha, size=count)), points)


def measure_beta(a: float, b: float) -> dict[str, float]:
    """Measure how a Beta's Laplace approximations in the standard and the softmax basis do: what figure 2.1 says.

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


def compute_curves(a: float, b: float) -> tuple[dict[str, Any], ...]:
    """Return the curves of figure 2.1: x, the Beta's density and its approximation's, for each panel; None if there is none."""
    found, x = measure_beta(a, b), np.linspace(0.001, 0.999, 999)
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


def _draws(mean: Tensor, covariance: Tensor, count: int, generator: Generator) -> Tensor:
    noise = torch.randn(count, len(mean), dtype=torch.float64, generator=generator)
    return mean + noise @ torch.linalg.cholesky(covariance).T


def _normal(x: _Floats, mean: float, deviation: float) -> _Floats:
    return np.exp(-(((x - mean) / deviation) ** 2) / 2) / (deviation * math.sqrt(2 * math.pi))


def _beta(x: _Floats, a: float, b: float) -> _Floats:
    """Return the density of Beta(a, b), 0 outside (0, 1)."""
    inside = np.clip(x, 1e-12, 1 - 1e-12)
    log_density = (a - 1) * np.log(inside) + (b - 1) * np.log1p(-inside) - special.betaln(a, b)
    return np.where((x > 0) & (x < 1), np.exp(log_density), 0.0)


def _beta_of_logit(z: _Floats, a: float, b: float) -> _Floats:
    """Return the density of the logit of a Beta(a, b)."""
    density: _Floats = np.exp(a * special.log_expit(z) + b * special.log_expit(-z) - special.betaln(a, b))
    return density


# Uncertainty of a small network on four Gaussians in the plane, near them and far away: Laplace's against the bridge's.
#
# Hobbhahn (2020), arXiv 2003.01227, section 5.4 and figure 5.4, without published data, settings or code. Four layers of
# 100 ReLU units; the posterior is that of all weights, by the Gauss-Newton matrix: its diagonal, Kronecker factors, and the whole of it,
# which is inverted in the space of the data's logits. The bridge takes the diagonal's logits.

CENTERS = ((2.0, 2.0), (2.0, -2.0), (-2.0, 2.0), (-2.0, -2.0))
_DEVIATION = 0.7  # of each Gaussian
_LIMIT, _SIDE = 12.0, 29  # of the grid
_FAR = 6.0  # standard deviations from every centre
_BLOCK = 256  # of grid points whose derivatives are held together
# Pairs that the text calls better and worse.
_COMPARED = (
    *(("diag", "map"), ("kron", "diag"), ("exact", "kron"), ("bridge_entropy", "map"), ("bridge_variance", "map")),
    *(("bridge_weighted", "map"), ("bridge_weighted", "bridge_entropy"), ("kron", "bridge_weighted")),
    *(("exact", "bridge_weighted"), ("exact_bridge_weighted", "map")),
)


def measure_toy_gaussians(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure how each uncertainty X tells points far from the Gaussians from new points near them.

    auroc_X; far_X, the mean entropy far away; gain_X_over_Y, differences of AUROCs of the same networks.
    """
    line = torch.linspace(-_LIMIT, _LIMIT, _SIDE)
    grid = torch.stack([line.repeat(_SIDE), line.repeat_interleave(_SIDE)], dim=1)  # row by row from below
    is_far = (torch.cdist(grid, torch.tensor(CENTERS)).min(dim=1).values > _FAR * _DEVIATION).numpy()

    def measure_one() -> One:
        train, labels = draw_points(settings["per_class"], generator)
        near, _ = draw_points(settings["per_class"], generator)
        target = train_network(train, labels, settings, generator)
        doubts = compute_uncertainties(target, torch.cat([near, grid]), settings["draws"], generator)
        inside = {name: value[: len(near)].numpy() for name, value in doubts.items()}
        maps = {name: value[len(near) :].numpy() for name, value in doubts.items()}
        areas = {name: Ranking(-inside[name], -maps[name][is_far]).estimate([auroc])[0] for name in doubts}
        values = {f"auroc_{name}": area for name, area in areas.items()}
        entropies = {name: one for name, one in maps.items() if not name.endswith(("variance", "weighted"))}
        values |= {f"far_{name}": float(one[is_far].mean()) for name, one in entropies.items()}
        values |= {f"gain_{better}_over_{other}": areas[better] - areas[other] for better, other in _COMPARED}
        arrays = {f"map {name}": one.reshape(_SIDE, _SIDE) for name, one in maps.items()}
        return values, arrays | {"points": train.numpy(), "labels": labels.numpy()}

    task = progress.task("networks", settings["repeats"])
    return Measurements(*measure_repeats(measure_one, settings["repeats"], task))


def draw_toy_gaussians(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw the maps of figure 5.4, of the first network, with the points that it was trained on."""
    titles = {
        "map": "network: entropy", "diag": "diagonal: entropy", "kron": "Kronecker: entropy", "exact": "whole: entropy",
        "bridge_entropy": "bridge: entropy", "bridge_variance": "bridge: variance",
        "bridge_weighted": "bridge: weighted mean, doubt", "exact_bridge_weighted": "bridge of whole: weighted, doubt",
    }  # fmt: skip
    planes = {}
    for name, title in titles.items():
        largest = math.log(len(CENTERS)) if "entropy" in title else None
        area = measured.values[f"auroc_{name}"].value
        planes[f"{title}\nAUROC {area:.3f}"] = (measured.arrays[f"map {name}"], largest)
    title = "Uncertainty of four classes (dark: certain)"
    where = (measured.arrays["points"], measured.arrays["labels"])
    return {"uncertainty": draw_planes(planes, limit=_LIMIT, points=where, title=title)}


def draw_points(per_class: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw points (N, 2) of the four Gaussians, and their labels (N,)."""
    labels = torch.arange(len(CENTERS)).repeat_interleave(per_class)
    noise = torch.randn(len(labels), 2, generator=generator)
    return torch.tensor(CENTERS)[labels] + _DEVIATION * noise, labels


def train_network(train: Tensor, labels: Tensor, settings: Settings, generator: Generator) -> NetworkTarget:
    """Train a network and return its log posterior, at its own weights."""
    module = build_seeded(lambda: build(inputs=2, hidden=(100, 100, 100), classes=len(CENTERS)), generator)
    likelihood = likelihood_of(len(CENTERS))
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


def build_seeded(build: Callable[[], nn.Module], generator: Generator) -> nn.Module:
    """Build a network whose first weights depend on the generator alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        return build()


def weights(target: NetworkTarget) -> Tensor:
    """Return the network's own weights (P,)."""
    network = target.layout.network
    assert network is not None
    return torch.nn.utils.parameters_to_vector(network.module.parameters()).detach()


def compute_uncertainties(target: NetworkTarget, inputs: Tensor, draws: int, generator: Generator) -> dict[str, Tensor]:
    """Return the uncertainty (n,) at inputs (n, 2) by each method of the figure, higher where less is certain."""
    theta = weights(target)
    mean = target.layout.logits(inputs, theta.unsqueeze(0))[0].double()
    moments = {
        name: fit_gaussian(target, start=theta, structure=name, center="checkpoint")
        .gaussian.logits.spread.covariance(inputs)
        .double()
        for name in ("diag", "kron")
    }
    moments["exact"] = compute_covariances(target, inputs)
    doubts = {"map": _entropy(mean.softmax(dim=1))}
    for name, covariances in moments.items():
        noise = torch.randn(draws, mean.shape[1], dtype=torch.float64, generator=generator)
        logits = root_of_covariances(covariances).apply(noise).permute(0, 2, 1) + mean
        doubts[name] = _entropy(logits.softmax(dim=2).mean(dim=0))
    doubts |= compute_bridge_uncertainties(mean, moments["diag"])
    doubts["exact_bridge_weighted"] = compute_bridge_uncertainties(mean, moments["exact"])["bridge_weighted"]
    return doubts


def compute_covariances(target: NetworkTarget, inputs: Tensor) -> Tensor:
    """Return J (A^T A + lambda)^-1 J^T (n, K, K) float64, with A the rows R_n^T J_n of the data and R R^T their Fisher information.

    (J J^T - J A^T (A A^T + lambda)^-1 A J^T) / lambda: as large as the data's logits, not as theta.
    """
    theta, precision = weights(target), target.prior.weight_precision
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


def compute_bridge_uncertainties(mean: Tensor, covariances: Tensor) -> dict[str, Tensor]:
    """Return uncertainties of the bridge's Dirichlet, with variances as they are: entropy of the mean, variance, and the weighted mean.

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


def _jacobians(target: NetworkTarget, theta: Tensor, inputs: Tensor) -> Tensor:
    """Return derivatives of the logits by theta, (n, K, P) float64."""

    def of_one(one: Tensor) -> Tensor:
        return torch.func.jacrev(lambda at: target.layout.logits(one.unsqueeze(0), at.unsqueeze(0))[0, 0])(theta)

    return torch.vmap(of_one)(inputs).double()


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(dim=1)


# Uncertainty-aware top-k by the Laplace bridge with the released covariance, which has no factor N, and with the right one.
#
# Hobbhahn (2020), arXiv 2003.01227, section 5.5: a diagonal Gaussian over the last layer, of the Gauss-Newton matrix. The released
# notebook adds the inverse of a prior variance to the matrix's mean over images, in the place of its sum: nearly the prior again.

_CAP = 10  # classes, as published


def measure_overlapping_classes(
    settings: Settings, files: Files, generator: Generator, progress: Progress
) -> Measurements:
    """Measure the classes that overlapping Betas keep, for each RULE and V thousandths of prior variance.

    length_V_RULE, the mean number of classes kept; rescued_V_RULE and gain_V_RULE, how many more labels are among them than are first,
    and than a plain rule keeps with as many classes; longer_V_RULE, the share of images with several classes. With the suffix _right, of
    the covariance with the factor N. confidence_V, the bridge's mean confidence over the network's.
    """
    state = load_checkpoint(files["net"]).state
    head = torch.cat([state["ll.weight"], state["ll.bias"].unsqueeze(1)], dim=1).double()
    with np.load(files["train"]) as stored:
        num_train = len(stored["y"])
    curvature = mean_curvature(append_one(compute_last_features(files, num_train)[0]), head)
    features, labels = compute_last_features({**files, "train": files["test"]}, settings["images"])
    inner = append_one(features)
    logits = inner @ head.T
    values: dict[str, Estimate] = {}
    arrays = {}
    for variance in settings["variances"]:
        thousandths = round(1000 * variance)
        for suffix, factor in (("", 1), ("_right", num_train)):
            spread = inner.square() @ (factor * curvature + 1 / variance).reciprocal().T
            alpha = dirichlet.from_gaussian(logits, spread)
            share = dirichlet.mean(alpha).amax(dim=1).mean() / logits.softmax(dim=1).amax(dim=1).mean()
            values[f"confidence_{thousandths}{suffix}"] = Estimate(float(share))
            for rule in RULES:
                lengths = ranked_lengths(alpha, rule=rule, cap=_CAP)
                found = measure_lengths(alpha, logits, lengths, labels)
                values |= {f"{name}_{thousandths}_{rule}{suffix}": one for name, one in found.items()}
                shares = torch.bincount(lengths, minlength=_CAP + 1)[1:].numpy() / len(lengths)
                arrays[f"{thousandths} {rule}{suffix}"] = shares
    return Measurements(values, arrays)


def append_one(features: Tensor) -> Tensor:
    """Append a one for the bias to features (N, D), (N, D + 1) float64."""
    return torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], dim=1)


def mean_curvature(inner: Tensor, head: Tensor) -> Tensor:
    """Return the diagonal of the Gauss-Newton matrix, mean over images, (K, D + 1): p_k (1 - p_k) x_j^2 for the weight from j to k."""
    probs = (inner @ head.T).softmax(dim=1)
    return (probs * (1 - probs)).T @ inner.square() / len(inner)


def measure_lengths(alpha: Tensor, logits: Tensor, lengths: Tensor, labels: Tensor) -> dict[str, Estimate]:
    """Return length, rescued, gain and longer, each with its standard error over images."""
    order = alpha.argsort(dim=1, descending=True)
    rank = (order == labels.unsqueeze(1)).int().argmax(dim=1)
    plain = cumulative_lengths(
        logits.softmax(dim=1).sort(dim=1, descending=True).values, mean_length=float(lengths.double().mean())
    )
    first = logits.argmax(dim=1) == labels
    place = (logits.argsort(dim=1, descending=True) == labels.unsqueeze(1)).int().argmax(dim=1)
    kept = (rank < lengths).double()
    parts = {"length": lengths.double(), "rescued": kept - first.double(), "gain": kept - (place < plain).double()}
    means = {name: Estimate(float(one.mean()), float(one.std()) / len(one) ** 0.5) for name, one in parts.items()}
    return means | {"longer": Estimate.of_share(float((lengths > 1).double().mean()), len(lengths))}


def draw_overlapping_classes(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw how many images keep how many classes, as figure 5.6."""
    lengths = list(range(1, _CAP + 1))
    panels = []
    for variance in settings["variances"]:
        key = round(1000 * variance)
        names = [f"{key} {rule}{suffix}" for suffix in ("", "_right") for rule in RULES]
        series = [
            Series(name.replace("_", ", ").partition(" ")[2], lengths, measured.arrays[name].tolist()) for name in names
        ]
        panels.append(LinePanel(f"prior variance {variance:g}", "classes kept", "share of images", series))
    return {"lengths": LinePanels("lengths", "Classes kept", "", panels).draw()}

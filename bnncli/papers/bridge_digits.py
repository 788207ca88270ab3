"""The Laplace bridge on a network of digits: tables 5.1, 7.1 and 7.3, and the Dirichlet's variance of figures 5.1 and 5.2."""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.errors import DataError
from bnncli.evaluation.comparison import Estimate
from bnncli.evaluation.detection import Ranking, auroc
from bnncli.figures.fits import draw_measured_lines
from bnncli.lazy import torch
from bnncli.likelihoods import likelihood_of
from bnncli.numerics import dirichlet
from bnncli.papers.bridge_toys import build_seeded, build_vertices, dirichlet_shares, weights
from bnncli.papers.figures import build_line, draw_times, draw_triangles
from bnncli.papers.recipe import Files, Measurements, Settings
from bnncli.parameters.module import ModuleLayout, ModuleNetwork
from bnncli.parameters.prior import Prior
from bnncli.posteriors.gaussian import Gaussian
from bnncli.progress import Progress
from bnncli.structures import ggn
from bnncli.structures.diag import Diag
from bnncli.structures.logits import root_of_covariances
from bnncli.targets.network import NetworkTarget

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Generator, Tensor, nn

# The convolutional network of Hobbhahn (2020), arXiv 2003.01227, section 5.1, and Gaussians over all of its weights.
#
# As released: 32 and 64 filters of 5 x 5, each with ReLU and pooling, then 256 units and the classes with no activation between; Adam,
# 1e-3, weight decay 5e-4, batches of 64, where the text has 128.

WEIGHT_DECAY = 5e-4
_RATE, _BATCH = 1e-3, 64
_SHAPE = (1, 28, 28)


def read_images(path: Path, *, classes: int | None = None, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Read the first images (n, 1, 28, 28) in [0, 1] of a file, and labels (n,), of the first classes alone if `classes` is given.

    Raises:
        DataError: the file has no such arrays.
    """
    try:
        with np.load(path) as arrays:
            pixels, labels = arrays["x"], arrays["y"]
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: expected arrays x and y: {error}") from None
    if pixels.shape[1:] != _SHAPE[1:] or pixels.dtype != np.uint8:
        raise DataError(f"{path}: expected uint8 images of 28 x 28; got {pixels.dtype}, {pixels.shape[1:]}")
    is_chosen = labels < classes if classes is not None else np.ones(len(labels), dtype=bool)
    chosen = np.flatnonzero(is_chosen)[:count]
    return torch.from_numpy(pixels[chosen]).unsqueeze(1) / 255, torch.from_numpy(labels[chosen]).long()


def _build_network(classes: int) -> nn.Module:
    of = torch.nn
    filters = [of.Conv2d(1, 32, 5), of.ReLU(), of.MaxPool2d(2), of.Conv2d(32, 64, 5), of.ReLU(), of.MaxPool2d(2)]
    return of.Sequential(*filters, of.Flatten(), of.Linear(1024, 256), of.Linear(256, classes))


def train_network(inputs: Tensor, labels: Tensor, *, classes: int, epochs: int, generator: Generator) -> NetworkTarget:
    """Train such a network and return its log posterior with the prior of its weight decay, at its own weights."""
    network, likelihood = build_seeded(lambda: _build_network(classes), generator), likelihood_of(classes)
    optimizer = torch.optim.Adam(network.parameters(), lr=_RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(_BATCH):
            optimizer.zero_grad()
            loss = -likelihood.log_likelihoods(network(inputs[rows]).unsqueeze(0), labels[rows]).mean()
            loss.backward()
            optimizer.step()
    network.requires_grad_(False)
    layout = ModuleLayout.of(ModuleNetwork(network.eval()), num_outputs=classes, input_shape=_SHAPE)
    return NetworkTarget(inputs, labels, layout, Prior(WEIGHT_DECAY * len(inputs)))


def compute_curvature(target: NetworkTarget, count: int) -> Tensor:
    """Return the diagonal of the Gauss-Newton matrix of one image (P,) float64, the mean over the first `count` training images.

    It is the curvature that the released code has, with no factor N.
    """
    few = target.minibatch(*target.examples(torch.arange(min(count, target.num_examples))))
    return ggn(few, weights(target), "diag")["hessian.diag"].double() / target.num_examples


def build_gaussian(target: NetworkTarget, variances: Tensor) -> Gaussian[ModuleLayout]:
    """Return the Gaussian at the network's weights with these variances (P,)."""
    return Gaussian(weights(target).double(), Diag(variances), target.layout)


# A network on digits and images of other kinds: samples of the logits, of all weights, and the Laplace bridge; what each of them takes.
#
# Hobbhahn (2020), arXiv 2003.01227, section 5.2, tables 5.1 and 7.3, the rows of MNIST. Published is the released definition: the
# precision H + 1/200, H the mean over images, in the place of a covariance, and variances of logits as they are. Right: the diagonal of
# (N H + tau)^-1, where tau makes samples 5 % less confident than the network on training images, and logits minus their mean.

CLASSES = 10
PUBLISHED_VARIANCE = 200.0  # var0 of the released notebook
_SHARE = 0.95  # of the network's mean confidence
_REPLICATES = 200
_TRIES, _WIDEST = 8, 6.0  # bisections of log10 tau within so many powers of ten
_TIMED = 3


def measure_digit_bridge(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure confidences and detection by samples and by the bridge, and the time that each takes.

    For each METHOD (map, sample, bridge, sample_published, bridge_published, weights): mmc_METHOD_SET, and auroc_METHOD_SET of the other
    sets. Seconds of each part, and how much faster the bridge is.
    """
    train = read_images(files["train"], count=settings["train"])
    names = ["test", *(name for name in files if name not in ("train", "test"))]
    sets = {name: read_images(files[name], count=settings["images"])[0] for name in names}
    found: dict[str, list[float]] = {}
    task = progress.task("networks", settings["repeats"])
    for _ in range(settings["repeats"]):
        target = train_network(*train, classes=CLASSES, epochs=settings["epochs"], generator=generator)
        confidences, seconds = _confidences(target, sets, settings, generator)
        scores = score_methods(confidences, generator)
        errors = {name: error for name, (_, error) in scores.items()}
        for name, value in ({name: value for name, (value, _) in scores.items()} | seconds).items():
            found.setdefault(name, []).append(value)
        task.advance()
    if settings["repeats"] == 1:
        return Measurements({name: Estimate(each[0], errors.get(name)) for name, each in found.items()})
    return Measurements({name: Estimate.of_repeats(each) for name, each in found.items()})


def draw_digit_bridge(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw where the time goes: forward pass, moments of the logits, and samples or the bridge."""
    seconds = {name: measured.values[f"seconds_{name}"].value for name in ("network", "moments", "sample", "bridge")}
    shared = {"network": seconds["network"], "moments of the logits": seconds["moments"]}
    rows = {"samples": {**shared, "samples": seconds["sample"]}, "bridge": {**shared, "bridge": seconds["bridge"]}}
    return {"seconds": draw_times(rows, title="Seconds per prediction")}


def prior_precision(
    target: NetworkTarget, curvature: Tensor, inputs: Tensor, generator: Generator, *, draws: int
) -> float:
    """Return the tau at which samples of the logits are 5 % less confident than the network, by bisecting its logarithm."""
    wanted = _SHARE * float(_network_probs(target, inputs).amax(dim=1).mean())
    noise = torch.randn(draws, target.layout.num_outputs, dtype=torch.float64, generator=generator)
    low, high = -_WIDEST, _WIDEST
    for _ in range(_TRIES):
        middle = (low + high) / 2
        variances = 1 / (target.num_examples * curvature + 10**middle)
        moments = build_gaussian(target, variances).logits.moments(inputs)
        if float(sample_probs(*moments, noise).amax(dim=1).mean()) < wanted:
            low = middle
        else:
            high = middle
    return float(10 ** ((low + high) / 2))


def sample_probs(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """Return mean probabilities (n, K) of softmax(N(mean (n, K), covariance (n, K, K))), with the noise (S, K) of all examples."""
    root = root_of_covariances(covariance.double())
    total = torch.zeros(mean.shape, dtype=torch.float64)
    for part in noise.split(50):
        total += (root.apply(part).permute(0, 2, 1) + mean).softmax(dim=2).sum(dim=0)
    return total / len(noise)


def _confidences(
    target: NetworkTarget, sets: Mapping[str, Tensor], settings: Settings, generator: Generator
) -> tuple[dict[str, dict[str, NDArray[Any]]], dict[str, float]]:
    """Return confidence of each image, by method and set; and the seconds that parts took on the first set."""
    curvature = compute_curvature(target, settings["curvature"])
    few = target.inputs[: settings["weight_images"]]
    tau = prior_precision(target, curvature, few, generator, draws=settings["draws"])
    right = build_gaussian(target, 1 / (target.num_examples * curvature + tau))
    published = build_gaussian(target, curvature + 1 / PUBLISHED_VARIANCE)
    noise = torch.randn(settings["draws"], CLASSES, dtype=torch.float64, generator=generator)
    thetas = right.sample(settings["weight_draws"], generator=generator).float()
    found: dict[str, dict[str, NDArray[Any]]] = {}
    seconds: dict[str, float] = {"prior_precision": tau}

    def note(method: str, name: str, probs: Tensor) -> None:
        found.setdefault(method, {})[name] = probs.amax(dim=1).double().numpy()

    for name, inputs in sets.items():
        note("map", name, _network_probs(target, inputs))
        began = time.perf_counter()
        mean, covariance = right.logits.moments(inputs)
        taken = time.perf_counter() - began
        centre = covariance - covariance.mean(dim=1, keepdim=True)
        projected = (centre - centre.mean(dim=2, keepdim=True)).diagonal(dim1=1, dim2=2)
        note("sample", name, sample_probs(mean, covariance, noise))
        note("bridge", name, dirichlet.mean(dirichlet.from_gaussian(mean, projected)))
        if not seconds.get("seconds_network"):
            seconds |= _seconds(target, inputs, (mean, covariance), noise, moments=taken)
        mean, covariance = published.logits.moments(inputs)
        note("sample_published", name, sample_probs(mean, covariance, noise))
        raw = covariance.diagonal(dim1=1, dim2=2)
        note("bridge_published", name, dirichlet.mean(dirichlet.from_gaussian(mean, raw)))
        part = inputs[: settings["weight_images"]]
        many = [target.layout.logits(part, theta.unsqueeze(0))[0].softmax(dim=1) for theta in thetas]
        note("weights", name, torch.stack(many).mean(dim=0))
    return found, seconds


def _seconds(
    target: NetworkTarget, inputs: Tensor, moments_of: tuple[Tensor, Tensor], noise: Tensor, *, moments: float
) -> dict[str, float]:
    """Return the time of each part, the least of three, and how much faster the bridge is: alone, as published, and as a whole."""
    mean, covariance = moments_of
    network = min(timeit.repeat(lambda: _network_probs(target, inputs), number=1, repeat=_TIMED))
    sample = min(timeit.repeat(lambda: sample_probs(mean, covariance, noise), number=1, repeat=_TIMED))
    variances = covariance.diagonal(dim1=1, dim2=2)
    bridge = min(
        timeit.repeat(lambda: dirichlet.mean(dirichlet.from_gaussian(mean, variances)), number=1, repeat=_TIMED)
    )
    before = network + moments
    found = {"network": network, "moments": moments, "sample": sample, "bridge": bridge}
    faster = {"faster_alone": sample / bridge, "faster_whole": (before + sample) / (before + bridge)}
    return {f"seconds_{name}": value for name, value in found.items()} | faster


def score_methods(
    confidences: Mapping[str, Mapping[str, NDArray[Any]]], generator: Generator
) -> dict[str, tuple[float, float]]:
    """Return mean confidences and AUROCs, each with its bootstrap standard error over images."""
    rng = seed_bootstrap(generator)
    found = {}
    for method, each in confidences.items():
        inside = each["test"]
        for name, scores in each.items():
            found[f"mmc_{method}_{name}"] = float(scores.mean()), float(scores.std(ddof=1)) / math.sqrt(len(scores))
            if name != "test":
                found[f"auroc_{method}_{name}"] = compute_auroc(inside, scores, rng)
    return found


def seed_bootstrap(generator: Generator) -> np.random.Generator:
    """Return the random numbers of a bootstrap, seeded by the generator's next."""
    return np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))


def compute_auroc(inside: NDArray[Any], outside: NDArray[Any], rng: np.random.Generator) -> tuple[float, float]:
    """Return the AUROC of scores (n,) that are larger inside, with its bootstrap standard error over both."""
    ranking = Ranking(inside, outside)
    counts = [rng.multinomial(len(one), [1 / len(one)] * len(one), _REPLICATES) for one in (inside, outside)]
    replicates = ranking.evaluate([auroc], *(one.astype(float) for one in counts))
    return ranking.estimate([auroc])[0], float(replicates.std(ddof=1))


def _network_probs(target: NetworkTarget, inputs: Tensor) -> Tensor:
    return target.layout.logits(inputs, weights(target).unsqueeze(0))[0].softmax(dim=1)


# Variance of the bridge's Dirichlet for all ten digits, of a network that has seen the first three.
#
# Hobbhahn (2020), arXiv 2003.01227, section 5.1, figures 5.1 and 5.2. Published is the released covariance, the inverse of H + 1/2 with
# no factor N, and variances of the logits as they are; right as above.

SEEN, DIGITS = 3, 10
_VARIANCE = 2.0  # var0 of the released notebook
_SHOWN = (0, 1, 2, 4, 5, 9)  # digits; of each the image whose variance is nearest the digit's mean is drawn
_HALVINGS, _SAMPLES = 5, 100_000


def measure_digit_variance(settings: Settings, files: Files, generator: Generator, progress: Progress) -> Measurements:
    """Measure the variance of the predicted class on digits that were and were not seen.

    variance_D of each digit D; variance_seen and variance_unseen, their means; highest_seen and lowest_unseen of the digits; auroc of
    the variance and auroc_map of the network's own confidence. The suffix _published stands for that definition.
    """
    train = read_images(files["train"], classes=SEEN, count=settings["train"])
    test, labels = read_images(files["test"], count=settings["images"])
    target = train_network(*train, classes=SEEN, epochs=settings["epochs"], generator=generator)
    curvature = compute_curvature(target, settings["curvature"])
    few = target.inputs[: settings["curvature"]]
    tau = prior_precision(target, curvature, few, generator, draws=500)
    digits, values, arrays = labels.numpy(), {"prior_precision": Estimate(tau)}, {}
    logits = target.layout.logits(test, weights(target).unsqueeze(0))[0]
    confidence = logits.softmax(dim=1).amax(dim=1).numpy()
    rng = seed_bootstrap(generator)
    values["auroc_map"] = _estimate_auroc(confidence, digits, rng)
    task = progress.task("definitions", 2)
    for suffix, variances in (
        ("", 1 / (target.num_examples * curvature + tau)),
        ("_published", 1 / (curvature + 1 / _VARIANCE)),
    ):
        spread = build_gaussian(target, variances).logits.spread
        marginal = (spread.variance(test) if suffix else spread.projected_variance(test)).double()
        log_alpha = dirichlet.from_gaussian(logits, marginal)
        variance = predicted_variance(log_alpha)
        values |= {f"{name}{suffix}": value for name, value in summarize_variance(variance, digits).items()}
        values[f"auroc{suffix}"] = _estimate_auroc(-variance, digits, rng)
        points = build_vertices(_HALVINGS)
        for digit in _SHOWN:
            own = np.flatnonzero(digits == digit)
            alpha = log_alpha[own[np.abs(variance[own] - variance[own].mean()).argmin()]].exp().numpy()
            arrays[f"density{suffix} {digit}"] = dirichlet_shares(alpha, points, _SAMPLES, generator)
        task.advance()
    return Measurements(values, arrays)


def draw_digit_variance(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Draw Figure 5.1 as a line over the digits, and the densities of figure 5.2."""
    suffixes = {"published": "_published", "right": ""}
    lines = {
        name: build_line({digit: measured.values[f"variance_{digit}{suffix}"] for digit in range(DIGITS)})
        for name, suffix in suffixes.items()
    }
    title = "The network was trained on the digits 0, 1 and 2"
    variance = draw_measured_lines(lines, title=title, x_label="digit", y_label="mean variance, predicted class")
    rows = {
        name: [measured.arrays[f"density{suffix} {digit}"] for digit in _SHOWN] for name, suffix in suffixes.items()
    }
    titles = [f"a {digit}, mean variance,\n{'trained on' if digit < SEEN else 'not trained on'}" for digit in _SHOWN]
    title = "Densities over 0, 1 and 2 (corners 1, 2, 3)"
    return {"variance": variance, "densities": draw_triangles(rows, titles, build_vertices(_HALVINGS), title=title)}


def predicted_variance(log_alpha: Tensor) -> NDArray[np.float64]:
    """Return variance (n,) of the probability of the most probable class under Dirichlets (n, K)."""
    first = log_alpha.argmax(dim=1, keepdim=True)
    found: NDArray[np.float64] = dirichlet.variance(log_alpha).gather(1, first)[:, 0].numpy()
    return found


def summarize_variance(variance: NDArray[np.float64], digits: NDArray[Any]) -> dict[str, Estimate]:
    """Return the mean variance of each digit, of those seen and unseen, and the extremes, from the variances (n,) of images."""
    each = {digit: _mean(variance[digits == digit]) for digit in range(DIGITS)}
    return {
        **{f"variance_{digit}": value for digit, value in each.items()},
        "variance_seen": _mean(variance[digits < SEEN]),
        "variance_unseen": _mean(variance[digits >= SEEN]),
        "highest_seen": max((each[digit] for digit in range(SEEN)), key=lambda one: one.value),
        "lowest_unseen": min((each[digit] for digit in range(SEEN, DIGITS)), key=lambda one: one.value),
    }


def _mean(values: NDArray[np.float64]) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)))


def _estimate_auroc(scores: NDArray[Any], digits: NDArray[Any], rng: np.random.Generator) -> Estimate:
    return Estimate(*compute_auroc(scores[digits < SEEN], scores[digits >= SEEN], rng))


# How often the condition of proposition 1 holds: the variance of the bridge's most probable class grows with that class's logit variance.
#
# Hobbhahn (2020), arXiv 2003.01227, proposition 1 and table 7.1, the rows of MNIST, which are empty there.


def measure_proposition_frequency(
    settings: Settings, files: Files, generator: Generator, progress: Progress
) -> Measurements:
    """Measure frequency_S of the condition in each set S; the suffix _published stands for that definition."""
    train = read_images(files["train"], count=settings["train"])
    sets = {name: read_images(path, count=settings["images"])[0] for name, path in files.items()}
    del sets["train"]
    target = train_network(*train, classes=CLASSES, epochs=settings["epochs"], generator=generator)
    curvature = compute_curvature(target, settings["curvature"])
    tau = prior_precision(target, curvature, target.inputs[: settings["tuned"]], generator, draws=500)
    right = build_gaussian(target, 1 / (target.num_examples * curvature + tau)).logits
    published = build_gaussian(target, curvature + 1 / PUBLISHED_VARIANCE).logits
    values, task = {}, progress.task("sets", len(sets))
    for name, images in sets.items():
        logits = target.layout.logits(images, weights(target).unsqueeze(0))[0]
        variances = {"": right.spread.projected_variance(images), "_published": published.spread.variance(images)}
        for suffix, variance in variances.items():
            holds = check_condition(dirichlet.from_gaussian(logits, variance.double()))
            share = float(holds.double().mean())
            values[f"frequency_{name}{suffix}"] = Estimate(share, math.sqrt(share * (1 - share) / len(holds)))
        task.advance()
    return Measurements(values)


def check_condition(log_alpha: Tensor) -> Tensor:
    """Whether proposition 1's condition holds of the most probable class, (N,) bool, of log alpha (N, K).

    alpha_k > (sqrt(9 b^2 + 10 b + 1) - b - 1) / 4 with b the sum of the others, both divided by b: no concentration overflows.
    """
    top = log_alpha.argmax(dim=1, keepdim=True)
    log_a, log_b = (one[:, 0] for one in dirichlet.beta_marginals(log_alpha, top))
    inverse = (-log_b).exp()
    return (log_a - log_b).exp() > ((9 + 10 * inverse + inverse**2).sqrt() - 1 - inverse) / 4

"""A network on digits and images of other kinds: samples of the logits, of all weights, and the Laplace bridge; what each of them takes.

Hobbhahn (2020), arXiv 2003.01227, section 5.2, tables 5.1 and 7.3, the rows of MNIST. Published is the released definition: the precision
H + 1/200, H the mean over images, in the place of a covariance, and variances of logits as they are. Right: the diagonal of (N H + tau)^-1,
where tau makes the mean confidence of samples 5 % less than that of the network, as the text has it, here on training images; and the
bridge from the logits minus their mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.evaluation.agreement import Estimate
from bnncli.evaluation.detection import Ranking, auroc
from bnncli.experiments import Inputs, Measurements, Settings, digit_network
from bnncli.lazy import torch
from bnncli.logits import root_of_covariances
from bnncli.numerics import dirichlet
from bnncli.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from bnncli.targets.network import NetworkTarget

CLASSES = 10
PUBLISHED_VARIANCE = 200.0  # var0 of the released notebook
_SHARE = 0.95  # of the network's mean confidence
_REPLICATES = 200
_TRIES, _WIDEST = 8, 6.0  # bisections of log10 tau within so many powers of ten
_TIMED = 3


def measure(settings: Settings, inputs: Inputs, *, generator: torch.Generator, progress: Progress) -> Measurements:
    """mmc_METHOD_SET and, of the sets beside the first, auroc_METHOD_SET; seconds of each part, and how much faster the bridge is.

    Methods: map, sample and bridge, sample_published and bridge_published, and weights, draws of all of them.

    Args:
        settings: train and epochs of training; curvature, images for H; images of each set; draws of the logits; weight_draws and
            weight_images of `weights`; repeats, networks.
        inputs: train and test, and the other sets.
    """
    train = digit_network.images(inputs["train"], count=settings["train"])
    names = ["test", *(name for name in inputs if name not in ("train", "test"))]
    sets = {name: digit_network.images(inputs[name], count=settings["images"])[0] for name in names}
    found: dict[str, list[float]] = {}
    task = progress.task("networks", settings["repeats"])
    for _ in range(settings["repeats"]):
        target = digit_network.trained(*train, classes=CLASSES, epochs=settings["epochs"], generator=generator)
        confidences, seconds = _confidences(target, sets, settings, generator)
        errors: dict[str, float] = {}
        for name, (value, error) in _scores(confidences, generator).items():
            found.setdefault(name, []).append(value)
            errors[name] = error
        for name, value in seconds.items():
            found.setdefault(name, []).append(value)
        task.advance()
    if settings["repeats"] == 1:
        return Measurements({name: Estimate(each[0], errors.get(name)) for name, each in found.items()})
    return Measurements({name: Estimate.of_repeats(each) for name, each in found.items()})


def draw(measured: Measurements, settings: Settings) -> Mapping[str, Figure]:
    """Where the time goes: forward pass, moments of the logits, and samples or the bridge."""
    from bnncli.figures.time_shares import draw as draw_times

    seconds = {name: measured.values[f"seconds_{name}"].value for name in ("network", "moments", "sample", "bridge")}
    shared = {"network": seconds["network"], "moments of the logits": seconds["moments"]}
    rows = {
        "samples": {**shared, "samples": seconds["sample"]},
        "bridge": {**shared, "bridge": seconds["bridge"]},
    }
    return {"seconds": draw_times(rows, title="Seconds per prediction")}


def prior_precision(
    target: NetworkTarget, curvature: Tensor, inputs: Tensor, generator: torch.Generator, *, draws: int
) -> float:
    """tau with which samples of the logits are so much less confident than the network, on inputs; a bisection of its logarithm."""
    wanted = _SHARE * float(_network_probs(target, inputs).amax(dim=1).mean())
    noise = torch.randn(draws, target.layout.num_outputs, dtype=torch.float64, generator=generator)
    low, high = -_WIDEST, _WIDEST
    for _ in range(_TRIES):
        middle = (low + high) / 2
        variances = 1 / (target.num_examples * curvature + 10**middle)
        moments = digit_network.gaussian(target, variances).logits.moments(inputs)
        if float(sampled(*moments, noise).amax(dim=1).mean()) < wanted:
            low = middle
        else:
            high = middle
    return float(10 ** ((low + high) / 2))


def sampled(mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
    """Mean probabilities (n, K) of softmax(N(mean (n, K), covariance (n, K, K))), with the noise (S, K) of all examples."""
    root = root_of_covariances(covariance.double())
    total = torch.zeros(mean.shape, dtype=torch.float64)
    for part in noise.split(50):
        total += (root.apply(part).permute(0, 2, 1) + mean).softmax(dim=2).sum(dim=0)
    return total / len(noise)


def _confidences(
    target: NetworkTarget, sets: Mapping[str, Tensor], settings: Settings, generator: torch.Generator
) -> tuple[dict[str, dict[str, NDArray[Any]]], dict[str, float]]:
    """Confidence of each image, by method and set; and the seconds that parts took on the first set."""
    curvature = digit_network.curvature(target, settings["curvature"])
    few = target.inputs[: settings["weight_images"]]
    tau = prior_precision(target, curvature, few, generator, draws=settings["draws"])
    right = digit_network.gaussian(target, 1 / (target.num_examples * curvature + tau))
    published = digit_network.gaussian(target, curvature + 1 / PUBLISHED_VARIANCE)
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
        note("sample", name, sampled(mean, covariance, noise))
        note("bridge", name, dirichlet.mean(dirichlet.from_gaussian(mean, projected)))
        if not seconds.get("seconds_network"):
            seconds |= _seconds(target, inputs, (mean, covariance), noise, moments=taken)
        mean, covariance = published.logits.moments(inputs)
        note("sample_published", name, sampled(mean, covariance, noise))
        raw = covariance.diagonal(dim1=1, dim2=2)
        note("bridge_published", name, dirichlet.mean(dirichlet.from_gaussian(mean, raw)))
        part = inputs[: settings["weight_images"]]
        many = [target.layout.logits(part, theta.unsqueeze(0))[0].softmax(dim=1) for theta in thetas]
        note("weights", name, torch.stack(many).mean(dim=0))
    return found, seconds


def _seconds(
    target: NetworkTarget, inputs: Tensor, moments_of: tuple[Tensor, Tensor], noise: Tensor, *, moments: float
) -> dict[str, float]:
    """Of each part, the least of three; how much faster the bridge is alone, as published, and with all that comes before it."""
    mean, covariance = moments_of
    network = _least(lambda: _network_probs(target, inputs))
    sample = _least(lambda: sampled(mean, covariance, noise))
    variances = covariance.diagonal(dim1=1, dim2=2)
    bridge = _least(lambda: dirichlet.mean(dirichlet.from_gaussian(mean, variances)))
    before = network + moments
    return {
        "seconds_network": network,
        "seconds_moments": moments,
        "seconds_sample": sample,
        "seconds_bridge": bridge,
        "faster_alone": sample / bridge,
        "faster_whole": (before + sample) / (before + bridge),
    }


def _least(work: Callable[[], object]) -> float:
    took = []
    for _ in range(_TIMED):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def _scores(
    confidences: Mapping[str, Mapping[str, NDArray[Any]]], generator: torch.Generator
) -> dict[str, tuple[float, float]]:
    """Mean confidences and AUROCs, each with its bootstrap standard error over images."""
    rng = bootstrap_of(generator)
    found = {}
    for method, each in confidences.items():
        inside = each["test"]
        for name, scores in each.items():
            found[f"mmc_{method}_{name}"] = float(scores.mean()), float(scores.std(ddof=1)) / math.sqrt(len(scores))
            if name != "test":
                found[f"auroc_{method}_{name}"] = area(inside, scores, rng)
    return found


def bootstrap_of(generator: torch.Generator) -> np.random.Generator:
    """The random numbers of a bootstrap, seeded by the next of a generator's."""
    return np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))


def area(inside: NDArray[Any], outside: NDArray[Any], rng: np.random.Generator) -> tuple[float, float]:
    """AUROC of scores (n,) that are larger inside, with its bootstrap standard error over both."""
    ranking = Ranking(inside, outside)
    counts = [rng.multinomial(len(one), [1 / len(one)] * len(one), _REPLICATES) for one in (inside, outside)]
    replicates = ranking.evaluate([auroc], *(one.astype(float) for one in counts))
    return ranking.estimate([auroc])[0], float(replicates.std(ddof=1))


def _network_probs(target: NetworkTarget, inputs: Tensor) -> Tensor:
    return target.layout.logits(inputs, digit_network.weights(target).unsqueeze(0))[0].softmax(dim=1)

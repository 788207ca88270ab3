"""How many draws a prediction needs: the Monte Carlo error of scores beside the sampling error of 10,000 examples.

For posteriors of a run and numbers of draws, a table of the ratio of the two for NLL, Brier score, ECE (15 bins), accuracy
and, with --ood, AUROC of the largest probability; of the bias of NLL, which fewer draws make larger, on the same scale;
the largest ratio's number of draws for a tenth (where the error falls as 1 / sqrt(S)); and milliseconds for 10,000 inputs.
Monte Carlo errors are root mean squares over a few seeds of what the groups of draws tell.

    python benchmarks/draws.py lenet.pt.bnn --posterior laplace --posterior refine --ood kmnist --samples 20,100,200
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from bnncli.artifacts.features import read_features
from bnncli.evaluation.bootstrap import DrawGroups, balanced_halves, integration_error
from bnncli.integrators import load_integrator
from bnncli.parameters.prior import Prior
from bnncli.session.inputs import open_posterior, posterior_prior
from bnncli.targets.last_layer import LastLayerTarget

NUM_EXAMPLES = 10_000
NUM_BINS = 15
SCORES = ("nll", "brier", "ece", "accuracy", "auroc")


def losses(name: str, probs: NDArray, labels: NDArray) -> NDArray:
    """The (N,) whose mean a score is."""
    own = probs[np.arange(len(labels)), labels]
    if name == "nll":
        return -np.log(np.maximum(own, 1e-12))
    if name == "brier":
        return (probs**2).sum(axis=1) - 2 * own + 1
    return (probs.argmax(axis=1) == labels).astype(float)


def ece(probs: NDArray, labels: NDArray, rows: NDArray | slice = slice(None)) -> float:
    """Expected calibration error of some rows."""
    confidence, is_right = probs[rows].max(axis=1), (probs.argmax(axis=1) == labels)[rows]
    index = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = np.bincount(index, weights=confidence - is_right, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def placements(probs: NDArray, others: NDArray) -> tuple[NDArray, NDArray]:
    """For each example the share of the other split on its right side; their means are the AUROC (DeLong 1988)."""
    here, there = probs.max(axis=1), others.max(axis=1)
    ranks = rankdata(np.concatenate([here, there]))
    inside = (ranks[: len(here)] - rankdata(here)) / len(there)
    outside = 1 - (ranks[len(here) :] - rankdata(there)) / len(here)
    return inside, outside


def score(name: str, probs: NDArray, labels: NDArray, others: NDArray | None) -> float:
    """One score of the predictions of a split, and of another for AUROC."""
    if name == "auroc":
        assert others is not None
        return float(placements(probs, others)[0].mean())
    return ece(probs, labels) if name == "ece" else float(losses(name, probs, labels).mean())


def sampling_error(name: str, probs: NDArray, labels: NDArray, others: NDArray | None) -> float:
    """Standard error of a score with NUM_EXAMPLES examples in each split."""
    if name == "auroc":
        assert others is not None
        return math.sqrt(sum(part.var() for part in placements(probs, others)) / NUM_EXAMPLES)
    if name == "ece":
        stream, size = np.random.default_rng(0), len(labels)
        found = [ece(probs, labels, stream.integers(size, size=size)) for _ in range(100)]
        return float(np.std(found) * math.sqrt(size / NUM_EXAMPLES))
    return float(losses(name, probs, labels).std() / math.sqrt(NUM_EXAMPLES))


def measure(folder: Path, posterior: str, integrator: Any, num_samples: int, options: argparse.Namespace) -> list[str]:
    """One row of the table."""
    opened, header = open_posterior(folder / "posteriors" / f"{posterior}.safetensors")
    test = read_features(folder / "features" / f"{options.split}.h5")
    blocks = [torch.from_numpy(np.ascontiguousarray(test.features[:]))]
    if options.ood:
        blocks.append(
            torch.from_numpy(np.ascontiguousarray(read_features(folder / f"features/{options.ood}.h5").features[:]))
        )
    target = None
    if integrator.needs_target:
        train = read_features(folder / "features" / "train.h5")
        prior: Prior = posterior_prior(header.path, header)
        target = LastLayerTarget(
            torch.from_numpy(train.features[:]), torch.from_numpy(train.labels[:]), opened.layout, prior
        )
    names = SCORES if options.ood else SCORES[:-1]
    labels = test.labels[:]
    variances: dict[str, list[float]] = {name: [] for name in names}
    biases, seconds = [], math.inf
    for seed in range(options.repeats):
        generator = torch.Generator().manual_seed(seed)
        start = time.perf_counter()
        ready: Any = integrator.prepare(opened, num_samples=num_samples, generator=generator, target=target)
        drawn_in = time.perf_counter() - start if target is None else 0.0
        groups = []
        for block in blocks:
            start = time.perf_counter()
            found = ready.predict(opened, block, group_rows=torch.arange(len(block)))
            if block is blocks[0]:
                seconds = min(seconds, drawn_in + (time.perf_counter() - start) * NUM_EXAMPLES / len(block))
            groups.append(DrawGroups(found.group_probs.numpy(), ready.groups.weights.numpy()))
        for name in names:
            used = groups if name == "auroc" else groups[:1]
            told = integration_error(
                lambda probs, *others, name=name: score(name, probs, labels, *(others or (None,))), *used
            )
            variances[name].append(told.variance)
        halves = [score("nll", groups[0].half(half), labels, None) for half in balanced_halves(len(groups[0]))]
        biases.append(np.mean(halves) - score("nll", groups[0].mean(), labels, None))
    means = [group.mean() for group in groups] + [None]
    errors = {name: sampling_error(name, means[0], labels, means[1]) for name in names}
    ratios = {name: math.sqrt(np.mean(variances[name])) / errors[name] for name in names}
    cells = [f"{ratios[name]:.3f}" for name in names] + [f"{np.mean(biases) / errors['nll']:+.3f}"]
    needed = num_samples * (max(ratios.values()) / 0.1) ** 2
    return [posterior, str(num_samples), *cells, f"{needed:.0f}", f"{1000 * seconds:.0f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("--posterior", action="append", default=[])
    parser.add_argument("--integrator", default="mc")
    parser.add_argument("--qmc", action="store_true")
    parser.add_argument("--samples", default="20,200", help="numbers of draws, separated by commas")
    parser.add_argument("--split", default="test")
    parser.add_argument("--ood", help="split outside the distribution, for AUROC")
    parser.add_argument("--repeats", type=int, default=4, help="seeds")
    options = parser.parse_args()
    integrator = load_integrator(options.integrator, **({"qmc": True} if options.qmc else {}))
    names = SCORES if options.ood else SCORES[:-1]
    columns = ["posterior", "draws", *names, "bias", "for 0.1", "ms"]
    print(
        f"{options.integrator}{'-qmc' * options.qmc}: integration error over the sampling error of {NUM_EXAMPLES:,} examples"
    )
    print(" ".join(f"{column:>14}" for column in columns))
    for posterior in options.posterior or ["laplace"]:
        for num_samples in map(int, options.samples.split(",")):
            row = measure(options.folder, posterior, integrator, num_samples, options)
            print(" ".join(f"{cell:>14}" for cell in row), flush=True)


if __name__ == "__main__":
    main()

"""Posteriors of the German credit data against the moments that the Inference Gym publishes for its logistic regression.

25 weights with N(0, 1) priors: the mode lies up to a third of a standard deviation from the mean, so that a sampler can be
told from a Gaussian at the mode. For every posterior: how far its means lie from the published ones, in combined standard
errors (largest of 25) and in posterior standard deviations (root mean square), the ratios of its standard deviations to the
published ones, and the seconds its command took. Pyro's NUTS, on the same target, is what one would otherwise use.

    python benchmarks/german_credit.py german-credit.npz --out german.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bnncli.evaluation.convergence import convergence
from bnncli.posteriors.samples import Samples
from bnncli.session.inputs import open_posterior

NUM_DRAWS = 20_000  # of a posterior that can be drawn from at will
FITS = {
    "laplace": ("fit-laplace", "--prior-precision", "1"),
    "refine": ("refine",),
    "refine, radial": ("refine", "--flow", "radial", "--length", "5", "--name", "radial"),
    "hmc": ("hmc",),
    "hmc, Pyro's NUTS": ("hmc", "--sampler", "nuts", "--chains", "1", "--name", "nuts"),
}


@dataclass(frozen=True)
class Moments:
    """Means (25,), their standard errors, and standard deviations."""

    mean: np.ndarray
    standard_error: np.ndarray
    sd: np.ndarray


def main() -> None:
    """Fit all, print a table, write JSON."""
    arguments = _parse()
    with np.load(arguments.data) as file:
        published = Moments(file["mean"], file["mean_standard_error"], file["sd"])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "german"
        _bnncli(
            "extract-features", run, "--model", "flatten", "--task", "binary", "--data", f"train=npz:{arguments.data}"
        )
        rows = [_row(name, words, run, published, arguments) for name, words in FITS.items()]
    print(f"{'':<20}{'mean: errors':>14}{'mean: sds, rms':>16}{'sd ratio':>16}{'seconds':>10}")
    for row in rows:
        low, high = row["sd_ratio"]
        print(f"{row['posterior']:<20}{row['mean_in_standard_errors']:>14.1f}{row['mean_in_sds']:>16.4f}"
              f"{f'{low:.3f} to {high:.3f}':>16}{row['seconds']:>10.1f}")  # fmt: skip
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"schema": "bnncli.benchmark.german-credit/1", "rows": rows}, indent=1) + "\n"
        )


def _row(
    name: str, words: tuple[str, ...], run: Path, published: Moments, arguments: argparse.Namespace
) -> dict[str, Any]:
    command, *options = words
    if command == "hmc" and arguments.quick:
        options += ["--draws", "60"]
    start = time.perf_counter()
    path = _bnncli(command, run, *options, "--seed", "0", "--device", arguments.device)
    seconds = time.perf_counter() - start
    found = _moments(path)
    error = np.hypot(found.standard_error, published.standard_error)
    ratio = found.sd / published.sd
    return {
        "posterior": name,
        "mean_in_standard_errors": float(np.abs((found.mean - published.mean) / error).max()),
        "mean_in_sds": float(np.sqrt(np.mean(((found.mean - published.mean) / published.sd) ** 2))),
        "sd_ratio": [float(ratio.min()), float(ratio.max())],
        "seconds": seconds,
    }


def _moments(path: Path) -> Moments:
    """Of a posterior: by its effective draws where it is draws, else by independent ones."""
    posterior, _ = open_posterior(path)
    if isinstance(posterior, Samples):
        draws = posterior.draws.double()
        effective = convergence(posterior.draws.numpy()).ess_bulk or 1.0  # of the parameter that mixes worst
        flat = draws.flatten(0, 1)
    else:
        flat = posterior.sample(NUM_DRAWS, torch.Generator().manual_seed(0)).double()
        effective = NUM_DRAWS
    sd = flat.std(dim=0).numpy()
    return Moments(flat.mean(dim=0).numpy(), sd / np.sqrt(effective), sd)


def _bnncli(command: str, *words: object) -> Path:
    """The artifact that a command wrote last."""
    line = [sys.executable, "-m", "bnncli", command, *map(str, words), "--quiet"]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="npz with x (1000, 24) standardised, y, mean, mean_standard_error, sd")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="fewer draws of hmc")
    parser.add_argument("--out", type=Path, help="where the numbers go as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()

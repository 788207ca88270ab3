"""Our engine against what people would otherwise use, on the same features, device and target, in one run.

fit-laplace against laplace-torch (where it is installed), refine against Pyro's SVI in time to equal ELBO, hmc against
Pyro's NUTS in worst-parameter effective draws a second. Beside each: the floor, the least that the device could need for
the job's arithmetic and traffic. Prints a table and writes JSON.

    python benchmarks/engine.py lenet.pt.bnn/features/train.h5 --out engine.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is imported

import machine
import theirs
import torch
from hmc_job import measure_hmc
from machine import Rates
from problem import Problem, fit_laplace, fixture_features, load_problem
from refine_job import measure_refine
from report import Row, against, row_of, table

from bnncli.errors import BnnError
from bnncli.system.devices import configure_torch, resolve_device

SCHEMA = "bnncli.benchmark.engine/1"
STRUCTURES = ("full", "kron", "diag")
GOALS = {  # how many times faster than theirs
    "cpu": {"fit-laplace": 20, "refine": 20, "hmc": 100},
    "cuda": {"fit-laplace": 20, "refine": 100, "hmc": 10_000},
}
LAPLACE_BATCHES = (128, 1024)  # laplace-torch gets whichever is faster


def main() -> None:
    """Measure, print, write."""
    arguments = _parse()
    warnings.filterwarnings("ignore")  # of the other libraries; ours raise
    configure_torch(threads=None, deterministic=False)
    try:
        device = resolve_device(arguments.device)
        with tempfile.TemporaryDirectory() as folder:
            path = arguments.features or fixture_features(Path(folder))
            problem = load_problem(path, arguments.prior_precision, device)
            report = measure(problem, arguments, device)
    except BnnError as error:
        sys.exit(f"engine.py: {error}")
    report["features"] = str(arguments.features or "the embedded fixture")
    print("\n".join(table(report)))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def measure(problem: Problem, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The whole report."""
    rates = machine.measure_rates(device, size=256 if arguments.quick else None)
    wanted = arguments.jobs.split(",")
    rows: list[Row] = []
    if "laplace" in wanted:
        for structure in STRUCTURES:
            rows += measure_laplace(problem, structure, rates, arguments)
    if "refine" in wanted:
        rows += measure_refine(problem, fit_laplace(problem, "full").gaussian, rates, arguments)
    if "hmc" in wanted:
        rows += measure_hmc(problem, rates, arguments)
    for row in rows:
        row["goal"] = GOALS[device.type].get(row["job"].removesuffix(", fastest"))
        row["times_floor"] = row["ours_seconds"] / row["floor_seconds"]
    layout = problem.layout
    sizes = {"N": len(problem.features), "D": layout.num_features, "K": layout.num_outputs, "P": layout.num_params}
    return {
        "schema": SCHEMA,
        "is_quick": arguments.quick,
        "machine": machine.describe(device),
        "rates": rates._asdict(),
        "problem": {**sizes, "prior_precision": problem.prior_precision},
        "laplace_torch": theirs.laplace_torch_problem() or "used",
        "rows": rows,
    }


def measure_laplace(problem: Problem, structure: str, rates: Rates, arguments: argparse.Namespace) -> list[Row]:
    """One structure at the checkpoint's weights, against the default backend and against whichever is fastest.

    Theirs is the time of fit() alone, with the faster of two batch sizes; ours ends with a factored covariance.
    """
    device, count = problem.features.device, len(problem.features)
    repeats = 1 if arguments.quick else 3
    ours, _ = machine.best_of(lambda: fit_laplace(problem, structure), device, repeats=max(2, repeats))
    work = machine.curvature_work(structure, count, problem.layout)
    work = work.plus(machine.covariance_work(structure, problem.layout))
    row = row_of("fit-laplace", structure, ours, work.seconds(rates))
    if theirs.laplace_torch_problem() is not None:
        return [row]
    tries = []
    for backend, batch_size in itertools.product(theirs.LAPLACE_BACKENDS, LAPLACE_BATCHES):
        fit = partial(theirs.fit_by_laplace_torch, problem, structure, backend=backend, batch_size=batch_size)
        try:
            seconds, _ = machine.best_of(fit, device, repeats=repeats)
        except RuntimeError as error:
            print(f"engine.py: laplace-torch, {backend}, {structure}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        tries.append((seconds, backend, batch_size))
    rows = []
    default = [entry for entry in tries if entry[1] == theirs.LAPLACE_BACKENDS[0]]
    for job, entries in (("fit-laplace", default), ("fit-laplace, fastest", tries)):
        if entries:
            seconds, backend, batch_size = min(entries)
            name = f"laplace-torch, {backend}, batches of {batch_size}"
            rows.append(against({**row, "job": job}, seconds, name))
    return rows or [row]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "features", nargs="?", type=Path, help="train split that extract-features wrote; the fixture's by default"
    )
    parser.add_argument("--prior-precision", type=float, default=510.0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--jobs", default="laplace,refine,hmc", help="which to measure, joined by commas")
    parser.add_argument(
        "--seconds-nuts", type=float, default=120.0, help="time limit of Pyro's NUTS on the ordinary model"
    )
    parser.add_argument("--out", type=Path, help="write the report to this file as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="short runs on both sides, to try the script; not to quote"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

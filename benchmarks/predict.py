"""Integrators against Monte Carlo with 1,000 draws: how long, and how far from the exact integral; the same in one run.

Twice: the integrals alone, from the same moments of the logits, and end to end, from features and posterior to probabilities.
Beside them the Python sampling loop that the Laplace bridge was compared with when it was published, and
laplace-torch's own predictive, where it is installed. Times are medians after a warm-up. Distances are of probabilities,
on some examples, from scrambled Sobol points whose own standard error is given. Prints a table and writes JSON.

    python benchmarks/predict.py --out predict.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is imported

import machine
import theirs
import torch
from given_moments import GivenMoments, loop_over_draws
from problem import Problem, fit_laplace, load_problem
from synthetic import write_split
from torch import Tensor

from bnncli.errors import BnnError
from bnncli.integrators import Prediction, load_integrator, variant
from bnncli.integrators._exact import SOBOL_LOGITS, exact_probs
from bnncli.numerics import dirichlet
from bnncli.numerics.random import stream
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.gaussian import Gaussian
from bnncli.system.devices import configure_torch, resolve_device

SCHEMA = "bnncli.benchmark.predict/1"
NUM_DRAWS = 1000
PRIOR_PRECISION = 1.0
REFERENCE = {"integrals": f"logit-mc, {NUM_DRAWS} draws", "end to end": f"mc, {NUM_DRAWS} draws"}
INTEGRATORS: tuple[tuple[str, dict[str, Any], int | None], ...] = (
    ("bridge", {}, None),
    ("probit", {}, None),
    ("probit", {"projection": "sum-zero"}, None),
    ("mean-field", {}, None),
    ("mean-field", {"order": 2}, None),
    ("logit-mc", {"qmc": True}, 128),
    ("logit-mc", {}, NUM_DRAWS),
)
SAMPLING_THETA: tuple[tuple[str, dict[str, Any], int | None], ...] = (
    ("plug-in", {}, None),
    ("mc", {}, 20),
    ("mc", {}, NUM_DRAWS),
)
_JACOBIAN_BYTES = 2**28  # of laplace-torch, at once
_MOST_BATCH = 256
_LOOP_CLASSES = 10  # more would take minutes
Row = dict[str, Any]


class Sizes(NamedTuple):
    """Examples to predict, features, classes, structure of the Gaussian, and examples that the distance is measured on."""

    N: int
    D: int
    K: int
    structure: str
    num_exact: int

    @property
    def layout(self) -> HeadLayout:
        """Of the head."""
        return HeadLayout(self.K, self.D)


SIZES = (Sizes(8000, 84, 10, "full", 16), Sizes(2000, 256, 100, "kron", 8), Sizes(200, 64, 1000, "kron", 3))
QUICK = (Sizes(150, 6, 3, "full", 4), Sizes(100, 8, 12, "kron", 2))


class Exact(NamedTuple):
    """Probabilities (n, K) at some examples, given by their numbers (n,), and the largest standard error."""

    rows: Tensor
    probs: Tensor
    error: float


def main() -> None:
    """Measure, print, write."""
    arguments = _parse()
    warnings.filterwarnings("ignore")  # of the other libraries; ours raise
    configure_torch(threads=None, deterministic=False)
    try:
        device = resolve_device(arguments.device)
        print(
            f"{'K':>5}  {'what':<12}{'integrator':<34}{'seconds':>10}{'x faster':>10}{'largest off':>13}{'mean off':>11}"
        )
        rows: list[Row] = []
        for sizes in QUICK if arguments.quick else SIZES:
            if arguments.classes and sizes.K not in arguments.classes:
                continue
            for row in _measure(sizes, device, arguments.quick):
                print(_line(row), flush=True)
                rows.append(row)
    except BnnError as error:
        sys.exit(f"predict.py: {error}")
    print("\n".join(_notes(rows)))
    report = {"schema": SCHEMA, "is_quick": arguments.quick, "machine": machine.describe(device), "draws": NUM_DRAWS,
              "laplace_torch": theirs.laplace_torch_problem() or "used", "rows": rows}  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _measure(sizes: Sizes, device: torch.device, is_quick: bool) -> Iterator[Row]:
    """Every row of one size; the reference of each kind comes first, so that ratios are there as rows come."""
    problem = _problem(sizes, device)
    posterior = fit_laplace(problem, sizes.structure).gaussian
    features = problem.features
    moments = GivenMoments.of(posterior, features)
    rows = torch.linspace(0, len(features) - 1, sizes.num_exact, device=device).long()
    exact = _exact(moments.mean[rows], moments.covariance(rows), rows, is_quick=is_quick)
    common = {**sizes._asdict(), "exact_error": exact.error, "logit_sd": float(moments.variance.mean().sqrt())}
    found: dict[str, float] = {}
    for what, name, run in _jobs(sizes, posterior, features, moments):
        seconds, probs = machine.median_of(run, device, repeats=2 if is_quick else 3)
        found.setdefault(what, seconds)
        yield {**common, "what": what, "integrator": name, "seconds": seconds, "ratio": found[what] / seconds,
               **_distance(probs[exact.rows], exact.probs)}  # fmt: skip
    yield from _theirs(sizes, problem, found["end to end"], common, is_quick=is_quick)


def _problem(sizes: Sizes, device: torch.device) -> Problem:
    """Synthetic features and a random head; the posterior is fitted to what is then predicted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.h5"
        write_split(path, sizes.N, sizes.layout, seed=0)
        return load_problem(path, PRIOR_PRECISION, device)


Job = tuple[str, str, Callable[[], Tensor]]


def _jobs(sizes: Sizes, posterior: Gaussian, features: Tensor, moments: GivenMoments) -> Iterator[Job]:
    """What is timed: kind, name, and a function that gives probabilities (N, K); in each kind the reference first."""
    for what, target, inputs, choices in (
        ("integrals", moments, moments.examples, INTEGRATORS),
        ("end to end", posterior, features, (*SAMPLING_THETA, *INTEGRATORS)),
    ):
        jobs = [
            (_name(*choice), _predictor(target, inputs, *choice)) for choice in choices if _is_cheap(sizes, choice[1])
        ]
        jobs.sort(key=lambda job, what=what: job[0] != REFERENCE[what])  # type: ignore[misc]
        yield from ((what, name, run) for name, run in jobs)
        if what == "integrals":
            yield what, "bridge, probabilities alone", lambda: _bridge_alone(moments)
            if sizes.K <= _LOOP_CLASSES:
                yield what, f"loop of the thesis, {NUM_DRAWS} draws", _loop(moments)


def _loop(moments: GivenMoments) -> Callable[[], Tensor]:
    """The covariances are multiplied out before the clock starts."""
    covariance = moments.covariance(moments.examples[:, 0].long())
    return lambda: loop_over_draws(moments.mean, covariance, num_samples=NUM_DRAWS)


def _is_cheap(sizes: Sizes, settings: dict[str, Any]) -> bool:
    """Whether a setting is worth its time: the second order takes K^3 an example, and minutes from 1,000 classes on."""
    return "order" not in settings or sizes.K <= 100


def _name(integrator: str, settings: dict[str, Any], num_samples: int | None) -> str:
    draws = f", {num_samples} draws" if num_samples else ""
    return variant(integrator, settings) + draws


def _predictor(
    posterior: Any, features: Tensor, name: str, settings: dict[str, Any], num_samples: int | None
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        generator = stream(0, f"bench/{name}")
        found: Prediction = load_integrator(name, **settings).predict(
            posterior, features, num_samples=num_samples, generator=generator
        )
        return found.probs

    return run


def _bridge_alone(moments: GivenMoments) -> Tensor:
    """Without mutual information and interval: the formula alone, which published times are of."""
    mean = moments.mean - moments.mean.mean(dim=1, keepdim=True)
    return dirichlet.mean(dirichlet.from_gaussian(mean, moments.projected))


def _exact(mean: Tensor, covariance: Tensor, rows: Tensor, *, is_quick: bool) -> Exact:
    budget = SOBOL_LOGITS // 2**8 if is_quick else SOBOL_LOGITS
    found = [exact_probs(m, c, sobol_logits=budget) for m, c in zip(mean, covariance, strict=True)]
    return Exact(rows, torch.stack([one.probs for one in found]).to(mean.device), max(one.error for one in found))


def _distance(probs: Tensor, exact: Tensor) -> Row:
    off = (probs.double() - exact).abs()
    return {"largest_off": float(off.max()), "mean_off": float(off.mean())}


def _theirs(sizes: Sizes, problem: Problem, reference: float, common: Row, *, is_quick: bool) -> Iterator[Row]:
    """laplace-torch on as many examples as its Jacobians let it take, its time scaled to all; against its own moments."""
    per_example = 4 * sizes.K * sizes.layout.num_params
    batch_size = min(_MOST_BATCH, _JACOBIAN_BYTES // per_example)
    if theirs.laplace_torch_problem() is not None or batch_size < 1:
        return
    fit = theirs.fit_by_laplace_torch(problem, sizes.structure, backend=theirs.LAPLACE_BACKENDS[1], batch_size=1024)
    features = problem.features[: batch_size * (4 if batch_size == _MOST_BATCH and not is_quick else 1)]
    rows = torch.arange(min(sizes.num_exact, batch_size), device=features.device)
    exact = _exact(*theirs.logit_moments_by_laplace_torch(fit, features[rows]), rows, is_quick=is_quick)
    for link in ("probit", "bridge", "mc"):

        def run(link: str = link) -> Tensor:
            return theirs.predict_by_laplace_torch(
                fit, features, link=link, num_samples=NUM_DRAWS, batch_size=batch_size
            )

        seconds, probs = machine.median_of(run, features.device, repeats=1 if is_quick else 3)
        seconds *= sizes.N / len(features)
        draws = f", {NUM_DRAWS} draws" if link == "mc" else ""
        yield {**common, "what": "end to end", "integrator": f"laplace-torch {link}{draws}", "seconds": seconds,
               "exact_error": exact.error, "ratio": reference / seconds, "examples_timed": len(features),
               **_distance(probs[rows], exact.probs)}  # fmt: skip


def _line(row: Row) -> str:
    return (
        f"{row['K']:>5}  {row['what']:<12}{row['integrator']:<34}{row['seconds']:>10.3g}{row['ratio']:>10.3g}"
        f"{row['largest_off']:>13.2g}{row['mean_off']:>11.2g}"
    )


def _notes(rows: list[Row]) -> list[str]:
    """What the columns mean, and the bridge against the published claim of 400 times."""
    lines = [f"x faster: than {' and '.join(f'{name} ({what})' for what, name in REFERENCE.items())}"]
    for size in dict.fromkeys((row["N"], row["D"], row["K"], row["structure"]) for row in rows):
        mine = [row for row in rows if (row["N"], row["D"], row["K"], row["structure"]) == size]
        lines.append(
            f"K {size[2]}: N {size[0]}, D {size[1]}, {size[3]} covariance, logits' standard deviation {mine[0]['logit_sd']:.2g} "
            f"(root mean square); distances on {mine[0]['num_exact']} examples, whose standard error is at most {mine[0]['exact_error']:.1g}"
        )
        timed = {row["examples_timed"] for row in mine if "examples_timed" in row}
        lines += [f"K {size[2]}: laplace-torch ran on {n} examples, its time is scaled to {size[0]}" for n in timed]
        seconds = {row["integrator"]: row["seconds"] for row in mine if row["what"] == "integrals"}
        loop = next((value for name, value in seconds.items() if name.startswith("loop")), None)
        if loop is not None:
            lines.append(f"K {size[2]}: the loop takes {loop / seconds['bridge, probabilities alone']:.0f} times the bridge's formula (published: 400 and more), "
                         f"{loop / seconds[REFERENCE['integrals']]:.1f} times the same draws in one batch")  # fmt: skip
    return lines


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=lambda text: [int(part) for part in text.split(",")],
                        help="measure these numbers of classes alone, of " + ", ".join(str(sizes.K) for sizes in SIZES))  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, help="write the report to this file as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny problems, to try the script; not to quote")
    return parser.parse_args()


if __name__ == "__main__":
    main()

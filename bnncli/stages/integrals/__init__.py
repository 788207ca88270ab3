"""integrals: how far each integrator is from the exact integral, for one Gaussian over logits or over a grid of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.integrators._exact import Exact, exact_probs
from bnncli.integrators.quadrature import binary_probs
from bnncli.lazy import torch
from bnncli.options.command import Command, CommonOptions, ComputeOptions
from bnncli.options.integrals import IntegralsOptions
from bnncli.session.run import Result, Run, Table
from bnncli.stages.integrals.gaussians import (
    ConfiguredIntegrator,
    integrators_for,
    predict,
    sigmoid_posterior,
    softmax_posterior,
)

COMMAND = Command(
    "Measure each integrator's error against the exact integral.",
    "Integrates a Gaussian over one logit (sigmoid) or several (softmax) with every integrator and compares the "
    "results with the exact probabilities. Without --mean, reports the errors for one logit over a grid of "
    "means and standard deviations.",
    (IntegralsOptions, ComputeOptions, CommonOptions),
    (
        "bnncli integrals --mean 1.7 --variance 4",
        "bnncli integrals --mean 2,0,-1 --covariance '2,1,0;1,2,0;0,0,1' --samples 1000",
        "bnncli integrals --plot errors.png",
    ),
    (),
    section="Research",
    place=30,
)

_MOST_COLUMNS = 6  # of probabilities in the table; --json has all
_SINGLE_PRECISION = "errors below 6e-8 are float32 rounding"


def run(run: Run, options: IntegralsOptions) -> Result:
    """The table of errors; of one Gaussian where a mean was given, else of a grid."""
    options.check_together()
    return _single(run, options) if options.mean is not None else _grid(run, options)


def _single(run: Run, options: IntegralsOptions) -> Result:
    """Probabilities of every class, and their errors."""
    mean, covariance = (torch.tensor(part, dtype=torch.float64) for part in options.moments)
    posterior = softmax_posterior(mean, covariance)
    exact = exact_probs(mean, covariance, seed=run.compute.seed)
    posterior = posterior.to(run.device)
    rows = []
    for configured in integrators_for(posterior, options.integrator):
        generator = run.stream(f"integrals/{configured.variant}")
        prediction = predict(configured, posterior, num_samples=options.samples, generator=generator)
        probs = prediction.probs[0].double().cpu()
        errors = probs - exact.probs
        rows.append(
            _row(configured, options)
            | {
                "probs": probs.tolist(),
                "errors": errors.tolist(),
                "largest_error": errors.abs().max().item(),
                "mean_error": errors.abs().mean().item(),
                "mutual_info": None if prediction.mutual_info is None else prediction.mutual_info[0].item(),
                "interval": None if prediction.interval is None else prediction.interval[0].tolist(),
            }
        )
    document = {
        "mean": mean.tolist(),
        "covariance": covariance.tolist(),
        "samples": options.samples,
        "exact": {"probs": exact.probs.tolist(), "error": exact.error, "method": exact.method},
        "integrators": rows,
    }
    return Result(extra=document, tables=[_single_table(rows, exact, len(mean), options.samples)])


def _single_table(rows: list[dict[str, Any]], exact: Exact, num_logits: int, samples: int) -> Table:
    if num_logits == 1:
        columns = ["integrator", "probability", "error"]
        cells = [[row["variant"], f"{row['probs'][1]:.7f}", f"{row['errors'][1]:+.2g}"] for row in rows]
        cells.insert(0, ["exact", f"{exact.probs[1].item():.7f}", ""])
    else:
        shown = range(min(num_logits, _MOST_COLUMNS))
        columns = ["integrator", *(f"class {k}" for k in shown), "largest error", "mean error"]
        cells = [
            [
                row["variant"],
                *(f"{row['probs'][k]:.6f}" for k in shown),
                f"{row['largest_error']:.2g}",
                f"{row['mean_error']:.2g}",
            ]
            for row in rows
        ]
        cells.insert(0, ["exact", *(f"{exact.probs[k].item():.6f}" for k in shown), "", ""])
    kind = "standard error" if "Sobol" in exact.method else "error at most about"
    notes = [f"exact: {exact.method}; {kind} {exact.error:.1g}", *_draws_note(rows, samples), _SINGLE_PRECISION]
    if num_logits > _MOST_COLUMNS:
        notes.append(f"showing {_MOST_COLUMNS} of {num_logits} classes; --json has all")
    return Table(columns, cells, notes=["; ".join(notes)])


@dataclass(frozen=True)
class _Map:
    """Absolute errors (sds, means) of one integrator over the grid."""

    configured: ConfiguredIntegrator
    errors: NDArray[np.float64]

    def worst(self, means: NDArray[np.float64], sds: NDArray[np.float64]) -> tuple[float, float]:
        """Mean and standard deviation where the error is largest."""
        row, column = np.unravel_index(self.errors.argmax(), self.errors.shape)
        return float(means[column]), float(sds[row])


def _grid(run: Run, options: IntegralsOptions) -> Result:
    """Largest and mean absolute errors of the probability of two classes over mean and standard deviation."""
    if options.plot is not None:
        check_figure_path(Path(options.plot), "--plot", force=options.force, others=[])
    size = options.grid_size
    means = np.linspace(-options.max_mean, options.max_mean, size + 1)
    sds = np.linspace(options.max_sd / size, options.max_sd, size)
    maps = _maps(run, options, means, sds)
    rows = []
    for entry in maps:
        mean, sd = entry.worst(means, sds)
        rows.append(
            _row(entry.configured, options)
            | {"largest_error": float(entry.errors.max()), "mean_error": float(entry.errors.mean())}
            | {"at": {"mean": mean, "sd": sd}}
        )
    grid = {
        "mean": {"low": means[0], "high": means[-1], "count": len(means)},
        "sd": {"low": sds[0], "high": sds[-1], "count": len(sds)},
    }
    document = {
        "grid": grid,
        "samples": options.samples,
        "monte_carlo_sd_bound": 0.5 / math.sqrt(options.samples),
        "exact": {"error": 1e-13, "method": "quadrature in one dimension"},
        "integrators": rows,
    }
    result = Result(extra=document, tables=[_grid_table(rows, grid, options)])
    if options.plot is not None:
        result.lines.append(f"figure: {options.plot}")
        result.outputs = _plot(Path(options.plot), maps, means, sds, options)
        result.action = "computed"
    return result


def _maps(run: Run, options: IntegralsOptions, means: NDArray[np.float64], sds: NDArray[np.float64]) -> list[_Map]:
    """The error of every integrator in every cell, a row of one standard deviation at a time."""
    mean = torch.from_numpy(means).to(run.device)
    variances = [torch.full_like(mean, sd**2) for sd in sds]
    exact = [binary_probs(mean, variance)[0][:, 1] for variance in variances]
    integrators = integrators_for(sigmoid_posterior(mean, variances[0]), options.integrator)
    task = run.console.task("integrals", len(integrators) * len(sds))
    maps = []
    for configured in integrators:
        generator = run.stream(f"integrals/{configured.variant}")  # goes on from row to row: draws are new in each
        errors = []
        for variance, expected in zip(variances, exact, strict=True):
            posterior = sigmoid_posterior(mean, variance)
            prediction = predict(configured, posterior, num_samples=options.samples, generator=generator)
            errors.append((prediction.probs[:, 1].double().to(expected) - expected).abs())
            task.advance()
        maps.append(_Map(configured, torch.stack(errors).cpu().numpy()))
    return maps


def _row(configured: ConfiguredIntegrator, options: IntegralsOptions) -> dict[str, Any]:
    """Which integrator a row of the result is about."""
    return {
        "integrator": configured.name,
        "variant": configured.variant,
        "settings": configured.settings,
        "samples": options.samples if configured.integrator.is_sampling else None,
    }


def _grid_table(rows: list[dict[str, Any]], grid: dict[str, Any], options: IntegralsOptions) -> Table:
    cells = [
        [
            row["variant"],
            f"{row['largest_error']:.4f}" if row["largest_error"] >= 5e-5 else f"{row['largest_error']:.1e}",
            f"{row['at']['mean']:g}",
            f"{row['at']['sd']:g}",
            f"{row['mean_error']:.5f}" if row["mean_error"] >= 5e-6 else f"{row['mean_error']:.1e}",
        ]
        for row in rows
    ]
    mean, sd = grid["mean"], grid["sd"]
    notes = [
        f"exact: quadrature; grid: {mean['count']} means in [{mean['low']:g}, {mean['high']:g}] x {sd['count']} "
        f"standard deviations in [{sd['low']:g}, {sd['high']:g}] of one logit (two classes)",
        *_draws_note(rows, options.samples),
        _SINGLE_PRECISION,
    ]
    if {"mc", "logit-mc"} & {row["integrator"] for row in rows}:
        notes.insert(2, "mc and logit-mc draw again in every cell, so the largest of their errors grows with the grid")
    return Table(["integrator", "largest error", "at mean", "at sd", "mean error"], cells, notes=["; ".join(notes)])


def _draws_note(rows: list[dict[str, Any]], samples: int) -> list[str]:
    """How many draws the integrators that draw made, where there are any."""
    if all(row["samples"] is None for row in rows):
        return []
    return [
        f"sampling integrators: {samples} draws, Monte Carlo standard deviation at most {0.5 / math.sqrt(samples):.2g}"
    ]


def _plot(
    path: Path, maps: list[_Map], means: NDArray[np.float64], sds: NDArray[np.float64], options: IntegralsOptions
) -> list[dict[str, Any]]:
    """The figure, published; as the result's outputs."""
    from bnncli.figures import render
    from bnncli.figures.integrals import ErrorPanel, draw

    panels: list[ErrorPanel] = []
    for entry in maps:
        same = next((p for p in panels if np.allclose(p.errors, entry.errors, rtol=0, atol=5e-7)), None)
        if same is not None:
            if entry.configured.name not in same.names:  # "probit" stands for its variants that err as it does
                panels[panels.index(same)] = same._replace(names=[*same.names, entry.configured.variant])
        else:
            panels.append(ErrorPanel([entry.configured.variant], entry.errors, entry.worst(means, sds)))
    title = f"Distance from the exact probability of two classes ({options.samples} draws for sampling integrators)"
    digest = write_figure(path, render(draw(panels, means, sds, title=title), path.suffix[1:].lower()))
    return [{"role": "integrals.plot", "path": str(path), "content_digest": digest}]

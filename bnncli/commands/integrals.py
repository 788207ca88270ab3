"""integrals: compare each integrator with the exact integral, for one Gaussian over logits or a grid of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import UsageError
from bnncli.figures import render
from bnncli.figures.integrals import ErrorPanel, draw
from bnncli.integrators import Integrator, Prediction, load_integrator, supports, variant
from bnncli.integrators._exact import Exact, exact_probs
from bnncli.integrators.quadrature import binary_probs
from bnncli.lazy import torch
from bnncli.options.command import Command, CommonOptions, ComputeOptions
from bnncli.options.declaration import CheckedOptions, check_suffix, declaration, option
from bnncli.parameters.layouts import HeadLayout
from bnncli.posteriors.gaussian import Gaussian
from bnncli.registry import names
from bnncli.session.run import Result, Run, Table
from bnncli.structures.diag import Diag
from bnncli.structures.full import Full

if TYPE_CHECKING:
    from torch import Tensor


MAX_LOGITS = 1000


@dataclass(frozen=True)
class IntegralsOptions(CheckedOptions):
    """Options of integrals: one Gaussian over logits or, without --mean, a grid of them."""

    mean: str | None = option(
        None,
        "Means of the logits, joined by commas: one (sigmoid), or one per class (softmax).",
        metavar="M,...",
    )
    variance: str | None = option(
        None, "Variances of independent logits: one per mean, or one for all.", metavar="V,..."
    )
    covariance: str | None = option(
        None,
        "Covariance matrix of the logits, in place of variances: rows joined by semicolons, such as '2,1;1,2'.",
        metavar="V,...;V,...",
    )
    integrator: list[str] = option(
        [],
        "Integrator to measure, in all its variants. Default: all integrators that need no training data.",
        family="integrators",
    )
    samples: int = option(100, "Number of draws for sampling integrators.", minimum=1)
    grid_size: int = option(
        80,
        "Without \0mean\0: number of standard deviations on the grid. The number of means is one higher.",
        minimum=2,
        maximum=1000,
        is_rare=True,
    )
    max_mean: float = option(10.0, "Largest mean on the grid.", minimum=1e-6, maximum=1e6, is_rare=True)
    max_sd: float = option(10.0, "Largest standard deviation on the grid.", minimum=1e-6, maximum=1e6, is_rare=True)
    plot: str | None = option(
        None,
        "Plot the errors on the grid as .png, .svg or .pdf.",
        metavar="FILE",
        writes=True,
    )
    force: bool = option(False, "Let \0plot\0 replace a file that bnncli did not create.", short="-f")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plot is not None:
            check_suffix(self.plot, "\0plot\0", ("png", "svg", "pdf"))

    def check_together(self) -> None:
        """Raise UsageError unless the options fit together."""
        if self.mean is None and (self.variance is not None or self.covariance is not None):
            raise UsageError("\0variance\0 and \0covariance\0 need \0mean\0; without all three a grid is computed")
        if self.mean is not None and self.plot is not None:
            raise UsageError("\0plot\0 draws the grid: drop \0mean\0")
        if self.mean is not None and (self.variance is None) == (self.covariance is None):
            raise UsageError("\0mean\0: give either \0variance\0 or \0covariance\0 with it")

    @property
    def moments(self) -> tuple[list[float], list[list[float]]]:
        """Return the mean (K,) and covariance (K, K) of the logits. Eigenvalues are not checked here."""
        mean = _parse_numbers(self.mean or "", "\0mean\0")
        if len(mean) > MAX_LOGITS:
            raise UsageError(f"\0mean\0: expected at most {MAX_LOGITS} logits; got {len(mean)}")
        if self.variance is not None:
            return mean, _diagonal(_parse_numbers(self.variance, "\0variance\0"), len(mean))
        rows = [_parse_numbers(row, "\0covariance\0") for row in (self.covariance or "").split(";")]
        if len(rows) != len(mean) or any(len(row) != len(mean) for row in rows):
            raise UsageError(
                f"\0covariance\0: expected {len(mean)} rows of {len(mean)} numbers, one per mean; got "
                f"{self.covariance!r}"
            )
        if any(abs(rows[i][j] - rows[j][i]) > 1e-9 * abs(rows[i][j]) for i in range(len(rows)) for j in range(i)):
            raise UsageError("\0covariance\0: expected a symmetric matrix")
        return mean, rows


def _diagonal(variances: list[float], count: int) -> list[list[float]]:
    if len(variances) == 1:
        variances = variances * count
    if len(variances) != count:
        raise UsageError(f"\0variance\0: expected one number, or {count} (one per mean); got {len(variances)}")
    if min(variances) < 0:
        raise UsageError(f"\0variance\0: expected numbers of at least 0; got {min(variances):g}")
    return [[variances[i] if i == j else 0.0 for j in range(count)] for i in range(count)]


def _parse_numbers(text: str, flag: str) -> list[float]:
    """Parse a comma-separated list of finite numbers."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(math.isfinite(value) and abs(value) <= 1e100 for value in values):
        raise UsageError(f"{flag}: expected finite numbers joined by commas; got {text!r}")
    return values


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


def execute(run: Run, options: IntegralsOptions) -> Result:
    """Print the errors for one Gaussian if --mean is given, else for a grid."""
    options.check_together()
    return _compare_single(run, options) if options.mean is not None else _grid(run, options)


def _compare_single(run: Run, options: IntegralsOptions) -> Result:
    """Return each integrator's class probabilities and their errors."""
    mean, covariance = (torch.tensor(part, dtype=torch.float64) for part in options.moments)
    posterior = softmax_posterior(mean, covariance)
    exact = exact_probs(mean, covariance, seed=run.compute.seed)
    posterior = posterior.to(run.device)
    rows = []
    for configured in list_integrators(posterior, options.integrator):
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


def softmax_posterior(mean: Tensor, covariance: Tensor) -> Gaussian:
    """Return one example whose K logits are N(mean (K,), covariance (K, K)). Raises UsageError for an invalid covariance."""
    layout = HeadLayout(len(mean), 1, has_bias=False)
    variances = covariance.diagonal()
    if torch.equal(covariance, variances.diag()):
        return Gaussian(mean, Diag(variances), layout)
    values, vectors = torch.linalg.eigh(covariance)
    if values.min() < -1e-10 * values.abs().max():
        raise UsageError(
            f"--covariance: expected no negative eigenvalue; got {values.min().item():.4g}", hint="check its entries"
        )
    # A root of any shape becomes a triangular one, also where the covariance is singular.
    upper = torch.linalg.qr((vectors * values.clamp_min(0).sqrt()).T).R
    return Gaussian(mean, Full(upper.T.contiguous()), layout)


_MOST_COLUMNS = 6  # of probabilities in the table; --json has all
_SINGLE_PRECISION = "errors below 6e-8 are float32 rounding"


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


def _grid(run: Run, options: IntegralsOptions) -> Result:
    """Return largest and mean absolute errors of a binary probability over a grid of means and standard deviations."""
    if options.plot is not None:
        check_figure_path(Path(options.plot), "--plot", force=options.force, others=[])
    size = options.grid_size
    means = np.linspace(-options.max_mean, options.max_mean, size + 1)
    sds = np.linspace(options.max_sd / size, options.max_sd, size)
    maps = _compute_maps(run, options, means, sds)
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


@dataclass(frozen=True)
class ConfiguredIntegrator:
    """An integrator with settings, under the name of its predictions."""

    name: str
    settings: dict[str, Any]

    @property
    def variant(self) -> str:
        """Return the name of the variant, such as probit-sum-zero."""
        return variant(self.name, self.settings)

    @property
    def integrator(self) -> Integrator:
        """The integrator itself."""
        return load_integrator(self.name, **self.settings)


@dataclass(frozen=True)
class _Map:
    """Absolute errors (sds, means) of one integrator over the grid."""

    configured: ConfiguredIntegrator
    errors: NDArray[np.float64]

    def worst(self, means: NDArray[np.float64], sds: NDArray[np.float64]) -> tuple[float, float]:
        """Return the mean and standard deviation with the largest error."""
        row, column = np.unravel_index(self.errors.argmax(), self.errors.shape)
        return float(means[column]), float(sds[row])


def _compute_maps(
    run: Run, options: IntegralsOptions, means: NDArray[np.float64], sds: NDArray[np.float64]
) -> list[_Map]:
    """Return the errors of every integrator, computed one standard deviation at a time."""
    mean = torch.from_numpy(means).to(run.device)
    variances = [torch.full_like(mean, sd**2) for sd in sds]
    exact = [binary_probs(mean, variance)[0][:, 1] for variance in variances]
    integrators = list_integrators(sigmoid_posterior(mean, variances[0]), options.integrator)
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


def list_integrators(posterior: Gaussian, wanted: Sequence[str]) -> list[ConfiguredIntegrator]:
    """Return the integrators that fit the posterior and need no training data, with each setting once.

    Raises:
        UsageError: a requested integrator does not fit.
    """
    integrators = []
    for name in wanted or names("integrators"):
        needs_target = load_integrator(name).needs_target
        if needs_target or not supports(name, posterior):
            why = (
                "needs training data" if needs_target else f"does not work with {posterior.layout.num_classes} classes"
            )
            if wanted:
                raise UsageError(f"--integrator {name} {why}, so it cannot be compared on a Gaussian")
            continue
        integrators += [
            configured
            for settings in _settings(name)
            if _is_supported(configured := ConfiguredIntegrator(name, settings), posterior)
        ]
    return integrators


def _settings(name: str) -> Iterator[dict[str, Any]]:
    """Yield the defaults, then change one setting at a time."""
    yield {}
    for setting, spec in (declaration("integrators", name, "SETTINGS") or {}).items():
        choices = (True,) if spec.type is bool else spec.choices
        yield from ({setting: value} for value in choices if value != spec.default)


def _is_supported(configured: ConfiguredIntegrator, posterior: Gaussian) -> bool:
    """True where the integrator takes these settings with this number of classes."""
    try:
        predict(configured, posterior, num_samples=1, generator=torch.Generator().manual_seed(0))
    except UsageError:
        return False
    return True


def sigmoid_posterior(means: Tensor, variances: Tensor) -> Gaussian:
    """Return N examples with independent single logits of these means (N,) and variances (N,)."""
    return Gaussian(means, Diag(variances), HeadLayout(1, len(means), has_bias=False))


def predict(
    configured: ConfiguredIntegrator, posterior: Gaussian, *, num_samples: int, generator: torch.Generator
) -> Prediction:
    """Return the prediction for each row of the identity, in float64 if the integrator keeps it."""
    features = torch.eye(posterior.layout.num_features, dtype=torch.float64, device=posterior.mean.device)
    integrator = configured.integrator
    draws = num_samples if integrator.is_sampling else None
    ready = integrator.prepare(posterior, num_samples=draws, generator=generator)
    return ready.predict(posterior, features, num_samples=draws, generator=generator)


def _row(configured: ConfiguredIntegrator, options: IntegralsOptions) -> dict[str, Any]:
    """Return the part of a result's row that names the integrator."""
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
    """Return a note on the draws of the sampling integrators, if any."""
    if all(row["samples"] is None for row in rows):
        return []
    return [
        f"sampling integrators: {samples} draws, Monte Carlo standard deviation at most {0.5 / math.sqrt(samples):.2g}"
    ]


def _plot(
    path: Path, maps: list[_Map], means: NDArray[np.float64], sds: NDArray[np.float64], options: IntegralsOptions
) -> list[dict[str, Any]]:
    """Draw and publish the figure, and return its output entries."""

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

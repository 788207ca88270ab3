"""Compute and plot evaluate's curves, and score the density and input selection of latent binary networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from bnncli.artifacts.files import read_header
from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import UsageError, WriteError
from bnncli.evaluation.calibration import calibration_scores, pooled_calibration
from bnncli.evaluation.class_scores import decision_scores
from bnncli.evaluation.curves import reliability_curve_of_predictions, risk_coverage_curve, roc_curve
from bnncli.evaluation.latent_networks import (
    density_rows,
    density_thresholds,
    inclusion_histogram,
    prediction_density_rows,
    selection_rows,
)
from bnncli.evaluation.scores import accuracy_nll_brier, input_numbers
from bnncli.evaluation.statistics import Row, ScoreGroup, compute_example_statistics, score_rows
from bnncli.figures import posteriors, predictions, render
from bnncli.integrators import load_integrator
from bnncli.integrators.plug_in import PlugIn
from bnncli.lazy import torch
from bnncli.likelihoods import has_exclusive_classes, read_recorded_name
from bnncli.names import posterior_title
from bnncli.options.scoring import Quantity
from bnncli.posteriors import LATENT_BINARY, SPARSE
from bnncli.posteriors.latent_binary import LatentBinary
from bnncli.posteriors.sparse import Sparse
from bnncli.session.inputs import load_split, open_posterior
from bnncli.session.predictions import PredictionGroup
from bnncli.session.predictor import type_of
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import PredictedSplit, find_metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def has_density(path: Path | None) -> bool:
    """True where the posterior in a file is a latent binary or pruned network."""
    return path is not None and path.is_file() and type_of(read_header(path)) in (LATENT_BINARY, SPARSE)


def check_true_inputs(groups: Sequence[PredictionGroup], true_inputs: str | None) -> None:
    """Raise UsageError unless every group comes from a latent binary network with one layer, one logit and these inputs."""
    numbers = input_numbers(true_inputs)
    for group in groups if numbers else ():
        path = group.posterior_path
        sizes: list[int] = read_header(path).meta["sizes"] if path is not None and is_latent(path) else []
        if len(sizes) != 2 or sizes[1] != 1:
            raise UsageError(
                "--true-inputs: expected fit-lbbnn posteriors with one layer and a single logit; "
                f"{group.posterior} is not one",
                hint="name one with --posterior",
                code="wrong_type",
            )
        if max(numbers) > sizes[0]:
            raise UsageError(
                f"--true-inputs: {group.posterior} has {sizes[0]} inputs, which are numbered from 1; got {max(numbers)}"
            )


def compute_density_metrics(run: Run, path: Path, integrator: str) -> tuple[list[Row], list[Row]]:
    """Return metric rows of the density, and histograms of the inclusion probabilities of each layer.

    The first row is of the networks that the integrator predicts with. A pruned network has no histograms.
    """
    posterior = open_posterior(path)[0]
    used = prediction_density_rows(_read_used_probabilities(posterior, integrator))
    if isinstance(posterior, Sparse):
        return used, []
    rows, histograms = _measure_inclusions(run, posterior)
    return used + rows, histograms


def _read_used_probabilities(posterior: LatentBinary | Sparse, integrator: str) -> list[torch.Tensor]:
    """Return each layer's probabilities that a weight is in the networks that an integrator predicts with."""
    if isinstance(posterior, Sparse):
        return [(weight != 0).double() for weight, _ in posterior.network.split(posterior.theta)]
    layout, needs = posterior.model.layout, load_integrator(integrator).needs
    if needs == "sample":  # draws come from all repeats in turn
        return layout.weights(posterior.model.factors.inclusion.double().mean(dim=0))
    return [(weight != 0).double() for weight, _ in layout.split(getattr(posterior, needs))]


_DRAWN_NETWORKS = 10  # to report the fraction of weights that drawn networks have


def _measure_inclusions(run: Run, posterior: LatentBinary) -> tuple[list[Row], list[Row]]:
    """Return metric rows of the best repeat's density, and a histogram of the inclusion probabilities of each layer."""
    layout, best = posterior.model.layout, posterior.best
    inclusion = layout.weights(posterior.inclusion)
    drawn = posterior.model.draw_weights(torch.full((_DRAWN_NETWORKS,), best), run.stream("evaluate/density"))[0]
    shares = [(part != 0).flatten(1).double().mean(dim=1) for part in layout.weights(drawn)]
    histograms = [{"layer": str(index), **inclusion_histogram(part)} for index, part in enumerate(inclusion)]
    return density_rows(inclusion, shares), histograms


def compute_selection_metrics(path: Path, true_inputs: str | None) -> list[Row]:
    """Return metric rows of the inputs that all repeats select; none without true inputs."""
    numbers = input_numbers(true_inputs)
    return selection_rows(open_posterior(path)[0].model.factors.inclusion, numbers) if numbers else []


def compute_curves(
    run: Run, group: PredictionGroup, splits: Sequence[str], *, score: str, num_bins: int
) -> dict[str, Row]:
    """Return the curves of one posterior's predictions for each in-distribution split, or for those in `splits`.

    `reliability` and `risk_coverage` need labels, the latter one class per example; they are None otherwise. `roc` maps each
    out-of-distribution split to the curve by `score`, where both have examples with that score.
    """
    outside = [PredictedSplit(header) for header in group.splits(is_ood=True).values()]
    latent = group.posterior_path if is_latent(group.posterior_path) else None
    found = {}
    for name, header in group.splits(is_ood=False).items():
        if splits and name not in splits:
            continue
        run.console.poll(f"curves of {group.name}")
        split = PredictedSplit(header)
        examples = split.examples
        reliability = reliability_curve_of_predictions(split.file.probs, examples, num_bins=num_bins)
        curves: Row = {"reliability": reliability, "risk_coverage": None, "roc": {}}
        if examples.is_right is not None and len(examples) > 0:
            curves["risk_coverage"] = risk_coverage_curve(examples.confidence, examples.is_right)
        for other in outside:
            inside, far = (one.detection_scores([score])[score] for one in (split, other))
            if not isinstance(inside, str) and not isinstance(far, str) and len(inside) and len(far):
                curves["roc"][other.name] = roc_curve(inside, far)
        if latent is not None:
            curves["density"] = compute_density_curve(run, latent, name, num_bins=num_bins)
        found[name] = curves
    return found


def compute_density_curve(run: Run, path: Path, split_name: str, *, num_bins: int) -> Row | None:
    """Return accuracy, NLL and ECE of the networks above rising inclusion thresholds; None without labels."""
    split = load_split(run, split_name)
    if split.content.labels is None or len(split.content.labels) == 0:
        return None
    posterior: LatentBinary = open_posterior(path)[0].to(run.device)
    network = posterior.model.layout
    inclusion = posterior.inclusion
    curve: dict[str, list[float]] = {name: [] for name in ("threshold", "density", "accuracy", "nll", "ece")}
    for threshold in density_thresholds(inclusion):
        single: Any = Sparse(posterior.pruned(threshold), network)
        parts = [
            PlugIn().predict(single, features, num_samples=None, generator=run.stream("evaluate/density")).probs.cpu()
            for features in split.feature_blocks(run.device)
        ]
        scores = _compute_scores(torch.cat(parts).numpy(), split.content.labels, num_bins)
        rows = score_rows(scores, (split_name, len(split.content.labels)))
        found = {row["name"]: row["value"] for row in reversed(rows)}  # the usual form stands first
        curve["threshold"].append(max(threshold, 0.0))
        curve["density"].append(float((inclusion > threshold).double().mean()))
        for name in ("accuracy", "nll", "ece"):
            curve[name].append(found[name])
        run.console.poll()
    return curve


def _compute_scores(probs: NDArray, labels: NDArray, num_bins: int) -> list[ScoreGroup]:
    """Return accuracy, NLL and calibration errors of probs (N, K), the usual form of each first."""
    if labels.ndim == 2:  # several labels per example
        examples = compute_example_statistics(probs, labels, is_exclusive=False)
        return [*decision_scores(probs, examples), pooled_calibration(probs, labels, num_bins=num_bins)]
    examples = compute_example_statistics(probs, labels)
    return [*accuracy_nll_brier(examples), *calibration_scores(examples, num_bins=num_bins)]


@dataclass(frozen=True)
class Plot:
    """One figure of --plot: its file, its kind of curve, the split and, for ROC curves, the out-of-distribution split."""

    path: Path
    kind: str
    split: str
    ood: str | None = None


def plan_plots(run: Run, groups: Sequence[PredictionGroup], splits: Sequence[str], folder: Path) -> list[Plot]:
    """Return the figures that --plot will draw, after checking their paths.

    Raises:
        OutputExists: the folder cannot be written, or another file is in the way.
    """
    plots: dict[Path, Plot] = {}

    def add(kind: str, split: str, ood: str | None = None) -> None:
        path = folder / ("-".join([kind, split, *([ood] if ood else [])]) + ".png")
        plots.setdefault(path, Plot(path, kind, split, ood))

    for group in groups:
        for name, header in group.splits(is_ood=False).items():
            if splits and name not in splits:
                continue
            if header.meta.get("is_labeled") and header.meta["num_examples"]:
                add("reliability", name)
                if has_exclusive_classes(read_recorded_name(header.meta)):
                    add("risk-coverage", name)
                if is_latent(group.posterior_path):
                    add("density", name)
            for other, outside in group.splits(is_ood=True).items():
                if header.meta["num_examples"] and outside.meta["num_examples"]:
                    add("roc", name, other)
    for path in plots:
        check_figure_path(path, "--plot", force=run.write.force, others=[])
    return list(plots.values())


def is_latent(path: Path | None) -> bool:
    """True where the posterior in a file is a latent binary network."""
    return path is not None and path.is_file() and type_of(read_header(path)) == LATENT_BINARY


def draw_plots(run: Run, plots: Sequence[Plot], rows: Sequence[Row], *, score: str) -> Result:
    """Draw and publish the figures.

    Args:
        rows: evaluate's rows with all metrics. Those without `curves` (scores of the features) are not drawn.
        score: detection score of the ROC curves.

    Raises:
        WriteError: a figure could not be written; the scores are complete.
    """
    result = Result()
    for plot in plots:
        output: Row = {"role": f"plot.{plot.path.stem}", "path": str(plot.path)}
        if run.write.dry_run:
            output |= {"planned": "compute", "estimated_bytes": 1 << 17}
            result.add(Result("planned", [output], lines=[f"draw: {plot.path}"]))
            continue
        run.console.poll(f"plot {plot.path.name}")
        result.outputs.append(output | {"content_digest": _write(plot, _draw(plot, rows, score))})
    if plots and not run.write.dry_run:
        result.summary.append(f"{len(plots)} figures in {plots[0].path.parent}")
    return result


def _write(plot: Plot, figure: Figure) -> str:
    try:
        return write_figure(plot.path, render(figure, "png"))
    except WriteError as error:
        message = f"--plot: cannot write {plot.path}; the scores are complete, and --plot draws again without scoring"
        raise WriteError(message, hint=error.hint, path=plot.path) from None


def _draw(plot: Plot, rows: Iterable[Row], score: str) -> Figure:
    shown: dict[str, Row] = {}
    for row in rows:
        if row["split"] == plot.split and "curves" in row:
            title = posterior_title(row["posterior"], row["variant"], row.get("name"))
            shown[f"{title} ({row['variant']})" if title == row["posterior"] else title] = row
    if plot.kind == "roc":
        assert plot.ood is not None
        curves = {
            name: row["curves"]["roc"][plot.ood] for name, row in shown.items() if plot.ood in row["curves"]["roc"]
        }
        areas = {name: _value(shown[name], Quantity("auroc", (plot.ood, score))) for name in curves}
        return predictions.draw_roc(
            *predictions.merge_equal_curves(curves, areas), split=plot.split, ood=plot.ood, score=score
        )
    if plot.kind == "density":
        # One curve per posterior, whatever the integrator.
        own = {row["posterior"]: row for row in shown.values() if row.get("curves", {}).get("density")}
        return posteriors.draw_density(
            {name: row["curves"]["density"] for name, row in own.items()},
            {name: row["inclusion"] for name, row in own.items()},
            medians={name: _value(row, Quantity("density", ("median",))) for name, row in own.items()},
            split=plot.split,
        )
    key = plot.kind.replace("-", "_")
    curves = {name: row["curves"][key] for name, row in shown.items() if row["curves"][key] is not None}
    if plot.kind == "reliability":
        return predictions.draw_reliability(
            curves, split=plot.split, errors={name: _value(shown[name], Quantity("ece")) for name in curves}
        )

    areas = {name: _value(shown[name], Quantity("aurc")) for name in curves}
    return predictions.draw_risk_coverage(curves, split=plot.split, areas=areas)


def _value(row: Row, wanted: Quantity) -> float:
    """Return the value of a row's score in its usual form."""
    return float(find_metric(row["metrics"], wanted)[0]["value"])

"""The curves of evaluate: computed from the predictions for --curves, drawn into files for --plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import WriteError
from bnncli.evaluation.metric_rows import Row
from bnncli.likelihoods import has_exclusive_classes, recorded_name
from bnncli.names import posterior_title
from bnncli.options.scoring import Quantity
from bnncli.session.predictions import PredictionGroup
from bnncli.session.run import Result, Run
from bnncli.session.score_rows import PredictedSplit, find_metric
from bnncli.stages.evaluate.thinned import is_latent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_SIZE = 1 << 17  # of a figure, about


@dataclass(frozen=True)
class Plot:
    """One figure that --plot makes: its file, and which curves of which split, against which other split."""

    path: Path
    kind: str
    split: str
    ood: str | None = None


def curves_of(run: Run, group: PredictionGroup, splits: Sequence[str], *, score: str, num_bins: int) -> dict[str, Row]:
    """The curves of one posterior's predictions of each in-distribution split (all when none is named), by split.

    `reliability` and `risk_coverage` are None without labels, the latter of several labels an example too; `roc` has a curve by `score` for each out-of-distribution split.
    A split without examples has none of them, predictions without the score no `roc`.
    """
    from bnncli.evaluation.curves import reliability_of, risk_coverage_curve, roc_curve

    outside = [PredictedSplit(header) for header in group.splits(is_ood=True).values()]
    latent = group.posterior_path if is_latent(group.posterior_path) else None
    found = {}
    for name, header in group.splits(is_ood=False).items():
        if splits and name not in splits:
            continue
        run.console.poll(f"curves of {group.name}")
        split = PredictedSplit(header)
        examples = split.examples
        reliability = reliability_of(split.file.probs, examples, num_bins=num_bins)
        curves: Row = {"reliability": reliability, "risk_coverage": None, "roc": {}}
        if examples.is_right is not None and len(examples) > 0:
            curves["risk_coverage"] = risk_coverage_curve(examples.confidence, examples.is_right)
        for other in outside:
            inside, far = (one.detection_scores([score])[score] for one in (split, other))
            if not isinstance(inside, str) and not isinstance(far, str) and len(inside) and len(far):
                curves["roc"][other.name] = roc_curve(inside, far)
        if latent is not None:
            from bnncli.stages.evaluate.density import density_curve

            curves["density"] = density_curve(run, latent, name, num_bins=num_bins)
        found[name] = curves
    return found


def planned_plots(run: Run, groups: Sequence[PredictionGroup], splits: Sequence[str], folder: Path) -> list[Plot]:
    """The figures that --plot will make, once their paths are known to be free.

    Raises:
        OutputExists: the folder cannot be written, or a foreign file is in the way.
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
                if has_exclusive_classes(recorded_name(header.meta)):
                    add("risk-coverage", name)
                if is_latent(group.posterior_path):
                    add("density", name)
            for other, outside in group.splits(is_ood=True).items():
                if header.meta["num_examples"] and outside.meta["num_examples"]:
                    add("roc", name, other)
    for path in plots:
        check_figure_path(path, "--plot", force=run.write.force, others=[])
    return list(plots.values())


def draw_plots(run: Run, plots: Sequence[Plot], rows: Sequence[Row], *, score: str) -> Result:
    """Draw and publish the figures.

    Args:
        score: that ROC curves go by.
        rows: of evaluate, with all their metrics and with `curves`; one without (scores of the features) is not drawn.

    Raises:
        WriteError: a figure could not be written; the scores are complete.
    """
    result = Result()
    for plot in plots:
        output: Row = {"role": f"plot.{plot.path.stem}", "path": str(plot.path)}
        if run.write.dry_run:
            result.add(
                Result(
                    "planned", [output | {"planned": "compute", "estimated_bytes": _SIZE}], lines=[f"draw: {plot.path}"]
                )
            )
            continue
        run.console.poll(f"plot {plot.path.name}")
        result.outputs.append(output | {"content_digest": _write(plot, _draw(plot, rows, score))})
    if plots and not run.write.dry_run:
        result.summary.append(f"{len(plots)} figures in {plots[0].path.parent}")
    return result


def _draw(plot: Plot, rows: Iterable[Row], score: str) -> Figure:
    """The figure of one plot."""
    shown: dict[str, Row] = {}
    for row in rows:
        if row["split"] == plot.split and "curves" in row:  # the scores of features have none
            title = posterior_title(row["posterior"], row["variant"], row.get("name"))
            shown[f"{title} ({row['variant']})" if title == row["posterior"] else title] = row
    if plot.kind == "roc":
        from bnncli.figures import predictions

        assert plot.ood is not None
        curves = {
            name: row["curves"]["roc"][plot.ood] for name, row in shown.items() if plot.ood in row["curves"]["roc"]
        }
        areas = {name: _value(shown[name], Quantity("auroc", (plot.ood, score))) for name in curves}
        return predictions.draw_roc(*predictions.merged(curves, areas), split=plot.split, ood=plot.ood, score=score)
    if plot.kind == "density":
        from bnncli.figures import posteriors

        # One curve a posterior, whatever the integrator.
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
        from bnncli.figures import predictions

        return predictions.draw_reliability(
            curves, split=plot.split, errors={name: _value(shown[name], Quantity("ece")) for name in curves}
        )
    from bnncli.figures import predictions

    areas = {name: _value(shown[name], Quantity("aurc")) for name in curves}
    return predictions.draw_risk_coverage(curves, split=plot.split, areas=areas)


def _value(row: Row, wanted: Quantity) -> float:
    """The value of a score of a row in its usual form."""
    return float(find_metric(row["metrics"], wanted)[0]["value"])


def _write(plot: Plot, figure: Figure) -> str:
    from bnncli.figures import render

    try:
        return write_figure(plot.path, render(figure, "png"))
    except WriteError as error:
        message = f"--plot: cannot write {plot.path}; the scores are complete, and --plot draws again without scoring"
        raise WriteError(message, hint=error.hint, path=plot.path) from None

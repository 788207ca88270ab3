"""The figure of compare --plot: what it shows of a comparison, and its file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.errors import WriteError
from bnncli.evaluation.scores import declared
from bnncli.session.run import Result, Run
from bnncli.stages.compare.measure import Column
from bnncli.stages.compare.tables import Comparison, score_titles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bnncli.figures.scores import Line, ScorePanel

_SIZE = 1 << 17  # of a figure, about
_BETTER = {True: ", higher is better", False: ", lower is better", None: ""}


def planned_plot(run: Run, folder: str, split: str) -> Path:
    """The file that --plot will make, once it is known to be free.

    Raises:
        OutputExists: the folder cannot be written, or a foreign file is in the way.
    """
    path = Path(folder) / f"compare-{split}.png"
    check_figure_path(path, "--plot", force=run.write.force, others=[])
    return path


def planned_result(path: Path) -> Result:
    """What --dry-run says of the figure."""
    output = {**_output(path), "planned": "compute", "estimated_bytes": _SIZE}
    return Result("planned", [output], lines=[f"draw: {path}"])


def draw_plot(run: Run, path: Path, comparison: Comparison) -> Result:
    """Draw and publish the figure.

    Raises:
        WriteError: it could not be written.
    """
    from bnncli.figures import render

    run.console.poll(f"plot {path.name}")
    try:
        digest = write_figure(path, render(_draw(comparison), "png"))
    except WriteError as error:
        raise WriteError(f"--plot: cannot write {path}", hint=error.hint, path=path) from None
    output: dict[str, Any] = _output(path) | {"content_digest": digest}
    return Result("computed", [output], summary=[f"figure: {path}"])


def _output(path: Path) -> dict[str, Any]:
    return {"role": f"plot.{path.stem}", "path": str(path)}


def _draw(comparison: Comparison) -> Figure:
    from bnncli.figures import scores as figure

    many, level = comparison.num_checkpoints > 1, 100 * (1 - comparison.alpha)
    what = f"{comparison.num_checkpoints} checkpoints" if many else f"{comparison.num_examples} examples"
    baseline = comparison.baseline
    zero = None if baseline is None else comparison.names[baseline].folder
    marked, plain = (
        ("best, or not significantly worse", "significantly worse than another")
        if zero is None
        else (f"significantly different from {zero}", "not significantly different")
    )
    shown = "means" if many else "values"
    subject = f"{shown} of scores" if zero is None else f"differences from {zero}"
    title = f"{subject[0].upper()}{subject[1:]} on {comparison.split} ({what}) with {level:g}% intervals"
    tests = (
        f"marks by paired tests at level {comparison.alpha:g}, jointly over each panel; each interval holds on its own"
    )
    return figure.draw_comparison(
        score_panels(comparison), labels(comparison), title=title, marked=marked, plain=plain, tests=tests, zero=zero
    )


def score_panels(comparison: Comparison) -> list[ScorePanel]:
    """A panel for each score, a line for each posterior."""
    from bnncli.figures.scores import ScorePanel

    return [
        ScorePanel(
            title + _BETTER[column.row["higher_is_better"]],
            [_line(comparison, column, place, row) for row in range(len(comparison.names))],
        )
        for place, (title, column) in enumerate(zip(score_titles(comparison), comparison.columns, strict=True))
    ]


def labels(comparison: Comparison) -> list[str]:
    """Posteriors by name, with the integrator where one has several."""
    times = Counter(name.cells[0] for name in comparison.names)
    return [
        name.cells[0] if times[name.cells[0]] == 1 else f"{name.cells[0]} ({name.variant})" for name in comparison.names
    ]


def _line(comparison: Comparison, column: Column, place: int, row: int) -> Line:
    """One posterior of one panel: its score, or its difference from the baseline."""
    from bnncli.figures.scores import Line

    sample, standing = column.entries[row].samples, comparison.standings[place][row]
    base = None if comparison.baseline is None else column.entries[comparison.baseline].samples
    if sample is None or (comparison.baseline is not None and base is None):
        return Line((), None, None, False)
    if row == comparison.baseline:
        return Line((), 0.0, None, False)
    is_marked = comparison.is_marked(place, row)
    values = sample.values if base is None else sample.values - base.values
    points = tuple(values.tolist()) if len(values) > 1 else ()
    if base is None:
        return Line(
            points, sample.mean, _possible(sample.interval(1 - comparison.alpha), sample.mean, column), is_marked
        )
    against = standing.against
    if against is None or against.low is None or against.high is None:
        return Line(points, float(values.mean()), None, is_marked)
    return Line(points, against.value, (against.low, against.high), is_marked)


def _possible(interval: tuple[float, float] | None, value: float, column: Column) -> tuple[float, float] | None:
    """The part of an interval that the score can have at all: those of Student over two checkpoints reach far beyond."""
    score = declared().get(str(column.row["name"]))
    if interval is None or score is None:
        return interval
    low, high = score.limits  # a form that is no usual one may pass them: never its own value
    return max(interval[0], min(low, value)), min(interval[1], max(high, value))

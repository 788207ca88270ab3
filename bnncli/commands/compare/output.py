"""Print compare's result as a table, CSV, Markdown, LaTeX or JSON, and draw its figure."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.artifacts.outputs import check_figure_path, write_figure
from bnncli.commands.compare.measure import Column
from bnncli.errors import WriteError
from bnncli.evaluation.comparison import Difference, Sample, Standing, correlation
from bnncli.evaluation.scores import all_scores
from bnncli.figures import render
from bnncli.figures import scores as figure
from bnncli.figures.scores import Line, ScorePanel
from bnncli.names import percent, posterior_title
from bnncli.session.costs import HEAD, NETWORK, TotalCost
from bnncli.session.run import Result, Run, Table
from bnncli.session.score_tables import score_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bnncli.figures.scores import Line, ScorePanel


MARKED = "marked:"  # in a note, in place of the mark
_FEW_EXAMPLES = 3000  # with which the level of the confidence set may be off
_NAMES = ("posterior", "integrator", "draws")
_COST = "gradient passes"
UNKNOWN = TotalCost(None, None, None)


class Name(NamedTuple):
    """Name of predictions: their folder, posterior, integrator and variant.

    draws: number of draws they average over; None where nothing is sampled, or checkpoints differ.
    cost: cost of the first checkpoint's posterior.
    """

    folder: str
    posterior: str
    integrator: str
    variant: str
    draws: int | None = None
    cost: TotalCost = UNKNOWN

    @property
    def cells(self) -> list[str]:
        """Return the posterior, with the folder if its name differs, the variant and the draws."""
        shown = "-" if self.draws is None else str(self.draws)
        return [posterior_title(self.posterior, self.variant, self.folder), self.variant, shown]

    @property
    def cost_cell(self) -> str:
        """Return the gradient passes and what they went through, including the checkpoint's training if known."""
        cost = self.cost
        if cost.head is None or cost.network is None:
            return "unknown"
        parts = [(cost.network + (cost.training or 0.0), NETWORK), (cost.head, HEAD)]
        return (
            " + ".join(
                f"{passes:,.4g} {name}" if passes < 100 else f"{passes:,.0f} {name}" for passes, name in parts if passes
            )
            or "0"
        )


@dataclass(frozen=True)
class Comparison:
    """Scores of all posteriors, and how each compares within its column.

    Args:
        names: name of each row.
        standings: column by column, the standing of each row.
        num_examples: examples of the split, for the first checkpoint.
        num_groups: groups that are resampled; None if examples are.
        baseline: row that all are compared with; None for the best of each column.
        shows_cost: True to show a column of costs.
        recommendation: auto's recommendation in words, for a single checkpoint.
    """

    names: list[Name]
    columns: list[Column]
    standings: list[list[Standing]]
    split: str
    num_examples: int
    num_checkpoints: int
    replicates: int
    alpha: float
    baseline: int | None
    num_groups: int | None = None
    shows_cost: bool = False
    recommendation: str | None = None

    @property
    def heads(self) -> list[str]:
        """Return the titles of the columns before the scores."""
        return [*_NAMES, *([_COST] if self.shows_cost else [])]

    def cells_of(self, name: Name) -> list[str]:
        """Return the cells of a row before the scores."""
        return [*name.cells, *([name.cost_cell] if self.shows_cost else [])]

    def is_marked(self, column: int, row: int) -> bool:
        """True for a number that is not shown to be worse than any or, with a baseline, differs from it significantly."""
        standing = self.standings[column][row]
        if self.baseline is None:
            return standing.is_close
        return standing.p_adjusted is not None and standing.p_adjusted <= self.alpha

    def tells_apart(self, column: int) -> bool:
        """True where marks in a column are informative: some number is shown to be worse, or there is one row, or a baseline."""
        if self.baseline is not None:
            return True
        entries, standings = self.columns[column].entries, self.standings[column]
        close = [one.is_close for one, entry in zip(standings, entries, strict=True) if entry.samples is not None]
        return len(close) < 2 or not all(close)

    def note(self) -> str:
        """Return what the numbers and the marks mean."""
        if self.num_checkpoints > 1:
            parts = [f"split {self.split}, mean +- standard error over {self.num_checkpoints} checkpoints"]
        else:
            units = f"{self.num_examples} examples"
            units = units if self.num_groups is None else f"{self.num_groups} groups of {units}"
            parts = [f"split {self.split}, value +- standard error over {units}"]
        scores = list(
            dict.fromkeys(
                str(column.row["score"]) for column in self.columns if "score" in column.row and "ood" in column.row
            )
        )
        if scores:
            parts.append(f"detection by {', '.join(scores)}")
        if self.shows_cost:
            is_known = all(name.cost.training is not None for name in self.names)
            parts.append(f"{_COST} {'with' if is_known else 'without'} the checkpoint's training")
        level = percent(self.alpha, "g")
        if self.baseline is not None:
            parts[0] += (
                f" for {self.names[self.baseline].folder}; for the others, the difference from it with a "
                f"{percent(1 - self.alpha, 'g')} interval"
            )
            return "; ".join([*parts, f"{MARKED} significantly different (Holm, family-wise {level} per column)"])
        about = "about " * (self.num_checkpoints == 1 and (self.num_groups or self.num_examples) < _FEW_EXAMPLES)
        parts.append(f"{MARKED} best, or not significantly worse (family-wise {about}{level} per column)")
        untold = [title for place, title in enumerate(format_score_titles(self)) if not self.tells_apart(place)]
        return "; ".join([*parts, *([f"no significant difference in {', '.join(untold)}"] if untold else [])])

    def unknown_errors(self) -> list[str]:
        """Return a note on unknown integration errors, which count as zero."""
        if self.num_checkpoints > 1:
            return []
        whose: dict[str, dict[str, None]] = {}
        for column in self.columns:
            for name, entry in zip(self.names, column.entries, strict=True):
                if entry.samples is not None and entry.integration_unknown is not None:
                    whose.setdefault(entry.integration_unknown, {})[f"{column.form} of {name.folder}"] = None
        return [
            f"integration error unknown and ignored: {', '.join(scores)} ({reason})" for reason, scores in whose.items()
        ]


def build_table(comparison: Comparison) -> Table:
    """Return the table for people. Marks are leading stars, so that numbers stay aligned."""
    titles = format_score_titles(comparison)
    cells = _format_cells(comparison, lambda text, is_marked: f"{'*' if is_marked else ' '} {text}", sign="+-")
    names, heads = [comparison.cells_of(name) for name in comparison.names], comparison.heads
    narrow = [
        Table([*heads, title], [[*name, row[place]] for name, row in zip(names, cells, strict=True)])
        for place, title in enumerate(titles)
    ]
    rows = [[*name, *row] for name, row in zip(names, cells, strict=True)]
    return Table([*heads, *titles], rows, notes=[comparison.note().replace(MARKED, "*")], narrow=narrow)


def format_markdown(comparison: Comparison) -> list[str]:
    """Return a Markdown table with marked numbers in bold, and the notes below."""
    cells = _format_cells(comparison, lambda text, is_marked: f"**{text}**" if is_marked else text, sign="±")
    head = [*comparison.heads, *format_score_titles(comparison)]
    lines = [head, ["---", "---", *("---:" for _ in head[2:])]]
    lines += [[*comparison.cells_of(name), *row] for name, row in zip(comparison.names, cells, strict=True)]
    table = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]
    note = comparison.note().replace("+-", "±").replace(MARKED, "bold:")
    return [*table, "", f"{note[0].upper()}{note[1:]}."]


def format_latex(comparison: Comparison) -> list[str]:
    """Return a LaTeX tabular for booktabs with marked numbers in bold. The notes are comments."""

    def mark(text: str, is_marked: bool) -> str:
        value, sign, rest = text.partition(r" \pm ")
        whole = rf"\mathbf{{{value}}}{sign}{rest}" if is_marked else text
        return f"${whole}$" if text != "-" else "--"

    cells = _format_cells(comparison, mark, sign=r"\pm")
    arrows = [r"$\uparrow$" if column.row["higher_is_better"] else r"$\downarrow$" for column in comparison.columns]
    arrows = [
        "" if column.row["higher_is_better"] is None else arrow
        for column, arrow in zip(comparison.columns, arrows, strict=True)
    ]
    titles = [
        f"{_escape_latex(t)} {arrow}".strip() for t, arrow in zip(format_score_titles(comparison), arrows, strict=True)
    ]
    lines = [r"% needs \usepackage{booktabs}", f"% {comparison.note().replace(MARKED, 'bold:')}"]
    heads = comparison.heads
    lines += [rf"\begin{{tabular}}{{ll{'r' * (len(heads) - 2 + len(titles))}}}", r"\toprule"]
    lines += [" & ".join([*heads, *titles]) + r" \\", r"\midrule"]
    for name, row in zip(comparison.names, cells, strict=True):
        lines.append(" & ".join([*map(_escape_latex, comparison.cells_of(name)), *row]) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _format_cells(comparison: Comparison, mark: Callable[[str, bool], str], *, sign: str) -> list[list[str]]:
    """Return the numbers of each row, with marks."""
    rows = []
    for place in range(len(comparison.names)):
        row = []
        for number, column in enumerate(comparison.columns):
            text = _format_score(
                column.entries[place].samples, comparison.standings[number][place], comparison.baseline, sign
            )
            row.append(mark(text, comparison.is_marked(number, place) and comparison.tells_apart(number)))
        rows.append(row)
    return rows


def _format_score(sample: Sample | None, standing: Standing, baseline: int | None, sign: str) -> str:
    if sample is None:
        return "-"
    if baseline is None or standing.against is None:
        return _format_number(sample.mean) + _format_error(sample.standard_error, sign)
    against = standing.against
    text = _format_number(against.value, is_signed=True)
    if against.low is None or against.high is None or against.p_value is None:
        return text
    ends = f"[{_format_number(against.low, is_signed=True)}, {_format_number(against.high, is_signed=True)}]"
    return f"{text} {ends} p={against.p_value:.2g}" if sign != r"\pm" else rf"{text}\;{ends}"


_DIGITS = 4


def _format_number(value: float, *, is_signed: bool = False) -> str:
    rounded = round(value, _DIGITS) + 0.0  # + 0.0: no minus before a zero
    return f"{rounded:+.{_DIGITS}f}" if is_signed else f"{rounded:.{_DIGITS}f}"


def _format_error(value: float | None, sign: str) -> str:
    return "" if value is None else f" {sign} {value:.{_DIGITS}f}"


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: f"\\{c}" for c in "&%$#_{}"
}


def _escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(_LATEX.get(char, char) for char in text)


_FIELDS = (
    "value", "standard_error", "integration_error", "is_best", "is_close", "difference", "difference_standard_error", "low", "high", "p_value", "p_adjusted",
)  # fmt: skip


def format_csv(comparison: Comparison) -> list[str]:
    """Return one line per posterior and score, with all digits; empty where undefined."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*_NAMES, "split", "score", *_FIELDS])
    for name, scores in zip(comparison.names, _documents(comparison), strict=True):
        for column, score in zip(comparison.columns, scores, strict=True):
            values = [score[key] for key in _FIELDS]
            shown = ["" if v is None else str(v).lower() if isinstance(v, bool) else v for v in values]
            writer.writerow([*name.cells[:2], name.draws or "", comparison.split, column.form, *shown])
    return stream.getvalue().splitlines()


def build_json(comparison: Comparison) -> dict[str, Any]:
    """Return the keys of the JSON document."""
    rows = [
        {
            "name": name.folder,
            "posterior": name.posterior,
            "integrator": name.integrator,
            "variant": name.variant,
            "draws": name.draws,
            "cost": name.cost.to_json(),
            "split": comparison.split,
            "scores": scores,
        }
        for name, scores in zip(comparison.names, _documents(comparison), strict=True)
    ]
    many = comparison.num_checkpoints > 1
    units = "examples" if comparison.num_groups is None else "groups"
    return {
        "rows": rows,
        "baseline": None if comparison.baseline is None else comparison.names[comparison.baseline].folder,
        "alpha": comparison.alpha,
        "adjustment": "of being among the best: step-down over all pairs of a column"
        if comparison.baseline is None
        else "of no difference: holm, over the comparisons of a column",
        "test": "paired t over checkpoints" if many else f"paired bootstrap over {units}, symmetric",
        **({} if comparison.num_groups is None else {"resampled": "groups", "num_groups": comparison.num_groups}),
        "replicates": None if many else comparison.replicates,
        "num_checkpoints": comparison.num_checkpoints,
    }


def _documents(comparison: Comparison) -> list[list[dict[str, Any]]]:
    """Return the scores of each row: definition, value and standing. Differences are own minus the other."""
    found = []
    for place in range(len(comparison.names)):
        scores = []
        for column, standings in zip(comparison.columns, comparison.standings, strict=True):
            entry, standing = column.entries[place], standings[place]
            known = entry.samples
            against = standing.against or Difference(0.0)
            score: dict[str, Any] = {**column.row, "form": column.form}
            score["value"] = None if known is None else known.mean
            score["standard_error"] = None if known is None else known.standard_error
            score["integration_error"] = None if known is None else known.integration_error
            if score["integration_error"] is None:
                score["integration_unknown"] = entry.integration_unknown or entry.undefined
            score["values"] = None if known is None else known.values.tolist()
            score["correlations"] = None if known is None else _correlations(comparison, column, known)
            score |= {"is_best": standing.is_best, "is_close": standing.is_close}
            score["difference"] = None if standing.against is None else against.value
            score["difference_standard_error"] = against.standard_error
            score |= {"low": against.low, "high": against.high}
            score |= {"p_value": against.p_value, "p_adjusted": standing.p_adjusted}
            if known is None:
                score["undefined"] = entry.undefined
            scores.append(score)
        found.append(scores)
    return found


def _correlations(comparison: Comparison, column: Column, known: Sample) -> dict[str, float] | None:
    """Return correlations over examples with each posterior's score, by name; None for several checkpoints, or without resampling."""
    pairs = zip(comparison.names, column.entries, strict=True)
    found = {name.folder: correlation(known, other.samples) for name, other in pairs if other.samples is not None}
    return {name: one for name, one in found.items() if one is not None} or None


def plan_plot(run: Run, folder: str, split: str) -> Path:
    """Return the file of --plot, after checking that it may be written.

    Raises:
        OutputExists: the folder cannot be written, or another file is in the way.
    """
    path = Path(folder) / f"compare-{split}.png"
    check_figure_path(path, "--plot", force=run.write.force, others=[])
    return path


_SIZE = 1 << 17  # of a figure, about


def build_dry_run_result(path: Path) -> Result:
    """Return the result of --dry-run for the figure."""
    output = {**_output(path), "planned": "compute", "estimated_bytes": _SIZE}
    return Result("planned", [output], lines=[f"draw: {path}"])


def draw_plot(run: Run, path: Path, comparison: Comparison) -> Result:
    """Draw and publish the figure.

    Raises:
        WriteError: the figure could not be written.
    """

    run.console.poll(f"plot {path.name}")
    try:
        digest = write_figure(path, render(_draw(comparison), "png"))
    except WriteError as error:
        raise WriteError(f"--plot: cannot write {path}", hint=error.hint, path=path) from None
    output: dict[str, Any] = _output(path) | {"content_digest": digest}
    return Result("computed", [output], summary=[f"figure: {path}"])


def _draw(comparison: Comparison) -> Figure:
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
        score_panels(comparison),
        format_labels(comparison),
        title=title,
        marked=marked,
        plain=plain,
        tests=tests,
        zero=zero,
    )


_BETTER = {True: ", higher is better", False: ", lower is better", None: ""}


def score_panels(comparison: Comparison) -> list[ScorePanel]:
    """Return a panel for each score, with a line for each posterior."""

    return [
        ScorePanel(
            title + _BETTER[column.row["higher_is_better"]],
            [_line(comparison, column, place, row) for row in range(len(comparison.names))],
        )
        for place, (title, column) in enumerate(zip(format_score_titles(comparison), comparison.columns, strict=True))
    ]


def _line(comparison: Comparison, column: Column, place: int, row: int) -> Line:
    """Return one posterior's line in a panel: its score, or its difference from the baseline."""

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
            points, sample.mean, _clip_interval(sample.interval(1 - comparison.alpha), sample.mean, column), is_marked
        )
    against = standing.against
    if against is None or against.low is None or against.high is None:
        return Line(points, float(values.mean()), None, is_marked)
    return Line(points, against.value, (against.low, against.high), is_marked)


def _clip_interval(interval: tuple[float, float] | None, value: float, column: Column) -> tuple[float, float] | None:
    """Clip an interval to the score's range. Student intervals over two checkpoints reach far beyond it."""
    score = all_scores().get(str(column.row["name"]))
    if interval is None or score is None:
        return interval
    low, high = score.limits  # a form that is no usual one may pass them: never its own value
    return max(interval[0], min(low, value)), min(interval[1], max(high, value))


def format_score_titles(comparison: Comparison) -> list[str]:
    """Return the title of each column: its score and the choices that tell it from others."""
    return [" ".join([score_title(column.row), *column.form.split(":")[1:]]) for column in comparison.columns]


def format_labels(comparison: Comparison) -> list[str]:
    """Return the labels of posteriors, with the integrator where one has several."""
    times = Counter(name.cells[0] for name in comparison.names)
    return [
        name.cells[0] if times[name.cells[0]] == 1 else f"{name.cells[0]} ({name.variant})" for name in comparison.names
    ]


def _output(path: Path) -> dict[str, Any]:
    return {"role": f"plot.{path.stem}", "path": str(path)}

"""Judge a recipe's cells and claims by what was measured, and write the results as JSON, a page, figures and tables."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.outputs import write_figure
from bnncli.evaluation.comparison import LEVEL, Agreement, Estimate, agreement
from bnncli.evaluation.curves import density_grid, estimate_density, quantile_indices, standardised_distances
from bnncli.figures import render
from bnncli.figures.fits import draw_measured_lines
from bnncli.figures.posteriors import Marginal, Marginals
from bnncli.names import count_noun
from bnncli.numerics import random as seeds
from bnncli.papers import BOTH
from bnncli.papers.figures import Pair, build_line, draw_agreement
from bnncli.papers.numbers import Numbers, Replicates, Unmeasured, list_names
from bnncli.papers.recipe import Cell, Claim, LineFigure, MarginalFigure, PaperRecipe, Results, Row
from bnncli.papers.runner import ExperimentRun, StudyRun, Workshop
from bnncli.session.inputs import open_posterior
from bnncli.session.run import Run, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPRODUCED, DIFFERS, NOT_RUN = "reproduced", "differs", "not runnable here"
SHOWN = "shown"  # measured, and not judged
HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
SCHEMA = "bnncli.reproduce/1"
RULE = (
    "reproduced: |ours - published| is at most the tolerance plus k times the combined standard error; k is the "
    f"quantile of Student's t that two estimates of one number exceed with probability {LEVEL:g}"
)
CLAIM_RULE = (
    f"holds or does not hold: chance alone would give this verdict with a probability of at most {LEVEL / 2:g}; "
    "otherwise open. Scores of the same examples are compared in pairs, which their standard errors do not "
    "show. Numbers without a standard error are taken as exact; a standard error of 0 leaves the claim open"
)
COLUMNS = ["row", "column", "published", "ours", "tolerance", "k", "verdict"]
_OF_SEVERAL = {DIFFERS: "differ", HOLDS: "hold", FAILS: "do not hold"}

# Of densities of single weights.
_SHARES = (1.0, 0.9, 0.5, 0.1)  # of the weights in order of how far posteriors lie apart, 1 being the furthest
_DRAWS = 2000  # of a posterior that is no sample: a density of so many looks as it is
_GRID = 241
_REACH = 6.0  # standard deviations of the reference beyond the furthest mean: Laplace as published is tens of them wide


# Verdicts.


@dataclass(frozen=True)
class JudgedCell:
    """A cell by one definition (published, right, or empty if there is one), or why it was not judged.

    Args:
        ours: None if it could not be measured.
        judged: None if it was not measured, or only shown.
    """

    cell: Cell
    definition: str
    ours: Estimate | None
    judged: Agreement | None
    why: str

    @property
    def status(self) -> str:
        """reproduced, differs, shown or not runnable here."""
        if self.judged is None:
            return NOT_RUN if self.ours is None else SHOWN
        return REPRODUCED if self.judged.is_within else DIFFERS

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the results."""
        judged, formula = self.judged, self.cell.formulas.get(self.definition)
        cell = self.cell
        return {
            "row": cell.row, "column": cell.column, "definition": self.definition or None, "formula": formula,
            "published": _json(cell.published), "ours": None if self.ours is None else _json(self.ours),
            "tolerance": cell.tolerance, "because": cell.because, "factor": None if judged is None else judged.factor,
            "distance": None if judged is None else judged.distance, "allowed": None if judged is None else judged.allowed,
            "status": self.status, "why": self.why or None,
        }  # fmt: skip

    def texts(self, column: str) -> list[str]:
        """Return its row of a table for people; `column` says how a definition stands beside the column's name."""
        cell, factor = self.cell, "" if self.judged is None else f"{self.judged.factor:.2f}"
        name = column.format(cell.column, self.definition) if self.definition else cell.column
        ours = "" if self.ours is None else format_number(self.ours)
        verdict = f"{self.status}: {self.why}" if self.why else self.status
        return [cell.row, name, format_number(cell.published), ours, f"{cell.tolerance:g}", factor, verdict]


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its verdict: holds, does not hold, open, shown or not runnable here.

    Args:
        numbers: that decided.
        why: in the last two cases, and if a standard error of 0 leaves it open.
    """

    claim: Claim
    verdict: str
    numbers: Mapping[str, Estimate]
    why: str

    @property
    def reason(self) -> str:
        """The numbers that decided, and why they did not."""
        numbers = ", ".join(f"{name} {format_number(value)}" for name, value in self.numbers.items())
        return "; ".join(part for part in (numbers, self.why) if part)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the results."""
        claim, numbers = self.claim, {name: _json(one) for name, one in self.numbers.items()}
        return {
            "id": claim.name, "text": claim.text, "where": claim.where, "rule": claim.rule, "verdict": self.verdict,
            "numbers": numbers, "why": self.why or None,
        }  # fmt: skip


def judge_cell(
    cell: Cell, numbers: Numbers, *, scale: str, definitions: str, absent: Mapping[str, str]
) -> list[JudgedCell]:
    """Judge a cell by each of the definitions that were asked for; `absent` are optional files, by name, with what to give."""
    if cell.unavailable is not None:
        return [JudgedCell(cell, "", None, None, cell.unavailable)]
    found = []
    for definition, formula in cell.formulas.items():
        if definition not in ("", definitions) and definitions != BOTH:
            continue
        ours, judged, why = None, None, ""
        try:
            _check_files(cell, absent)
            ours = numbers.estimate(formula)
            judged = agreement(ours, cell.published, cell.tolerance)
            if scale in cell.not_at:
                why = cell.not_at[scale]
            elif judged.is_within and 0 < abs(cell.published.value) <= cell.tolerance:
                why = f"the tolerance ({cell.tolerance:g}) is as large as the number, so a match would mean nothing"
        except Unmeasured as error:
            why = error.message
        found.append(JudgedCell(cell, definition, ours, None if why else judged, why))
    return found


def judge_claim(claim: Claim, numbers: Numbers, *, scale: str, absent: Mapping[str, str]) -> JudgedClaim:
    """Judge a claim; `absent` as of judge_cell."""
    try:
        _check_files(claim, absent)
        holds = numbers.decide(claim.rule)
    except Unmeasured as error:
        return JudgedClaim(claim, NOT_RUN, {}, error.message)
    known = {name: numbers.estimate(name) for name in list_names(claim.rule)}
    if scale in claim.not_at:
        return JudgedClaim(claim, SHOWN, known, claim.not_at[scale])
    constant = numbers.constants(claim.rule) if holds is None else []
    why = f"the standard error of {', '.join(constant)} is 0, so chance cannot be judged" if constant else ""
    return JudgedClaim(claim, OPEN if holds is None else HOLDS if holds else FAILS, known, why)


def _check_files(row: Cell | Claim, absent: Mapping[str, str]) -> None:
    if lacking := [absent[name] for name in row.needs if name in absent]:
        raise Unmeasured("; ".join(lacking))


def format_counts(counts: Mapping[str, int]) -> str:
    """Say how many there are of each verdict: 3 hold, 1 does not hold."""
    return ", ".join(
        f"{count} {verdict if count == 1 else _OF_SEVERAL.get(verdict, verdict)}" for verdict, count in counts.items()
    )


def _json(one: Estimate) -> dict[str, Any]:
    return {"value": one.value, "standard_error": one.standard_error, "count": one.count or None}


def format_number(one: Estimate) -> str:
    """Write a number with its standard error for people."""
    value = f"{one.value:.4g}"
    return value if one.standard_error is None else f"{value} ± {one.standard_error:.2g}"


# What came of a recipe.


@dataclass(frozen=True)
class Outcome:
    """A recipe, judged.

    Args:
        lacking: required files that are missing, and what to give, in a line; empty if all are there.
        missing: every file that is missing, optional ones as well, with what it is and what to give.
    """

    recipe: PaperRecipe
    rows: Sequence[Row]
    numbers: Numbers
    cells: list[JudgedCell]
    claims: list[JudgedClaim]
    studies: list[StudyRun]
    experiment: ExperimentRun
    lacking: str
    missing: list[str]
    seconds: float
    seed: int

    @property
    def differs(self) -> list[str]:
        """Cells that differ and claims that do not hold, in words."""
        cells = [f"{one.cell.row} / {one.cell.column}" for one in self.cells if one.status == DIFFERS]
        return [*cells, *(one.claim.name for one in self.claims if one.verdict == FAILS)]

    @property
    def did_run(self) -> bool:
        """Whether anything could be measured."""
        return any(one.ours is not None for one in self.cells) or any(one.verdict != NOT_RUN for one in self.claims)

    @property
    def failed(self) -> list[str]:
        """Lines of its studies that failed, with why."""
        return [f"{done.line}: {done.why}" for study in self.studies for done in study.ended if done.why is not None]

    @property
    def line_figures(self) -> list[tuple[LineFigure, dict[str, dict[float, Estimate]]]]:
        """Return the figures with a measured line, and the numbers of each line by place."""
        found = []
        for figure in (row for row in self.rows if isinstance(row, LineFigure)):
            lines: dict[str, dict[float, Estimate]] = {}
            for name, formulas in figure.lines.items():
                for x, formula in zip(figure.x, formulas, strict=True):
                    with suppress(Unmeasured):
                        estimate = self.numbers.estimate(formula)
                        lines.setdefault(name, {})[float(x)] = estimate
            found += [(figure, lines)] if lines else []
        return found

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many cells and claims there are of each verdict."""
        cells, claims = Counter(one.status for one in self.cells), Counter(one.verdict for one in self.claims)
        return {"cells": dict(cells), "claims": dict(claims)}

    def summarize(self) -> list[str]:
        """Say how many cells and claims there are of each verdict."""
        return [format_counts(count) or "none" for count in self.counts().values()]

    def figures(self) -> dict[str, Figure]:
        """Draw published numbers beside ours, the recipe's figures, and those of its experiment."""
        found: dict[str, Figure] = {}
        columns: dict[str, list[Pair]] = {}
        for one in self.cells:
            name = f"{one.cell.row} ({one.definition})" if one.definition else one.cell.row
            columns.setdefault(one.cell.column, []).append(Pair(name, one.cell.published, one.ours, one.cell.tolerance))
        panels = [(name, pairs) for name, pairs in columns.items() if any(pair.ours is not None for pair in pairs)]
        if panels:
            found["numbers"] = draw_agreement(panels, title=self.recipe.title)
        for figure, lines in self.line_figures:
            shown = {name: build_line(points) for name, points in lines.items()}
            labels = {"title": figure.title, "x_label": figure.x_label, "y_label": figure.y_label}
            found[figure.name] = draw_measured_lines(shown, **labels, log=figure.log)
        if self.experiment.measured is not None:
            assert self.recipe.experiment is not None
            draw = self.recipe.experiment.find("draw")
            found |= {} if draw is None else draw(self.experiment.measured, self.experiment.settings)
        for row in self.rows:
            if isinstance(row, MarginalFigure):
                folder = next(one for one in self.studies if one.study is row.study).posteriors
                densities = None if folder is None else marginals(row, folder, seed=self.seed)
                found |= {} if densities is None else {row.name: densities.draw()}
        return found


def judge_recipe(workshop: Workshop, recipe: PaperRecipe) -> Outcome:
    """Judge a recipe whose parts were made; it has the seconds of those that no recipe before has."""
    options, places, scale, start = workshop.options, workshop.places, workshop.options.scale, time.monotonic()
    studies, experiment = [workshop.study(one) for one in recipe.studies], workshop.experiment(recipe)
    rows, numbers = read_rows(recipe, studies, experiment)
    needs = [part.needs[scale] for part in (recipe, *recipe.studies)]
    optional = {name: file for one in needs for name, file in one.optional.items()}
    absent = {name: said for name, file in optional.items() if (said := places.missing([file]))}
    cells: list[JudgedCell] = []
    for row in rows:
        if isinstance(row, Cell):
            cells += judge_cell(row, numbers, scale=scale, definitions=options.definitions, absent=absent)
    claims = [judge_claim(row, numbers, scale=scale, absent=absent) for row in rows if isinstance(row, Claim)]
    lacks = [study.why for study in studies] + [workshop.missing(recipe)]
    files = dict.fromkeys(file for one in needs for part in (one.required, one.optional) for file in part.values())
    took = sum(workshop.made[part].seconds for part in recipe.parts if part not in workshop.counted)
    workshop.counted |= {*recipe.parts}
    return Outcome(
        recipe, rows, numbers, cells, claims, studies, experiment,
        lacking="; ".join(dict.fromkeys(one for one in lacks if one)), missing=places.missing_each(files),
        seconds=round(took + time.monotonic() - start, 2), seed=workshop.run.compute.seed,
    )  # fmt: skip


def read_rows(recipe: PaperRecipe, studies: Sequence[StudyRun], experiment: ExperimentRun) -> tuple[list[Row], Numbers]:
    """Run a recipe's function, and read its numbers from what its studies and its experiment have measured."""
    results, by_study = Results(), {one.study: one for one in studies}
    rows = list(recipe.declared(results))
    found: dict[str, Replicates] = {}
    why: dict[str, str] = {}
    for name, reading in results.readings.items():
        try:
            found[name] = by_study[reading.study].replicates(reading)
        except Unmeasured as error:
            why[name] = error.message
    correlations: dict[tuple[str, str], float] = {}
    for study, one in by_study.items():
        correlations |= one.correlations(
            {name: results.readings[name] for name in found if results.readings[name].study is study}
        )
    if experiment.measured is not None:
        found |= {name: (value,) for name, value in experiment.measured.values.items()}
    return rows, Numbers(found, why, otherwise=experiment.why or "", correlations=correlations)


# Densities of single weights that nobody picked.


def marginals(figure: MarginalFigure, folder: Path, *, seed: int) -> Marginals | None:
    """Return the densities of the posteriors in a folder; None if it lacks one of them."""
    draws = {}
    for called, name in figure.posteriors.items():
        path = next((one for end in ("nc", "safetensors") if (one := folder / f"{name}.{end}").is_file()), None)
        if path is None:
            return None
        draws[called] = _draws(path, seed=seed)
    reference, *others = draws
    distances = standardised_distances(draws[reference], {called: draws[called] for called in others})
    panels = [_panel(index, distances[index], draws) for index in quantile_indices(distances, _SHARES)]
    shares = ", ".join(f"{100 * share:g}%" for share in _SHARES[1:])
    how = (
        f"The first weight is the one where a posterior differs most from {reference}; the others are at {shares} of "
        "that order."
    )
    return Marginals(panels, reference, how)


def _draws(path: Path, *, seed: int) -> NDArray[np.float64]:
    """Return draws (S, P): all of a sampler's, seeded ones of a density."""
    posterior, header = open_posterior(path)
    if header.kind == "samples":
        return np.asarray(posterior.draws.flatten(0, 1), dtype=np.float64)
    return np.asarray(posterior.sample(_DRAWS, seeds.stream(seed, "reproduce/marginals")).detach(), dtype=np.float64)


def _panel(index: int, distance: float, draws: Mapping[str, NDArray[np.float64]]) -> Marginal:
    parts = {called: values[:, index] for called, values in draws.items()}
    center, sd = next((float(one.mean()), float(one.std())) for one in parts.values())
    reach = (_REACH + max(distance, _REACH)) * sd
    near = density_grid(list(parts.values()), 2)
    grid = np.linspace(max(near[0], center - reach), min(near[1], center + reach), _GRID)
    found = {called: estimate_density(values, grid) for called, values in parts.items()}
    densities = {called: one.tolist() for called, one in found.items() if one is not None}
    points = {called: float(parts[called][0]) for called, one in found.items() if one is None}
    return Marginal(f"weight {index}, {distance:.2g} sd", grid.tolist(), densities, points)


# Files.


def write_outcome(
    run: Run, outcome: Outcome, folder: Path, *, scale: str, line: str
) -> tuple[dict[str, Any], list[Path]]:
    """Write results.json and results.md, then the figures, so that a full disk leaves no figures without numbers.

    Returns:
        The document, and the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}.png": figure for name, figure in outcome.figures().items()
    }
    document = _document(run, outcome, scale, line) | {"figures": [path.name for path in figures]}
    page = markdown(outcome, scale=scale, line=line, figures=[path.name for path in figures])
    publish_bytes(folder / "results.json", (json.dumps(document, indent=1) + "\n").encode(), may_replace=True)
    publish_bytes(folder / "results.md", page.encode(), may_replace=True)
    for path, figure in figures.items():
        write_figure(path, render(figure, "png"))
    times = {one.study.name: [done.seconds for done in one.ended] for one in outcome.studies}
    document |= {"seconds": outcome.seconds, "line_seconds": times}  # not in the file, which is the same if made again
    return document, [folder / "results.json", folder / "results.md", *figures]


def _document(run: Run, outcome: Outcome, scale: str, line: str) -> dict[str, Any]:
    recipe = outcome.recipe
    studies = {
        one.study.name: {
            "not_run": one.why,
            "lines": [{"line": done.line, "warnings": done.warnings, "failed": done.why} for done in one.ended],
        }
        for one in outcome.studies
    }
    measured = {
        name: [{"value": one.value, "standard_error": one.standard_error} for one in found]
        for name, found in outcome.numbers.found.items()
    }
    return {
        "schema": SCHEMA, "recipe": recipe.name, "title": recipe.title,
        "source": {"work": recipe.work, "where": recipe.where}, "note": recipe.note or None, "scale": scale, "command": line,
        "rule": RULE, "claim_rule": CLAIM_RULE, "level": LEVEL, "counts": outcome.counts(),
        "cells": [one.to_json() for one in outcome.cells], "claims": [one.to_json() for one in outcome.claims],
        "measured": measured, "settings": dict(outcome.experiment.settings), "missing": outcome.missing, "studies": studies,
        "environment": run.environment(),
    }  # fmt: skip


def markdown(outcome: Outcome, *, scale: str, line: str, figures: Sequence[str]) -> str:
    """Return the page of a recipe."""
    recipe = outcome.recipe
    parts = [f"# {recipe.title}", f"{recipe.work}, {recipe.where}. Scale: {scale}.", f"    {line}"]
    parts += [recipe.note] if recipe.note else []
    if outcome.cells:
        rows = [one.texts("{} ({})") for one in outcome.cells]
        parts.append(_table(COLUMNS, rows))
        parts.append(f"Verdicts: {RULE}.")
        reasons = dict.fromkeys(one.cell.because for one in outcome.cells if one.judged is not None)
        parts += ["Tolerances: " + "; ".join(reasons) + "."] if reasons else []
    if outcome.claims:
        claims = [f"- **{one.verdict}**: {one.claim.text} ({one.claim.where}; {one.reason})" for one in outcome.claims]
        parts += ["## Claims", "\n".join(claims), f"Verdicts: {CLAIM_RULE}."]
    if outcome.line_figures:
        parts.append("## Numbers of the figures")
    for figure, lines in outcome.line_figures:
        places = [float(x) for x in figure.x]
        rows = [
            [name, *(format_number(points[x]) if x in points else "" for x in places)] for name, points in lines.items()
        ]
        parts.append(f"{figure.title}, {figure.y_label}:")
        parts.append(_table([figure.x_label, *(f"{x:g}" for x in figure.x)], rows))
    if outcome.missing:
        parts += ["## Not run", "\n".join(f"- {one}" for one in outcome.missing)]
    if outcome.failed:
        parts += ["## What failed", "\n".join(f"- `{one}`" for one in outcome.failed)]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def write_index(outcomes: Sequence[Outcome], lines: Sequence[str], target: Path, *, scale: str, line: str) -> None:
    """Write a page of all recipes: how many cells and claims have which verdict, and the command of each."""
    rows = [
        [f"[{one.recipe.title}]({one.recipe.name}/results.md)", *one.summarize(), f"`{command}`"]
        for one, command in zip(outcomes, lines, strict=True)
    ]
    head = [f"# Published results, reproduced: {scale}", f"    {line}"]
    page = "\n\n".join([*head, _table(["recipe", "cells", "claims", "command"], rows)]) + "\n"
    publish_bytes(target, page.encode(), may_replace=True)


# Tables for people.


def build_tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Return the numbers and claims of one recipe, or a line for each of several."""
    if len(outcomes) == 1:
        return _build_recipe_tables(outcomes[0])
    rows = [[one.recipe.name, *one.summarize(), f"{one.seconds:.1f}"] for one in outcomes]
    return [Table(["recipe", "numbers", "claims", "seconds"], rows)]


def _build_recipe_tables(outcome: Outcome) -> list[Table]:
    recipe, found = outcome.recipe, []
    if outcome.cells:
        note = (
            f"k: with probability {LEVEL:g}, two estimates of one number differ by more than the tolerance plus "
            "k standard errors"
        )
        rows = [one.texts("{}, {}") for one in outcome.cells if one.ours is not None]
        why = [one.why for one in outcome.cells if one.ours is None]
        found.append(_build_table(COLUMNS, rows, note, why, "number", title=f"{recipe.title} ({recipe.where})"))
    if outcome.claims:
        rows = [[one.verdict, one.claim.text, one.reason] for one in outcome.claims if one.verdict != NOT_RUN]
        why = [one.why for one in outcome.claims if one.verdict == NOT_RUN]
        found.append(_build_table(["claim", "claim", "by"], rows, CLAIM_RULE, why, "claim"))
    return found or [Table(["recipe"], [[recipe.name]], notes=["no numbers and no claims"])]


def _build_table(
    columns: list[str], rows: list[list[str]], note: str, why: Sequence[str], what: str, *, title: str = ""
) -> Table:
    """Return a table of what ran, and each reason why others did not, once; of these reasons alone if nothing ran."""
    reasons = [f"{NOT_RUN}, {count_noun(count, what)}: {reason}" for reason, count in Counter(why).items()]
    if not rows:
        return Table(["nothing ran"], [[one] for one in reasons], title)
    return Table(columns, rows, title, [note, *reasons])

"""Results of recipes as files: a JSON document, a page of Markdown and figures for each, and a page of all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.outputs import write_figure
from bnncli.evaluation.agreement import LEVEL, Estimate
from bnncli.figures import render
from bnncli.session.run import Run
from bnncli.stages.reproduce.drawn import file_name, lines_of
from bnncli.stages.reproduce.judged import JudgedCell, JudgedClaim, Numbers, counts_said
from bnncli.stages.reproduce.outcome import Outcome
from bnncli.stages.reproduce.recipe import LineFigure

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


def write_outcome(
    run: Run, outcome: Outcome, folder: Path, *, scale: str, line: str
) -> tuple[dict[str, Any], list[Path]]:
    """The document of a recipe, and the files: results.json and results.md first, so that a full disk leaves no figures without numbers.

    Args:
        folder: of the recipe at this scale. line: the command that makes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {folder / f"{file_name(name)}.png": figure for name, figure in outcome.figures().items()}
    document = _document(run, outcome, scale, line) | {"figures": [path.name for path in figures]}
    page = markdown(outcome, scale=scale, line=line, figures=[path.name for path in figures])
    publish_bytes(folder / "results.json", (json.dumps(document, indent=1) + "\n").encode(), may_replace=True)
    publish_bytes(folder / "results.md", page.encode(), may_replace=True)
    for path, figure in figures.items():
        write_figure(path, render(figure, "png"))
    times = {one.study.name: [done.seconds for done in one.ended] for one in outcome.studies}
    document |= {
        "seconds": outcome.seconds,
        "line_seconds": times,
    }  # not in the file, which is the same when it is made again
    return document, [folder / "results.json", folder / "results.md", *figures]


def _document(run: Run, outcome: Outcome, scale: str, line: str) -> dict[str, Any]:
    recipe = outcome.recipe
    return {
        "schema": SCHEMA,
        "recipe": recipe.name,
        "title": recipe.title,
        "source": {"work": recipe.work, "where": recipe.where},
        "note": recipe.note or None,
        "scale": scale,
        "command": line,
        "rule": RULE,
        "claim_rule": CLAIM_RULE,
        "level": LEVEL,
        "counts": outcome.counts(),
        "cells": [one.to_json() for one in outcome.cells],
        "claims": [one.to_json() for one in outcome.claims],
        "measured": {
            name: [{"value": one.value, "standard_error": one.standard_error} for one in found]
            for name, found in outcome.numbers.found.items()
        },
        "settings": dict(outcome.settings),
        "missing": outcome.missing,
        "studies": {
            one.study.name: {"not_run": one.why, "lines": [done.to_json() for done in one.ended]}
            for one in outcome.studies
        },
        "environment": run.environment(),
    }


def markdown(outcome: Outcome, *, scale: str, line: str, figures: Sequence[str]) -> str:
    """The page of a recipe."""
    recipe = outcome.recipe
    parts = [f"# {recipe.title}", f"{recipe.work}, {recipe.where}. Scale: {scale}.", f"    {line}"]
    parts += [recipe.note] if recipe.note else []
    if outcome.cells:
        rows = ["| row | column | published | ours | tolerance | k | verdict |", "|---|---|---|---|---|---|---|"]
        parts += ["\n".join([*rows, *map(_cell_line, outcome.cells)]), f"Verdicts: {RULE}."]
        reasons = dict.fromkeys(one.cell.because for one in outcome.cells if one.judged is not None)
        parts.append("Tolerances: " + "; ".join(reasons) + ".") if reasons else None
    if outcome.claims:
        parts += ["## Claims", "\n".join(map(_claim_line, outcome.claims)), f"Verdicts: {CLAIM_RULE}."]
    tables = [one for figure in recipe.figures for one in _figure_table(figure, outcome.numbers)]
    parts += ["## Numbers of the figures", *tables] if tables else []
    if outcome.missing:
        parts += ["## Not run", "\n".join(f"- {one}" for one in outcome.missing)]
    if outcome.failed:
        parts += ["## What failed", "\n".join(f"- `{one}`" for one in outcome.failed)]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _figure_table(figure: LineFigure, numbers: Numbers) -> Iterator[str]:
    """What the lines of a figure are, where any was measured."""
    lines = dict(lines_of(figure, numbers))
    if lines:
        rows = [f"| {figure.x_label} | {' | '.join(f'{x:g}' for x in figure.x)} |", "|---" * (len(figure.x) + 1) + "|"]
        for name, line in lines.items():
            found = {x: said(Estimate(value, error)) for x, value, error in zip(*line, strict=True)}
            rows.append(f"| {name} | {' | '.join(found.get(x, '') for x in figure.x)} |")
        yield f"{figure.title}, {figure.y_label}:"
        yield "\n".join(rows)


def _cell_line(one: JudgedCell) -> str:
    column = f"{one.cell.column} ({one.definition})" if one.definition else one.cell.column
    factor = "" if one.judged is None else f"{one.judged.factor:.2f}"
    verdict = f"{one.status}: {one.why}" if one.why else one.status
    ours = "" if one.ours is None else said(one.ours)
    return f"| {one.cell.row} | {column} | {said(one.cell.published)} | {ours} | {one.cell.tolerance:g} | {factor} | {verdict} |"


def _claim_line(one: JudgedClaim) -> str:
    return f"- **{one.verdict}**: {one.claim.text} ({one.claim.where}; {reason(one)})"


def reason(one: JudgedClaim) -> str:
    """The numbers that decided, and why they did not."""
    numbers = ", ".join(f"{name} {said(value)}" for name, value in one.numbers.items())
    return "; ".join(part for part in (numbers, one.why) if part)


def said(one: Estimate) -> str:
    """A number with its standard error, for people."""
    value = f"{one.value:.4g}"
    return value if one.standard_error is None else f"{value} ± {one.standard_error:.2g}"


def write_index(documents: Sequence[dict[str, Any]], target: Path, *, scale: str, line: str) -> None:
    """A page of all recipes: how many cells and claims have which verdict, and the command of each."""
    head = [f"# Published results, reproduced: {scale}", f"    {line}"]
    rows = ["| recipe | cells | claims | command |", "|---|---|---|---|"]
    for one in documents:
        told = [counts_said(one["counts"][kind]) for kind in ("cells", "claims")]
        rows.append(
            f"| [{one['title']}]({one['recipe']}/results.md) | {told[0] or 'none'} | {told[1] or 'none'} | `{one['command']}` |"
        )
    publish_bytes(target, ("\n\n".join([*head, "\n".join(rows)]) + "\n").encode(), may_replace=True)

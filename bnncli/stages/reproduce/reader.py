"""Recipes and studies out of their files in bnncli/recipes, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import bnncli
from bnncli import registry
from bnncli.errors import UsageError
from bnncli.evaluation.agreement import Estimate
from bnncli.options.reproduce import PUBLISHED, RIGHT, SCALES
from bnncli.options.toml import closest, read_toml
from bnncli.stages.reproduce.entries import Entries
from bnncli.stages.reproduce.formulas import is_rule, names_in
from bnncli.stages.reproduce.paths import parts_of
from bnncli.stages.reproduce.recipe import (
    Cell,
    Claim,
    LineFigure,
    MarginalFigure,
    Needs,
    PaperRecipe,
    PreparedArrays,
    Reading,
    Study,
)

FOLDER = Path(bnncli.__file__).parent / "recipes"
_STUDIES = "studies"
_STUDY_KEYS = ("title", "like", "seconds", "needs", "optional", "settings", "prepare", "step")
_PATHS = ("value", "error", "count", "trials", "pairs")  # of a measure
_SHARED = ("tolerance", "because", "unavailable", "needs", "count", "not_at")  # what a column may say for its cells
_RECIPE_KEYS = (
    *("title", "where", "note", "studies", "experiment", "settings", "needs", "optional", "seconds"),
    *("reads", "measure", "column", "claim", "figure", "marginals"),
)


def recipe_names() -> list[str]:
    """All recipes as work/name, sorted by work and number."""
    found = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.glob("*/*.toml"))
    return sorted((one.as_posix() for one in found if one.parts[0] != _STUDIES), key=_by_number)


def _by_number(name: str) -> list[tuple[int, str]]:
    """table-2 before table-10."""
    return [(int(one) if one.isdecimal() else -1, one) for one in name.replace("/", "-").replace(".", "-").split("-")]


def known_files() -> dict[str, str]:
    """What each file is that recipes need, by place and name."""
    return Entries(FOLDER / "files.toml", "", _entries(FOLDER / "files.toml")).texts("files")


def _entries(path: Path) -> dict[str, Any]:
    return dict(read_toml(path, what="the recipe ")[1])


@cache
def read_study(name: str) -> Study:
    """A study, which may have the steps of another that it is like. Raises ConfigError where its file is wrong."""
    path = FOLDER / _STUDIES / f"{name}.toml"
    table = Entries(path, "", _entries(path))
    prepared = [
        PreparedArrays(one.take("name", str), _experiment(one, one.take("experiment", str)))
        for one in table.tables("prepare")
    ]
    like = table.take("like", str, None)
    if like is not None and not path.with_name(f"{like}.toml").is_file():
        raise table.fault(f"like: there is no study {like!r}")
    other = None if like is None else read_study(like)
    study = Study(
        name=name,
        path=path,
        title=table.take("title", str),
        seconds=_seconds(table),
        needs=_needs(table),
        settings=_settings(table),
        prepared=tuple(prepared) or (() if other is None else other.prepared),
        steps=tuple(one.entries for one in table.tables("step")) or (() if other is None else other.steps),
    )
    table.end(_STUDY_KEYS)
    return study


@cache
def read_recipe(name: str) -> PaperRecipe:
    """A recipe, by work/name. Raises UsageError where there is none of this name, ConfigError where its file is wrong."""
    if name not in recipe_names():
        raise UsageError(f"no recipe is called {name!r}{closest(name, recipe_names())}", hint="bnncli reproduce")
    path = FOLDER / f"{name}.toml"
    table = Entries(path, "", _entries(path))
    studies = table.names("studies")
    for study in studies:
        if not (FOLDER / _STUDIES / f"{study}.toml").is_file():
            raise table.fault(f"studies: there is no study {study!r}")
    experiment = table.take("experiment", str, None)
    work = Entries(FOLDER / "works.toml", "", _entries(FOLDER / "works.toml")).texts("works")[name.partition("/")[0]]
    recipe = PaperRecipe(
        name=name,
        path=path,
        title=table.take("title", str),
        work=work,
        where=table.take("where", str),
        note=table.take("note", str, ""),
        studies=studies,
        experiment=None if experiment is None else _experiment(table, experiment),
        settings=_settings(table),
        needs=_needs(table),
        seconds=_seconds(table),
        reads=_reads(table, studies),
        measures=dict(_measures(table, studies)),
        cells=tuple(cell for column in table.tables("column") for cell in _cells(column)),
        claims=tuple(_claim(one) for one in table.tables("claim")),
        figures=tuple(_figure(one) for one in table.tables("figure")),
        marginals=tuple(_marginals(one, studies) for one in table.tables("marginals")),
    )
    table.end(_RECIPE_KEYS)
    _check_names(recipe)
    return recipe


def _experiment(table: Entries, name: str) -> str:
    if name not in registry.own_names("experiments"):
        raise table.fault(f"no experiment is called {name!r}{closest(name, registry.own_names('experiments'))}")
    return name


def _by_scale(table: Entries, key: str) -> dict[str, dict[str, Any]]:
    found = {name: one.entries for name, one in table.by_name(key).items()}
    if not set(found) <= set(SCALES):
        raise table.fault(f"{key}: expected {' and '.join(SCALES)}; got {', '.join(found)}")
    return found


def _settings(table: Entries) -> dict[str, dict[str, Any]]:
    found = _by_scale(table, "settings")
    return {scale: found.get(scale, {}) for scale in SCALES}


def _needs(table: Entries) -> dict[str, Needs]:
    required, optional = _by_scale(table, "needs"), _by_scale(table, "optional")
    for file in (file for part in (required, optional) for one in part.values() for file in one.values()):
        if file not in known_files():
            raise table.fault(f"needs: {file!r} is not in files.toml{closest(str(file), list(known_files()))}")
    return {scale: Needs(required.get(scale, {}), optional.get(scale, {})) for scale in SCALES}


def _seconds(table: Entries) -> dict[str, float]:
    return {scale: float(value) for scale, value in table.take("seconds", dict, {}).items()}


def _measures(table: Entries, studies: tuple[str, ...]) -> Iterator[tuple[str, Reading]]:
    """Each [measure.NAME]; with `each`, one for every name in it, called NAME_KEY, whose text stands for $each."""
    for name, one in table.by_name("measure").items():
        study = one.take("study", str, studies[0] if studies else "")
        if study not in studies:
            raise one.fault(f"study: expected one of the recipe's studies; got {study!r}")
        step = one.take("step", str)
        paths = {key: one.take(key, str, None) for key in _PATHS if key in one.entries}
        each, other = one.texts("each"), one.take("trials_step", str, None)
        one.end(("study", "step", "trials_step", *_PATHS, "each"))
        if "value" not in paths:
            raise one.fault("expected 'value', the path of a number; got none")
        for key, text in each.items() or [("", "")]:
            filled = {name: path.replace("$each", text) for name, path in paths.items()}
            for path in filled.values():
                _check_path(one, path)
            yield (
                (f"{name}_{key}" if key else name),
                Reading(study, step.replace("$each", text), **filled, trials_step=other),
            )


def _reads(table: Entries, studies: tuple[str, ...]) -> dict[str, str]:
    found = table.texts("reads")
    for name, file in found.items():
        study, slash, _ = file.partition("/")
        if study not in studies or not slash:
            raise table.fault(f"reads: {name}: expected STUDY/FILE of one of the recipe's studies; got {file!r}")
    return found


def _marginals(table: Entries, studies: tuple[str, ...]) -> MarginalFigure:
    found = MarginalFigure(
        table.take("name", str), table.take("study", str, studies[0] if studies else ""), table.texts("posteriors")
    )
    table.end(("name", "study", "posteriors"))
    if found.study not in studies:
        raise table.fault(f"study: expected one of the recipe's studies; got {found.study!r}")
    if len(found.posteriors) < 2:
        raise table.fault(f"posteriors: expected the reference and others; got {found.posteriors!r}")
    return found


def _check_path(table: Entries, path: str) -> None:
    try:
        parts_of(path)
    except ValueError as error:
        raise table.fault(str(error)) from None


def _cells(column: Entries) -> Iterator[Cell]:
    """The cells of a column, to which it gives what they do not say themselves."""
    name = column.take("name", str)
    shared = {key: column.entries.pop(key) for key in _SHARED if key in column.entries}
    for table in column.tables("cells"):
        yield _cell(name, Entries(table.path, table.where, shared | table.entries))
    column.end(("name", "cells", *shared))


def _cell(column: str, table: Entries) -> Cell:
    error, count = table.take("error", float, None), table.take("count", int, 0)
    try:
        published = Estimate(table.take("published", float), error, count if error else 0)
    except ValueError as fault:
        raise table.fault(f"published: {fault}") from None
    measure = table.entries.pop("measure", None)
    formulas = {"": measure} if isinstance(measure, str) else measure or {}
    unavailable = table.take("unavailable", str, None)
    if (
        not isinstance(formulas, dict)
        or not set(formulas) <= {"", PUBLISHED, RIGHT}
        or bool(formulas) == bool(unavailable)
    ):
        raise table.fault(
            f"expected measure, a formula or one for {PUBLISHED} and {RIGHT}, or unavailable; got {measure!r}"
        )
    cell = Cell(
        row=table.take("row", str),
        column=column,
        published=published,
        tolerance=table.take("tolerance", float),
        because=table.take("because", str),
        formulas=formulas,
        unavailable=unavailable,
        needs=table.names("needs"),
        not_at=table.texts("not_at"),
    )
    _check_scales(table, cell.not_at)
    table.end(("row", "published", "error", "measure", *_SHARED))
    return cell


def _claim(table: Entries) -> Claim:
    name, text, where, rule = (table.take(key, str) for key in ("id", "text", "where", "rule"))
    claim = Claim(name, text, where, rule, table.texts("not_at"), table.names("needs"))
    _check_scales(table, claim.not_at)
    table.end(("id", "text", "where", "rule", "not_at", "needs"))
    return claim


def _check_scales(table: Entries, not_at: Mapping[str, str]) -> None:
    if not set(not_at) <= set(SCALES):
        raise table.fault(f"not_at: expected {' and '.join(SCALES)}; got {', '.join(not_at)}")


def _figure(table: Entries) -> LineFigure:
    lines = {name: tuple(formulas) for name, formulas in table.take("lines", dict).items()}
    words = [table.take(key, str) for key in ("name", "title", "x_label", "y_label")]
    places, log = tuple(map(float, table.take("x", list))), table.take("log", str, "")
    figure = LineFigure(words[0], words[1], places, words[2], words[3], lines, log)
    table.end(("name", "title", "x", "x_label", "y_label", "lines", "log"))
    if log not in ("", "x", "y", "xy"):
        raise table.fault(f"log: expected x, y or xy; got {log!r}")
    if any(len(formulas) != len(figure.x) for formulas in lines.values()):
        raise table.fault(f"expected {len(figure.x)} formulas in each line")
    return figure


def _check_names(recipe: PaperRecipe) -> None:
    """Raise ConfigError for a formula that is none, or names what no measure is called; an experiment's numbers are known when it ran."""
    formulas = [(text, False) for cell in recipe.cells for text in cell.formulas.values()]
    formulas += [(claim.rule, True) for claim in recipe.claims]
    formulas += [(text, False) for one in recipe.figures for line in one.lines.values() for text in line]
    for text, must_compare in formulas:
        try:
            names = names_in(text)
            if is_rule(text) is not must_compare:
                raise ValueError(f"expected a {'rule, which compares' if must_compare else 'formula'}; got {text!r}")
        except (SyntaxError, ValueError) as error:
            raise recipe.fault(str(error)) from None
        for name in names:
            if name not in recipe.measures and recipe.experiment is None:
                raise recipe.fault(f"{text!r}: no measure is called {name!r}{closest(name, list(recipe.measures))}")
    _check_unique(recipe, [f"{cell.row} / {cell.column}" for cell in recipe.cells])
    _check_unique(recipe, [claim.name for claim in recipe.claims])
    needed: Mapping[str, Needs] = recipe.needs
    for study in map(read_study, recipe.studies):
        needed = {
            scale: Needs(
                {**needed[scale].required, **study.needs[scale].required},
                {**needed[scale].optional, **study.needs[scale].optional},
            )
            for scale in SCALES
        }
    names_known = {name for one in needed.values() for name in one.optional}
    takers = [(f"{cell.row} / {cell.column}", cell.needs) for cell in recipe.cells]
    for called, needs in [*takers, *((claim.name, claim.needs) for claim in recipe.claims)]:
        for name in needs:
            if name not in names_known:
                raise recipe.fault(f"{called}: no optional file is called {name!r}")


def _check_unique(recipe: PaperRecipe, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise recipe.fault(f"{name!r} is given twice")

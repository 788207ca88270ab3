"""Recipes that are wrong: told with the file and the place, whatever is wrong; and those that ship."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from problems.recipes import FILES, RECIPE, STUDY

from bnncli.errors import ConfigError
from bnncli.options.reproduce import SCALES
from bnncli.stages.grid.plan import plan_jobs
from bnncli.stages.grid.reader import read_grid
from bnncli.stages.reproduce import reader
from bnncli.stages.reproduce.filled import filled_settings, filled_steps, grid_text

Recipes = Callable[..., Path]


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('title = "a table"', "", "expected 'title', text; got none"),
        ('title = "a table"', "title = 3", "title: expected text; got 3"),
        ('where = "table 1"', 'where = "table 1"\nwere = 1', "unknown key 'were'; did you mean 'where'"),
        (
            'studies = ["small"]',
            'studies = ["large"]',
            "studies: there is no study 'large'",
        ),
        (
            '"nll_map"',
            '"nll_mop"',
            "no measure is called 'nll_mop'; did you mean",
        ),
        ('measure = "nll_map"', 'measure = "nll_map +"', "invalid syntax"),
        ('measure = "nll_map"', 'measure = "nll_map < 1"', "expected a formula; got 'nll_map < 1'"),
        ('measure = "nll_map"', 'note = "none"', "expected measure"),
        ('rule = "nll_map < -1"', 'rule = "nll_map"', "expected a rule, which compares"),
        ('id = "negative"', 'id = "positive"', "'positive' is given twice"),
        ("tolerance = 0.1", "", "cells 1: expected 'tolerance', a number; got none"),
        ('value = "rows', 'value = "rows..', "expected keys with dots"),
        ('needs = ["more"]', 'needs = ["less"]', "no optional file is called 'less'"),
        ("published = 100.0", "published = nan", "expected a finite value"),
        ('["nll_map", "nll_g"]', '["nll_map"]', "expected 2 formulas in each line"),
        ('studies = ["small"]', 'studies = ["small"]\nreads = { t = "no/x.npz" }', "reads: t: expected STUDY/FILE"),
        ("not_at = { quick", "not_at = { quickly", "not_at: expected"),
        ('rule = "nll_map < -1"', 'rule = "nll_map < -1"\nnot_at = { slow = "x" }', "not_at: expected quick and paper"),
        ("[figure.lines]", 'log = "z"\n[figure.lines]', "log: expected x, y or xy"),
    ],
)
def test_a_wrong_recipe_is_told(recipes: Recipes, old: str, new: str, match: str) -> None:
    assert old in RECIPE
    folder = recipes(recipe=RECIPE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=match) as told:
        reader.read_recipe("test/table-1")
    assert str(folder) in told.value.message


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("[needs.quick]", "[needs.slow]", "needs: expected quick and paper; got"),
        ('"data/features.npz"', '"data/fratures.npz"', "'data/fratures.npz' is not in files.toml"),
        ('title = "a small head"', 'like = "none"\ntitle = "a"', "there is no study 'none'"),
        (
            "[settings.quick]",
            '[[prepare]]\nname = "x"\nexperiment = "no"\n[settings.quick]',
            "no experiment is called 'no'",
        ),
    ],
)
def test_a_wrong_study_is_told(recipes: Recipes, old: str, new: str, match: str) -> None:
    recipes(study=STUDY.replace(old, new, 1))
    with pytest.raises(ConfigError, match=match):
        reader.read_study("small")


def test_a_study_that_is_like_another_has_its_steps(recipes: Recipes) -> None:
    folder = recipes()
    (folder / "studies/other.toml").write_text('title = "other"\nlike = "small"\n[settings.quick]\nprecision = 9\n')
    assert reader.read_study("other").steps == reader.read_study("small").steps
    assert reader.read_study("other").settings["quick"] == {"precision": 9}


def test_what_refers_to_an_absent_file_is_left_out() -> None:
    steps = [{"ood": ["a=$a", "b=$b"]}, {"from": "$b"}, {"n": "$n", "scales": ["paper"]}, {"n": "$n", "text": "x$n"}]
    settings = filled_settings({"n": 3}, {"a": Path("/x")}, absent=["b"])
    assert filled_steps(steps, settings, "quick", absent=["b"]) == [{"ood": ["a=/x"]}, {"n": 3, "text": "x3"}]
    assert filled_steps([{"n": "$m", "o": 1}], {"m": ""}, "quick", absent=[]) == [{"o": 1}]  # left to its default
    with pytest.raises(ConfigError, match=r"\$c: expected a setting or a file"):
        filled_steps([{"n": "$c"}], settings, "quick", absent=["b"])


NAMES = reader.recipe_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_that_ships_can_be_read_and_judges_something(name: str) -> None:
    recipe = reader.read_recipe(name)
    assert recipe.studies or recipe.experiment
    assert recipe.claims or recipe.cells
    for cell in recipe.cells:
        assert cell.tolerance >= 0
        assert cell.because


@pytest.mark.parametrize("path", sorted((reader.FOLDER / "studies").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("scale", SCALES)
def test_every_study_that_ships_is_a_grid_whose_lines_its_commands_take(path: Path, scale: str, tmp_path: Path) -> None:
    study = reader.read_study(path.stem)
    needs = study.needs[scale]
    files = {name: tmp_path / Path(file).name for name, file in {**needs.required, **needs.optional}.items()}
    settings = filled_settings({"folder": str(tmp_path), **study.settings[scale]}, files, absent=[])
    settings |= {one.name: str(tmp_path / one.name) for one in study.prepared}
    text = grid_text(
        settings["checkpoints"],
        filled_steps(study.steps, settings, scale, absent=[]),
        run_dir=f"{tmp_path}/{{checkpoint}}",
        said="a test",
    )
    (tmp_path / "grid.toml").write_text(text)
    jobs = plan_jobs(read_grid(tmp_path / "grid.toml"))
    names = {job.name for job in jobs}
    measures = [one for name in NAMES for one in reader.read_recipe(name).measures.values() if one.study == study.name]
    assert measures
    left_out = {step.get("name") for step in study.steps if scale not in step.get("scales", [scale])}
    assert {one.step for one in measures} <= names | left_out


def test_recipes_are_in_the_order_of_their_numbers(recipes: Recipes) -> None:
    folder = recipes()
    for name in ("table-10", "figure-5.2", "table-2"):
        (folder / f"test/{name}.toml").write_text(RECIPE)
    assert reader.recipe_names() == ["test/figure-5.2", "test/table-1", "test/table-2", "test/table-10"]


def test_files_of_recipes_are_told_apart_by_their_place() -> None:
    assert {name.partition("/")[0] for name in reader.known_files()} == {"data", "checkpoints", "fixtures"}
    assert FILES

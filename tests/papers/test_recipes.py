"""Recipes that ship: what they declare, and their quick runs where the full-size data are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from problems.command_line import Cli
from problems.recipes import Recipes, small_recipe

from bnncli.commands.grid.plan import plan_jobs, read_grid
from bnncli.papers import SCALES, studies
from bnncli.papers.numbers import list_names
from bnncli.papers.recipe import FILES, Cell, Claim, LineFigure, Reading, Results, Study, find_recipe, recipe_names
from bnncli.papers.runner import grid_text

SHARED = Path(__file__).parents[3] / "shared"
KNOWN = (
    *("needs ", "a fit of", "quick has", "undefined"),  # not measured, or of something else
    *("the standard error of", "a factor of time", "the tolerance ("),  # measured and left open
)
QUICK = ("refinement/figure-2", "bridge/figure-5.3")  # seconds, with what travels with the package
NAMES = recipe_names()
STUDIES = {one.name: one for one in vars(studies).values() if isinstance(one, Study)}


def read(name: str) -> tuple[list[object], dict[str, Reading]]:
    results = Results()
    return list(find_recipe(name).declared(results)), results.readings


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_judges_something_by_its_own_studies_and_files(name: str) -> None:
    recipe, (rows, readings) = find_recipe(name), read(name)
    assert recipe.studies or recipe.experiment
    judged = [one for one in rows if isinstance(one, Cell | Claim)]
    named = [f"{one.row} / {one.column}" if isinstance(one, Cell) else one.name for one in judged]
    assert judged
    assert len({*named}) == len(named)
    assert {one.study for one in readings.values()} <= {*recipe.studies}
    needed = [one.needs[scale] for one in (recipe, *recipe.studies) for scale in SCALES]
    assert {file for one in needed for part in (one.required, one.optional) for file in part.values()} <= FILES.keys()
    optional = {called for one in needed for called in one.optional}
    for one in judged:
        assert {*one.needs} <= optional
        assert {*one.not_at} <= {*SCALES}
    for cell in (one for one in rows if isinstance(one, Cell)):
        assert cell.tolerance >= 0
        assert cell.because
        assert bool(cell.formulas) != bool(cell.unavailable)
    for figure in (one for one in rows if isinstance(one, LineFigure)):
        assert {len(line) for line in figure.lines.values()} == {len(figure.x)}
    if recipe.experiment is not None:
        assert recipe.experiment.find("measure") is not None
    else:
        rules = [text for one in judged for text in ([one.rule] if isinstance(one, Claim) else one.formulas.values())]
        assert {name for text in rules for name in list_names(text)} <= readings.keys()


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_study_is_a_grid_whose_lines_its_commands_take(name: str, scale: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    needs = study.needs[scale]
    files = {called: tmp_path / Path(file).name for called, file in {**needs.required, **needs.optional}.items()}
    grid = study.declared(scale, files | {"folder": tmp_path, "arrays": tmp_path / "arrays.npz"})
    (tmp_path / "grid.toml").write_text(grid_text(*grid, run_dir=f"{tmp_path}/{{checkpoint}}", said="a test"))
    steps = {job.name for job in plan_jobs(read_grid(tmp_path / "grid.toml"))}
    readings = [one for recipe in NAMES for one in read(recipe)[1].values() if one.study is study]
    assert readings
    assert scale == "quick" or {one.step for one in readings} <= steps


def test_a_study_leaves_out_files_that_are_missing() -> None:
    study = STUDIES["fmnist-last-layer"]
    files = {called: Path(file) for called, file in study.needs["quick"].required.items()}
    _, (extract, *_) = study.declared("quick", files)
    assert extract["ood"] == ["mnist=npz:fixtures/mnist.npz"]
    _, (extract, *_) = study.declared("quick", files | {"kmnist": Path("k.npz")})
    assert extract["ood"] == ["mnist=npz:fixtures/mnist.npz", "kmnist=npz:k.npz@1000"]


def test_recipes_are_in_the_order_of_their_numbers(recipes: Recipes) -> None:
    recipes(*map(small_recipe, ("table-10", "figure-5.2", "table-2", "table-1")))
    assert recipe_names() == ["test/figure-5.2", "test/table-1", "test/table-2", "test/table-10"]


@pytest.mark.parametrize("name", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.nightly)])
def test_a_quick_recipe_measures_every_number_that_it_judges(name: str, tmp_path: Path, cli: Cli) -> None:
    done = cli("reproduce", name, "--out", tmp_path, "--json")
    assert done.code == 0, done.stderr
    (document,) = done.json["recipes"]
    assert {cell["status"] for cell in document["cells"]} <= {"reproduced", "differs"}
    assert all(cell["status"] == "reproduced" for cell in document["cells"] if cell["definition"] != "right")
    assert all(claim["verdict"] != "not runnable here" for claim in document["claims"])
    assert all((tmp_path / "quick" / name / figure).stat().st_size > 5000 for figure in document["figures"])


@pytest.mark.nightly
def test_everything_at_quick_takes_ten_minutes_and_says_of_each_number_what_came_of_it(
    tmp_path: Path, cli: Cli
) -> None:
    folders = ("--data", SHARED / "data", "--checkpoints", SHARED / "checkpoints") if SHARED.is_dir() else ()
    start = time.monotonic()
    done = cli("reproduce", "--all", *folders, "--out", tmp_path, "--json")
    took = time.monotonic() - start
    assert done.code == 0, done.stderr
    documents = done.json["recipes"]
    assert [one["recipe"] for one in documents] == NAMES
    for one in documents:
        failed = [line for study in one["studies"].values() for line in study["lines"] if line["failed"]]
        assert not failed, failed
        for judged in [*one["cells"], *one["claims"]]:
            assert judged["why"] is None or judged["why"].startswith(KNOWN), judged
    assert took < 600, {one["recipe"]: one["seconds"] for one in documents}

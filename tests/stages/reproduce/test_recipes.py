"""Recipes that ship, run at quick: those that need no files here, all of them where the full-size data are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from problems.command_line import Cli

from bnncli.stages.reproduce import reader

SHARED = Path(__file__).parents[4] / "shared"
KNOWN = (
    *("needs ", "a fit of", "quick has", "undefined"),  # not measured, or of something else
    *("the standard error of", "a factor of time", "the tolerance ("),  # measured and left open
)
QUICK = ("refinement/figure-2", "bridge/figure-5.3")  # seconds, with what travels with the package


@pytest.mark.parametrize("name", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.long)])
def test_a_quick_recipe_measures_every_number_that_it_judges(name: str, tmp_path: Path, cli: Cli) -> None:
    done = cli("reproduce", name, "--out", tmp_path, "--json")
    assert done.code == 0, done.stderr
    (document,) = done.json["recipes"]
    assert {cell["status"] for cell in document["cells"]} <= {"reproduced", "differs"}
    assert all(cell["status"] == "reproduced" for cell in document["cells"] if cell["definition"] != "right")
    assert all(claim["verdict"] != "not runnable here" for claim in document["claims"])
    assert all((tmp_path / "quick" / name / figure).stat().st_size > 5000 for figure in document["figures"])


@pytest.mark.long
def test_everything_at_quick_takes_ten_minutes_and_says_of_each_number_what_came_of_it(
    tmp_path: Path, cli: Cli
) -> None:
    folders = ("--data", SHARED / "data", "--checkpoints", SHARED / "checkpoints") if SHARED.is_dir() else ()
    start = time.monotonic()
    done = cli("reproduce", "--all", *folders, "--out", tmp_path, "--json")
    took = time.monotonic() - start
    assert done.code == 0, done.stderr
    documents = done.json["recipes"]
    assert [one["recipe"] for one in documents] == reader.recipe_names()
    for one in documents:
        failed = [line for study in one["studies"].values() for line in study["lines"] if line["failed"]]
        assert not failed, failed
        for judged in [*one["cells"], *one["claims"]]:
            assert judged["why"] is None or judged["why"].startswith(KNOWN), judged
    assert took < 600, {one["recipe"]: one["seconds"] for one in documents}

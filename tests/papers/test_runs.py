"""Recipes run: what they measure and say of it, what they leave, and what is missing."""

from __future__ import annotations

import errno
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli
from problems.recipes import TABLE, Recipes, small_recipe, small_study

from bnncli.artifacts.atomic import write_error
from bnncli.errors import Interrupted
from bnncli.figures import MARK
from bnncli.papers import results as written


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "quick" / TABLE / "results.json").read_text())


def cells(document: dict[str, Any]) -> dict[tuple[str, str | None], dict[str, Any]]:
    return {(cell["row"], cell["definition"]): cell for cell in document["cells"]}


def test_every_cell_and_claim_is_judged(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes()
    done = cli("reproduce", TABLE, "--data", data, "--out", out)
    assert done.code == 0, done.stderr
    document = results(out)
    found = cells(document)
    assert {key: cell["status"] for key, cell in found.items()} == {
        ("network", None): "differs",
        ("both", "published"): "reproduced",
        ("both", "right"): "differs",
        ("elsewhere", None): "not runnable here",
        ("more", None): "not runnable here",
        ("not at quick", None): "shown",
    }
    assert found["elsewhere", None]["why"] == "it takes a telescope"
    assert found["more", None]["why"] == f"needs more.npz (more features), which is not in {data}"
    assert (found["not at quick", None]["ours"] is None, found["not at quick", None]["why"]) == (False, "other units")
    assert [claim["verdict"] for claim in document["claims"]] == ["holds", "does not hold"]
    assert document["counts"]["cells"] == {"differs": 2, "reproduced": 1, "not runnable here": 2, "shown": 1}


def test_a_number_is_the_mean_of_what_evaluate_said_of_each_checkpoint(
    recipes: Recipes, data: Path, out: Path, cli: Cli
) -> None:
    recipes()
    assert cli("reproduce", TABLE, "--data", data, "--out", out).code == 0
    ours = cells(results(out))["network", None]["ours"]
    said = []
    for name in ("one", "two"):
        run = out / "quick/studies/small/runs" / name
        rows = cli("evaluate", name, "--run-dir", run, "--bootstrap", 50, "--json").json["rows"]
        row = next(row for row in rows if row["name"] == "map.plug-in")
        said.append(next(metric["value"] for metric in row["metrics"] if metric["name"] == "nll"))
    assert ours["value"] == pytest.approx(np.mean(said), rel=1e-12)
    assert ours["count"] == 2


def test_the_pages_tell_the_same_and_show_every_figure(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes(is_drawn=True)
    assert cli("reproduce", TABLE, "--data", data, "--out", out).code == 0
    folder, document = out / "quick" / TABLE, results(out)
    page = (folder / "results.md").read_text()
    assert page.count("| not runnable here") == 2
    assert "- **does not hold**: NLL is below minus one." in page
    assert "with a probability of at most 0.005; otherwise open" in page
    assert document["figures"] == ["numbers.png", "lines.png"]
    each = [[one["value"] for one in document["measured"][name]] for name in ("nll_map", "nll_g")]
    cells_of_line = [f"{np.mean(one):.4g} ± {np.std(one, ddof=1) / 2**0.5:.2g}" for one in each]
    assert f"NLL, NLL:\n\n| number | 0 | 1 |\n|---|---|---|\n| both | {' | '.join(cells_of_line)} |" in page
    for name in document["figures"]:
        content = (folder / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert MARK.encode() in content
        assert f"]({name})" in page


def test_definitions_choose_the_rows(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes()
    words = ("reproduce", TABLE, "--data", data, "--out", out, "--json")
    for wanted, rows in (("published", [None, "published"]), ("right", [None, "right"])):
        document = cli(*words, "--definitions", wanted).json["recipes"][0]
        assert sorted({cell["definition"] for cell in document["cells"]}, key=str) == sorted(rows, key=str)


def test_strict_ends_with_3_after_everything_is_written(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes()
    done = cli("reproduce", TABLE, "--data", data, "--out", out, "--strict")
    assert done.code == 3
    assert "3 numbers and claims differ from what was published: test/table-1: network / NLL" in done.stderr
    assert results(out)["counts"]["cells"]["differs"] == 2


def test_run_again_nothing_is_fitted_again_and_the_numbers_are_the_same(
    recipes: Recipes, data: Path, out: Path, cli: Cli
) -> None:
    recipes()
    words = ("reproduce", TABLE, "--data", data, "--out", out)
    assert cli(*words).code == 0
    before, made = results(out), (out / "quick/studies/small/runs/one/posteriors/g.safetensors").stat().st_mtime_ns
    assert cli(*words).code == 0
    assert (out / "quick/studies/small/runs/one/posteriors/g.safetensors").stat().st_mtime_ns == made
    assert results(out)["measured"] == before["measured"]


def test_the_seed_goes_to_every_step_that_takes_one(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes()
    assert cli("reproduce", TABLE, "--data", data, "--out", out, "--seed", 5).code == 0
    lines = [one["line"] for one in results(out)["studies"]["small"]["lines"]]
    assert len(lines) == 8
    assert all("--seed 5" in line for line in lines)


def test_the_grid_that_it_leaves_is_one_that_grid_takes(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes()
    assert cli("reproduce", TABLE, "--data", data, "--out", out).code == 0
    path = out / "quick/studies/small/grid.toml"
    done = cli("grid", path, "--dry-run", "--json")
    ran = [one["line"] for one in results(out)["studies"]["small"]["lines"]]
    assert done.json["lines"] == ran
    assert tomllib.loads(path.read_text())["checkpoints"] == ["one", "two"]


def test_a_step_that_fails_says_why_in_each_cell_that_needs_it(
    recipes: Recipes, data: Path, out: Path, cli: Cli
) -> None:
    recipes(small_recipe(study=small_study(posteriors=("map", "{g}", "lost"))))
    done = cli("reproduce", TABLE, "--data", data, "--out", out)
    assert done.code == 0, done.stderr
    found = cells(results(out))
    assert found["network", None]["status"] == "not runnable here"
    assert "it needs predict" in found["network", None]["why"]
    assert "lost" in found["network", None]["why"]
    assert "4 lines failed; see the results" in done.stderr


def test_a_recipe_whose_files_are_not_there_has_results_that_say_what_to_give(
    recipes: Recipes, out: Path, cli: Cli
) -> None:
    recipes()
    done = cli("reproduce", TABLE, "--out", out)
    assert done.code == 0, done.stderr
    needs = "needs features.npz (features of a small head): give --data DIR"
    assert f"{TABLE}: cannot run here: {needs}" in done.stderr
    document = results(out)
    assert {one["status"] for one in document["cells"]} == {"not runnable here"}
    assert [(one["verdict"], one["why"]) for one in document["claims"]] == [("not runnable here", needs)] * 2
    assert needs in (out / "quick" / TABLE / "results.md").read_text()
    assert document["studies"]["small"] == {"not_run": needs, "lines": []}


def test_the_list_says_what_can_run(recipes: Recipes, data: Path, cli: Cli) -> None:
    recipes()
    (entry,) = cli("reproduce", "--json").json["recipes"]
    assert (entry["recipe"], entry["can_run"], entry["needs"]) == (TABLE, False, ["data/features.npz"])
    (entry,) = cli("reproduce", "--json", "--data", data).json["recipes"]
    assert (entry["can_run"], entry["missing"], entry["seconds"]) == (True, [], 1)
    assert cli("reproduce", "--data", data, "--scale", "paper").stdout.splitlines()[2].endswith("no     ")


def test_all_has_a_page_of_every_recipe(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes(small_recipe(), small_recipe("table-2", title="another table"))
    done = cli("reproduce", "--all", "--data", data, "--out", out, "--json")
    assert [one["recipe"] for one in done.json["recipes"]] == [TABLE, "test/table-2"]
    page = (out / "quick/results.md").read_text()
    assert (
        "[another table](test/table-2/results.md) | 2 differ, 1 reproduced, 2 not runnable here, 1 shown | 1 holds, 1 does not hold |"
        in page
    )
    assert f"bnncli reproduce {TABLE} --data {data} --out {out}" in page


@pytest.mark.parametrize(
    ("words", "code", "match"),
    [
        (["nothing"], 2, "no recipe is called 'nothing'"),
        ([TABLE, "--all"], 2, "give one of the two"),
        ([TABLE, "--data", "absent"], 66, "--data: expected a folder; absent is not one"),
        ([TABLE, "--scale", "huge"], 2, "scale"),
        (["--strict"], 2, "--strict: expected a recipe to run; got none"),
        (["tets/*"], 2, "no recipe matches 'tets/*'; did you mean 'test/table-1'?"),
        ([TABLE, "more"], 2, "expected 1 argument, RECIPE; got 'more' as well"),
    ],
)
def test_wrong_words_are_told_in_one_line(recipes: Recipes, cli: Cli, words: list[str], code: int, match: str) -> None:
    recipes()
    done = cli("reproduce", *words)
    assert done.code == code
    assert match in done.stderr


def test_under_torchrun_it_is_refused(recipes: Recipes, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    from bnncli.system import workers as team

    assert team.rank_and_size() == (0, 2)
    done = cli("reproduce", TABLE)
    assert (done.code, "start it without torchrun" in done.stderr) == (2, True)


@pytest.mark.parametrize("taken", ["quick", "quick/studies", f"quick/{TABLE}"])
def test_a_place_that_cannot_be_written_is_told_before_anything_runs(
    recipes: Recipes, data: Path, out: Path, cli: Cli, taken: str
) -> None:
    recipes()
    (out / taken).parent.mkdir(parents=True)
    (out / taken).write_text("a file")
    done = cli("reproduce", TABLE, "--data", data, "--out", out)
    assert done.code == 73
    assert f"{out / taken} is not a folder" in done.stderr
    assert "choose another place with --out" in done.stderr
    assert [path for path in out.rglob("*") if path.is_file()] == [out / taken]


def test_where_a_figure_cannot_be_written_the_numbers_are_there(
    recipes: Recipes, data: Path, out: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise write_error(OSError(errno.ENOSPC, "no space"), path)

    recipes()
    monkeypatch.setattr(written, "write_figure", full)
    done = cli("reproduce", TABLE, "--data", data, "--out", out)
    assert done.code == 74
    assert "numbers.png failed: No space left on device" in done.stderr
    assert "hint: free space" in done.stderr
    assert results(out)["counts"]["cells"]["reproduced"] == 1


def test_a_signal_leaves_a_line_that_goes_on(
    recipes: Recipes, data: Path, out: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> None:
        raise Interrupted(2, "interrupted by SIGINT")

    recipes()
    monkeypatch.setattr(written, "judge_recipe", stopped)
    done = cli("reproduce", TABLE, "--data", data, "--out", out, "--force")
    assert done.code == 130
    assert f"hint: continue with: bnncli reproduce {TABLE} --data {data} --out {out}\n" in done.stderr


def test_several_missing_files_are_one_short_line_and_each_has_its_own_in_the_results(
    recipes: Recipes, out: Path, cli: Cli
) -> None:
    recipes(small_recipe(study=small_study(required={"b": "data/other.npz"})))
    assert "needs features.npz and 1 other file: give --data DIR" in cli("reproduce", TABLE, "--out", out).stderr
    each = [
        f"{name}.npz ({what}): give --data DIR"
        for name, what in (
            ("features", "features of a small head"),
            ("other", "other features"),
            ("more", "more features"),
        )
    ]
    assert results(out)["missing"] == each
    assert "\n".join(f"- {one}" for one in each) in (out / "quick" / TABLE / "results.md").read_text()
    listed = cli("reproduce").stdout.splitlines()
    assert [f"  {one}" for one in each[:2]] == [line for line in listed if "give --data" in line][:2]

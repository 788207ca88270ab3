"""What experiments measured, taken again: of the same request alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from problems.arrays import make_arrays
from problems.command_line import Cli
from problems.recipes import TABLE, WORK, Recipes, steps_of

from bnncli.evaluation.comparison import Estimate
from bnncli.papers import beyond_toys
from bnncli.papers.recipe import Claim, Experiment, Files, Grid, Measurements, Results, Row, needs, study
from bnncli.papers.runner import MEASURED as NAME
from bnncli.papers.runner import digest_request, read_measurements, write_measurements
from bnncli.progress import SILENT

MEASURED = Measurements(
    {"exact": Estimate(0.1), "spread": Estimate(1 / 3, 0.25, 5)},
    {"draws": np.arange(6.0).reshape(2, 3), "names": np.array(["a", "b"])},
)
ERRORS = {"percentages": [0, 90], "examples": 500, "repeats": 3}


@WORK.recipe(
    "table-1", title="an error", where="ours", experiment=Experiment("beyond_toys", "published-ece"), settings=ERRORS
)
def measured_error(results: Results) -> Iterator[Row]:
    yield Claim("above", "The published error is above the real one.", "published_90 > real_90")


@study("small", "entropies", quick=needs(arrays="data/features.npz"), paper=needs())
def entropies(scale: str, files: Files) -> Grid:
    first, fit, predict, _ = steps_of(files)
    table = {"posterior": "{g}", "split": ["test", "other"], "table": f"{files['folder']}/t.npz"}
    return ["one"], [first | {"ood": ["other"]}, fit, predict | table]


@WORK.recipe(
    "table-0",
    title="an error",
    where="ours",
    studies=(entropies,),
    experiment=Experiment("lbbnn_toys", "entropy-curves"),
    reads={"small": "small/t.npz"},
    settings={"methods": {"g": "g"}, "hundredths": [300]},
)
def bounded_entropies(results: Results) -> Iterator[Row]:
    yield Claim("all", "Entropies are bounded.", "below_small_test_g_300 > 0.5")


def test_what_is_kept_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    write_measurements(tmp_path / NAME, "a", MEASURED)
    found = read_measurements(tmp_path / NAME, "a")
    assert found is not None
    assert found.values == MEASURED.values
    assert {name: one.tolist() for name, one in found.arrays.items()} == {
        name: one.tolist() for name, one in MEASURED.arrays.items()
    }


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 no more", b"{}"])
def test_another_request_and_a_damaged_file_are_nothing(tmp_path: Path, content: bytes | None) -> None:
    write_measurements(tmp_path / NAME, "a", MEASURED)
    if content is None:
        assert read_measurements(tmp_path / NAME, "b") is None
        assert read_measurements(tmp_path / "none.npz", "a") is None
    else:
        (tmp_path / NAME).write_bytes(content)
        assert read_measurements(tmp_path / NAME, "a") is None


def test_a_request_is_of_settings_content_and_seed_and_of_no_place(tmp_path: Path) -> None:
    for name, content in (("one", b"x"), ("moved", b"x"), ("other", b"y")):
        (tmp_path / name).write_bytes(content)

    def asked(file: str, size: int = 3, seed: int = 0, name: str = "r") -> str:
        return digest_request(name, {"size": size}, {"train": tmp_path / file}, seed=seed, progress=SILENT)

    assert asked("one") == asked("moved")
    assert len({asked("one"), asked("other"), asked("one", 4), asked("one", seed=1), asked("one", name="s")}) == 5


def test_a_finished_experiment_is_taken_and_force_measures_anew(
    recipes: Recipes, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes(measured_error)
    words, calls, measure = ("reproduce", TABLE, "--out", tmp_path / "out"), [], beyond_toys.measure_published_ece
    counted = lambda *given, **more: calls.append(1) or measure(*given, **more)  # noqa: E731
    monkeypatch.setattr(beyond_toys, "measure_published_ece", counted)
    first = cli(*words, "--json").json["recipes"][0]
    again = cli(*words, "--json").json["recipes"][0]
    assert len(calls) == 1
    assert again["measured"] == first["measured"]
    assert cli(*words, "--seed", 3).code == 0
    assert len(calls) == 2
    assert cli(*words, "--seed", 3, "--force").code == 0
    assert len(calls) == 3


def test_force_fits_anew_and_is_no_part_of_what_is_recorded(recipes: Recipes, data: Path, out: Path, cli: Cli) -> None:
    recipes()
    words = ("reproduce", TABLE, "--data", data, "--out", out, "--json")
    assert cli(*words).code == 0
    file = out / "quick/studies/small/runs/one/posteriors/g.safetensors"
    before = file.stat().st_mtime_ns
    (document,) = cli(*words, "--force").json["recipes"]
    assert file.stat().st_mtime_ns > before
    assert "--force" not in document["command"]
    assert not any("--force" in line["line"] for line in document["studies"]["small"]["lines"])


@pytest.mark.long
def test_an_experiment_reads_what_a_study_has_written(recipes: Recipes, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "data").mkdir()
    arrays = {name.replace("_far", "_other"): part for name, part in make_arrays().items()}
    np.savez(tmp_path / "data" / "features.npz", **arrays)
    recipes(bounded_entropies)
    words = ("reproduce", "test/table-0", "--out", tmp_path / "out", "--json")
    assert cli(*words).json["recipes"][0]["claims"][0]["why"].startswith("needs features.npz")
    (document,) = cli(*words, "--data", tmp_path / "data").json["recipes"]
    assert (document["claims"][0]["verdict"], document["claims"][0]["why"]) == ("holds", None)
    assert "ecdf-test.png" in document["figures"]


@pytest.mark.long
def test_an_experiment_that_fails_says_why_and_the_others_go_on(
    recipes: Recipes, data: Path, out: Path, cli: Cli
) -> None:
    recipes(measured_error, bounded_entropies)
    (out / "quick/studies/small").mkdir(parents=True)
    np.savez(out / "quick/studies/small/t.npz", x=np.zeros(3))
    done = cli("reproduce", "--all", "--data", data, "--out", out, "--json")
    assert done.code == 0, done.stderr
    first, second = done.json["recipes"]
    assert "entropy-curves failed: " in first["claims"][0]["why"]
    assert second["claims"][0]["verdict"] in ("holds", "open")

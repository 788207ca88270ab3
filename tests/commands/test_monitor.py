"""monitor: a stream of tables, what it counts, when it raises an alarm, and what it refuses."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run_all
from problems.arrays import make_arrays
from problems.command_line import Cli
from scipy import stats

from bnncli.artifacts.files import read_header
from bnncli.artifacts.posteriors import read_decision, read_tensors
from bnncli.artifacts.predictions import read_predictions
from bnncli.evaluation.decisions import SetRule
from bnncli.evaluation.monitoring import Capital, ConformalRanks, bet_on_p_values
from bnncli.numerics.random import stream_seed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with splits calib (200 rows) and night (400 rows), both unused, a shifted one, and predictions of laplace."""
    folder = tmp_path_factory.mktemp("monitor")
    arrays = make_arrays()
    centers, generator = arrays["head_weight"] / 2, np.random.default_rng(1)
    for name, spread, size in (("test", 1.0, 200), ("night", 1.0, 400), ("noisy", 2.5, 300)):
        labels = generator.integers(3, size=size)
        arrays[f"features_{name}"] = (centers[labels] + spread * generator.normal(size=(size, 5))).astype(np.float32)
        arrays[f"labels_{name}"] = labels
    np.savez(folder / "arrays.npz", **arrays)  # type: ignore[arg-type]
    run = folder / "small"
    run_all(
        ("extract-features", run, "--from-npz", folder / "arrays.npz", "--ood", "far", "--hold-out", "calib=test:199"),
        ("fit-laplace", run, "--prior-precision", 10),
        ("predict", run, "--posterior", "laplace", "--samples", 50),
        *(
            (
                "predict",
                run,
                "--posterior",
                "laplace",
                "--samples",
                50,
                "--split",
                split,
                "--table",
                folder / f"{split}{suffix}",
            )
            for split in ("night", "noisy", "calib")
            for suffix in (".csv", ".npz")
        ),
    )
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores_are_rough: None) -> Path:
    """A copy of it that a test may change, with its tables in the working folder."""
    shutil.copytree(made.with_name("small.bnn"), tmp_path / "small.bnn")
    for table in (*made.parent.glob("*.csv"), *made.parent.glob("*.npz")):
        shutil.copy(table, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "small"


def numbers_of(done: Any) -> dict[str, Any]:
    return dict(done.json["metrics"])


def state_of(run: Path) -> Path:
    return run.with_name("small.bnn") / "monitor" / "laplace.mc.safetensors"


def split_table(source: str, *sizes: int) -> list[str]:
    """Parts of a table, by their numbers of rows."""
    with open(source, newline="") as stream:
        header, *rows = csv.reader(stream)
    names, start = [], 0
    for place, size in enumerate(sizes):
        names.append(f"part-{place}.csv")
        with open(names[-1], "w", newline="") as stream:
            csv.writer(stream).writerows([header, *rows[start : start + size]])
        start += size
    return names


def test_the_path_is_that_of_the_predictions_by_hand(cli: Cli, run: Path) -> None:
    cli("monitor", run, "--table", "night.csv").expect(0)
    predictions = run.with_name("small.bnn") / "predictions" / "laplace.mc"
    calib, night = (read_predictions(predictions / f"{name}.h5").combined for name in ("calib", "night"))
    assert calib is not None
    assert night is not None
    uniforms = np.random.default_rng(stream_seed(0, "monitor/ties")).random(400)
    p_values = ConformalRanks(np.asarray(calib, np.float64)).extend(np.asarray(night, np.float64), uniforms)
    path = Capital.start(8).play(bet_on_p_values(p_values))[1]
    tensors, _ = read_tensors(state_of(run), kind="monitor")
    np.testing.assert_allclose(tensors["inputs.path"].numpy(), path, rtol=1e-9, atol=1e-9)
    cli("verify", state_of(run)).expect(0)


@pytest.mark.parametrize("score", ["combined", "mutual_info", "max_prob"])
@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_scores_of_a_table_are_those_of_the_predictions(cli: Cli, run: Path, score: str, suffix: str) -> None:
    cli("monitor", run, "--table", f"night{suffix}", "--score", score)
    content = read_predictions(run.with_name("small.bnn") / "predictions" / "laplace.mc" / "night.h5")
    assert content.mutual_info is not None
    expected = {
        "combined": content.combined,
        "mutual_info": -content.mutual_info,
        "max_prob": content.probs.max(axis=1),
    }
    tensors, _ = read_tensors(state_of(run), kind="monitor")
    np.testing.assert_array_equal(tensors["inputs.values"].numpy(), expected[score])


@pytest.mark.parametrize("score", ["combined", "mutual_info"])
def test_a_night_without_change_is_quiet_and_a_shifted_one_is_dated(cli: Cli, run: Path, score: str) -> None:
    quiet = numbers_of(cli("monitor", run, "--table", "night.csv", "--score", score, "--json").expect(0))
    assert not quiet["is_alarm"]
    assert (quiet["tests"]["inputs"]["examples"], quiet["tests"]["errors"]["examples"]) == (400, 400)
    done = cli("monitor", run, "--table", "noisy.csv", "--alarm-file", "ALARM.json", "--plot", "chart.png", "--json")
    assert (done.code, done.json["error"]["code"]) == (3, "alarm")
    inputs = numbers_of(done)["tests"]["inputs"]
    assert inputs["is_alarm"]
    assert 400 < inputs["alarm_at"] < 600
    assert abs(inputs["change_after"] - 400) < 60
    alarms = json.loads(Path("ALARM.json").read_text())
    assert alarms["alarms"]["inputs"]["alarm_at"] == inputs["alarm_at"]
    assert Path("chart.png").read_bytes().startswith(b"\x89PNG")
    # It stays until it is reset, which also removes the alarm file.
    assert "the inputs have changed" in cli("monitor", run).expect(3).stderr
    cli("monitor", run, "--table", "night.csv").expect(3)
    cli("monitor", run, "--reset", "--score", score, "--alarm-file", "ALARM.json").expect(0)
    assert not Path("ALARM.json").exists()


def test_nights_apart_are_as_one_and_no_row_counts_twice(cli: Cli, run: Path) -> None:
    whole = numbers_of(cli("monitor", run, "--table", "night.csv", "--name", "whole", "--json").expect(0))
    parts = split_table("night.csv", 1, 150, 249)
    for part in (*parts, parts[1]):
        found = numbers_of(cli("monitor", run, "--table", part, "--json").expect(0))
    assert found["tests"]["inputs"]["new"] == 0
    for test in ("inputs", "errors"):
        assert found["tests"][test]["examples"] == 400
        assert found["tests"][test]["log10_e"] == pytest.approx(whole["tests"][test]["log10_e"], abs=1e-9)
    again = cli("monitor", run, "--table", parts[1], "--json").expect(0)
    assert numbers_of(again)["tests"] == found["tests"]


def test_csv_and_npz_tables_are_alike(cli: Cli, run: Path) -> None:
    found = [
        numbers_of(cli("monitor", run, "--table", f"noisy{suffix}", "--name", suffix[1:], "--json").expect(3))
        for suffix in (".csv", ".npz")
    ]
    assert found[0] == found[1]


def test_labels_come_later_by_row_or_by_name(cli: Cli, run: Path) -> None:
    with open("noisy.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    wrong = sum(row["predicted"] != row["label"] for row in rows)
    with open("labels.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([["label"], *([row["label"]] for row in rows)])
    with open("by-name.csv", "w", newline="") as stream:
        shuffled = [(f"image-{k}.png", rows[k]["label"]) for k in np.random.default_rng(0).permutation(200)]
        csv.writer(stream).writerows([["name", "label"], *shuffled, ["other.png", rows[0]["label"]]])
    for name, titles in (("bare.csv", []), ("named.csv", ["name"])):
        with open(name, "w", newline="") as stream:
            table = csv.DictWriter(stream, [*rows[0], *titles])
            table.writeheader()
            table.writerows(
                {**row, "label": "", **dict.fromkeys(titles, f"image-{k}.png")} for k, row in enumerate(rows)
            )
    first = numbers_of(cli("monitor", run, "--table", "bare.csv", "--json").expect(3))
    assert first["tests"]["errors"]["examples"] == 0
    later = numbers_of(cli("monitor", run, "--table", "bare.csv", "--labels", "labels.csv", "--json").expect(3))
    assert (later["tests"]["inputs"]["new"], later["tests"]["errors"]["new"]) == (0, 300)
    assert later["tests"]["errors"]["error_rate"] == pytest.approx(wrong / 300)
    named = cli("monitor", run, "--table", "named.csv", "--labels", "by-name.csv", "--name", "named", "--json").expect(
        3
    )
    assert numbers_of(named)["tests"]["errors"]["examples"] == 200
    assert "1 of 201 names are not in the tables" in named.stderr
    cli("monitor", run, "--table", "bare.csv", "--table", "named.csv", "--labels", "labels.csv").expect(65, "600 rows")


def test_the_levels_of_both_tests_and_of_the_reference_add_up_to_alpha(cli: Cli, run: Path) -> None:
    tests = numbers_of(cli("monitor", run, "--table", "night.csv", "--alpha", 0.04, "--json").expect(0))["tests"]
    assert tests["inputs"]["threshold_log10_e"] == pytest.approx(-np.log10(0.02))
    assert tests["errors"]["threshold_log10_e"] == pytest.approx(-np.log10(0.01))
    calib = read_predictions(run.with_name("small.bnn") / "predictions" / "laplace.mc" / "calib.h5")
    wrong = int((np.asarray(calib.probs).argmax(axis=1) != np.asarray(calib.labels)).sum())
    bound = stats.binomtest(wrong, len(calib.probs), alternative="less").proportion_ci(1 - 0.01).high
    assert tests["errors"]["reference"] == pytest.approx(bound)


def test_a_given_error_rate_is_the_reference(cli: Cli, run: Path) -> None:
    words = ("monitor", run, "--table", "night.csv", "--json")
    calm = numbers_of(cli(*words, "--max-error", 0.6, "--name", "calm").expect(0))
    assert calm["tests"]["errors"]["reference"] == 0.6
    assert calm["tests"]["errors"]["threshold_log10_e"] == pytest.approx(-np.log10(0.005))
    strict = numbers_of(cli(*words, "--max-error", 0.01, "--name", "strict").expect(3))
    assert strict["tests"]["errors"]["is_alarm"]
    assert not strict["tests"]["inputs"]["is_alarm"]


def test_adaptive_sets_follow_the_labels(cli: Cli, run: Path) -> None:
    cli("monitor", run, "--reset", "--coverage", 0.8).expect(0)
    rule = run.with_name("small.bnn") / "decisions" / "laplace.mc" / "adaptive.safetensors"
    cli("calibrate", run, "--sets", "lac", "--coverage", 0.8, "--name", "fixed").expect(0)
    fixed = read_decision(rule.with_name("fixed.safetensors")).rule
    first = read_decision(rule).rule
    assert isinstance(first, SetRule)
    assert isinstance(fixed, SetRule)
    assert first.thresholds.tolist() == fixed.thresholds.tolist()
    cli("predict", run, "--posterior", "laplace", "--samples", 50, "--split", "noisy", "--table", "sets.csv").expect(0)
    with open("sets.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    missed = np.mean([row["label"] not in row["adaptive_set"].split(";") for row in rows])
    found = numbers_of(cli("monitor", run, "--table", "sets.csv", "--json").expect(3))["sets"]
    assert found["coverage"] == pytest.approx(1 - missed)
    assert found["level"] == pytest.approx(0.2 + 0.1 * (0.2 - missed))
    assert read_header(rule).meta["metrics"]["level"] == found["level"]
    after = read_decision(rule).rule
    assert isinstance(after, SetRule)
    assert (after.thresholds > first.thresholds) == (missed > 0.2)


def test_monitors_beside_each_other_keep_their_own_sets_and_alarm_files(cli: Cli, run: Path) -> None:
    for name, coverage in (("wide", 0.9), ("narrow", 0.5)):
        cli("monitor", run, "--reset", "--coverage", coverage, "--name", name).expect(0)
    words = ("predict", run, "--posterior", "laplace", "--samples", 50, "--split", "night", "--table", "sets.csv")
    cli(*words).expect(0)
    coverages = [
        numbers_of(cli("monitor", run, "--table", "sets.csv", "--name", name, "--json").expect(0))["sets"]["coverage"]
        for name in ("wide", "narrow")
    ]
    assert coverages[0] > 0.8
    assert coverages[1] < 0.7
    cli("monitor", run, "--table", "noisy.csv", "--name", "wide", "--alarm-file", "ALARM.json").expect(3)
    cli("monitor", run, "--name", "narrow", "--alarm-file", "ALARM.json").expect(
        73, "not a list of this monitor's alarms"
    )
    cli("monitor", run, "--name", "typo").expect(66, "no monitor")
    assert Path("ALARM.json").exists()
    rule = run.with_name("small.bnn") / "decisions" / "laplace.mc" / "adaptive-wide.safetensors"
    rule.unlink()  # as after a kill
    cli("monitor", run, "--name", "wide").expect(3)
    assert rule.exists()
    cli("monitor", run, "--name", "wide", "--reset").expect(0)
    assert not rule.exists()


def test_rows_without_a_prediction_or_a_score_are_no_errors(cli: Cli, run: Path) -> None:
    with open("night.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for name, column in (("blank.csv", "predicted"), ("score.csv", "combined")):
        with open(name, "w", newline="") as stream:
            table = csv.DictWriter(stream, [*rows[0]])
            table.writeheader()
            table.writerows(row if number != 7 else {**row, column: ""} for number, row in enumerate(rows))
    found = numbers_of(cli("monitor", run, "--table", "blank.csv", "--json").expect(0))
    assert (found["tests"]["inputs"]["examples"], found["tests"]["errors"]["examples"]) == (400, 399)
    cli("monitor", run, "--table", "score.csv").expect(65, "row 7 has no number in column 'combined'")


def test_what_does_not_fit_is_refused_in_one_line(cli: Cli, run: Path) -> None:
    monitor = ("monitor", run, "--table")
    cli(*monitor, "calib.csv").expect(65, "rows of split 'calib', which are not new examples")
    cli(*monitor, "absent.csv").expect(66)
    Path("other.csv").write_text("a,b\n1,2\n")
    cli(*monitor, "other.csv").expect(65, "has no column 'split'")
    Path("odd.csv").write_text(Path("night.csv").read_text().replace("laplace,mc", "hmc,mc"))
    cli(*monitor, "odd.csv").expect(65, "has no predictions of laplace.mc (has: hmc.mc)")
    cli("monitor", run, "--labels", "night.csv").expect(2, "add --table FILE")
    cli("monitor", run, "--split", "val", "--posterior", "laplace").expect(65, "was fitted or chosen with this split")
    assert not state_of(run).exists()
    cli(*monitor, "night.csv").expect(0)
    before = state_of(run).read_bytes()
    cli("monitor", run, "--alpha", 0.2).expect(2, "began with --alpha 0.01; got 0.2")
    cli("monitor", run, "--score", "max_prob").expect(2, "--reset to start over, or --name NAME")
    cli("predict", run, "--posterior", "laplace", "--samples", 60, "--split", "calib", "--force").expect(0)
    cli("monitor", run).expect(65, "predictions that have changed since")
    assert state_of(run).read_bytes() == before
    Path("keep.json").write_text("{}")
    cli("monitor", run, "--reset", "--alarm-file", "keep.json").expect(
        73, "is not a list of this monitor's alarms created by bnncli"
    )


def test_a_night_without_examples_changes_nothing(cli: Cli, run: Path) -> None:
    Path("none.csv").write_text(Path("night.csv").read_text().partition("\n")[0] + "\n")
    found = numbers_of(cli("monitor", run, "--table", "none.csv", "--json").expect(0))
    assert [one["examples"] for one in found["tests"].values()] == [0, 0]


def test_a_dry_run_writes_nothing(cli: Cli, run: Path) -> None:
    assert "compute" in cli("monitor", run, "--table", "night.csv", "--dry-run").expect(0).stdout
    assert not state_of(run).exists()

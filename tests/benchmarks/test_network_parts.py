"""Benchmarks of networks."""

from __future__ import annotations

import importlib
import json
import math
import mmap
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bnncli.models.architectures.lenet5 import build

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's modules can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def report_of(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """The exit code and the part's report, on random images and a LeNet-5 of random weights."""
    generator = np.random.default_rng(0)
    for name, rows in (("fmnist-train", 400), ("fmnist-test", 100)):
        images = generator.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", x=images, y=np.arange(rows) % 10)
    torch.save(build().state_dict(), folder / "lenet-fmnist-1.pt")
    script = str(BENCHMARKS / "whole_networks.py")
    words = ["--data", folder, "--checkpoints", folder, "--out", folder / "out", "--only", part, "--quick"]
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    return int(str(ended.value.code)), json.loads((folder / "out/report.json").read_text())["parts"][part]


def test_a_job_has_its_value_its_seconds_and_the_memory_that_it_took() -> None:
    from network_parts._forked import measured

    def work() -> float:
        with mmap.mmap(-1, 2**27) as pages:  # what was freed before is not taken again
            bytes_there = np.frombuffer(pages, np.uint8)
            bytes_there[:] = 1
            total = float(bytes_there.sum())
            del bytes_there
        return total

    done = measured(work)
    assert done.value == 2**27
    assert 120 < done.mib < 160
    assert 0 < done.seconds < 5


def test_a_job_that_fails_says_why() -> None:
    from network_parts._bench import Failed
    from network_parts._forked import measured

    def fail() -> None:
        raise ValueError("too small")

    with pytest.raises(Failed, match="ValueError: too small"):
        measured(fail)


def test_probabilities_of_two_networks_agree_and_vary() -> None:
    from network_parts.resnet20 import apart

    ours, others = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]]), np.array([[0.4, 0.5, 0.1], [0.1, 0.1, 0.8]])
    assert apart(ours, others) == pytest.approx((0.5, 0.35))
    assert apart(ours, ours) == (1.0, 0.0)


@pytest.mark.nightly
def test_a_library_that_is_not_there_leaves_its_part_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    code, report = report_of("theirs", tmp_path, monkeypatch)
    assert (code, list(report)) == (0, ["left_out"])
    assert report["left_out"].startswith("laplace-torch is not importable")


@pytest.mark.nightly
def test_each_command_has_its_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = report_of("seconds", tmp_path, monkeypatch)
    assert code == 0, report
    chains, adapter = report["tables"]
    assert [row["command"] for row in chains["rows"]] == ["hmc"]
    fits = ["fit-laplace --structure kron", "fit-laplace --structure diag"]
    assert [row["command"] for row in adapter["rows"]] == ["pass", *fits, "predict"]
    assert all(row["seconds"] > 0 for row in (*chains["rows"], *adapter["rows"]))


@pytest.mark.nightly
def test_predictives_are_compared_under_each_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = report_of("predictives", tmp_path, monkeypatch)
    assert code == 0
    rows = report["tables"][0]["rows"]
    assert [row["prior precision"] for row in rows] == [10, 1000]
    for name in ("mc", "logit-mc", "probit", "plug-in"):
        assert all(row[f"{name} nll"] > 0 and 0 <= row[f"{name} ece"] <= 1 for row in rows)
    assert rows[0]["plug-in nll"] == rows[1]["plug-in nll"]  # the mean is the network's weights


@pytest.mark.nightly
def test_laplace_torch_is_right_where_it_is_as_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from theirs import laplace_torch_problem

    if laplace_torch_problem():
        pytest.skip("laplace-torch cannot be imported")
    code, report = report_of("theirs", tmp_path, monkeypatch)
    assert code == 0
    dense = [row for row in report["tables"][-1]["rows"] if row["structure"] == "full"]
    assert all(row["ours"] < 1e-5 and row["laplace-torch"] < 1e-5 for row in dense)


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The exit code and the parts' reports of the script in its quick form, on the data in tmp_path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "out"
        script = str(BENCHMARKS / "whole_networks.py")
        monkeypatch.setattr(sys, "argv", [script, "--data", str(tmp_path), "--out", str(out), "--quick", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        return int(str(ended.value.code)), json.loads((out / "report.json").read_text())["parts"]

    return call


def write_images(folder: Path, *names: str) -> None:
    """Bytes (600, 28, 28) whose class is the bright row, as npz."""
    generator = np.random.default_rng(0)
    for name in names:
        labels = generator.integers(10, size=600)
        images = generator.integers(120, size=(600, 28, 28), dtype=np.uint8)
        images[np.arange(600), 2 * labels] += 90
        np.savez(folder / f"{name}.npz", x=images, y=labels)


def test_a_part_whose_data_are_missing_is_left_out_with_the_files_name(run: Run, capsys: Any) -> None:
    code, parts = run("--only", "tanh-200", "lenet")
    assert code == 0
    assert parts["tanh-200"] == {"left_out": "fmnist-train.npz is not in the folder of --data"}
    assert set(parts) == {"tanh-200", "lenet"}
    assert "left out: fmnist-train.npz" in capsys.readouterr().out


def test_a_command_that_fails_is_told_and_ends_the_part(run: Run, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "fmnist-train.npz").write_bytes(b"no npz")
    write_images(tmp_path, "fmnist-test")
    weights = tmp_path / "out" / "tanh-200" / "tanh.pt"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"trained before")
    code, parts = run("--only", "tanh-200")
    assert code == 1
    assert "extract-features tanh.pt" in parts["tanh-200"]["failed"]
    assert "failed: bnncli" in capsys.readouterr().out


def test_tables_have_a_dash_where_there_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    table = importlib.import_module("network_parts._table").Table("of two", {"name": "", "nll": ".3f"})
    table.rows += [{"name": "map", "nll": 0.12345}, {"name": "hmc", "nll": None}, {"name": "x", "nll": math.nan}]
    table.notes.append("that is all")
    lines = ["of two", "name |   nll", "-----+------", "map  | 0.123", "hmc  |     -", "x    |     -", "that is all"]
    assert table.lines() == lines


@pytest.mark.nightly
def test_posteriors_of_a_network_are_fitted_once_and_scored(run: Run, tmp_path: Path) -> None:
    write_images(tmp_path, "fmnist-train", "fmnist-test")
    code, parts = run("--only", "tanh-200")
    assert code == 0, parts
    (table,) = parts["tanh-200"]["tables"]
    rows = {row["posterior"]: row for row in table["rows"] if row["integrator"] != "published"}
    assert {"map", "temperature", "laplace", "kron-all", "ekfac-all", "subspace-all"} == set(rows)
    for name, row in rows.items():
        assert 0 <= row["accuracy"] <= 1
        assert row["nll"] > 0
        assert (name == "map") == ("CPU s" not in row)
    assert "kron, all layers" in [row["posterior"] for row in table["rows"]]
    assert any(line.startswith("map") for line in table["notes"])
    costs = json.loads((tmp_path / "out" / "tanh-200" / "costs.json").read_text())
    again, parts = run("--only", "tanh-200")
    same = {row["posterior"]: row for row in parts["tanh-200"]["tables"][0]["rows"] if row["integrator"] != "published"}
    assert again == 0
    assert same == rows
    after = json.loads((tmp_path / "out" / "tanh-200" / "costs.json").read_text())
    assert all(after[key] == costs[key] for key in costs if "fit-laplace" in key)

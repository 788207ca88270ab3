"""benchmarks/whole_networks.py: its parts on a few made-up images, what it leaves out, and what it remembers."""

from __future__ import annotations

import importlib
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
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


@pytest.mark.long
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

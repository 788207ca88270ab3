"""Parts of benchmarks/whole_networks.py: a job's memory and seconds, libraries that are not there, the predictives' table."""

from __future__ import annotations

import json
import mmap
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bnncli.networks.lenet5 import build

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


@pytest.mark.long
def test_a_library_that_is_not_there_leaves_its_part_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    code, report = report_of("theirs", tmp_path, monkeypatch)
    assert (code, list(report)) == (0, ["left_out"])
    assert report["left_out"].startswith("laplace-torch is not importable")


@pytest.mark.long
def test_predictives_are_compared_under_each_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = report_of("predictives", tmp_path, monkeypatch)
    assert code == 0
    rows = report["tables"][0]["rows"]
    assert [row["prior precision"] for row in rows] == [10, 1000]
    for name in ("mc", "logit-mc", "probit", "plug-in"):
        assert all(row[f"{name} nll"] > 0 and 0 <= row[f"{name} ece"] <= 1 for row in rows)
    assert rows[0]["plug-in nll"] == rows[1]["plug-in nll"]  # the mean is the network's weights


@pytest.mark.long
def test_laplace_torch_is_right_where_it_is_as_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from theirs import laplace_torch_problem

    if laplace_torch_problem():
        pytest.skip("laplace-torch cannot be imported")
    code, report = report_of("theirs", tmp_path, monkeypatch)
    assert code == 0
    dense = [row for row in report["tables"][-1]["rows"] if row["structure"] == "full"]
    assert all(row["ours"] < 1e-5 and row["laplace-torch"] < 1e-5 for row in dense)

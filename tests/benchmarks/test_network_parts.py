"""Parts of benchmarks/whole_networks.py: a job's memory and seconds, libraries that are not there, the predictives' table."""

from __future__ import annotations

import csv
import importlib
import json
import mmap
import runpy
import sys
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


def reviews_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of the reviews' part, on made-up ones in the folder."""
    with open(folder / "reviews.csv", "w", newline="", encoding="utf-8") as stream:
        words = [("good", "bad", "the film", "a plot")[row % 4] for row in range(80)]
        rows = [(f"{word} is {'very ' * (row % 9)}{'not ' * (row // 9)}", row % 2) for row, word in enumerate(words)]
        csv.writer(stream).writerows([("text", "label"), *rows])
    (folder / "encoder").mkdir(exist_ok=True)
    return report_of("reviews", folder, monkeypatch)


def test_reviews_are_left_out_without_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    code, report = reviews_of(tmp_path, monkeypatch)
    assert (code, list(report)) == (0, ["left_out"])
    assert report["left_out"].startswith("needs transformers and peft")


@pytest.mark.long
def test_posteriors_over_an_adapter_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    folders = importlib.import_module("problems.hf_folders")
    folders.text_folder(tmp_path / "encoder", num_hidden_layers=2, num_labels=2, id2label=None, label2id=None)
    code, report = reviews_of(tmp_path, monkeypatch)
    assert code == 0, report
    rows = {row["posterior"]: row for row in report["tables"][0]["rows"]}
    own = {f"{name}-lora" for name in ("diag", "kron", "full", "low-rank", "draws", "subspace")}
    assert own | {"map", "temperature", "laplace"} == set(rows)
    assert all(row["nll"] > 0 and 0 <= row["accuracy"] <= 1 for row in rows.values())


@pytest.mark.long
def test_a_library_that_is_not_there_leaves_its_part_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    code, report = report_of("theirs", tmp_path, monkeypatch)
    assert (code, list(report)) == (0, ["left_out"])
    assert report["left_out"].startswith("laplace-torch is not importable")


@pytest.mark.long
def test_each_command_has_its_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, report = report_of("seconds", tmp_path, monkeypatch)
    assert code == 0, report
    chains, adapter = report["tables"]
    assert [row["command"] for row in chains["rows"]] == ["hmc"]
    fits = ["fit-laplace --structure kron", "fit-laplace --structure diag"]
    assert [row["command"] for row in adapter["rows"]] == ["pass", *fits, "predict"]
    assert all(row["seconds"] > 0 for row in (*chains["rows"], *adapter["rows"]))


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

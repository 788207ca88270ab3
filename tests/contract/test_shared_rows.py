"""predict and evaluate in several processes: the same files for any number of them, said once, and ended by an error of any."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli, Invocation, new_run
from problems.workers import run_processes, run_workers

NETWORK = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
"""
ROUGH = """
import pytest
from conftest import make_scores_rough
make_scores_rough(pytest.MonkeyPatch())
"""  # as `cli` has it
SIZES = {"train": 211, "val": 1300, "test": 1300, "two": 2, "far": 1100}
ALONE, TRUST = ("--shards", 64, "--threads", 1, "--json"), ("--trust-code",)


def problem(*splits: str) -> dict[str, np.ndarray]:
    """Features of three classes, of numbers of rows that no number of workers divides."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(3, 4))
    arrays = {"head_weight": weight.astype(np.float32), "head_bias": np.zeros(3, np.float32)}
    for split in splits:
        features = generator.normal(size=(SIZES[split], 4), scale=3 if split == "far" else 1).astype(np.float32)
        arrays[f"features_{split}"] = features
        if split != "far":
            noise = generator.gumbel(size=(SIZES[split], 3))
            arrays[f"labels_{split}"] = (features @ weight.T + noise).argmax(axis=1)
    return arrays


def fitted(cli: Cli, run: Path, arrays: dict[str, np.ndarray], *words: str) -> Path:
    """A run with these features and a Gaussian; words go to extract-features."""
    new_run(cli, run, arrays, *words)
    assert cli("fit-laplace", run, "--prior-precision", 3, *ALONE).code == 0
    return run


def digests(done: Invocation) -> dict[str, str]:
    """Of each output that a command has written, by its role."""
    assert done.code == 0, done.stderr
    return {output["role"]: output["content_digest"] for output in done.json["outputs"]}


def assert_equal(alone: Invocation, workers: Sequence[Invocation]) -> None:
    """Workers have made what one process has, the first has said what it says, and the others nothing."""
    first, *others = workers
    assert digests(first) == digests(alone)
    assert first.json["warnings"] == alone.json["warnings"]
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * len(others)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        pytest.param(2, ("--integrator", "mc", "--integrator", "probit"), id="2"),
        pytest.param(3, ("--integrator", "all", "--top-k", "best"), id="3", marks=pytest.mark.long),
        pytest.param(4, ("--integrator", "mc", "--qmc", "--keep-samples"), id="4", marks=pytest.mark.long),
    ],
)
def test_predictions_are_equal_for_any_number_of_workers(
    cli: Cli, tmp_path: Path, size: int, words: tuple[str, ...]
) -> None:
    arrays = problem("train", "test", "two")
    alone, run = (fitted(cli, tmp_path / name, arrays) for name in ("alone", "run"))
    done = cli("predict", alone, *words, "--table", tmp_path / "alone.csv", *ALONE)
    assert_equal(done, run_workers(size, "predict", run, *words, "--table", "run.csv", "--json", cwd=tmp_path))
    assert cli("verify", tmp_path / "run.bnn").code == 0
    assert cli("predict", run, *words, "--json").json["action"] == "up_to_date"


@pytest.mark.long
def test_predictions_by_whole_networks_are_equal_for_any_number_of_workers(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    rng, space = np.random.default_rng(0), dict[str, Any]()
    for name, count in (("train", 40), ("test", 700)):
        inputs = rng.normal(size=(count, 1, 2, 2)).astype(np.float32)
        np.savez(f"{name}.npz", x=inputs, y=rng.integers(0, 3, count))
    exec(NETWORK, space)
    for seed in range(2):
        torch.manual_seed(seed)
        torch.save(space["make"]().state_dict(), f"{seed}.pt")
    splits = [word for name in ("train", "test") for word in ("--data", f"{name}=npz:{name}.npz")]
    assert cli("extract-features", "0.pt", "--model", "net.py:make", *splits).code == 0
    assert cli("fit-laplace", "0.pt", "--prior-precision", 3, "--layers", "all", "--name", "whole", *TRUST).code == 0
    assert cli("fit-ensemble", "0.pt", "1.pt", *TRUST).code == 0
    words = ("predict", "0.pt", "--posterior", "whole", "--posterior", "ensemble", "--force", *TRUST)
    for more in ((), ("--integrator", "mc")):
        done = cli(*words, *more, *ALONE)
        assert_equal(done, run_workers(3, *words, *more, "--json", cwd=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_scores_are_equal_for_any_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    arrays = problem("train", "test", "two", "far")
    alone, run = (fitted(cli, tmp_path / name, arrays, "--ood", "far") for name in ("alone", "run"))
    for one in (alone, run):
        assert cli("hmc", one, "--chains", 4, "--warmup", 8, "--draws", 8, *ALONE).code == 0
        assert cli("predict", one, *ALONE).code == 0
    words = ("--score", "all", "--per-class", "--reference", "hmc", "--bootstrap", 1000, "--json", "--plot")
    done = cli("evaluate", alone, *words, tmp_path / "alone", "--threads", 1)
    workers = run_workers(size, "evaluate", run, *words, "run", cwd=tmp_path, before=ROUGH)
    assert_equal(done, workers)
    assert workers[0].json["rows"] == done.json["rows"]


@pytest.mark.long
def test_what_val_says_of_a_fit_is_the_same_for_any_number_of_workers(cli: Cli, tmp_path: Path) -> None:
    arrays = problem("train", "val")
    alone, run = (new_run(cli, tmp_path / name, arrays) for name in ("alone", "run"))
    words = ("--prior-precision", 3, "--structure", "full")
    done = cli("fit-laplace", alone, *words, *ALONE)
    first = run_workers(3, "fit-laplace", run, *words, "--json", cwd=tmp_path)[0]
    assert first.json["metrics"]["val"] == done.json["metrics"]["val"]
    assert first.json["metrics"]["val_excess"] == done.json["metrics"]["val_excess"]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_one_worker_cannot_predict_end_all(cli: Cli, tmp_path: Path, size: int) -> None:
    arrays = problem("train", "test")
    arrays["features_test"][-1] = 3e38  # whose logits are infinite
    run = fitted(cli, tmp_path / "run", arrays)
    words = ("predict", run, "--posterior", "laplace", "--integrator", "mc", "--json")
    first, *others = run_processes(size, *words, cwd=tmp_path)
    assert first.code == 70
    assert all(one.code in (69, 70) for one in others)  # 69 where it has lost the first before it heard why
    said = f"worker {size - 1}: class probabilities are not finite for 1 of 434 examples"
    assert (first.json["error"]["code"], first.json["error"]["message"]) == ("numeric", said)
    assert first.stderr.count(said) == 1
    assert [one.stdout + one.stderr for one in others] == [""] * (size - 1)
    assert not (tmp_path / "run.bnn/predictions/laplace.mc/test.h5").exists()

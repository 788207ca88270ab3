"""Several workers give what one gives, and end together."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems.command_line import Cli, Invocation, new_run
from problems.workers import ended, free_port, run_processes, run_workers, start_workers
from torch import nn

from bnncli.cli import spread
from bnncli.commands.demo import fixture_path
from bnncli.errors import UsageError
from bnncli.inference import mode
from bnncli.options.command import ComputeOptions
from bnncli.system import memory as panels

FITS = {
    "fit-laplace": ("--structure", "full"),
    "fit-laplace/kron": ("--structure", "kron", "--name", "kron"),
    "fit-laplace/loo": ("--structure", "full", "--prior-precision", "loo", "--name", "loo"),
    "fit-laplace/marglik": ("--structure", "diag", "--prior-precision", "marglik", "--name", "diag"),
    "refine": ("--epochs", 1, "--length", 2),
    "refine/batches": ("--epochs", 1, "--batch-size", 16, "--name", "batches"),
    "hmc": ("--chains", 4, "--warmup", 8, "--draws", 8),
    "hmc/examples": ("--chains", 9, "--warmup", 8, "--draws", 8, "--spread", "examples", "--name", "examples"),
    "hmc/chains": ("--chains", 9, "--warmup", 8, "--draws", 8, "--spread", "chains", "--name", "chains"),
    "hmc/nuts": ("--sampler", "nuts", "--chains", 4, "--warmup", 8, "--draws", 8, "--name", "nuts"),
    "fit-vi": ("--epochs", 1),
    "fit-swag": ("--epochs", 4),
    "fit-sghmc": ("--chains", 2, "--epochs", 4, "--draws", 2, "--exploration", 0.5),
    "fit-temperature": (),
}


def problem(num_examples: int, num_features: int = 4) -> dict[str, np.ndarray]:
    """Features of three classes, whose number no number of workers divides."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(3, num_features))
    arrays = {"head_weight": weight.astype(np.float32), "head_bias": np.zeros(3, np.float32)}
    for split, count in (("train", num_examples), ("val", 50)):
        features = generator.normal(size=(count, num_features)).astype(np.float32)
        arrays[f"features_{split}"] = features
        arrays[f"labels_{split}"] = (features @ weight.T + generator.gumbel(size=(count, 3))).argmax(axis=1)
    return arrays


@pytest.mark.parametrize(
    ("size", "num_examples", "lines"),
    [
        pytest.param(2, 211, ("hmc/chains",), id="2"),
        *(
            pytest.param(size, count, lines, id=f"{size} {count}", marks=pytest.mark.nightly)
            for size, count, lines in (
                (1, 150, ("fit-laplace", "hmc", "hmc/examples")),
                (2, 211, ("hmc/examples",)),
                (3, 150, tuple(FITS)),
                (4, 5, ("refine", "hmc")),
            )
        ),
    ],
)
def test_digests_are_equal(cli: Cli, tmp_path: Path, size: int, num_examples: int, lines: tuple[str, ...]) -> None:
    arrays = problem(num_examples)
    alone, run = (new_run(cli, tmp_path / name, arrays) for name in ("alone", "shared"))
    if "fit-laplace" not in lines:
        lines = ("fit-laplace", *lines)
    for line in lines:
        command, words = line.partition("/")[0], FITS[line]
        done = cli(command, alone, *words, "--shards", 64, "--json").expect(0)
        if line == "fit-laplace" and len(lines) == 2:  # what the other needs
            cli(command, run, *words, "--shards", 64).expect(0)
            continue
        first, *others = run_workers(size, command, run, *words, "--json", cwd=tmp_path)
        assert first.code == 0, first.stderr
        assert first.json["outputs"][0]["content_digest"] == done.json["outputs"][0]["content_digest"], line
        assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)
    cli("verify", tmp_path / "shared.bnn").expect(0)
    assert [path.name for path in (tmp_path / "shared.bnn/posteriors").iterdir() if path.name.startswith(".")] == []


SMALL_DEVICES = """
import os
from bnncli.inference import memory, mode
from bnncli.system import memory as panels
panels._WIDTH, panels._LARGE = {"cpu": 5}, 10
mode.MAX_FULL_PRECONDITIONER = 0
memory.has_room_whole = lambda layout, device: False
rows = mode._spread
mode._spread = lambda *a, **k: os.write(2, b"rows are spread ") and rows(*a, **k)
"""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_spread_rows_give_same_covariance(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(panels, "_WIDTH", {"cpu": 5})
    monkeypatch.setattr(panels, "_LARGE", 10)
    monkeypatch.setattr(mode, "MAX_FULL_PRECONDITIONER", 0)  # as of any head that has no room
    arrays = problem(150)
    alone, run = (new_run(cli, tmp_path / name, arrays) for name in ("alone", "shared"))
    words = ("--structure", "full", "--prior-precision", 3, "--json")
    done = cli("fit-laplace", alone, *words, "--shards", 64)
    found = run_workers(size, "fit-laplace", run, *words, cwd=tmp_path, before=SMALL_DEVICES)
    assert [one.code for one in found] == [0] * size, found[0].stderr
    assert found[0].json["outputs"][0]["content_digest"] == done.json["outputs"][0]["content_digest"]
    assert all("rows are spread" in one.stderr for one in found)


REPEATS = {
    "2": (2, ("--repeats", 3)),
    "3": (3, ("--repeats", 5, "--estimator", "concrete")),
    "4": (4, ("--repeats", 3, "--estimator", "mnf", "--flow-hidden", 5)),
    "4 one": (4, ("--repeats", 1, "--standardize")),
}
MARKS = {"2": (), "3": pytest.mark.long}


@pytest.mark.parametrize(
    ("size", "words"),
    [pytest.param(*case, id=name, marks=MARKS.get(name, pytest.mark.nightly)) for name, case in REPEATS.items()],
)
def test_repeats_are_equal_for_workers(cli: Cli, tmp_path: Path, size: int, words: tuple[object, ...]) -> None:
    # Layers so wide that each network is a batch of its own.
    check_latent_fits(cli, tmp_path, size, "--hidden", "250,200", "--epochs", 2, *words)


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3])
def test_candidates_for_a_slab_are_the_same_for_any_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    check_latent_fits(cli, tmp_path, size, "--epochs", 2, "--repeats", 2, num_features=3000)


def check_latent_fits(cli: Cli, tmp_path: Path, size: int, *words: object, num_features: int = 4) -> None:
    """Fits of so many workers have the digest of a process alone, and say what there is to say once."""
    alone, run = (new_run(cli, tmp_path / name, problem(211, num_features)) for name in ("alone", "shared"))
    done = cli("fit-lbbnn", alone, *words, "--shards", 64, "--json").expect(0)
    first, *others = run_workers(size, "fit-lbbnn", run, *words, "--json", cwd=tmp_path)
    assert first.code == 0, first.stderr
    assert first.json["outputs"][0]["content_digest"] == done.json["outputs"][0]["content_digest"]
    told = [dict(one.json["metrics"], seconds_per_epoch=None) for one in (first, done)]
    assert told[0] == told[1]
    assert first.json["warnings"] == done.json["warnings"]
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 4])
def test_seeds_of_a_network_are_the_same_for_any_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    arrays = problem(70)
    np.savez(tmp_path / "train.npz", x=arrays["features_train"], y=arrays["labels_train"])
    words = (
        "--model",
        "mlp",
        "--model-arg",
        "inputs=4",
        "--model-arg",
        "classes=3",
        "--data",
        f"train=npz:{tmp_path}/train.npz",
    )
    words += ("--epochs", 3, "--seeds", 3, "--learning-rate", 0.01)
    done = cli("train", tmp_path / "alone.safetensors", *words, "--shards", 64, "--json").expect(0)
    first, *others = run_workers(size, "train", "shared.safetensors", *words, "--json", cwd=tmp_path)
    assert first.code == 0, first.stderr
    digests = [[output["content_digest"] for output in one.json["outputs"]] for one in (first, done)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 3
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)


@pytest.mark.long
def test_repeats_go_on_with_another_number_of_workers(cli: Cli, tmp_path: Path) -> None:
    words = ("--hidden", "250,200", "--epochs", 20, "--repeats", 3, "--save-every", 0)
    whole, run = (new_run(cli, tmp_path / name, problem(211)) for name in ("whole", "parts"))
    started = start_workers(2, ("fit-lbbnn", run, *words), cwd=tmp_path)
    state = tmp_path / "parts.bnn/posteriors/.lbbnn.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.05)
    started[1].send_signal(signal.SIGTERM)  # as torchrun sends it to all
    started[0].send_signal(signal.SIGTERM)
    first, second = ended(started)
    assert (first.code, second.stderr) == (143, ""), first.stderr
    assert "continue with: torchrun --nproc-per-node 2 -m bnncli fit-lbbnn" in first.stderr
    cli("fit-lbbnn", run, *words, "--resume").expect(65, "it was saved with networks grouped into different batches")
    done = run_workers(3, "fit-lbbnn", run, *words, "--resume", "--json", cwd=tmp_path)[0]
    assert (done.code, "resuming" in done.stderr) == (0, True), done.stderr
    expected = cli("fit-lbbnn", whole, *words, "--shards", 64, "--json").json["outputs"][0]["content_digest"]
    assert done.json["outputs"][0]["content_digest"] == expected
    assert not state.exists()


@pytest.mark.long
def test_what_is_up_to_date_is_so_for_all_workers_and_errors_are_said_once(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    cli("fit-laplace", run, "--prior-precision", 3).expect(0)
    first, second = run_workers(2, "fit-laplace", run, "--prior-precision", 3, cwd=tmp_path)
    assert (first.code, second.code, second.stderr) == (0, 0, "")
    assert "up to date" in first.stderr
    first, second = run_processes(2, "fit-laplace", run, "--prior-precision", 4, cwd=tmp_path)
    assert (first.code, second.stdout + second.stderr) == (73, "")
    assert "already exists with other options" in first.stderr
    assert second.code in (73, 69)  # where the store ends with worker 0, as without torchrun


@pytest.mark.long
def test_a_figure_is_drawn_by_the_first_worker(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(70))
    words = ("fit-laplace", run, "--prior-precision", "marglik", "--plot", "search.png", "--json")
    first, second = run_workers(2, *words, cwd=tmp_path)
    assert (first.code, second.code, second.stdout + second.stderr) == (0, 0, "")
    digest = hashlib.sha256((tmp_path / "search.png").read_bytes()).hexdigest()
    assert first.json["outputs"][-1]["content_digest"] == f"sha256:{digest}"


@pytest.mark.parametrize(("local", "here", "given"), [(1, 2, "cuda:1"), (0, 3, None), (2, 3, None)])
def test_each_worker_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch, local: int, here: int, given: str | None) -> None:
    told = {"RANK": local, "WORLD_SIZE": here, "MASTER_ADDR": "x", "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(spread, "device_name", lambda device: "cuda:0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with nullcontext() if given else pytest.raises(UsageError, match="3 workers on this machine, which has 2 GPUs"):
        assert spread.own_device(ComputeOptions()).device == given


@pytest.mark.nightly
@pytest.mark.parametrize("size", [3])
def test_an_interrupted_sampler_goes_on_with_another_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    words = ("--chains", 4, "--warmup", 20, "--draws", 150, "--save-every", 0)
    runs = [new_run(cli, tmp_path / name, problem(211)) for name in ("whole", "parts")]
    for run in runs:
        cli("fit-laplace", run, "--prior-precision", 3).expect(0)
    whole = cli("hmc", runs[0], *words, "--shards", 64, "--json").json["outputs"][0]["content_digest"]
    started = start_workers(2, ("hmc", runs[1], *words), cwd=tmp_path)
    state = tmp_path / "parts.bnn/posteriors/.hmc.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.05)
    for one in started:
        one.send_signal(signal.SIGTERM)
    first, second = ended(started)
    assert first.code == 128 + signal.SIGTERM, first.stderr
    assert "--resume" in first.stderr
    assert (second.stdout, second.stderr) == ("", "")
    assert second.code != 0
    done = run_workers(size, "hmc", runs[1], *words, "--resume", "--json", cwd=tmp_path)[0]
    assert done.code == 0, done.stderr
    assert done.json["outputs"][0]["content_digest"] == whole


@pytest.mark.long
def test_a_killed_worker_ends_all(cli: Cli, tmp_path: Path) -> None:
    run = new_run(cli, tmp_path / "run", problem(211))
    cli("fit-laplace", run, "--prior-precision", 3).expect(0)
    words = ("hmc", run, "--chains", 4, "--warmup", 50, "--draws", 100_000, "--save-every", 0)
    started = start_workers(2, words, cwd=tmp_path)
    state = tmp_path / "run.bnn/posteriors/.hmc.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.05)
    started[1].kill()
    before = time.monotonic()
    first, _ = ended(started)
    assert time.monotonic() - before < 20
    assert first.code == 69, first.stderr
    assert "a worker stopped without an error message (it may have been killed): stopping all workers" in first.stderr
    assert "Traceback" not in first.stderr
    assert not (tmp_path / "run.bnn/posteriors/hmc.nc").exists()


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


def row_problem(*splits: str) -> dict[str, np.ndarray]:
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
    cli("fit-laplace", run, "--prior-precision", 3, *ALONE).expect(0)
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
def test_predictions_are_equal_for_workers(cli: Cli, tmp_path: Path, size: int, words: tuple[str, ...]) -> None:
    arrays = row_problem("train", "test", "two")
    alone, run = (fitted(cli, tmp_path / name, arrays) for name in ("alone", "run"))
    done = cli("predict", alone, *words, "--table", tmp_path / "alone.csv", *ALONE)
    assert_equal(done, run_workers(size, "predict", run, *words, "--table", "run.csv", "--json", cwd=tmp_path))
    cli("verify", tmp_path / "run.bnn").expect(0)
    assert cli("predict", run, *words, "--json").json["action"] == "up_to_date"


@pytest.mark.long
def test_network_predictions_are_equal_for_workers(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    cli("extract-features", "0.pt", "--model", "net.py:make", *splits).expect(0)
    cli("fit-laplace", "0.pt", "--prior-precision", 3, "--layers", "all", "--name", "whole", *TRUST).expect(0)
    cli("fit-ensemble", "0.pt", "1.pt", *TRUST).expect(0)
    words = ("predict", "0.pt", "--posterior", "whole", "--posterior", "ensemble", "--force", *TRUST)
    for more in ((), ("--integrator", "mc")):
        assert_equal(cli(*words, *more, *ALONE), run_workers(3, *words, *more, "--json", cwd=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_scores_are_equal_for_any_number_of_workers(cli: Cli, tmp_path: Path, size: int) -> None:
    arrays = row_problem("train", "test", "two", "far")
    alone, run = (fitted(cli, tmp_path / name, arrays, "--ood", "far") for name in ("alone", "run"))
    for one in (alone, run):
        cli("hmc", one, "--chains", 4, "--warmup", 8, "--draws", 8, *ALONE).expect(0)
        cli("predict", one, *ALONE).expect(0)
    words = ("--score", "all", "--per-class", "--reference", "hmc", "--bootstrap", 1000, "--json", "--plot")
    done = cli("evaluate", alone, *words, tmp_path / "alone", "--threads", 1)
    workers = run_workers(size, "evaluate", run, *words, "run", cwd=tmp_path, before=ROUGH)
    assert_equal(done, workers)
    assert workers[0].json["rows"] == done.json["rows"]


@pytest.mark.long
def test_what_val_says_of_a_fit_is_the_same_for_any_number_of_workers(cli: Cli, tmp_path: Path) -> None:
    arrays = row_problem("train", "val")
    alone, run = (new_run(cli, tmp_path / name, arrays) for name in ("alone", "run"))
    words = ("--prior-precision", 3, "--structure", "full")
    done = cli("fit-laplace", alone, *words, *ALONE)
    first = run_workers(3, "fit-laplace", run, *words, "--json", cwd=tmp_path)[0]
    assert first.json["metrics"]["val"] == done.json["metrics"]["val"]
    assert first.json["metrics"]["val_excess"] == done.json["metrics"]["val_excess"]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_one_worker_cannot_predict_end_all(cli: Cli, tmp_path: Path, size: int) -> None:
    arrays = row_problem("train", "test")
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


EXTRACTED_NETWORK = """
import os, time
from torch import nn
class Slow(nn.Module):
    def forward(self, inputs):
        time.sleep(0.02)
        return inputs
class Same(Slow):
    forward = lambda self, inputs: inputs
def layers(first):
    return nn.Sequential(nn.Linear(4, 6), first, nn.Linear(6, 3))
def make():
    print("a factory that prints")
    return layers(Same())
def slow():
    return layers(Slow())
def only_first():
    if os.environ.get("RANK") == "1":
        raise ValueError("no network here")
    return make()
"""
DATA = """
import os, time
import numpy as np
class Data:
    def __len__(self):
        return 250
    def __getitem__(self, row):
        return np.sin(np.arange(4, dtype="f4") + row), row % 3
class Broken(Data):
    def __getitem__(self, row):
        if row == 130:
            raise KeyError("nothing there")
        return super().__getitem__(row)
class Exits(Data):
    def __getitem__(self, row):
        time.sleep(3 if row == 50 and os.environ.get("RANK") == "0" else 0)
        if row == 130:
            raise SystemExit("enough")
        return super().__getitem__(row)
class Dies(Exits):
    def __getitem__(self, row):
        if row == 130:
            os.kill(os.getpid(), 9)
        return super().__getitem__(row)
class Other(Data):
    def __init__(self):
        self.names = [f"{os.environ.get('RANK', 0)}/{row}" for row in range(250)]
"""
LENET = ("--model", "lenet5", "--data", f"test=npz:{fixture_path('test.npz')}@700", "--batch-size", 128)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, its network's code, arrays and a Dataset, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(EXTRACTED_NETWORK)
    Path("data.py").write_text(DATA)
    rng = np.random.default_rng(1)
    arrays = {"x": rng.normal(size=(911, 4)).astype("f4"), "y": rng.integers(3, size=911)}
    np.savez("train.npz", **arrays)  # type: ignore[arg-type]
    np.savez("bad_label.npz", **{**arrays, "y": np.where(np.arange(911) == 130, 7, arrays["y"])})  # type: ignore[arg-type]
    far = arrays["x"].copy()
    far[[130, 250], 2] = np.inf
    np.savez("bad_input.npz", x=far)
    torch.manual_seed(1)
    torch.save(nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 3)).state_dict(), "net.pt")
    return tmp_path


def line(
    *words: object, data: str = "train=npz:train.npz", make: str = "make", batch_size: int = 100
) -> tuple[object, ...]:
    """A command of the small network."""
    named = ("--model", f"net.py:{make}", "--data", data, "--batch-size", batch_size)
    return ("extract-features", "net.pt", *named, *words)


def feature_digests(done: Invocation) -> dict[str, str]:
    return {output["role"]: output["content_digest"] for output in done.json["outputs"]}


def last_words(done: Invocation) -> list[str]:
    return [text for text in done.stderr.splitlines() if text.startswith(("error:", "hint:"))]


def left_behind(run: Path) -> list[str]:
    return sorted(path.name for path in run.rglob(".*") if path.is_file() and not path.name.endswith(".lock"))


def test_two_workers_give_the_features_of_one_process(cli: Cli, tmp_path: Path) -> None:
    for name in ("alone.pt", "shared.pt"):
        (tmp_path / name).write_bytes(fixture_path("lenet5-fmnist.pt").read_bytes())
    alone = cli("extract-features", tmp_path / "alone.pt", *LENET, "--threads", 1, "--json")
    first, second = run_workers(2, "extract-features", tmp_path / "shared.pt", *LENET, "--json", "-v", cwd=tmp_path)
    assert first.code == 0, first.stderr
    assert feature_digests(first) == feature_digests(alone)
    assert (second.code, second.stdout, second.stderr) == (0, "", "")
    assert left_behind(tmp_path / "shared.pt.bnn") == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, ()),
        (4, ("--ood", "few=npz:train.npz@3", "--data", "late=py:data.py:Data", "--num-workers", 1)),
        (3, ("--hold-out", "val=train:211", "--autocast", "bf16")),
        (2, ("--dtype", "float16", "--data", "late=py:data.py:Data")),
    ],
)
def test_features_are_equal_for_workers(cli: Cli, folder: Path, size: int, words: Sequence[object]) -> None:
    alone = cli(*line(*words, "--run-dir", "alone.bnn", "--threads", 1, "--json"))
    first, *others = run_workers(size, *line(*words, "--json"), cwd=folder)
    assert first.code == 0, first.stderr
    assert feature_digests(first) == feature_digests(alone)
    assert first.json["warnings"] == alone.json["warnings"]
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)
    cli("verify", folder / "net.pt.bnn").expect(0)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 0)])
def test_interrupted_extraction_goes_on_with_other_workers(cli: Cli, folder: Path, before: int, after: int) -> None:
    words = line("--save-every", 0, make="slow", batch_size=8)
    whole = feature_digests(cli(*words, "--run-dir", "whole.bnn", "--threads", 1, "--json"))
    started = start_workers(before, words, cwd=folder)
    state = folder / "net.pt.bnn/features/.train.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.02)
    for one in started:
        one.send_signal(signal.SIGTERM)
    first, *others = ended(started)
    assert first.code == 128 + signal.SIGTERM, first.stderr
    assert "--resume" in first.stderr.splitlines()[-1]
    assert [(one.stdout, one.stderr) for one in others] == [("", "")] * (before - 1)
    words = (*words, "--resume", "--json")
    done = run_workers(after, *words, cwd=folder)[0] if after else cli(*words, "--threads", 1)
    assert done.code == 0, done.stderr
    assert "resuming after" in done.stderr
    assert feature_digests(done) == whole
    assert left_behind(folder / "net.pt.bnn") == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("train=npz:bad_label.npz", "row 130 has label 7"),
        ("train=npz:bad_input.npz", "the first is in row 130"),  # worker 2 meets one in row 250
        ("train=py:data.py:Broken", "row 130 raised KeyError"),
        ("train=py:data.py:Exits", "called exit('enough')"),
    ],
)
def test_error_of_one_worker_is_that_of_one_process(cli: Cli, folder: Path, data: str, said: str) -> None:
    alone = cli(*line("--run-dir", "alone.bnn", data=data))
    first, *others = run_processes(3, *line(data=data), cwd=folder)
    assert said in first.stderr
    assert first.code == alone.code != 0
    number = "worker 1: " if "Exits" in data else ""  # that is none of the row's, but what ends the process
    assert last_words(first) == [text.replace("error: ", f"error: {number}") for text in last_words(alone)]
    assert [(one.stdout, one.stderr) for one in others] == [("", "")] * 2
    assert all(one.code for one in others)
    assert left_behind(folder / "net.pt.bnn") == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "make", "code", "said"),
    [
        ("train=npz:train.npz", "only_first", 65, "worker 1: --model: 'net.py:only_first' raised ValueError"),
        (
            "train=py:data.py:Other",
            "make",
            65,
            "worker 1: py:data.py:Other has different examples here and on worker 0",
        ),
    ],
)
def test_error_of_a_worker_has_its_number(folder: Path, data: str, make: str, code: int, said: str) -> None:
    first, second = run_processes(2, *line(data=data, make=make), cwd=folder)
    assert (first.code, second.stdout, second.stderr) == (code, "", ""), first.stderr
    assert said in last_words(first)[0]
    assert second.code in (code, 69)  # where the store ends with worker 0, as without torchrun


def by_torchrun(*words: object) -> Invocation:
    """Two processes, started by torchrun itself."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "bnncli")
    command = [sys.executable, *torchrun, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Invocation(done.returncode, done.stdout, done.stderr)


@pytest.mark.long
def test_torchrun_gives_the_one_document_of_the_first(cli: Cli, folder: Path) -> None:
    alone = cli(*line("--run-dir", "alone.bnn", "--threads", 1, "--json"))
    assert feature_digests(by_torchrun(*line("--json"))) == feature_digests(alone)


@pytest.mark.long
def test_torchrun_ends_the_first_when_that_has_said_why(folder: Path) -> None:
    """Which is at work while the other ends: torchrun ends all at once, as far as they can be."""
    done = by_torchrun(*line("--save-every", 0, data="train=py:data.py:Exits"))
    assert last_words(done)[0] == "error: worker 1: user code called exit('enough')"
    assert "interrupted" not in done.stderr


@pytest.mark.long
def test_torchrun_names_a_killed_worker_and_the_first_says_how_to_go_on(folder: Path) -> None:
    done = by_torchrun(*line("--save-every", 0, data="train=py:data.py:Dies"))
    assert done.code == 1
    (first, *_) = last_words(done)
    assert "a worker stopped" in first or "interrupted by SIGTERM" in first
    assert "Signal 9 (SIGKILL)" in done.stderr


@pytest.mark.long
def test_what_has_no_network_is_done_by_the_first_worker(cli: Cli, folder: Path) -> None:
    words = ("--model", "flatten", "--data", "train=npz:train.npz")
    first, second = run_workers(2, "extract-features", "flat", *words, cwd=folder)
    assert (first.code, second.code, second.stdout, second.stderr) == (0, 0, "", "")
    assert "without a network does not run in parallel: worker 0 of 2 does all the work" in first.stderr

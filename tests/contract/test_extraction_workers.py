"""extract-features in several processes: the features of one process to the bit, its words, and one end for all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from problems.command_line import Cli, Invocation
from problems.workers import ended, free_port, run_processes, run_workers, start_workers
from torch import nn

from bnncli.commands.demo import fixture_path

NETWORK = """
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
    Path("net.py").write_text(NETWORK)
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


def digests(done: Invocation) -> dict[str, str]:
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
    assert digests(first) == digests(alone)
    assert (second.code, second.stdout, second.stderr) == (0, "", "")
    received = int(first.stderr.split("received ")[1].split()[0])
    assert received > (128 + 128 + 60) * 84 * 4  # three batches of six are the second worker's
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
def test_features_are_equal_for_any_number_of_workers(
    cli: Cli, folder: Path, size: int, words: Sequence[object]
) -> None:
    alone = cli(*line(*words, "--run-dir", "alone.bnn", "--threads", 1, "--json"))
    first, *others = run_workers(size, *line(*words, "--json"), cwd=folder)
    assert first.code == 0, first.stderr
    assert digests(first) == digests(alone)
    assert first.json["warnings"] == alone.json["warnings"]
    assert [(one.code, one.stdout, one.stderr) for one in others] == [(0, "", "")] * (size - 1)
    assert cli("verify", folder / "net.pt.bnn").code == 0


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 0)])
def test_an_interrupted_extraction_goes_on_with_another_number_of_workers(
    cli: Cli, folder: Path, before: int, after: int
) -> None:
    words = line("--save-every", 0, make="slow", batch_size=8)
    whole = digests(cli(*words, "--run-dir", "whole.bnn", "--threads", 1, "--json"))
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
    assert digests(done) == whole
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
def test_an_error_that_only_another_worker_meets_is_that_of_one_process(
    cli: Cli, folder: Path, data: str, said: str
) -> None:
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
def test_what_ends_another_worker_alone_is_said_with_its_number(
    folder: Path, data: str, make: str, code: int, said: str
) -> None:
    first, second = run_processes(2, *line(data=data, make=make), cwd=folder)
    assert (first.code, second.stdout, second.stderr) == (code, "", ""), first.stderr
    assert said in last_words(first)[0]
    assert second.code == code


def by_torchrun(*words: object) -> Invocation:
    """Two processes, started by torchrun itself."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", "bnncli")
    command = [sys.executable, *torchrun, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Invocation(done.returncode, done.stdout, done.stderr)


@pytest.mark.long
def test_torchrun_gives_the_one_document_of_the_first(cli: Cli, folder: Path) -> None:
    alone = cli(*line("--run-dir", "alone.bnn", "--threads", 1, "--json"))
    assert digests(by_torchrun(*line("--json"))) == digests(alone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("Exits", "error: worker 1: user code called exit('enough')"),
        ("Dies", "error: worker 1 stopped without an error message (it may have been killed): stopping all workers"),
    ],
)
def test_torchrun_ends_the_first_when_that_has_said_why(folder: Path, data: str, said: str) -> None:
    """Which is at work while the other ends: torchrun ends all at once, as far as they can be."""
    done = by_torchrun(*line("--save-every", 0, data=f"train=py:data.py:{data}"))
    assert last_words(done)[0] == said
    assert "interrupted" not in done.stderr


@pytest.mark.long
def test_a_killed_worker_ends_an_extraction(folder: Path) -> None:
    words = line("--save-every", 0, make="slow", batch_size=2)
    started = start_workers(3, words, cwd=folder)
    state = folder / "net.pt.bnn/features/.train.resume.safetensors"
    while not state.exists() and started[0].poll() is None:
        time.sleep(0.02)
    started[1].kill()
    first, _, third = ended(started)
    assert (first.code, last_words(first)) == (
        69,
        ["error: worker 1 stopped without an error message (it may have been killed): stopping all workers"],
    )
    assert (third.code, third.stdout, third.stderr) == (69, "", "")
    assert not (folder / "net.pt.bnn/features/train.h5").exists()


@pytest.mark.long
def test_what_has_no_network_is_done_by_the_first_worker(cli: Cli, folder: Path) -> None:
    words = ("--model", "flatten", "--data", "train=npz:train.npz")
    first, second = run_workers(2, "extract-features", "flat", *words, cwd=folder)
    assert (first.code, second.code, second.stdout, second.stderr) == (0, 0, "", "")
    assert "without a network does not run in parallel: worker 0 of 2 does all the work" in first.stderr


@pytest.mark.long
def test_a_plan_and_a_refusal_are_those_of_one_process(cli: Cli, folder: Path) -> None:
    first, second = run_workers(2, *line("--dry-run"), cwd=folder)
    assert (first.code, second.code, second.stdout, second.stderr) == (0, 0, "", "")
    assert not (folder / "net.pt.bnn").exists()
    assert cli(*line()).code == 0
    first, second = run_workers(2, *line(), cwd=folder)
    assert (first.code, second.code, second.stdout, second.stderr) == (0, 0, "", "")
    assert "artifacts are up to date" in first.stderr
    first, second = run_processes(2, *line("--dtype", "float16"), cwd=folder)
    assert (first.code, second.stdout, second.stderr) == (73, "", "")
    assert "already exists with other options" in first.stderr
    assert second.code != 0

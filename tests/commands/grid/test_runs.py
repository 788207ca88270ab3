"""Grids of real lines: they leave what the lines leave by hand, whatever was killed on the way."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from problems.command_line import Cli
from problems.grids import write_grid

from bnncli.artifacts.files import read_header
from bnncli.artifacts.run_folder import RunFolder

FEW = """
[[step]]
command = "fit-laplace"
name = "k"
structure = "kron"
prior-precision = 3
threads = 1
[[step]]
command = "predict"
posterior = "{k}"
split = "test"
threads = 1
"""
CHAINS = """
[[step]]
command = "fit-laplace"
name = "g"
structure = STRUCTURES
prior-precision = 3
threads = 1
[[step]]
command = "hmc"
base = "{g}"
chains = 4
warmup = 20
draws = 500
seed = [1, 2]
save-every = 0
threads = 1
[[step]]
command = "merge"
name = "joined"
posterior = ["{hmc*}"]
threads = 1
[[step]]
command = "predict"
posterior = "{joined}"
split = "test"
threads = 1
[[step]]
command = "evaluate"
posterior = "{joined}"
bootstrap = 0
threads = 1
"""
SIX = CHAINS.replace("STRUCTURES", '"kron"')  # lines
TWELVE = CHAINS.replace("STRUCTURES", '["full", "kron"]')


def digests(run: Path) -> dict[str, str]:
    """Of the contents of all artifacts of a run."""
    folder = RunFolder.of(run, None, is_name=True)
    paths = [*folder.posteriors(), *folder.prediction_files(), *folder.metrics_files()]
    return {str(path.relative_to(folder.root)): read_header(path).content_digest for path in paths}


def by_hand(cli: Cli, path: Path, lines: list[str]) -> dict[str, str]:
    """What the lines leave in a copy of the run, one after the other."""
    copy = path.with_name("hand") / "small"
    shutil.copytree(path.with_name("small.bnn"), copy.with_name("small.bnn"))
    for line in lines:
        program, command, checkpoint, *words = shlex.split(line)
        assert (program, checkpoint) == ("bnncli", "small")
        done = cli(command, copy, *words)
        assert done.code == 0, done.stderr
    return digests(copy)


@pytest.mark.long
def test_a_grid_leaves_what_its_lines_leave_by_hand(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run.parent)
    path = write_grid(small_run.parent, FEW)
    lines = cli("grid", path.name, "-n").stdout.splitlines()
    expected = by_hand(cli, path, lines)
    done = cli("grid", path.name, "--jobs", 2, "--json")
    assert (done.code, done.json["counts"]) == (0, {"done": 2}), done.stdout
    assert digests(small_run) == expected
    assert [path for job in done.json["jobs"] for path in job["outputs"]] == [
        "small.bnn/posteriors/k.safetensors",
        "small.bnn/predictions/k.mc/test.h5",
    ]


def begin(path: Path, *words: str) -> subprocess.Popen[str]:
    """A grid in a process of its own, two lines at a time."""
    argv = [sys.executable, "-m", "bnncli", "grid", path.name, "--jobs", "2", *words]
    return subprocess.Popen(argv, cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_running(folder: Path) -> dict[str, int]:
    """Processes of lines in a folder, by the names of their results."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().decode().split("\0")
            if "--name" in words and Path(os.readlink(place / "cwd")) == folder:
                found[words[words.index("--name") + 1]] = int(place.name)
    return found


def wait_for(condition: Any, seconds: float = 120) -> Any:
    """What the condition gives, once it is true of something."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    assert found
    return found


def expected_of(cli: Cli, path: Path) -> dict[str, str]:
    """What the lines of a grid leave by hand."""
    return by_hand(cli, path, cli("grid", path.name, "-n").stdout.splitlines())


@pytest.mark.long
@pytest.mark.sure_scores
def test_a_grid_of_all_kinds_of_steps_leaves_what_its_lines_leave_by_hand(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_run.parent)
    path = write_grid(small_run.parent, TWELVE + '[[step]]\ncommand = "diagnose"\nposterior = ["{joined}"]\n')
    expected = expected_of(cli, path)
    done = cli("grid", path.name, "--jobs", 2, "--json")
    assert (done.code, done.json["counts"]) == (0, {"done": 14}), done.stdout
    assert digests(small_run) == expected
    again = cli("grid", path.name, "--jobs", 2, "--json").json
    assert again["counts"] == {"up_to_date": 14}, [job for job in again["jobs"] if job["state"] != "up_to_date"]


@pytest.mark.long
@pytest.mark.sure_scores
@pytest.mark.parametrize(("what", "code"), [("the grid", -9), ("a line", 3), ("the grid in an orderly way", 143)])
def test_after_a_kill_it_goes_on_to_the_same_content(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, what: str, code: int
) -> None:
    folder = small_run.parent
    monkeypatch.chdir(folder)
    path = write_grid(folder, SIX)
    expected = expected_of(cli, path)
    process = begin(path)
    posteriors = folder / "small.bnn" / "posteriors"
    name = wait_for(lambda: [found.name.split(".")[1] for found in posteriors.glob(".hmc-*.resume.safetensors")])[0]
    if what == "a line":
        os.kill(lines_running(folder)[name], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGKILL if what == "the grid" else signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert ("killed by SIGKILL" in out) == (what == "a line")
    wait_for(lambda: not lines_running(folder))  # which have been told to end, whatever ended the grid
    (log,) = (folder / "grid.toml.grid" / "logs").glob(f"small.{name}.*.log")
    assert ("interrupted by SIGTERM" in log.read_text()) == (what != "a line")
    there = {one.stem: one.stat().st_mtime_ns for one in posteriors.iterdir() if one.name[0] != "."}
    again = cli("grid", path.name, "--jobs", 2, "--json")
    assert again.code == 0, again.stdout
    assert digests(small_run) == expected
    made = {
        one["name"]: one["state"] for one in again.json["jobs"] if Path(one["outputs"][0]).parent.name == "posteriors"
    }
    assert made == {one: "up_to_date" if one in there else "done" for one in ("g", "hmc-seed1", "hmc-seed2", "joined")}
    assert all(one.stat().st_mtime_ns == there[one.stem] for one in posteriors.iterdir() if one.stem in there)
    assert "INFO hmc resuming" in log.read_text()
    assert not list(posteriors.glob(".*.resume.*"))


@pytest.mark.long
@pytest.mark.sure_scores
def test_tasks_of_slurm_leave_what_the_lines_leave_by_hand(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small_run.parent)
    path = write_grid(small_run.parent, SIX)
    expected = expected_of(cli, path)
    script = path.with_name("job.sh")
    script.write_text(cli("grid", path.name, "--slurm").stdout)
    assert "--array=0-0\n" in script.read_text()
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(["bash", script], env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert digests(small_run) == expected

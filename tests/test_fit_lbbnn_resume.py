"""fit-lbbnn can be killed and continued: the same bits as without the kill, and no state of another request."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from conftest import SCRIPT, Cli

PLAN = ["--epochs", "120", "--slab-sd", "0.5", "--batch-size", "60"]


def state_of(run: Path, name: str) -> Path:
    return run.with_name("small.bnn") / "posteriors" / f".{name}.resume.safetensors"


def kill_midway(run: Path, name: str, *words: str) -> None:
    """A fit that is killed as soon as it has saved a state."""
    command = ["fit-lbbnn", str(run), *PLAN, *words, "--name", name, "--save-every", "0", "--progress", "none"]
    process = subprocess.Popen([SCRIPT, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not state_of(run, name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait(timeout=60)
    assert state_of(run, name).exists()


@pytest.mark.parametrize(
    "words",
    [(), ("--estimator", "mnf", "--flow-hidden", "5", "--repeats", "2", "--epochs", "60"), ("--estimator", "concrete")],
)
def test_a_killed_fit_resumes_to_the_bits_of_an_uninterrupted_one(
    cli: Cli, small_run: Path, words: tuple[str, ...]
) -> None:
    kill_midway(small_run, "cut", *words)
    again = cli("fit-lbbnn", small_run, *PLAN, *words, "--name", "cut", "--resume", "--json")
    whole = cli("fit-lbbnn", small_run, *PLAN, *words, "--name", "whole", "--json")
    assert "resuming" in again.stderr
    assert again.json["outputs"][0]["content_digest"] == whole.json["outputs"][0]["content_digest"]
    assert not state_of(small_run, "cut").exists()


def test_a_state_of_another_request_is_refused(cli: Cli, small_run: Path) -> None:
    kill_midway(small_run, "cut")
    for change in (["--seed", "1"], ["--prior-inclusion", "0.2"]):
        refused = cli("fit-lbbnn", small_run, *PLAN, "--name", "cut", *change, "--resume")
        assert (refused.code, "cannot resume from" in refused.stderr) == (65, True)
        assert state_of(small_run, "cut").exists()

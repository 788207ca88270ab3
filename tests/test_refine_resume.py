"""refine can be killed and continued: the same bits as without the kill, and no state of another request."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from conftest import SCRIPT, Cli

PLAN = ["--flow", "affine", "--epochs", "1500", "--patience", "0", "--elbo-draws", "8"]


def state_of(run: Path, name: str) -> Path:
    return run.with_name("small.bnn") / "posteriors" / f".{name}.resume.safetensors"


def kill_midway(run: Path, name: str) -> None:
    """A refine that is killed as soon as it has saved a state."""
    words = ["refine", str(run), *PLAN, "--name", name, "--save-every", "0", "--progress", "none"]
    process = subprocess.Popen([SCRIPT, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not state_of(run, name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait(timeout=60)
    assert state_of(run, name).exists()


def test_a_killed_refine_resumes_to_the_bits_of_an_uninterrupted_one(cli: Cli, small_run: Path) -> None:
    kill_midway(small_run, "cut")
    again = cli("refine", small_run, *PLAN, "--name", "cut", "--resume", "--json")
    whole = cli("refine", small_run, *PLAN, "--name", "whole", "--json")
    assert "resuming" in again.stderr
    assert again.json["outputs"][0]["content_digest"] == whole.json["outputs"][0]["content_digest"]
    assert not state_of(small_run, "cut").exists()


def test_a_state_of_another_request_is_refused(cli: Cli, small_run: Path) -> None:
    kill_midway(small_run, "cut")
    words = ("refine", small_run, *PLAN, "--name", "cut")
    for change in (["--seed", "1"], ["--epochs", "9"]):
        refused = cli(*words, *change, "--resume")
        assert (refused.code, "cannot resume from" in refused.stderr) == (65, True)
        assert state_of(small_run, "cut").exists()
    fresh = cli(*words, "--epochs", "9")
    assert fresh.code == 0
    assert "an interrupted run can be continued with --resume" in fresh.stderr

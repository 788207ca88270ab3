"""refine can be killed and continued: the same bits as without the kill, and no state of another request."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import kill_midway, state_of
from problems.command_line import Cli

pytestmark = pytest.mark.gpu

PLAN = ["--flow", "affine", "--epochs", "80", "--patience", "0", "--elbo-draws", "8"]


def test_a_killed_refine_resumes_to_the_bits_of_an_uninterrupted_one(cli: Cli, small_run: Path) -> None:
    kill_midway(small_run, "cut", "refine", *PLAN)
    again = cli("refine", small_run, *PLAN, "--name", "cut", "--resume", "--json")
    whole = cli("refine", small_run, *PLAN, "--name", "whole", "--json")
    assert "resuming" in again.stderr
    assert again.json["outputs"][0]["content_digest"] == whole.json["outputs"][0]["content_digest"]
    assert not state_of(small_run, "cut").exists()


def test_a_state_of_another_request_is_refused(cli: Cli, small_run: Path) -> None:
    kill_midway(small_run, "cut", "refine", *PLAN)
    words = ("refine", small_run, *PLAN, "--name", "cut")
    for change in (["--seed", "1"], ["--epochs", "9"]):
        refused = cli(*words, *change, "--resume")
        assert (refused.code, "cannot resume from" in refused.stderr) == (65, True)
        assert state_of(small_run, "cut").exists()
    fresh = cli(*words, "--epochs", "9")
    assert fresh.code == 0
    assert "found an interrupted run; starting from scratch (--resume would continue it)" in fresh.stderr

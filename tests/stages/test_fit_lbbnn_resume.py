"""fit-lbbnn can be killed and continued: the same bits as without the kill, and no state of another request."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import kill_midway, state_of
from problems.command_line import Cli

pytestmark = pytest.mark.gpu

PLAN = ["--epochs", "6", "--slab-sd", "0.5", "--batch-size", "60"]


@pytest.mark.parametrize(
    "words",
    [(), ("--estimator", "mnf", "--flow-hidden", "5", "--repeats", "2"), ("--estimator", "concrete")],
)
def test_a_killed_fit_resumes_to_the_bits_of_an_uninterrupted_one(
    cli: Cli, small_run: Path, words: tuple[str, ...]
) -> None:
    kill_midway(small_run, "cut", "fit-lbbnn", *PLAN, *words)
    again = cli("fit-lbbnn", small_run, *PLAN, *words, "--name", "cut", "--resume", "--json")
    whole = cli("fit-lbbnn", small_run, *PLAN, *words, "--name", "whole", "--json")
    assert "resuming" in again.stderr
    assert again.json["outputs"][0]["content_digest"] == whole.json["outputs"][0]["content_digest"]
    assert not state_of(small_run, "cut").exists()


def test_a_state_of_another_request_is_refused(cli: Cli, small_run: Path) -> None:
    kill_midway(small_run, "cut", "fit-lbbnn", *PLAN)
    for change in (["--seed", "1"], ["--prior-inclusion", "0.2"]):
        refused = cli("fit-lbbnn", small_run, *PLAN, "--name", "cut", *change, "--resume")
        assert (refused.code, "cannot resume from" in refused.stderr) == (65, True)
        assert state_of(small_run, "cut").exists()

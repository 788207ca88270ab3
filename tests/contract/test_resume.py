"""Every fit that is killed and resumed gives the bits of an uninterrupted one, and refuses the state of another request."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import kill_midway, state_of
from problems.command_line import Cli

from bnncli.cli.commands import own_commands
from bnncli.cli.options import option_fields

pytestmark = pytest.mark.gpu

LBBNN = "fit-lbbnn --epochs 6 --slab-sd 0.5 --batch-size 60"
SHORT = (
    "refine --flow affine --epochs 40 --patience 0 --elbo-draws 8",
    "hmc --chains 4 --warmup 10 --draws 20",
    LBBNN,
    f"{LBBNN} --estimator mnf --flow-hidden 5 --repeats 2",
    f"{LBBNN} --estimator concrete",
)
LONG = (
    "fit-sghmc --chains 2 --epochs 1000 --batch-size 40",
    "fit-swag --epochs 1000 --batch-size 40",
    "fit-vi --epochs 2000 --patience 0 --estimator reparam --elbo-draws 8",
    "fit-vi --epochs 400 --patience 0 --optimizer ivon --elbo-draws 8",
    "fit-vi --epochs 400 --patience 0 --estimator local --elbo-draws 8",
)
SAVES = {"fit-sghmc": 150, "fit-swag": 150}  # until there are draws, or iterates to average
ELSEWHERE = {"train", "extract-features", "stack"}  # write no posterior of one fit: test_train.py and so on


def test_every_command_that_resumes_is_tried() -> None:
    resumable = {command.name for command in own_commands() if "resume" in option_fields(command)}
    assert resumable == {line.split()[0] for line in (*SHORT, *LONG)} | ELSEWHERE


@pytest.mark.parametrize("line", [*SHORT, *(pytest.param(line, marks=pytest.mark.long) for line in LONG)])
def test_a_killed_fit_resumes_to_the_bits_of_an_uninterrupted_one(cli: Cli, small_run: Path, line: str) -> None:
    command, *plan = line.split()
    kill_midway(small_run, "cut", command, *plan, saves=SAVES.get(command, 2))
    cli(command, small_run, *plan, "--name", "cut", "--seed", 1, "--resume").expect(65, "cannot resume from")
    again = cli(command, small_run, *plan, "--name", "cut", "--resume", "--json")
    whole = cli(command, small_run, *plan, "--name", "whole", "--json")
    assert "resuming" in again.stderr
    assert again.json["outputs"][0]["content_digest"] == whole.json["outputs"][0]["content_digest"]
    assert not state_of(small_run, "cut").exists()


def test_a_request_with_other_options_starts_from_scratch(cli: Cli, small_run: Path) -> None:
    kill_midway(small_run, "cut", *SHORT[0].split())
    words = (*SHORT[0].split()[1:], "--epochs", 9, "--name", "cut")
    cli("refine", small_run, *words, "--resume").expect(65)
    cli("refine", small_run, *words).expect(
        0, "found an interrupted run; starting from scratch (--resume would continue it)"
    )

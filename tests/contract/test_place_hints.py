"""Where a file cannot be written the hint names the option that said where, and no option that the command has not."""

from __future__ import annotations

from pathlib import Path

import pytest
from problems.command_line import Cli

from bnncli.cli.commands import find_command, own_commands
from bnncli.cli.places import place_advice
from bnncli.options.command import CommandLine

LAPLACE = ("--posterior", "laplace")
NOWHERE = [  # a folder that not even root can make files in
    (("predict", *LAPLACE, "--split", "test", "--table", "/proc/t.csv"), "--table"),
    (("predict", *LAPLACE, "--split", "test", "--table", "/proc/deep/t.csv"), "--table"),
    (("predict", *LAPLACE, "--integrator", "mc", "--split", "test", "--out", "/proc/t.h5"), "--out"),
    (("acquire", *LAPLACE, "--pool", "test", "--batch", "3", "--table", "/proc/t.csv"), "--table"),
    (("evaluate", *LAPLACE, "--bootstrap", "20", "--split", "test", "--plot", "/proc/plots"), "--plot"),
    (
        ("export", *LAPLACE, "--integrator", "probit", "--head-only", "--format", "torch", "--out", "/proc/t.st"),
        "--out",
    ),
    (("fit-temperature", "--out", "/proc/t.safetensors"), "--out"),
]


@pytest.mark.parametrize(("words", "flag"), NOWHERE, ids=lambda value: value[0] if isinstance(value, tuple) else value)
def test_the_option_that_named_the_place_is_named(cli: Cli, small_run: Path, words: tuple[str, ...], flag: str) -> None:
    done = cli(words[0], small_run, *words[1:])
    assert done.code in (73, 74), done.stderr
    assert done.stderr.rstrip().endswith(f"hint: choose another place with {flag}")


def line_of(name: str, *words: str) -> tuple[str, str | None]:
    """The advice to a command with these words about `here/x`, and about a place that no word names."""
    command = find_command([name])
    assert command is not None
    line = CommandLine.parse(name, ["ckpt.pt", *words], command.groups)
    return place_advice(command, line, "here/x"), place_advice(command, line, "there/x")


@pytest.mark.parametrize(
    ("words", "of_here"),
    [
        (("predict", "--table", "here/x"), "--table"),
        (("predict", "--table", "x", "--run-dir", "here"), "--run-dir"),
        (("compare", "--plot", "here"), "--plot"),
        (("predict", "--table", "here/.locks/x"), "--run-dir or --out"),
    ],
)
def test_the_place_may_be_a_file_or_a_folder_of_it(words: tuple[str, ...], of_here: str) -> None:
    assert line_of(*words)[0] == f"choose another place with {of_here}"


def test_a_lock_lies_beside_what_is_locked() -> None:
    command = find_command(["predict"])
    line = CommandLine.parse("predict", ["ckpt.pt", "--table", "here/x"], getattr(command, "groups", ()))
    assert place_advice(command, line, "here/.locks/x") == "choose another place with --table"


@pytest.mark.parametrize("command", own_commands(), ids=lambda command: command.name)
def test_no_option_is_named_that_the_command_has_not(cli: Cli, command: object) -> None:
    name = getattr(command, "name", "")
    said = place_advice(find_command(name.split("-", 1) if name == "config-show" else [name]), None, "there/x")
    help_text = cli(*(name.split("-", 1) if name == "config-show" else [name]), "--help").stdout
    assert all(flag in help_text for flag in said.split() if flag.startswith("--"))

"""Commands that artifacts record: shown again only as one of our own, with options and values that it accepts."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from forged import forge

from bnncli import options as o
from bnncli.cli.commands import COMMANDS
from bnncli.cli.settings import _from_text, option_fields
from bnncli.errors import UsageError
from bnncli.options.command_line import own_command
from bnncli.options.declaration import choices_of, flag_of
from bnncli.storage.freshness import UNKNOWN_MAKER

MAKERS = {one.name: one.groups for one in COMMANDS if o.RecordOptions in one.groups}
LEFT_OUT = {spec.name for group in (o.CommonOptions, o.RunOptions) for spec in fields(group)} | {"force", "dry_run"}
SAMPLES = (
    "3", "0.5", "x", "-1", "a=b", "x.png", "x.csv", "nll", "ece<=0.1", "rhat<=1.01", "test", "x.safetensors",
    "val=test:20", "max_prob", "cpu", "2,3", "mc", "16", "5000",
)  # fmt: skip


def recorded(*words: object) -> list[str] | None:
    return own_command(["bnncli", *words], MAKERS, "HERE")


COMPANIONS = {
    "extract-features": ({"model": "lenet5", "data": "a=npz:x"}, {"from_npz": "x"}),
    "prune": ({"rule": "density"},),
    "fit-lbbnn": ({"estimator": "mnf"}, {"estimator": "concrete"}),
}


def sample(command: Any, name: str) -> tuple[list[str], list[str]]:
    """The words of an option with a value that its command takes, and the words of options that it needs beside it."""
    options = option_fields(command)
    spec, hint = options[name]
    alone = hint is bool or name == "verbose"
    for value in ["1"] if alone else (*choices_of(spec.metadata), *SAMPLES):
        for beside in ({}, *COMPANIONS.get(command.name, ())):
            texts = {**beside, name: value}
            with contextlib.suppress(UsageError, ValueError):
                values = {key: _from_text(text, options[key][1], "") for key, text in texts.items()}
                for group in command.groups:
                    group(**{one.name: values[one.name] for one in fields(group) if one.name in values})
                return words_of(name, None if alone else value), [
                    word for key, text in beside.items() if key != name for word in words_of(key, text)
                ]
    raise AssertionError(f"no sample value for {flag_of(name)} of {command.name}")


def words_of(name: str, value: str | None) -> list[str]:
    flag = flag_of(name)
    return [flag] if value is None else [f"{flag}={value}"] if value.startswith("-") else [flag, value]


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.name in MAKERS], ids=lambda one: one.name)
def test_every_option_of_every_command_that_makes_artifacts_is_shown_again(command: Any) -> None:
    for name in option_fields(command):
        words, beside = sample(command, name)
        shown = [*([] if name in LEFT_OUT else words), *beside]
        words += beside
        assert recorded(command.name, *words, "CKPT") == ["bnncli", command.name, *shown, "HERE"]
        assert recorded(command.name, "CKPT", *words) == ["bnncli", command.name, "HERE", *shown]
        assert recorded(command.name, *words, "--", "-CKPT") == ["bnncli", command.name, *shown, "HERE"]
        assert recorded(command.name, *words) is None


def test_forms_that_the_command_line_takes_are_shown_in_one(tmp_path: Path) -> None:
    shown = ["bnncli", "fit-laplace", "HERE", "--name", "x", "--out", "y"]
    assert recorded("fit-laplace", "c", "--name=x") == shown[:5]
    assert recorded("fit-laplace", "-qf", "-vvn", "c", "--name", "x", "--run-dir", "r", "--log-file=f") == shown[:5]
    assert (
        recorded("fit-laplace", "c", "-fo", "y")
        == recorded("fit-laplace", "c", "-oy")
        == ["bnncli", "fit-laplace", "HERE", "--out", "y"]
    )


FORGED = {
    "another program": ["rm", "-rf", "x"],
    "nothing": [],
    "no argument": ["bnncli", "fit-laplace"],
    "two arguments": ["bnncli", "fit-laplace", "a", "b"],
    "no command of ours": ["bnncli", "explode", "a"],
    "a command that makes no artifact": ["bnncli", "clean", "a"],
    "one that runs what a file says": ["bnncli", "convert", "a", "b", "--trust-pickle"],
    "an option of another command": ["bnncli", "fit-laplace", "a", "--epochs", "3"],
    "an unknown option": ["bnncli", "refine", "a", "--exec", "rm"],
    "an unknown short option": ["bnncli", "refine", "a", "-x"],
    "a value that is no number": ["bnncli", "refine", "a", "--epochs", "$(rm -rf /)"],
    "a value out of bounds": ["bnncli", "refine", "a", "--epochs", "-3"],
    "a value that is no choice": ["bnncli", "refine", "a", "--flow", "; rm -rf /"],
    "options that exclude each other": ["bnncli", "refine", "a", "--name", "a", "--out", "b"],
    "no value": ["bnncli", "refine", "a", "--epochs"],
    "a value for what takes none": ["bnncli", "refine", "a", "--force=yes"],
    "a control character": ["bnncli", "refine", "a", "--out", "b\x1b[2J"],
    "a line break": ["bnncli", "refine", "a", "--out", "b\nrm -rf /"],
    "text that runs backwards": ["bnncli", "refine", "a", "--out", "b\u202ecod.exe"],
    "a number for a word": ["bnncli", "refine", 3],
    "a list for a word": ["bnncli", "refine", ["rm"]],
    "very many words": ["bnncli", "refine", "a", *["--out", "x" * 100] * 200],
}


@pytest.mark.parametrize("case", FORGED)
def test_nothing_of_a_record_that_is_not_ours_is_shown(case: str) -> None:
    assert own_command(FORGED[case], MAKERS, "HERE") is None


def test_values_that_a_shell_would_run_are_quoted(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "posteriors" / "refine.safetensors"
    words = ["bnncli", "refine", "$(rm -rf ~)", "--out", "; rm -rf ~"]
    forge(path, lambda document: document["provenance"].update(command=words))
    listed = {one["name"]: one["remake"] for one in cli("status", small_run, "--json").json["artifacts"]}
    assert listed["posteriors/refine.safetensors"] == f"bnncli refine {shlex.quote(str(small_run))} --out '; rm -rf ~'"


def test_a_forged_command_is_never_a_hint(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "posteriors" / "refine.safetensors"

    def change(document: dict[str, Any]) -> None:
        document["provenance"] |= {
            "command": ["rm", "-rf", "/"],
            "inputs": [{"role": "laplace", "path": "gone", "content_digest": "d"}],
        }

    forge(path, change)
    done = cli("predict", small_run, "--posterior", "refine", "--json")
    assert (done.code, done.json["error"]["hint"]) == (65, UNKNOWN_MAKER)
    listed = cli("status", small_run)
    assert "rm -rf" not in listed.stdout + listed.stderr + done.stdout + done.stderr
    remake = {one["name"]: one["remake"] for one in cli("status", small_run, "--json").json["artifacts"]}
    assert remake["posteriors/refine.safetensors"] is None
    assert remake["posteriors/laplace.safetensors"].startswith("bnncli fit-laplace ")

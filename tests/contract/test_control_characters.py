"""Names and texts of files with line breaks, escape sequences and text that runs backwards: escaped wherever they are shown."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from forged import forge
from problems.command_line import Cli, Invocation

from bnncli.names import printable

NASTY = "a\nb\x1b[31m\x1b]0;t\x07\r\u202e\u2028\x9b\u200b"
ESCAPED = "a\\nb\\x1b[31m"


@pytest.fixture
def nasty_run(small_run: Path) -> Path:
    """The small run in a folder of that name."""
    folder = small_run.with_name(NASTY)
    folder.mkdir()
    shutil.move(small_run.with_name("small.bnn"), folder / "small.bnn")
    return folder / "small"


def check(done: Invocation) -> Invocation:
    shown = done.stderr if done.stdout.startswith('{"schema"') else done.stdout + done.stderr
    assert [char for char in shown if not (char.isprintable() or char == "\n")] == []
    return done


def test_a_path_is_one_line_on_stdout_and_whole_in_json(cli: Cli, nasty_run: Path) -> None:
    words = ("fit-laplace", nasty_run, "--prior-precision", 10)
    done = check(cli(*words))
    assert (done.code, len(done.stdout.splitlines())) == (0, 1)
    assert ESCAPED in done.stdout
    assert done.stdout == printable(done.stdout.removesuffix("\n")) + "\n"
    assert cli(*words, "--json").json["outputs"][0]["path"] == f"{nasty_run}.bnn/posteriors/laplace.safetensors"


COMMANDS: tuple[tuple[object, ...], ...] = (
    ("status", "RUN"), ("verify", "RUN.bnn"), ("inspect", "RUN.bnn/posteriors/refine.safetensors"),
    ("clean", "RUN"), ("predict", "RUN", "--posterior", NASTY), ("inspect", NASTY),
    ("compare", "RUN", "--bootstrap", 20, "--format", "csv"), ("fit-laplace", "RUN", "--name", NASTY),
    ("fit-laplace", "RUN", "--data", NASTY), (NASTY,), ("status", "RUN", "-v"),
    ("extract-features", "RUN", "--model", NASTY, "--data", f"train=npz:{NASTY}"), ("inspect", NASTY, "-v"), ("extract-features", "RUN", "--from-npz", NASTY),
    ("config", "show", NASTY), ("refine", "RUN", "--flow", NASTY), ("fit-laplace", "RUN", "--device", NASTY), ("fit-laplace", "RUN", "--config", NASTY),
)  # fmt: skip


def test_no_command_prints_what_a_terminal_would_obey(cli: Cli, nasty_run: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["provenance"] |= {"source": NASTY, "created_at": NASTY, "device": NASTY, "tool": {"version": NASTY}}
        document["provenance"] |= {"params": {NASTY: NASTY}, "command": [NASTY]}
        document["meta"] |= {NASTY: NASTY, "method": NASTY}

    forge(nasty_run.with_name("small.bnn") / "posteriors" / "refine.safetensors", change)
    for command in COMMANDS:
        words = [word.replace("RUN", str(nasty_run)) if isinstance(word, str) else word for word in command]
        assert check(cli(*words)).code != 1
        document = cli(*words, "--json")
        assert isinstance(json.loads(document.stdout), dict), words


def test_a_traceback_is_escaped_too(cli: Cli, nasty_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.commands import status

    def fail(*_: object) -> None:
        raise ZeroDivisionError(NASTY)

    monkeypatch.setattr(status, "run", fail)
    done = cli("status", nasty_run)
    assert done.code == 1
    assert "Traceback" in done.stderr
    assert "\x1b" not in done.stderr


def test_bytes_that_are_not_utf8_reach_a_script_as_they_are() -> None:
    name = os.fsdecode(b"a\xff\n")
    assert printable(name) == "a\\udcff\\n"
    assert printable(name, keep_bytes=True) == "a\udcff\\n"

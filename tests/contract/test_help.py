"""Help and completion."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from problems.command_line import Cli

import bnncli
from bnncli.cli.commands import own_commands
from bnncli.cli.help import common_names
from bnncli.cli.topics import ENVIRONMENT, TOPICS
from bnncli.errors import Exit
from bnncli.options.command import Command
from bnncli.options.declaration import flag_of, list_forms
from bnncli.registry import names

# What other libraries read and we only set; and the line that a shell completes.
SET = {"GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"}
SET |= {
    "COMP_WORDS",
    "_TYPER_COMPLETE_ARGS",
    "CUBLAS_WORKSPACE_CONFIG",
    "TORCH_CPP_LOG_LEVEL",
    "TOKENIZERS_PARALLELISM",
}


def test_the_topics_are_listed_and_each_has_lines(cli: Cli) -> None:
    listed = cli("help")
    assert (listed.code, listed.stderr) == (0, "")
    for topic in TOPICS:
        assert f"  {topic} " in listed.stdout
        done = cli("help", topic)
        assert (done.code, done.stderr) == (0, "")
        assert cli("help", topic, "--json").json["lines"] == done.stdout.splitlines()
        assert all(len(line) <= 110 for line in done.stdout.splitlines())


def test_every_exit_code_has_a_meaning(cli: Cli) -> None:
    lines = cli("help", "exit-codes").stdout
    assert {int(code) for code in re.findall(r"^  (\d+) +[A-Z]", lines, re.MULTILINE)} == {int(code) for code in Exit}


def test_every_common_option_is_described(cli: Cli) -> None:
    lines = cli("help", "common").stdout
    for name in common_names():
        assert re.search(rf"^  (-. ?, )?(-.,? )?{flag_of(name)}\b", lines, re.MULTILINE), name


def test_every_kind_of_model_and_data_is_described(cli: Cli) -> None:
    lines = cli("help", "specs").stdout
    for form in (*list_forms("models"), *list_forms("data")):
        _, found, text = lines.partition(f"  {form}")
        assert found, form
        assert re.match(r"\s+[A-Z]", text), form
    assert all(name in lines for name in names("networks"))


@pytest.mark.parametrize("command", own_commands(), ids=lambda command: command.name)
def test_the_help_of_a_command_is_a_topic(cli: Cli, command: Command) -> None:
    words = command.name.split("-", 1) if command.parent else [command.name]
    assert cli("help", *words).stdout == cli(*words, "--help").stdout


@pytest.mark.parametrize("words", [("-q", "predict"), ("predict", "--json"), ("--json", "predict")])
def test_options_beside_the_name_of_a_command_change_nothing(cli: Cli, words: tuple[str, ...]) -> None:
    assert cli("help", *words).stdout == cli("predict", "--help").stdout


def test_a_topic_that_is_none_is_answered_with_the_one_that_was_meant(cli: Cli) -> None:
    done = cli("help", "exitcodes").expect(2)
    assert done.stderr.startswith("error: help: expected one of exit-codes, common, environment, specs, demo, ")
    assert done.stderr.endswith("; got 'exitcodes'\nhint: did you mean 'exit-codes'?\n")
    assert "did you mean 'predict'?" in cli("help", "predit").stderr


def read_variables() -> Iterator[tuple[str, Path]]:
    """Names of environment variables in our code: of what is asked of os.environ, in words or by a constant of the file."""
    for path in Path(bnncli.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text if "environ" in text else "")
        pairs = [(one.targets[0], one.value) for one in tree.body if isinstance(one, ast.Assign)]
        pairs += [
            two
            for one in pairs
            if isinstance(one[0], ast.Tuple) and isinstance(one[1], ast.Tuple)
            for two in zip(one[0].elts, one[1].elts, strict=True)
        ]
        constants = {ast.unparse(name): value.value for name, value in pairs if isinstance(value, ast.Constant)}
        for node in ast.walk(tree):
            keys: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                keys = node.args[:1] if ast.unparse(node.func.value).endswith("environ") else []
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                keys = [node.slice]
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
                keys = [node.left]
            for key in keys:
                if isinstance(key, ast.Constant) or (isinstance(key, ast.Name) and key.id in constants):
                    yield str(key.value if isinstance(key, ast.Constant) else constants[key.id]), path


def test_every_variable_that_the_code_reads_is_in_the_topic(cli: Cli) -> None:
    told = {name for names in ENVIRONMENT for name in names.split(", ")}
    read = {name for name, _ in read_variables()}
    assert {"CI", "RANK", "SOURCE_DATE_EPOCH", "BNNCLI_CONFIG", "NO_COLOR"} <= read
    assert read - SET == told
    assert read >= SET
    assert all(name in cli("help", "environment").stdout for name in told)


def on_a_terminal(words: list[str], **variables: str) -> str:
    """What a command prints on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "bnncli", *words]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"} | variables):
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            found += part
    os.close(ours)
    return found.decode().replace("\r\n", "\n")


def test_a_terminal_gets_headings_and_options_in_colour_unless_it_wants_none(cli: Cli) -> None:
    plain = cli("status", "--help").stdout
    coloured = on_a_terminal(["status", "--help"], COLUMNS="80")
    assert "\x1b[1mOptions\x1b[0m:" in coloured
    assert "\x1b[36m--check\x1b[0m" in coloured
    for without in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert on_a_terminal(["status", "--help"], COLUMNS="80", **without) == re.sub("\x1b\\[[0-9]*m", "", coloured)
    assert "\x1b" not in plain


def completed(*words: str) -> list[str]:
    """What the last of these words may become."""
    line = {
        "_BNNCLI_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["bnncli", *words]),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-m", "bnncli"]
    done = subprocess.run(command, env=os.environ | line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "among"),
    [
        (("predict", "x", "--integrator", "m"), ["mc", "mean", "mean-field"]),
        (("refine", "x", "--flow", ""), names("flows")),
        (("calibrate", "x", "--integrator", "pl"), ["plug-in"]),
        (("compare", "x", "--metric", "nl"), ["nll"]),
        (("evaluate", "x", "--score", "knn"), ["knn"]),
        (("help", "ex"), ["exit-codes", "export", "extract-features"]),
        (("config", "show", "fit-l"), ["fit-laplace", "fit-lbbnn"]),
        (("pre",), ["predict"]),
        (("predict", "absent", "--posterior", ""), []),
    ],
)
def test_choices_are_completed(words: tuple[str, ...], among: list[str]) -> None:
    assert completed(*words) == among


@pytest.mark.nightly
def test_names_in_the_run_folder_of_the_line_are_completed(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    posteriors = sorted(
        path.stem for path in (folder / "posteriors").iterdir() if path.suffix in (".safetensors", ".nc")
    )
    assert {"laplace", "map"} <= set(posteriors)
    assert completed("predict", str(small_run), "--posterior", "") == posteriors
    assert completed("evaluate", str(small_run), "--reference", "lap") == ["laplace"]
    assert completed("predict", str(small_run), "--follow", str(folder.parent), "--posterior", "lap") == ["laplace"]
    assert completed("rm", str(small_run), "hmc.") == ["hmc.mc"]
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    assert completed("predict", str(small_run), "--split", "t") == []
    assert completed("predict", str(small_run), "--run-dir", str(elsewhere), "--split", "t") == ["test", "train"]

"""What goes to stdout and stderr."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forged import forge
from kills import run_to_files, start
from problems.command_line import SCRIPT, Cli, Invocation

from bnncli.cli.commands import own_commands
from bnncli.names import printable

NOISY = """
import os, warnings
import torch

print("a print at import")

def make():
    print("a print of the factory")
    os.write(1, b"a write of C code\\n")
    warnings.warn("a warning of the factory")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
"""


TINY = ("--model", "mlp", "--model-arg", "inputs=5", "--model-arg", "hidden=3", "--model-arg", "classes=3")


def data_of(run: Path) -> tuple[str, str]:
    """The training features as inputs of a network."""
    return "--data", f"train=npz:{run.with_name('features.npz')}:features_train,labels_train"


def words_of(name: str, run: Path) -> list[object]:
    """A command line that succeeds on a finished run; the artifacts that it asks for are there already."""
    npz, folder = run.with_name("features.npz"), run.with_name("small.bnn")
    return {
        "extract-features": [name, run, "--from-npz", npz, "--ood", "far"],
        "fit-laplace": [name, run, "--prior-precision", "10"],
        "refine": [name, run, "--epochs", 1, "--length", 2],
        "hmc": [name, run, "--chains", 8, "--warmup", 8, "--draws", 16],
        "fit-sghmc": [name, run, "--chains", 2, "--epochs", 20],
        "fit-swag": [name, run, "--warmup", 20, "--epochs", 20],
        "fit-vi": [name, run, "--epochs", 100],
        "inspect": [name, folder / "posteriors" / "hmc.nc"],
        "verify": [name, *sorted((folder / "features").glob("*.h5")), *sorted((folder / "posteriors").iterdir())],
        "convert": [name, run.with_name("net.pt"), run.with_name("out.safetensors")],
        "config-show": ["config", "show", "refine"],
        "score": [name, folder / "predictions" / "laplace.mc" / "test.h5", "--bootstrap", 20],
        "integrals": [name, "--mean", "1.7", "--variance", "4"],
        "fit-lbbnn": [name, run, "--epochs", 50, "--inclusion-rate", 0.1],
        "sbc": [name, run, "--simulations", 20, "--draws", 9],
        "train": [name, run.with_name("net.safetensors"), *TINY, *data_of(run), "--epochs", 1],
        "export": [name, run, "--posterior", "laplace", "--integrator", "probit", "--head-only", "--format", "torch"],
        "merge": [name, run, "--posterior", "hmc", "--posterior", "again"],
        "acquire": [name, run, "--pool", "test", "--batch", 3],
        "calibrate": [name, run, "--posterior", "laplace", "--split", "test", "--sets", "lac"],
        "monitor": [name, run, "--reset", "--split", "test", "--posterior", "laplace"],
        "grid": [name, run.with_name("grid.toml")],
        "rm": [name, run, "hmc.mc", "--dry-run"],
        "reproduce": [name],
        "help": [name, "exit-codes"],
        "fit-ensemble": [name, *(run.with_name(f"net-{seed}.safetensors") for seed in (0, 1))],
    }.get(name, [name, run])


def broken_words_of(name: str, run: Path) -> list[object]:
    """A command line that fails."""
    missing = run.with_name("missing")
    return {
        "extract-features": [name, missing, "--from-npz", missing],
        "convert": [name, missing, run.with_name("out")],
        "merge": [name, missing, "--posterior", "a", "--posterior", "b"],
        "rm": [name, missing, "hmc"],
        "calibrate": [name, missing, "--sets", "lac"],
        "config-show": ["config", "show", "nothing"],
        "integrals": [name, "--mean", "nothing", "--variance", "4"],
        "demo": [name, "--dir", run.with_name("features.npz")],
    }.get(name, [name, missing])


PIPELINE = ("extract-features", "fit-laplace", "refine", "hmc", "predict")
NAMES = [command.name for command in own_commands()]


@pytest.fixture(scope="module")
def lbbnn(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The posterior of fit-lbbnn on finished_run, as words_of asks for it."""
    from bnncli.cli.execute import run_command_line

    run = tmp_path_factory.mktemp("lbbnn") / "small"
    shutil.copytree(finished_run.with_name("small.bnn"), run.with_name("small.bnn"))
    assert run_command_line([*map(str, words_of("fit-lbbnn", run)), "-q"], io.StringIO()) == 0
    return run.with_name("small.bnn") / "posteriors" / "lbbnn.safetensors"


@pytest.fixture
def run(small_run: Path, request: pytest.FixtureRequest, cli: Cli) -> Path:
    torch.save({"w": torch.zeros(2)}, small_run.with_name("net.pt"))
    name = request.getfixturevalue("name") if "name" in request.fixturenames else None
    if name == "merge":
        cli("hmc", small_run, "--chains", 8, "--warmup", 8, "--draws", 16, "--seed", 5, "--name", "again").expect(0)
    if name == "grid":
        small_run.with_name("grid.toml").write_text(f'checkpoints = "{small_run}"\n[[step]]\ncommand = "status"\n')
    if name == "prune":
        cli("fit-lbbnn", small_run, "--epochs", 1).expect(0)
    if name == "fit-ensemble":
        trained = (
            "train",
            small_run.with_name("net.safetensors"),
            *TINY,
            *data_of(small_run),
            "--epochs",
            1,
            "--seeds",
            2,
        )
        cli(*trained).expect(0)
        cli("extract-features", small_run.with_name("net-0.safetensors"), *data_of(small_run)).expect(0)
    if name == "fit-lbbnn":
        shutil.copy(request.getfixturevalue("lbbnn"), small_run.with_name("small.bnn") / "posteriors")
    return small_run


@pytest.mark.usefixtures("pictures_are_names")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "demo"])
def test_success_is_one_document_and_quiet_changes_no_result(cli: Cli, run: Path, name: str) -> None:
    done = cli(*words_of(name, run), "--json").expect(0)
    assert done.stdout.count("\n") == 1
    document = done.json
    assert (document["schema"], document["ok"], document["command"]) == ("bnncli.result/1", True, name)
    said = " ".join(done.stderr.split())
    assert all(f"WARNING {name} {' '.join(text.split())}" in said for text in document["warnings"])
    assert "PosixPath" not in said
    # On the small run few draws and few examples leave doubts.
    assert bool(document["warnings"]) == (name in ("fit-sghmc", "fit-vi", "merge", "compare"))
    assert document["seconds"] >= 0
    run.with_name("out.safetensors").unlink(missing_ok=True)  # which convert does not replace
    loud = cli(*words_of(name, run))
    run.with_name("out.safetensors").unlink(missing_ok=True)
    quiet = cli(*words_of(name, run), "-q")
    assert (quiet.code, quiet.stderr) == (0, "")
    assert quiet.stdout == loud.stdout


@pytest.mark.parametrize("name", NAMES)
def test_failure_is_one_document_and_two_lines(cli: Cli, run: Path, name: str) -> None:
    done = cli(*broken_words_of(name, run), "--json")
    document = done.json
    assert (document["ok"], document["exit"], document["command"]) == (False, done.code, name)
    assert done.code in (2, 66, 73)
    assert set(document["error"]) == {"code", "message", "path", "hint"}
    lines = done.stderr.splitlines()
    assert lines[0] == f"error: {document['error']['message']}"
    assert lines[1:] == ([f"hint: {document['error']['hint']}"] if document["error"]["hint"] else [])


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_option_is_a_document_too(cli: Cli, run: Path, name: str) -> None:
    done = cli(*words_of(name, run)[:2] if name == "config-show" else [name], "--json", "--no-such-option")
    assert (done.code, done.json["exit"], done.json["error"]["code"]) == (2, 2, "usage")


@pytest.mark.parametrize("name", PIPELINE)
def test_commands_that_write_print_the_paths_and_only_them(cli: Cli, run: Path, name: str) -> None:
    paths = cli(*words_of(name, run)).stdout.splitlines()
    assert paths
    assert all(Path(path).is_file() for path in paths)
    document = cli(*words_of(name, run), "--json").json
    assert [output["path"] for output in document["outputs"]] == paths
    assert document["action"] == "up_to_date"


def test_computed_outputs_and_inputs_are_named_with_their_digests(cli: Cli, run: Path) -> None:
    document = cli("fit-laplace", run, "--prior-precision", 3, "--name", "new", "--seed", 7, "--json").json
    inspected = cli("inspect", document["outputs"][0]["path"], "--json").json
    assert document["action"] == "computed"
    assert document["outputs"][0]["content_digest"] == inspected["content_digest"]
    recorded = {entry["role"]: entry["content_digest"] for entry in inspected["provenance"]["inputs"]}
    assert {entry["role"]: entry["content_digest"] for entry in document["inputs"]} == recorded
    assert (document["seed"], inspected["provenance"]["seed"], document["device"]) == (7, 7, "cpu")


def test_quiet_still_shows_errors(cli: Cli, run: Path) -> None:
    assert cli("status", run.with_name("missing"), "-q").stderr.startswith("error: ")


def test_verbose_shows_where_an_expected_error_came_from(cli: Cli, run: Path) -> None:
    assert "Traceback" in cli("status", run.with_name("missing"), "-v").stderr
    assert "Traceback" not in cli("status", run.with_name("missing")).stderr


def test_result_that_is_not_finite_is_a_bug(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.commands import status
    from bnncli.session.run import Result

    monkeypatch.setattr(status, "execute", lambda run, options: Result(extra={"x": float("nan")}))
    done = cli("status", run, "--json")
    assert (done.code, done.json["ok"]) == (1, False)


def test_log_lines_can_be_json_and_go_to_a_file_as_well(cli: Cli, run: Path) -> None:
    log = run.with_name("log")
    done = cli("fit-laplace", run, "--prior-precision", "10", "--log-format", "json", "--log-file", log)
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert entries == [json.loads(line) for line in log.read_text().splitlines()]
    assert {entry["command"] for entry in entries} == {"fit-laplace"}
    assert any("up to date" in entry["message"] for entry in entries)


def test_nothing_that_user_code_prints_reaches_stdout(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NOISY)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    torch.save(network.state_dict(), tmp_path / "net.pt")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).random((9, 1, 2, 2), np.float32), y=np.arange(9) % 3)
    words = ["extract-features", "net.pt", "--model", "net.py:make", "--data", "train=npz:d.npz", "--json"]
    process = start(run_to_files, words, tmp_path)
    process.join(timeout=60)
    assert process.exitcode == 0
    document = json.loads((tmp_path / "out").read_text())
    assert [output["role"] for output in document["outputs"]] == ["features.train", "map"]
    said = (tmp_path / "err").read_text()
    for text in ("a print at import", "a print of the factory", "a write of C code", "a warning of the factory"):
        assert text in said


@pytest.mark.parametrize("descriptor", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_works_with_closed_descriptors(run: Path, descriptor: str) -> None:
    out = run.with_name("o")
    done = subprocess.run(f"exec '{SCRIPT}' config show refine {descriptor} {'' if '>' in descriptor else '>o'}",
                          shell=True, cwd=run.parent, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    if ">&-" not in descriptor:
        assert "learning-rate" in (out.read_text() if out.exists() else done.stdout)


def test_it_works_in_the_empty_environment_of_cron(run: Path) -> None:
    words = [SCRIPT, "status", os.fsencode(run)]
    done = subprocess.run(words, env={"LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True, cwd="/")
    assert done.returncode == 0
    assert b"posteriors/refine.safetensors" in done.stdout
    assert done.stderr == b""


def test_tables_are_not_cut_off_a_terminal(cli: Cli, run: Path) -> None:
    deep = run.with_name("d" * 200) / ("e" * 200)
    deep.mkdir(parents=True)
    shutil.copy(run.with_name("small.bnn") / "features" / "test.h5", deep / "test.h5")
    assert str(deep / "test.h5") in cli("verify", deep / "test.h5").stdout


def test_names_from_a_file_cannot_speak_to_the_terminal(cli: Cli, run: Path) -> None:
    torch.save({"\x1b[31mred\x07\n": torch.zeros(2), "y": torch.tensor([float("inf")])}, run.with_name("x.pt"))
    torch.save({"\x1b[31mred\x07\n": torch.zeros(2)}, run.with_name("\x1b[2Jy.pt"))
    for name in ("x.pt", "\x1b[2Jy.pt", "\x1b[2Jnone"):
        done = cli("inspect", run.with_name(name))
        assert "\x1b" not in done.stdout + done.stderr
        assert "\x07" not in done.stdout + done.stderr


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


PRINTING: tuple[tuple[object, ...], ...] = (
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
    for command in PRINTING:
        words = [word.replace("RUN", str(nasty_run)) if isinstance(word, str) else word for word in command]
        assert check(cli(*words)).code != 1
        assert isinstance(json.loads(cli(*words, "--json").stdout), dict), words


def test_a_traceback_is_escaped_too(cli: Cli, nasty_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.commands import status

    def fail(*_: object) -> None:
        raise ZeroDivisionError(NASTY)

    monkeypatch.setattr(status, "execute", fail)
    assert "\x1b" not in cli("status", nasty_run).expect(1, "Traceback").stderr


def test_bytes_that_are_not_utf8_reach_a_script_as_they_are() -> None:
    name = os.fsdecode(b"a\xff\n")
    assert printable(name) == "a\\udcff\\n"
    assert printable(name, keep_bytes=True) == "a\udcff\\n"

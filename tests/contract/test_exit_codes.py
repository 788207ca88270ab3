"""One test for each exit code, as scripts see them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import run_to_files, start
from problems.command_line import SCRIPT, Cli

from bnncli.cli.commands import own_commands
from bnncli.cli.execute import memory_advice
from bnncli.cli.options import option_fields
from bnncli.errors import DeviceError
from bnncli.inference import memory
from bnncli.inference.memory import NUM_DRAWS
from bnncli.options.command import Command
from bnncli.options.declaration import flag_of
from bnncli.parameters.layouts import HeadLayout
from bnncli.system.memory import SHARE


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch bomb-went-off",)


def test_1_is_a_bug_of_ours_with_its_traceback(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnncli.commands import status

    def fail(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(status, "execute", fail)
    done = cli("status", small_run, "--json").expect(1, "Traceback")
    assert done.stderr.splitlines()[-2:] == [
        "error: ZeroDivisionError: oh",
        "hint: this is a bug in bnncli; please report it",
    ]
    assert done.json["error"]["code"] == "bug"


@pytest.mark.parametrize(
    "words",
    [
        ["refine", "x", "--epochs", "many"],
        ["refine", "x", "--epochs", "0"],
        ["refine", "x", "--flow", "spiral"],
        ["refine", "x", "--epoch", "3"],
        ["refine"],
        ["refined", "x"],
        ["fit-laplace", "x", "--prior-precision", "-1"],
        ["fit-laplace", "x", "--name", "../x"],
        ["fit-laplace", "x", "--name", "a", "--out", "b"],
        ["config", "show", "nothing"],
    ],
    ids=" ".join,
)
def test_2_is_a_wrong_option_or_argument(cli: Cli, words: list[str]) -> None:
    assert cli(*words).expect(2).stdout == ""


@pytest.mark.parametrize("command", ["fit-laplace", "refine", "hmc"])
def test_2_is_a_posterior_named_as_the_network_itself_or_as_features(cli: Cli, small_run: Path, command: str) -> None:
    stored = small_run.with_name("small.bnn") / "posteriors" / "map.safetensors"
    before = stored.read_bytes()
    for name, use in (("map", "the trained network"), ("features", "scores that need no posterior")):
        cli(command, small_run, "--name", name, "--force").expect(2, f"is reserved for {use}")
    assert stored.read_bytes() == before


def test_66_is_a_missing_input_and_names_the_command_that_makes_it(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ckpt.pt").touch()
    cli("fit-laplace", tmp_path / "ckpt.pt").expect(66, f"hint: bnncli extract-features {tmp_path}/ckpt.pt --model")


def test_69_is_a_device_that_is_absent(cli: Cli, small_run: Path) -> None:
    cli("refine", small_run, "--name", "gpu", "--device", "cuda:99").expect(69, "CUDA device")


def memory_for(structure: str) -> int:
    """Bytes that must be free for fit-laplace on the small run to fit this structure and none that is larger."""
    return int(memory.fit_bytes(structure, HeadLayout(3, 5), num_draws=NUM_DRAWS) / SHARE) + 2


@pytest.mark.parametrize(("wanted", "fits"), [("full", "block"), ("full", "kron"), ("block", "kron")])
def test_69_is_memory_that_does_not_suffice(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, fits: str
) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: memory_for(fits))
    cli("fit-laplace", small_run, "--structure", wanted, "--name", "x").expect(
        69, f"use --structure {fits}, the largest that fits"
    )
    assert not (small_run.with_name("small.bnn") / "posteriors" / "x.safetensors").exists()
    cli("fit-laplace", small_run, "--structure", fits, "--name", "x", "--prior-precision", "1").expect(0)


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (("hmc", "--chains", "900"), "use at most --chains"),
        (("refine", "--elbo-draws", "9999"), "use fewer --elbo-draws"),
        (("fit-sghmc", "--chains", "9000"), "use fewer --chains"),
        (("fit-swag", "--rank", "9000", "--epochs", "9000"), "use a smaller --rank"),
        (("fit-vi", "--estimator", "reparam", "--num-draws", "9999"), "use a smaller --num-draws"),
        (("fit-lbbnn", "--repeats", "900"), "use fewer --repeats, at most"),
        (("fit-lbbnn", "--hidden", "90,90", "--epochs", "1"), "use smaller --hidden layers"),
        (("fit-lbbnn", "--estimator", "mnf", "--flow-hidden", "24"), "give --slab-sd as a number"),
    ],
)
def test_69_is_memory_for_draws_that_does_not_suffice(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], advice: str
) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 1_000_000)
    done = cli(command[0], small_run, *command[1:], "--name", "x", "--json")
    assert (done.code, advice in done.json["error"]["hint"]) == (69, True)
    assert_options_exist(command[0], done.json["error"]["hint"])


def assert_options_exist(name: str, hint: str) -> None:
    """Every option that a hint of a command names is its own, or of the other command that stands before it."""
    known = {command.name: {flag_of(option) for option in option_fields(command)} for command in own_commands()}
    for word in hint.replace(",", " ").split():
        name = word if word in known else name
        assert not word.startswith("--") or word in known[name], (name, hint)


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("command", own_commands(), ids=lambda one: one.name)
def test_what_helps_without_memory_are_options_that_the_command_has(command: Command, is_gpu: bool) -> None:
    assert_options_exist(command.name, memory_advice(command, is_gpu=is_gpu))
    flags = {flag_of(option) for option in option_fields(command)}
    assert ("--device cpu" in memory_advice(command, is_gpu=is_gpu)) == (is_gpu and "--device" in flags)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("predict", "--name", "x", "--posterior", "hmc"), "use at most --samples"),
        (("predict", "--name", "x", "--posterior", "laplace", "--samples", "90000"), "use at most --samples"),
        (("diagnose", "--posterior", "hmc"), "reduce the number of draws: hmc with fewer"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_69_is_memory_for_draws_of_a_posterior_that_does_not_suffice(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], advice: str
) -> None:
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 20_000)
    done = cli(words[0], small_run, *words[1:], "--json")
    assert (done.code, advice in done.json["error"]["hint"]) == (69, True)
    assert "draws with 18 parameters: needs about" in done.json["error"]["message"]
    assert_options_exist(words[0], done.json["error"]["hint"])
    if words[0] == "predict":
        most = done.json["error"]["hint"].split()[-1]
        cli(words[0], small_run, *words[1:], "--samples", most).expect(0)


def test_draws_without_room_have_no_distances(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("predict", small_run, "--posterior", "laplace").expect(0)
    monkeypatch.setattr("bnncli.system.memory.available_memory", lambda device: 5_000)
    cli("evaluate", small_run, "--json").expect(
        0, "skipping MMD^2: not enough memory for 128 draws with 18 parameters: needs about"
    )


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 50), lambda: np.ones(1 << 50)], ids=["torch", "numpy"])
def test_69_is_a_failed_allocation(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, allocate: Any) -> None:
    from bnncli.commands import refine

    monkeypatch.setattr(refine, "execute", lambda *_: allocate())
    cli("refine", small_run, "--name", "x").expect(69, "out of memory")


@pytest.mark.parametrize(("device", "hint"), [("cuda:0", "use less, or --device cpu"), ("cpu", "use less")])
def test_a_hint_for_a_full_gpu_names_the_cpu_too(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, device: str, hint: str
) -> None:
    from bnncli.commands import refine

    def require(*_: object) -> None:
        raise DeviceError(f"it needs more memory than {device} has", hint="use less", code="out_of_memory")

    monkeypatch.setattr(refine, "execute", require)
    assert f"hint: {hint}\n" in cli("refine", small_run, "--name", "x").stderr


def test_70_is_a_fit_that_failed_and_publishes_nothing(cli: Cli, small_run: Path) -> None:
    cli("refine", small_run, "--name", "wild", "--learning-rate", "1e300", "--epochs", 3).expect(70)
    assert not list(small_run.with_name("small.bnn").rglob("*wild.safetensors*.tmp"))
    assert not (small_run.with_name("small.bnn") / "posteriors" / "wild.safetensors").exists()


def test_74_is_a_write_that_failed(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    for extra in ((), ("--dry-run",)):
        cli("fit-laplace", small_run, "--name", "x", *extra).expect(74, "MiB are free")


def test_74_leaves_the_old_artifact_and_no_temporary(cli: Cli, small_run: Path) -> None:
    import resource

    folder = small_run.with_name("small.bnn") / "posteriors"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores the signal of it
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        done = cli("fit-laplace", small_run, "--prior-precision", "10", "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.code == 74
    assert "File too large" in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_75_is_a_lock_that_another_holds(cli: Cli, small_run: Path) -> None:
    import fcntl

    lock = small_run.with_name("small.bnn") / ".locks" / "posteriors-x.safetensors"
    with open(lock, "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        cli("fit-laplace", small_run, "--name", "x", "--prior-precision", "10").expect(75, "another bnncli")
        cli("fit-laplace", small_run, "--name", "y", "--prior-precision", "10").expect(0)
        cli("status", small_run).expect(0)
    cli("fit-laplace", small_run, "--name", "x", "--prior-precision", "10").expect(0)


def test_77_is_a_file_that_would_run_code(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"state_dict": Bomb()}))
    for words in (["inspect", "evil.pt"], ["convert", "evil.pt", "out.safetensors"]):
        cli(*words).expect(77, "system")
    assert not (tmp_path / "bomb-went-off").exists()


@pytest.mark.long
def test_a_terminated_refine_exits_143_and_says_how_to_go_on(small_run: Path) -> None:
    words = ["refine", str(small_run), "--name", "endless", "--epochs", "10000000", "--progress", "log"]
    process = start(run_to_files, [*words, "--save-every", "0"], small_run.parent)
    state = small_run.with_name("small.bnn") / "posteriors" / ".endless.resume.safetensors"
    while not state.exists() and process.is_alive():
        time.sleep(0.02)
    process.terminate()
    process.join(timeout=60)
    process.kill()  # where the signal was not heeded
    stdout, stderr = ((small_run.parent / name).read_text() for name in ("out", "err"))
    assert (process.exitcode, stdout) == (143, "")
    error, hint = stderr.splitlines()[-2:]
    assert error.startswith("error: interrupted by SIGTERM at")
    assert hint.endswith("--save-every 0 --resume")
    left = [path for path in small_run.with_name("small.bnn").rglob("*endless*") if path.parent.name != ".locks"]
    assert [path.name for path in left] == [".endless.resume.safetensors"]


LOOP = """
import time
from bnncli.__main__ import main
from bnncli.commands import config_show
def execute(run, options):
    task = run.console.task("loop", 1000)
    run.console.info("started")
    while True:
        task.advance()
        time.sleep(0.01)
config_show.execute = execute
import sys
sys.argv = ["bnncli", "config", "show", "--json"]
main()
"""


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)], ids=["SIGINT", "SIGTERM", "SIGHUP"]
)
def test_a_signal_ends_any_loop_with_128_plus_its_number(name: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOOP], stdout=-1, stderr=-1, text=True)
    assert process.stderr is not None
    assert "started" in process.stderr.readline()
    process.send_signal(signal.Signals[name])
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert json.loads(stdout)["exit"] == code
    assert stderr.startswith(f"error: interrupted by {name} at loop")
    assert "Traceback" not in stderr


def test_141_is_a_reader_that_went_away() -> None:
    for words in (["config", "show"], ["--help"]):
        with subprocess.Popen([SCRIPT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 141


SIGNALS = """
import os, signal
from bnncli.system import signals
signals.install_handlers()
"""


def run_python(code: str, **keywords: Any) -> int:
    return subprocess.run([sys.executable, "-c", SIGNALS + code], **keywords).returncode


def test_the_second_signal_ends_the_process_at_once() -> None:
    twice = "os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM); print('still here')"
    assert run_python(twice) == 143


def test_a_hangup_that_was_ignored_on_entry_stays_ignored() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    code = "os.kill(os.getpid(), signal.SIGHUP); signals.raise_if_interrupted()"
    assert run_python(code, preexec_fn=ignore) == 0
    assert run_python(code, stderr=subprocess.DEVNULL) == 1

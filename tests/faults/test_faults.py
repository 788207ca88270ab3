"""Every command under faults: nothing corrupt, one clear line, and the next run makes good what was lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from kills import SERVER, start
from problems.command_line import Cli
from problems.long_run import long_but

from bnncli.cli.commands import own_commands
from bnncli.options.declaration import flag_of, map_options
from faults.lines import LINES, READ, WRITTEN, prepare
from faults.trials import serve

FEW = 1  # trials of each kind and state in the default suite
SLOW = (  # in the long run only
    "train/seeds", "fit-ensemble", "fit-laplace/layers", "refine/layers", "hmc/layers", "predict/layers", "fit-sghmc", "fit-swag",
    "fit-sghmc/layers", "fit-vi/layers", "auto", "extract-features/network", "reproduce", "export", "stack",
)  # fmt: skip
HOURS = "demo"  # at every call only


@pytest.fixture(scope="module")
def prepared(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what every line needs."""
    folder = tmp_path_factory.mktemp("faults") / "base"
    shutil.copytree(finished_run.with_name("small.bnn"), folder / "small.bnn")
    shutil.copy(finished_run.with_name("features.npz"), folder / "features.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare(folder)
    return folder


@pytest.fixture(scope="module")
def requests() -> Iterator[Connection]:
    """What a process that runs the trials is asked through."""
    ours, theirs = SERVER.Pipe()
    process = start(serve, theirs)
    yield ours
    process.kill()
    process.join()


def failures(
    requests: Connection, base: Path, scratch: Path, key: str, count: int | None, *, seconds: float
) -> list[str]:
    """What went wrong in the trials of one line."""
    report = scratch / "report.json"
    requests.send((str(base), str(scratch), key, count, str(report)))
    assert requests.poll(seconds)
    assert requests.recv() == 0
    found = json.loads(report.read_text())
    print(f"{key}: {found['trials']} in {found['seconds']:.1f} s")
    return list(found["failures"])


def test_every_command_has_a_line() -> None:
    names = {
        (command.parent + " " if command.parent else "") + command.name.removeprefix(f"{command.parent}-")
        for command in own_commands()
    }
    assert {key.split("/")[0] for key in LINES} == names


def test_every_option_that_names_a_file_is_known() -> None:
    named = {
        flag_of(spec.name): spec.metadata["writes"]
        for command in own_commands()
        for group in command.groups
        for spec, _ in map_options(group).values()
        if {"FILE", "DIR"} & {*str(spec.metadata.get("metavar")).split("|")} and "NAME" not in spec.metadata["metavar"]
    }
    assert {*named} == WRITTEN | READ
    assert {flag for flag, writes in named.items() if writes} == WRITTEN - {"--run-dir"}


@pytest.mark.parametrize("key", [key for key, line in LINES.items() if line.inputs])
def test_no_command_writes_over_its_inputs_through_a_hard_link(
    cli: Cli, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.chdir(prepared)
    for number, name in enumerate(LINES[key].inputs):
        link, before = tmp_path / f"{number}.log", Path(name).read_bytes()
        link.hardlink_to(name)
        done = cli(*key.split("/")[0].split(" "), *LINES[key].words, "--log-file", link)
        assert (done.code, f"--log-file {link} is also an input (" in done.stderr) == (2, True), (name, done.stderr)
        assert Path(name).read_bytes() == before


@pytest.mark.parametrize("key", long_but((key for key in LINES if key != HOURS), *(LINES.keys() - {*SLOW, HOURS})))
def test_a_command_survives_faults_and_damaged_inputs(
    requests: Connection, prepared: Path, tmp_path: Path, key: str
) -> None:
    assert failures(requests, prepared, tmp_path, key, FEW, seconds=120) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", LINES)
def test_a_command_survives_a_fault_at_every_call_and_much_damage(
    requests: Connection, prepared: Path, tmp_path: Path, key: str
) -> None:
    assert failures(requests, prepared, tmp_path, key, None, seconds=7200) == []

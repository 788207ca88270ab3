"""Damaged artifacts: never used, never a traceback, and a killed writer leaves nothing half-done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

Cli = Any
ARTIFACTS = {
    "features": "features/test.h5",
    "point": "posteriors/map.safetensors",
    "gaussian": "posteriors/laplace.safetensors",
    "flow": "posteriors/refine.safetensors",
    "samples": "posteriors/hmc.nc",
    "predictions": "predictions/laplace.mc/test.h5",
    "metrics": "metrics/laplace.mc.json",
}


def artifact(run: Path, kind: str) -> Path:
    return run.with_name("small.bnn") / ARTIFACTS[kind]


def offsets(content: bytes, count: int = 20) -> list[int]:
    return [int(offset) for offset in np.linspace(0, len(content) - 1, count)]


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_a_whole_artifact_passes(cli: Cli, small_run: Path, kind: str) -> None:
    assert cli("verify", artifact(small_run, kind)).code == 0


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_verify_refuses_an_artifact_truncated_anywhere(cli: Cli, small_run: Path, kind: str) -> None:
    path = artifact(small_run, kind)
    content = path.read_bytes()
    for offset in offsets(content):
        path.write_bytes(content[:offset])
        for command in ("verify", "inspect"):
            done = cli(command, path)
            assert done.code == 65, (offset, done.stderr)
            assert "Traceback" not in done.stderr
            assert str(path) in done.stderr


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_verify_sees_one_flipped_byte_anywhere(cli: Cli, small_run: Path, kind: str) -> None:
    path = artifact(small_run, kind)
    content = path.read_bytes()
    for offset in offsets(content, 25):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        done = cli("verify", path)
        assert "Traceback" not in done.stderr
        assert done.code == 65, (offset, content[offset - 20 : offset + 20])


COMMANDS = {
    "features": ("predict", "--posterior", "map", "--integrator", "plug-in", "--name", "x"),
    "gaussian": ("refine", "--name", "x", "--epochs", 1),
    "flow": ("predict", "--posterior", "refine", "--name", "x"),
    "samples": ("predict", "--posterior", "hmc", "--name", "x"),
    "predictions": ("evaluate", "--force"),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_refuses_a_truncated_input(cli: Cli, small_run: Path, kind: str) -> None:
    command, *words = COMMANDS[kind]
    path = artifact(small_run, kind)
    content = path.read_bytes()
    for offset in offsets(content, 8):
        path.write_bytes(content[:offset])
        done = cli(command, small_run, *words)
        assert done.code == 65, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


OUTPUTS = {
    "features": ("extract-features", "--from-npz", "features.npz", "--ood", "far"),
    "gaussian": ("fit-laplace", "--prior-precision", "10"),
    "samples": ("hmc", "--chains", 8, "--warmup", 8, "--draws", 16),
    "predictions": ("predict", "--posterior", "laplace"),
    "metrics": ("evaluate", "--posterior", "laplace"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_damaged_output_is_kept_without_force_and_replaced_with_it(cli: Cli, small_run: Path, kind: str) -> None:
    command, *words = [small_run.with_name(str(w)) if w == "features.npz" else w for w in OUTPUTS[kind]]
    path = artifact(small_run, kind)
    whole = cli("inspect", path, "--json").json["content_digest"]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2 :] = b""
    path.write_bytes(damaged + b"bnncli_")
    refused = cli(command, small_run, *words)
    assert (refused.code, "Traceback" in refused.stderr) == (73, False)
    assert path.read_bytes() == damaged + b"bnncli_"
    assert cli(command, small_run, *words, "--force").code == 0
    assert cli("inspect", path, "--json").json["content_digest"] == whole


def test_verify_checks_every_file_and_reports_the_bad_ones(cli: Cli, small_run: Path) -> None:
    good, bad = artifact(small_run, "gaussian"), artifact(small_run, "features")
    bad.write_bytes(b"")
    done = cli("verify", bad, good, "--json")
    assert done.code == 65
    assert [entry["is_valid"] for entry in done.json["files"]] == [False, True]
    assert done.json["error"]["path"] == str(bad)


def test_a_flipped_feature_is_seen_by_every_command_that_reads_the_first_rows(cli: Cli, small_run: Path) -> None:
    path = artifact(small_run, "features").with_name("train.h5")
    with h5py.File(path, "r", locking=False) as file:
        start = file["features"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[start + 3] ^= 0x40
    path.write_bytes(content)
    assert cli("fit-laplace", small_run, "--name", "x").code == 65


def test_status_says_which_artifact_is_invalid(cli: Cli, small_run: Path) -> None:
    path = artifact(small_run, "gaussian")
    path.write_bytes(path.read_bytes()[:-1])
    done = cli("status", small_run, "--check", "--json")
    states = {entry["name"]: entry["state"] for entry in done.json["artifacts"]}
    assert done.code == 3
    assert states["posteriors/laplace.safetensors"] == "invalid"
    assert states["posteriors/map.safetensors"] == "fresh"
    assert states["posteriors/refine.safetensors"] == "stale"


KILL = """
import gc, io, os, random, signal, sys, time
from pathlib import Path
import torch
from bnncli.cli.execute import run_command_line
torch.set_num_threads(1)
run, moments = sys.argv[1], random.Random(0)
words = ["predict", run, "--posterior", "laplace", "--split", "test", "--name", "killed", "-q", "--force"]
target = Path(run + ".bnn/predictions/killed/test.h5")
assert run_command_line(words, io.StringIO()) == 0  # imports what the children need
gc.collect()
gc.freeze()  # a collection of everything takes longer than the command, and every child would begin with one
start = time.monotonic()
assert run_command_line(words, io.StringIO()) == 0
longest = 3 * (time.monotonic() - start)  # however busy the machine is, some children finish a command
target.unlink()
states = set()
for attempt in range(20):
    child = os.fork()
    if child == 0:
        while run_command_line(words, io.StringIO()) == 0:
            pass
        os._exit(1)
    time.sleep(moments.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    states.add(target.exists())
    assert not target.exists() or run_command_line(["verify", str(target), "-q"], io.StringIO()) == 0
assert run_command_line(words, io.StringIO()) == 0
assert [path.name for path in target.parent.iterdir()] == ["test.h5"]
assert True in states
"""


def test_a_command_killed_at_any_moment_leaves_nothing_or_a_whole_artifact(small_run: Path) -> None:
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", KILL, str(small_run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_leftovers_of_a_killed_run_are_shown_and_cleaned(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn") / "posteriors"
    dead = folder / f".hmc.nc.{2**22 + 7}.0123abcd.tmp"
    dead.write_bytes(b"half")
    assert str(dead) in cli("status", small_run).stdout
    shutil.copytree(folder, folder.with_name("copy"))
    done = cli("clean", small_run, "--json")
    assert {Path(path).name for path in done.json["removed"]} == {dead.name}
    assert not dead.exists()
    assert cli("status", small_run, "--check").code == 0
    assert cli("clean", small_run).stdout == ""


def test_the_next_writer_removes_the_leftovers_of_a_dead_one(cli: Cli, small_run: Path) -> None:
    dead = artifact(small_run, "gaussian").with_name(f".laplace.safetensors.{2**22 + 7}.0123abcd.tmp")
    dead.write_bytes(b"half")
    assert cli("fit-laplace", small_run, "--prior-precision", "10", "--force").code == 0
    assert not dead.exists()

"""Damaged artifacts: never used, never a traceback, and a killed writer leaves nothing half-done."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from problems.command_line import Cli

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


def refused_by_verify(cli: Cli, path: Path, damaged: dict[int, bytes]) -> None:
    """Every damaged version of an artifact is refused, each as a file of its own and all by one command."""
    copies = {offset: path.with_name(f"at-{offset}{path.suffix}") for offset in damaged}
    for offset, content in damaged.items():
        copies[offset].write_bytes(content)
    done = cli("verify", *copies.values(), path, "--json")
    assert (done.code, "Traceback" in done.stderr) == (65, False)
    found = {Path(entry["path"]): entry["is_valid"] for entry in done.json["files"]}
    assert found.pop(path)
    assert found == dict.fromkeys(copies.values(), False)


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_verify_refuses_an_artifact_truncated_anywhere(cli: Cli, small_run: Path, kind: str) -> None:
    path = artifact(small_run, kind)
    content = path.read_bytes()
    damaged = {offset: content[:offset] for offset in offsets(content)}
    refused_by_verify(cli, path, damaged)
    for offset, part in damaged.items():
        path.write_bytes(part)
        done = cli("inspect", path)
        assert done.code == 65, (offset, done.stderr)
        assert "Traceback" not in done.stderr
        assert str(path) in done.stderr


@pytest.mark.parametrize("kind", ARTIFACTS)
def test_verify_sees_one_flipped_byte_anywhere(cli: Cli, small_run: Path, kind: str) -> None:
    path = artifact(small_run, kind)
    content = path.read_bytes()
    flipped = {at: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in offsets(content, 25)}
    refused_by_verify(cli, path, flipped)


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

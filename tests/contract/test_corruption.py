"""Damaged and forged artifacts."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from forged import forge
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.errors import Exit

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


NUM_FORGERIES = int(os.environ.get("BNNCLI_FORGERIES", "4"))
ODD_CODES = {Exit.BUG, Exit.NUMERIC}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, -(10**400), 1e308, 0.5, "", "x", "²", "1.²", "9" * 5000, "a\0b", "\x1b[2J\n",
    "\u202e", "\udcff", "x" * 20_000, "../../../etc/passwd", "/dev/zero", [], {}, [[]], [None], ["x"], {"x": None},
    [[[[[[[[[[]]]]]]]]]], [0, 1, 2], ["\0"], {"": {}}, [{"role": "x", "path": "\0", "content_digest": "x"}],
    [{"role": "x", "path": "/dev/zero", "content_digest": "x"}], {"weights_digest": "x", "file_sha256": "x"},
    [{"name": "x", "value": "y"}], [{"shape": ["x"], "offset": None}], {"name": None}, "nan", "inf", "-1", "1e400",
)  # fmt: skip
NEW = ("--name", "new", "--samples", 10, "--split", "test")
CONSUMERS: dict[str, tuple[tuple[object, ...], ...]] = {
    "features/train.h5": (("fit-laplace", "RUN", "--name", "new", "--prior-precision", 1),),
    "features/test.h5": (("predict", "RUN", "--posterior", "map", *NEW), ("extract-features", "RUN", "--from-npz", "NPZ", "--ood", "far")),
    "posteriors/map.safetensors": (("predict", "RUN", "--posterior", "map", *NEW),),
    "posteriors/laplace.safetensors": (("predict", "RUN", "--posterior", "laplace", *NEW), ("fit-laplace", "RUN", "--prior-precision", 10), ("refine", "RUN", "--dry-run", "--name", "new")),
    "posteriors/refine.safetensors": (("predict", "RUN", "--posterior", "refine", *NEW), ("refine", "RUN", "--epochs", 1, "--length", 2)),
    "posteriors/hmc.nc": (("predict", "RUN", "--posterior", "hmc", *NEW), ("hmc", "RUN", "--chains", 8, "--warmup", 8, "--draws", 16)),
    "predictions/laplace.mc/test.h5": (("evaluate", "RUN", "--bootstrap", 20, "--force", "--split", "test"), ("compare", "RUN", "--bootstrap", 20), ("predict", "RUN", "--posterior", "laplace", "--split", "test")),
    "metrics/laplace.mc.json": (("evaluate", "RUN"),),
}  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = (), depth: int = 5) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, as keys from the top."""
    for key in sorted(document) if isinstance(document, dict) else range(min(len(document), 3)):
        yield (*path, key)
        if depth and isinstance(document[key], dict | list):
            yield from places(document[key], (*path, key), depth - 1)


def put(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    inner: Any = document
    for key in place[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = copy.deepcopy(value)


def documents(run: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name in CONSUMERS:
        header = read_header(run.with_name("small.bnn") / name)
        found[name] = {
            "kind": header.kind, "schema": header.schema, "content_digest": header.content_digest,
            "provenance": header.provenance, "meta": header.meta,
        }  # fmt: skip
    return found


def trials(run: Path, count: int) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """File, place in its header, and what to put there; the same ones every time."""
    every = {name: list(places(document)) for name, document in documents(run).items()}
    generator = np.random.default_rng(0)
    for number in range(count):
        name = list(every)[number % len(every)]
        place = every[name][generator.integers(len(every[name]))]
        yield name, place, (*VALUES, KeyError)[generator.integers(len(VALUES) + 1)]


def problem(cli: Cli, run: Path, name: str, place: tuple[Any, ...], value: Any) -> str | None:
    """What is wrong with how the commands take a forgery; None when nothing is."""
    folder = run.with_name("small.bnn")
    original = (folder / name).read_bytes()
    forge(folder / name, lambda document: put(document, place, value))
    words = {"RUN": run, "NPZ": run.with_name("features.npz")}
    commands: tuple[tuple[object, ...], ...] = (
        ("inspect", folder / name),
        ("status", "RUN"),
        ("verify", folder / name),
    )
    try:
        for command in (*commands, *CONSUMERS[name]):
            for extra in ((), ("--json",)) if command in commands else (("--json",),):
                done = cli(*(words.get(word, word) if isinstance(word, str) else word for word in command), *extra)
                said = f"{command[0]} on {name} with {value!r:.60} at {place}: exit {done.code}"
                if done.code in ODD_CODES or "Traceback" in done.stderr or done.code not in set(Exit):
                    return f"{said}: {done.stderr[-1500:]}"
                if any(not (char.isprintable() or char == "\n") for char in done.stdout + done.stderr):
                    return f"{said}: prints control characters"
                if extra and not isinstance(done.json, dict):
                    return f"{said}: no JSON"
                if (
                    max(map(len, [*(() if extra else done.stdout.splitlines()), *done.stderr.splitlines(), ""]))
                    > 50_000
                ):
                    return f"{said}: endless lines"
    finally:
        (folder / name).write_bytes(original)
        for path in folder.rglob("*new*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return None


def test_a_forgery_that_changes_nothing_is_taken(cli: Cli, small_run: Path) -> None:
    """The forger itself works: what it writes is what our own writers would."""
    for name in CONSUMERS:
        path = small_run.with_name("small.bnn") / name
        forge(path, lambda document: None)
        assert cli("verify", path).code == 0
    assert cli("status", small_run, "--check").code == 0


def test_the_values_that_ended_in_tracebacks_do_not(cli: Cli, small_run: Path) -> None:
    name = "posteriors/map.safetensors"
    known = {("schema",): "\u00b2", ("provenance", "tool"): None, ("meta", "metrics"): "x"}
    found = [problem(cli, small_run, name, place, value) for place, value in known.items()]
    nul = [{"role": "x", "path": "a\0b", "content_digest": "d"}]
    assert [text for text in [*found, problem(cli, small_run, name, ("provenance", "inputs"), nul)] if text] == []


def test_no_value_anywhere_in_a_header_ends_in_a_traceback(cli: Cli, small_run: Path) -> None:
    found = [problem(cli, small_run, *trial) for trial in trials(small_run, NUM_FORGERIES)]
    assert [text for text in found if text] == []

"""status and inspect on runs."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.session import states as artifact_states


def states(cli: Cli, run: Path) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in cli("status", run, "--json").json["artifacts"]}


def test_status_names_a_missing_input_and_ignores_other_files(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn")
    (folder / "features" / "train.h5").unlink()
    (folder / "notes.txt").write_text("mine")
    found = states(cli, small_run)
    assert found["features/train.h5"] == "missing"
    assert "notes.txt" not in found


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("features/train.h5", "features", "float32 (240, 5)"),
        ("posteriors/laplace.safetensors", "posterior", "F64 (18,)"),
        ("posteriors/hmc.nc", "samples", "float32 (8, 16, 3, 5)"),
        ("predictions/refine.mc/far.h5", "predictions", "float32 (60, 3)"),
        ("metrics/hmc.mc.json", "metrics", None),
    ],
)
def test_inspect_describes_each_kind(cli: Cli, small_run: Path, name: str, kind: str, expected: str | None) -> None:
    path = small_run.with_name("small.bnn") / name
    document = cli("inspect", path, "--json").json
    assert document["kind"] == kind
    assert expected is None or expected in document["arrays"].values()
    assert document["artifact_schema"] == "1.0"
    text = cli("inspect", path).stdout
    assert document["content_digest"] in text
    assert "bnncli " in text


def test_provenance_says_everything_that_made_the_numbers(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "posteriors" / "refine.safetensors"
    provenance = cli("inspect", path, "--json").json["provenance"]
    assert provenance["schema"] == "bnncli.provenance/1"
    assert provenance["command"][:2] == ["bnncli", "refine"]
    assert {"python", "torch", "numpy", "h5py", "safetensors"} <= set(provenance["versions"])
    assert (provenance["seed"], provenance["deterministic"], provenance["device"]) == (0, False, "cpu")
    assert provenance["threads"] >= 1
    assert {entry["role"]: entry["path"] for entry in provenance["inputs"]} == {
        "features.train": "../features/train.h5",
        "features.val": "../features/val.h5",
        "base": "laplace.safetensors",
    }


def test_no_artifact_names_the_folder_it_was_made_in_but_in_its_command(cli: Cli, small_run: Path) -> None:
    for path in small_run.with_name("small.bnn").rglob("*.*"):
        if path.is_file() and ".locks" not in path.parts:
            document = cli("inspect", path, "--json").json
            document["provenance"].pop("command")
            document["provenance"].pop("source", None)
            assert "finished" not in str(document)


def test_clean_never_touches_an_artifact_or_a_living_writer(cli: Cli, small_run: Path) -> None:
    import os

    folder = small_run.with_name("small.bnn")
    alive = folder / "posteriors" / f".x.safetensors.{os.getpid()}.0123abcd.tmp"
    resume = folder / "posteriors" / ".refine.resume.safetensors"
    alive.write_bytes(b"")
    resume.write_bytes(b"")
    before = {path for path in folder.rglob("*") if path.is_file()}
    assert cli("clean", small_run).stdout == f"{resume}\n"
    assert {path for path in folder.rglob("*") if path.is_file()} == before - {resume}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("last", [1, 12])
def test_status_ends_at_a_signal_and_says_where(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, last: int
) -> None:
    count, plain = 0, artifact_states.read_header

    def signalled(path: Path) -> Any:
        nonlocal count
        count += 1
        if count == last:
            os.kill(os.getpid(), number)
        return plain(path)

    monkeypatch.setattr(artifact_states, "read_header", signalled)
    cli("status", small_run).expect(128 + number, f"interrupted by {number.name} at ")
    assert count == last


def test_a_bootstrap_ends_at_a_signal(cli: Cli, tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", probs=np.full((5000, 2), 0.5), label=np.arange(5000) % 2)
    later = threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM))
    later.start()
    done = cli("score", tmp_path / "p.npz", "--bootstrap", 1_000_000)
    later.cancel()
    assert (done.code, "interrupted by SIGTERM at bootstrap" in done.stderr) == (143, True), done.stderr

"""Splits that belong together: replaced together or not at all, and never used where they come from two commands."""

from __future__ import annotations

import contextlib
import io
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kills import run_killed_at, start
from problems.command_line import Cli

from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import note_path
from bnncli.commands.extract_features import splits

NETWORK = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
"""
SPLITS = ("train", "val", "test", "far")


def extraction(*names: str) -> list[str]:
    flags = {"far": "--ood"}
    specs = [word for name in names for word in (flags.get(name, "--data"), f"{name}=npz:{name}.npz")]
    return ["extract-features", "net.pt", "--model", "net.py:make", *specs]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network and a run of it, fitted and predicted; the split `far` was added by a later command."""
    from bnncli.cli.execute import run_command_line

    folder, generator = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    torch.manual_seed(0)
    shapes = {"1.weight": (4, 5), "1.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "net.pt")
    (folder / "net.py").write_text(NETWORK)
    for name in SPLITS:
        labels = generator.integers(3, size=40)
        rows = (generator.normal(size=(40, 5)) + np.eye(3, 5)[labels]).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=rows, y=labels)
    fit = ["fit-laplace", "net.pt", "--prior-precision", "val"]
    with contextlib.chdir(folder):
        for words in (extraction("train", "val", "test"), extraction("far"), fit, ["predict", "net.pt"]):
            assert run_command_line([*words, "-q"], io.StringIO()) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def means(folder: Path) -> dict[str, Any]:
    """The --mean that each split was made with."""
    paths = (folder / "net.pt.bnn" / "features").glob("[!.]*.h5")
    return {path.stem: read_header(path).provenance["params"]["mean"] for path in paths}


def kill_after(folder: Path, count: int) -> None:
    """A command that makes all splits anew with another mean, killed after so many files have taken their names."""
    words = [*extraction(*SPLITS), "--mean", "0.5", "--force", "-q", "--threads", "1"]
    process = start(run_killed_at, words, "bnncli.artifacts.atomic", "_take_name", count)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL


def follow_hints(cli: Cli) -> None:
    """Run what predict says, until it works."""
    for _ in range(6):
        done = cli("predict", "net.pt", "--json")
        if done.code == 0:
            return
        assert done.code == 65
        assert cli(*shlex.split(done.json["error"]["hint"])[1:]).code == 0
    pytest.fail("the hints do not mend the run")


# Before the first name the notes are written, one a split; the map is the first of the files.
@pytest.mark.parametrize("count", [4 + 1, 4 + 3])
def test_splits_of_an_interrupted_command_are_refused_until_the_command_named_is_run(
    cli: Cli, folder: Path, count: int
) -> None:
    kill_after(folder, count)
    assert list(means(folder).values()).count("0.5") == count - 5
    for words in (("fit-laplace", "--name", "x"), ("predict",), ("evaluate",), ("diagnose",)):
        done = cli(words[0], "net.pt", *words[1:], "--json")
        assert (done.code, done.json["error"]["code"]) == (65, "stale_input"), words
    entries = cli("status", "net.pt", "--json").json["artifacts"]
    stale = {one["name"] for one in entries if one["state"] == "stale" and one["name"].startswith("features/")}
    assert stale
    if count > 5:
        hint = cli("predict", "net.pt", "--json").json["error"]["hint"]
        assert ("--mean 0.5" in hint, hint.endswith(" --force")) == (True, True)
        assert {one["remake"] for one in entries if one["name"] in stale} == {hint}
    follow_hints(cli)
    assert len(set(means(folder).values())) == 1
    assert (
        cli("fit-laplace", "net.pt", "--prior-precision", "val").code
        == cli("predict", "net.pt").code
        == cli("evaluate", "net.pt").code
        == 0
    )
    assert cli("status", "net.pt", "--check").code == 0


def test_a_command_killed_before_the_splits_are_complete_changes_nothing(cli: Cli, folder: Path) -> None:
    words = [*extraction(*SPLITS), "--mean", "0.5", "--force", "-q", "--threads", "1"]
    process = start(run_killed_at, words, "bnncli.commands.extract_features.splits", "write_features", 3)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    assert set(means(folder).values()) == {None}
    assert cli("predict", "net.pt", "--json").json["action"] == "up_to_date"
    assert cli("status", "net.pt", "--check").code == 0


def test_a_split_that_fails_leaves_all_as_they_were(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = splits.write_features, [2]

    def fail(*words: Any, **names: Any) -> str:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(*words, **names)

    monkeypatch.setattr(splits, "write_features", fail)
    assert cli(*extraction(*SPLITS), "--mean", "0.5", "--force").code == 74
    assert set(means(folder).values()) == {None}
    assert not list(folder.rglob(".*.tmp"))
    assert cli("status", "net.pt", "--check").code == 0


def test_splits_that_were_mixed_by_hand_are_refused(cli: Cli, folder: Path) -> None:
    elsewhere = ("--run-dir", folder / "elsewhere")
    assert cli(*extraction("test"), "--mean", "0.5", *elsewhere).code == 0
    shutil.copy(folder / "elsewhere/features/test.h5", folder / "net.pt.bnn/features/test.h5")
    for words in (("fit-laplace", "--name", "x"), ("predict", "--split", "test"), ("predict", "--split", "val")):
        done = cli(words[0], "net.pt", *words[1:], "--json")
        assert (done.code, done.json["error"]["code"]) == (65, "stale_input"), words
        assert "used --mean" in done.json["error"]["message"]
    allowed = cli("predict", "net.pt", "--split", "val", "--allow-stale", "--json")
    assert allowed.code == 0
    assert any("are inconsistent" in text for text in allowed.json["warnings"])


def test_a_split_that_was_extracted_later_with_the_same_options_belongs(cli: Cli, folder: Path) -> None:
    np.savez(folder / "more.npz", x=np.load(folder / "far.npz")["x"][:7])
    assert cli(*extraction("more")).code == 0
    assert cli("predict", "net.pt").code == 0
    assert cli("evaluate", "net.pt", "--bootstrap", 20).code == 0
    assert cli("status", "net.pt", "--check").code == 0


def test_no_note_is_left_where_all_went_well(cli: Cli, folder: Path) -> None:
    assert cli(*extraction(*SPLITS), "--mean", "0.5", "--force").code == 0
    assert not [name for name in SPLITS if note_path(folder / f"net.pt.bnn/features/{name}.h5").exists()]
    assert set(means(folder).values()) == {"0.5"}

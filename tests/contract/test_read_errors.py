"""A file that cannot be read is said to be just that: 74, never damaged, stale or left out."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts import hdf5
from bnncli.artifacts.hdf5 import open_hdf5
from bnncli.errors import MissingInput, ReadError

NUMBERS = [errno.EIO, errno.ESTALE]


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """HDF5 files of this name fail as they are opened, as the library says it."""

    class File(h5py.File):
        def __init__(self, path: Any, *words: Any, **names: Any) -> None:
            if Path(path).name == name:
                text = f"file descriptor = 3, errno = {number}, error message = '{os.strerror(number)}'"
                raise OSError(number, f"Unable to synchronously open file (file read failed: {text}, buf = 0x0)")
            super().__init__(path, *words, **names)

    monkeypatch.setattr(hdf5.h5py, "File", File)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test.h5", ("evaluate",)),
        ("hmc.nc", ("evaluate",)),
        ("far.h5", ("evaluate", "--force")),
        ("hmc.nc", ("diagnose",)),
        ("hmc.nc", ("predict",)),
        ("hmc.nc", ("status",)),
        ("train.h5", ("status",)),
        ("val.h5", ("fit-laplace", "--name", "x")),
    ],
)
def test_a_read_error_is_no_damage_and_leaves_nothing_out(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: tuple[str, ...], number: int
) -> None:
    unreadable(monkeypatch, name, number)
    done = cli(words[0], small_run, *words[1:], "--json")
    assert (done.code, done.json["error"]["code"]) == (74, "read_failed"), done.stderr
    assert os.strerror(number) in done.json["error"]["message"]
    assert "Traceback" not in done.stderr


def test_verify_says_74_of_what_it_cannot_read(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable(monkeypatch, "hmc.nc", errno.EIO)
    done = cli("verify", small_run.with_name("small.bnn"), "--json")
    assert done.code == 74
    assert [Path(one["path"]).name for one in done.json["files"] if not one["is_valid"]] == ["hmc.nc"]


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, ReadError), (errno.EACCES, MissingInput)])
def test_an_error_that_the_library_tells_as_a_missing_key_is_the_systems(
    small_run: Path, number: int, kind: type[Exception]
) -> None:
    path = small_run.with_name("small.bnn") / "features" / "test.h5"
    text = f"Unable to synchronously open object (file read failed: time = x, file descriptor = 3, errno = {number}, e"
    with pytest.raises(kind, match=os.strerror(number)), open_hdf5(path):
        raise KeyError(text)


@pytest.mark.parametrize("command", ["convert", "extract-features"])
@pytest.mark.parametrize("at", range(3))
def test_an_archive_whose_directory_cannot_be_read_is_not_called_damaged(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, command: str, at: int
) -> None:
    read, left = zipfile._EndRecData, [at]  # type: ignore[attr-defined]

    def fail(stream: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(errno.EIO, "x")
        return read(stream)

    torch.save({"weight": torch.ones(2)}, small_run.with_name("a.pt"))
    words = ("a.pt", "b.safetensors") if command == "convert" else ("other", "--from-npz", "features.npz")
    monkeypatch.chdir(small_run.parent)
    monkeypatch.setattr(zipfile, "_EndRecData", fail)
    done = cli(command, *words, "--json")
    assert (done.code, "Traceback" in done.stderr) == ((74, False) if left[0] < 0 else (0, False)), done.stderr
    assert at > 1 or left[0] < 0


def test_a_damaged_reference_is_refused_and_not_left_out(cli: Cli, small_run: Path) -> None:
    path = small_run.with_name("small.bnn") / "posteriors" / "hmc.nc"
    path.write_bytes(path.read_bytes()[:-9])
    assert cli("evaluate", small_run, "--posterior", "laplace", "--force").code == 65


def test_features_under_another_splits_name_are_refused(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn") / "features"
    (folder / "test.h5").write_bytes((folder / "train.h5").read_bytes())
    done = cli("predict", small_run, "--split", "test", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "wrong_split")

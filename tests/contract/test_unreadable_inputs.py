"""Files that cannot be read are told from damaged ones."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from problems.command_line import Cli

from bnncli.artifacts import hdf5
from bnncli.artifacts.atomic import write_error
from bnncli.artifacts.hdf5 import open_hdf5
from bnncli.errors import MissingInput, ReadError, WriteError
from bnncli.system.input_files import read_error

CODES = {
    errno.EACCES: (66, "missing_input", "Permission denied"),
    errno.EPERM: (66, "missing_input", "Operation not permitted"),
    errno.ELOOP: (66, "missing_input", "symbolic links"),
    errno.EMFILE: (69, "too_many_files", "too many open files"),
    errno.ENFILE: (69, "too_many_files", "too many open files"),
    errno.ENOMEM: (69, "out_of_memory", "out of memory"),
    errno.EIO: (74, "read_failed", "Input/output error"),
    errno.ESTALE: (74, "read_failed", "Stale file handle"),
}
FILES = {
    "features": ("features/train.h5", ("fit-laplace", "RUN", "--name", "new")),
    "posterior": ("posteriors/laplace.safetensors", ("refine", "RUN", "--name", "new")),
    "draws": ("posteriors/hmc.nc", ("predict", "RUN", "--posterior", "hmc", "--name", "new")),
    "predictions": ("predictions/map.plug-in/test.h5", ("verify", "FILE")),
    "metrics": ("metrics/map.plug-in.json", ("verify", "FILE")),
}


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path, number: int) -> None:
    """Let every way to open `path` fail, as the system would: a test that runs as root is let in everywhere."""

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(file: Any, *words: Any, **named: Any) -> Any:
            if isinstance(file, str | os.PathLike) and os.fspath(file) == str(path):
                raise OSError(number, os.strerror(number), str(path))
            return call(file, *words, **named)

        return checked

    monkeypatch.setattr(builtins, "open", failing(builtins.open))
    monkeypatch.setattr(io, "open", failing(io.open))
    monkeypatch.setattr(os, "open", failing(os.open))


def check(done: Any, number: int) -> None:
    exit_code, code, said = CODES[number]
    assert done.code == exit_code, done.stderr
    assert done.json["error"]["code"] == code
    assert said in done.json["error"]["message"]
    assert [line.partition(":")[0] for line in done.stderr.splitlines()][:1] == ["error"]
    assert "Traceback" not in done.stderr


SOME = [errno.EACCES, errno.EMFILE, errno.EIO]  # one of each kind; all of them in one place below


@pytest.mark.parametrize("number", SOME, ids=errno.errorcode.get)
@pytest.mark.parametrize("file", FILES)
def test_an_artifact_that_cannot_be_opened(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    place, words = FILES[file]
    path = small_run.with_name("small.bnn") / place
    refuse(monkeypatch, path, number)
    check(cli(*({"RUN": small_run, "FILE": path}.get(word, word) for word in words), "--json"), number)


@pytest.mark.parametrize("number", CODES)
def test_what_an_error_of_the_system_means_for_a_reader(number: int) -> None:
    error = read_error(OSError(number, "x"), Path("f"))
    exit_code, code, said = CODES[number]
    assert (error.exit, error.code) == (exit_code, code)
    assert said in error.message
    assert "'f'" in error.message


@pytest.mark.parametrize("number", SOME, ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", ["checkpoint", "npz", "idx", "images", "config"])
def test_a_file_of_the_users_that_cannot_be_opened(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "net.pt")
    for name in ("x", "a.png"):
        (tmp_path / name).write_bytes(b"some bytes")
    spec = {"npz": f"npz:{tmp_path}/x", "idx": f"idx:{tmp_path}/x", "images": f"images:{tmp_path}"}.get(kind)
    words: tuple[object, ...] = ("inspect", tmp_path / "net.pt")
    if spec is not None:
        words = ("extract-features", tmp_path / "run", "--model", "flatten", "--data", f"train={spec}")
    if kind == "config":
        words = (*words, "--config", tmp_path / "x")
    refuse(monkeypatch, tmp_path / {"checkpoint": "net.pt", "images": "a.png"}.get(kind, "x"), number)
    check(cli(*words, "--json"), number)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_read_that_fails_midway_is_no_damage(
    cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(h5py.Dataset, "__getitem__", fail)
    check(cli("evaluate", small_run, "--force", "--json"), number)
    check(cli("verify", small_run.with_name("small.bnn") / "features" / "train.h5", "--json"), number)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "no file"])
@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "fit-laplace"])
def test_what_is_no_regular_file_is_66(cli: Cli, tmp_path: Path, kind: str, command: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    path = "/dev/zero" if kind == "device" else tmp_path / kind
    done = cli(command, path, *([tmp_path / "out.safetensors"] if command == "convert" else []), "--json")
    assert done.code == 66, done.stderr
    assert "Traceback" not in done.stderr


def test_features_that_may_not_be_read_are_66_whoever_asks(installed: Cli, small_run: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything; the same with open replaced is tested above")
    (small_run.with_name("small.bnn") / "features" / "train.h5").chmod(0)
    assert installed("fit-laplace", small_run, "--name", "new").code == 66


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_write_for_which_the_machine_is_short_is_69(number: int) -> None:
    assert write_error(OSError(number, "x"), Path("f")).exit == 69
    assert isinstance(write_error(OSError(errno.EIO, "x"), Path("f")), WriteError)


def test_a_limit_on_open_files_is_told_with_what_helps(cli: Cli, tmp_path: Path) -> None:
    import resource

    np.savez(tmp_path / "x.npz", x=np.ones((3, 2), np.float32))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[Any] = []
    words = ("extract-features", tmp_path / "run", "--model", "flatten", "--data", f"train=npz:{tmp_path}/x.npz")
    assert cli(*words, "--dry-run").code == 0  # everything is imported
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            done = cli(*words, "--json")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    check(done, errno.EMFILE)
    assert "ulimit -n" in done.json["error"]["hint"]


def limited(num_bytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, under ulimit -v."""
    limits = (num_bytes, num_bytes)
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits),
    )  # fmt: skip


def test_a_library_for_which_there_is_no_memory_is_69(small_run: Path) -> None:
    done = limited(300 << 20, "-m", "bnncli", "fit-laplace", str(small_run), "--name", "new")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (69, "hint: raise the limit with ulimit -v"), done.stderr
    assert "Traceback" not in done.stderr


def test_scipy_is_not_loaded_where_it_would_wait_for_memory_for_ever() -> None:
    code = "import numpy, resource; from bnncli.lazy import special; used = int(open('/proc/self/statm').read().split()[0])\n"
    code += (
        "resource.setrlimit(resource.RLIMIT_AS, (used * resource.getpagesize() + (40 << 20),) * 2); special.expit(0.0)"
    )
    done = limited(4 << 30, "-c", code)
    assert "DeviceError: out of memory: cannot load scipy.special" in done.stderr, done.stderr


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

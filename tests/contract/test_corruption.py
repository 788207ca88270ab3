"""Damaged and unreadable files are refused, told and kept."""

from __future__ import annotations

import builtins
import copy
import errno
import io
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from forged import forge
from problems.command_line import Cli

from bnncli.artifacts import hdf5
from bnncli.artifacts.atomic import write_error
from bnncli.artifacts.files import read_header
from bnncli.artifacts.hdf5 import open_hdf5
from bnncli.errors import Exit, MissingInput, ReadError, WriteError
from bnncli.system.input_files import read_error

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
    cli(command, small_run, *words, "--force").expect(0)
    assert cli("inspect", path, "--json").json["content_digest"] == whole


def test_verify_checks_every_file_and_reports_the_bad_ones(cli: Cli, small_run: Path) -> None:
    good, bad = artifact(small_run, "gaussian"), artifact(small_run, "features")
    bad.write_bytes(b"")
    done = cli("verify", bad, good, "--json").expect(65)
    assert [entry["is_valid"] for entry in done.json["files"]] == [False, True]
    assert done.json["error"]["path"] == str(bad)


def test_a_flipped_feature_is_seen_by_every_command_that_reads_the_first_rows(cli: Cli, small_run: Path) -> None:
    path = artifact(small_run, "features").with_name("train.h5")
    with h5py.File(path, "r", locking=False) as file:
        start = file["features"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[start + 3] ^= 0x40
    path.write_bytes(content)
    cli("fit-laplace", small_run, "--name", "x").expect(65)


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
    assert {Path(path).name for path in cli("clean", small_run, "--json").json["removed"]} == {dead.name}
    assert not dead.exists()
    cli("status", small_run, "--check").expect(0)
    assert cli("clean", small_run).stdout == ""


def test_the_next_writer_removes_the_leftovers_of_a_dead_one(cli: Cli, small_run: Path) -> None:
    dead = artifact(small_run, "gaussian").with_name(f".laplace.safetensors.{2**22 + 7}.0123abcd.tmp")
    dead.write_bytes(b"half")
    cli("fit-laplace", small_run, "--prior-precision", "10", "--force").expect(0)
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
        cli("verify", path).expect(0)
    cli("status", small_run, "--check").expect(0)


def test_the_values_that_ended_in_tracebacks_do_not(cli: Cli, small_run: Path) -> None:
    name = "posteriors/map.safetensors"
    known = {("schema",): "\u00b2", ("provenance", "tool"): None, ("meta", "metrics"): "x"}
    found = [problem(cli, small_run, name, place, value) for place, value in known.items()]
    nul = [{"role": "x", "path": "a\0b", "content_digest": "d"}]
    assert [text for text in [*found, problem(cli, small_run, name, ("provenance", "inputs"), nul)] if text] == []


def test_no_value_anywhere_in_a_header_ends_in_a_traceback(cli: Cli, small_run: Path) -> None:
    found = [problem(cli, small_run, *trial) for trial in trials(small_run, NUM_FORGERIES)]
    assert [text for text in found if text] == []


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
def test_failed_read_is_no_damage(cli: Cli, small_run: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
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
    cli(command, path, *([tmp_path / "out.safetensors"] if command == "convert" else []), "--json").expect(66)


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
    cli(*words, "--dry-run").expect(0)
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
    done = cli("verify", small_run.with_name("small.bnn"), "--json").expect(74)
    assert [Path(one["path"]).name for one in done.json["files"] if not one["is_valid"]] == ["hmc.nc"]


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, ReadError), (errno.EACCES, MissingInput)])
def test_missing_key_of_the_library_is_a_read_error(small_run: Path, number: int, kind: type[Exception]) -> None:
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
    cli("evaluate", small_run, "--posterior", "laplace", "--force").expect(65)


def test_features_under_another_splits_name_are_refused(cli: Cli, small_run: Path) -> None:
    folder = small_run.with_name("small.bnn") / "features"
    (folder / "test.h5").write_bytes((folder / "train.h5").read_bytes())
    done = cli("predict", small_run, "--split", "test", "--json")
    assert (done.code, done.json["error"]["code"]) == (65, "wrong_split")

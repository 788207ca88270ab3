"""What one command remembers of its checks: each file is checked once, and again as soon as it changes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from problems.command_line import Cli

from bnncli.artifacts import files, hdf5, headers, posteriors
from bnncli.artifacts import known_files as caches
from bnncli.artifacts.files import read_header
from bnncli.artifacts.hdf5 import open_hdf5, write_hdf5
from bnncli.artifacts.known_files import STEP_NS, checks_remembered, is_checked, is_settled, remember, state_of
from bnncli.cli import execute
from bnncli.errors import BnnError, DataError, Untrusted


@pytest.fixture(autouse=True)
def each_command_is_by_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a user's are: what the suite remembers from one to the next is forgotten."""
    monkeypatch.setattr(execute, "checks_remembered", checks_remembered)
    token = caches._KNOWN.set(None)
    yield
    caches._KNOWN.reset(token)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the objects of each file were checked; and every file is old enough to be remembered."""
    found: Counter[str] = Counter()
    check = hdf5.check_objects

    def count(path: Path, file: h5py.h5f.FileID) -> None:
        found[str(path.resolve())] += 1
        check(path, file)

    monkeypatch.setattr(hdf5, "check_objects", count)
    monkeypatch.setattr(caches, "STEP_NS", -(1 << 62))
    monkeypatch.setattr(caches, "_SECOND_NS", 1 << 62)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "x.h5")
    return tmp_path / "x.h5"


@pytest.fixture
def command() -> Iterator[None]:
    with checks_remembered():
        yield


def write(path: Path) -> None:
    arrays = {"a": np.arange(6.0)}
    write_hdf5(path, arrays, {}, kind="features", meta={}, provenance={}, may_replace=True)


def look(path: Path) -> None:
    with open_hdf5(path):
        pass


@pytest.mark.parametrize(
    "words", [("evaluate",), ("evaluate", "--force", "--bootstrap=0"), ("compare",), ("status",)], ids=" ".join
)
def test_a_command_checks_each_file_once(
    cli: Cli, small_run: Path, checks: Counter[str], words: tuple[str, ...]
) -> None:
    assert cli(words[0], small_run, *words[1:]).code == 0
    assert len(checks) > 5
    assert set(checks.values()) == {1}
    assert cli(words[0], small_run, *words[1:]).code == 0  # another command trusts nothing that this one saw
    assert set(checks.values()) == {2}


@pytest.mark.parametrize("words", [("status",), ("evaluate",), ("predict",)], ids=" ".join)
def test_a_command_reads_each_header_once(
    cli: Cli, small_run: Path, checks: Counter[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    read: Counter[str] = Counter()

    def count(path: Path, *fields: Any) -> Any:
        read[str(path.resolve())] += 1
        return check_header(path, *fields)

    check_header = headers.check_header
    for module in (hdf5, files, posteriors):
        monkeypatch.setattr(module, "check_header", count)
    assert cli(words[0], small_run).code == 0
    assert len(read) > 5
    assert set(read.values()) == {1}
    assert cli(words[0], small_run).code == 0
    assert set(read.values()) == {2}


@pytest.mark.usefixtures("command", "checks")
@pytest.mark.parametrize("name", ["posteriors/laplace.safetensors", "features/test.h5", "metrics/laplace.mc.json"])
def test_a_header_is_that_of_the_file_as_it_is_now_wherever_it_lies(small_run: Path, name: str) -> None:
    path = small_run.with_name("small.bnn") / name
    os.link(path, path.with_name("again"))
    header = read_header(path)
    assert read_header(path) == header
    assert read_header(path.with_name("again")) == replace(header, path=path.with_name("again"))
    time.sleep(2 * STEP_NS / 1e9)
    other = next(file for file in path.parent.glob(f"*{path.suffix}") if file.name != path.name)
    path.write_bytes(other.read_bytes())
    assert read_header(path) == replace(read_header(other), path=path) != header


def test_outside_a_command_nothing_is_remembered(path: Path, checks: Counter[str]) -> None:
    look(path)
    look(path)
    assert checks[str(path)] == 2


def damage(path: Path) -> None:
    """Another byte in the structure, of the same length, with the file's times put back."""
    found, content = path.stat(), bytearray(path.read_bytes())
    content[40] ^= 1
    time.sleep(2 * STEP_NS / 1e9)
    with open(path, "r+b") as stream:
        stream.write(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_mtime_ns == found.st_mtime_ns


def link_away(path: Path) -> None:
    other = path.with_name("other.h5")
    other.write_bytes(path.read_bytes())
    with h5py.File(other, "r+") as file:
        file["b"] = h5py.ExternalLink("/etc/hostname", "x")
    os.replace(other, path)


@pytest.mark.usefixtures("command", "checks")
@pytest.mark.parametrize("change", [damage, link_away])
def test_a_file_that_changes_during_the_command_is_checked_again(path: Path, change: Any) -> None:
    look(path)
    change(path)
    with pytest.raises(BnnError, match=r"damaged|link"):
        look(path)


@pytest.mark.usefixtures("command", "checks")
def test_a_file_that_failed_is_not_remembered(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        file["b"] = h5py.SoftLink("/a")
    for _ in range(2):
        with pytest.raises(BnnError, match=r"damaged|link|incomplete"):
            look(path)


@pytest.mark.usefixtures("command", "checks")
@pytest.mark.parametrize(("has_seal", "error"), [(True, Untrusted), (False, DataError)])
def test_a_file_put_in_place_just_before_it_is_opened_is_checked(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_seal: bool, error: type[BnnError]
) -> None:
    from bnncli.artifacts.hdf5 import make_seal

    look(path)
    opened = h5py.File

    def replace_and_open(name: Path, *words: Any, **keywords: Any) -> h5py.File:
        monkeypatch.setattr(hdf5.h5py, "File", opened)
        if has_seal:
            link_away(path)
            with open(path, "r+b") as stream:
                stream.write(make_seal(stream, []))
        else:
            with opened(path.with_name("other.h5"), "w") as file:
                file["a"], file.attrs["bnncli_complete"] = np.zeros(3), 1
            os.replace(path.with_name("other.h5"), path)
        return opened(name, *words, **keywords)

    monkeypatch.setattr(hdf5.h5py, "File", replace_and_open)
    with pytest.raises(error, match="is a link" if has_seal else "incomplete"):
        look(path)


def test_a_change_of_the_last_moment_and_a_coarse_clock_are_not_settled(path: Path) -> None:
    state = state_of(path.stat())
    now = time.time_ns()
    fine = now - now % 1_000_000_000 + 7
    assert is_settled((*state[:-1], fine - 2_000_000_000))
    assert not is_settled((*state[:-1], now - STEP_NS // 2))
    assert not is_settled((*state[:-1], now + STEP_NS))  # a clock that was put back
    assert not is_settled((*state[:-1], fine - 7 - 10_000_000_000))


def test_what_is_remembered_ends_with_the_command(path: Path) -> None:
    state = state_of(path.stat())
    with checks_remembered():
        remember(state)
        assert is_checked(state)
        with checks_remembered():
            assert not is_checked(state)
        assert is_checked(state)
    assert not is_checked(state)


@pytest.mark.usefixtures("command")
def test_a_file_just_written_is_checked_every_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "STEP_NS", 1 << 62)
    look(path)
    assert not is_checked(state_of(path.stat()))

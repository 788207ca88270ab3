"""Files that are checked: once a command, to their seal, and wherever the run folder lies."""

from __future__ import annotations

import io
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

from bnncli.artifacts import hdf5, known_files
from bnncli.artifacts.files import read_header
from bnncli.artifacts.hdf5 import MARK, SKIP_BYTES, is_sealed, make_seal, open_hdf5, write_hdf5
from bnncli.artifacts.known_files import STEP_NS, is_checked, is_settled, remember, remember_checks, state_of
from bnncli.artifacts.run_folder import RunFolder
from bnncli.cli import execute
from bnncli.errors import BnnError, DataError, Untrusted, UsageError


@pytest.fixture(autouse=True)
def each_command_is_by_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a user's are: what the suite remembers from one to the next is forgotten."""
    monkeypatch.setattr(execute, "remember_checks", remember_checks)
    token = known_files._CHECKED_FILES.set(None)
    yield
    known_files._CHECKED_FILES.reset(token)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the objects of each file were checked; and every file is old enough to be remembered."""
    found: Counter[str] = Counter()
    check = hdf5.check_objects

    def count(path: Path, file: h5py.h5f.FileID) -> None:
        found[str(path.resolve())] += 1
        check(path, file)

    monkeypatch.setattr(hdf5, "check_objects", count)
    monkeypatch.setattr(known_files, "STEP_NS", -(1 << 62))
    monkeypatch.setattr(known_files, "_SECOND_NS", 1 << 62)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "x.h5")
    return tmp_path / "x.h5"


@pytest.fixture
def command() -> Iterator[None]:
    with remember_checks():
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
def test_each_file_is_checked_once(cli: Cli, small_run: Path, checks: Counter[str], words: tuple[str, ...]) -> None:
    cli(words[0], small_run, *words[1:]).expect(0)
    assert len(checks) > 5
    assert set(checks.values()) == {1}
    cli(words[0], small_run, *words[1:]).expect(0)
    assert set(checks.values()) == {2}


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
    with remember_checks():
        remember(state)
        assert is_checked(state)
        with remember_checks():
            assert not is_checked(state)
        assert is_checked(state)
    assert not is_checked(state)


@pytest.mark.usefixtures("command")
def test_a_file_just_written_is_checked_every_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_files, "STEP_NS", 1 << 62)
    look(path)
    assert not is_checked(state_of(path.stat()))


CONTENT = bytes(range(256)) * 1024
BLOCK = (1000, SKIP_BYTES + 5)
SEALED = CONTENT + make_seal(io.BytesIO(CONTENT), [BLOCK, (200_000, 10)])


@pytest.fixture
def sealed_path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_a_file_without_a_seal_is_not_sealed(sealed_path: Path) -> None:
    sealed_path.write_bytes(CONTENT)
    assert not is_sealed(sealed_path)


@pytest.mark.parametrize("offset", [0, 999, 1000 + SKIP_BYTES + 5, 200_005, len(CONTENT) - 1])
def test_any_changed_byte_of_the_structure_is_seen(sealed_path: Path, offset: int) -> None:
    changed = bytearray(SEALED)
    changed[offset] ^= 1
    sealed_path.write_bytes(changed)
    with pytest.raises(DataError, match="does not match its seal"):
        is_sealed(sealed_path)


def test_large_arrays_are_left_to_the_content_digest(sealed_path: Path) -> None:
    changed = bytearray(SEALED)
    changed[BLOCK[0]] ^= 1
    changed[sum(BLOCK) - 1] ^= 1
    sealed_path.write_bytes(changed)
    assert is_sealed(sealed_path)


def test_every_changed_byte_of_the_seal_itself_is_seen(sealed_path: Path) -> None:
    for offset in range(len(CONTENT), len(SEALED)):
        changed = bytearray(SEALED)
        changed[offset] ^= 1
        sealed_path.write_bytes(changed)
        if offset < len(CONTENT) + len(MARK):
            assert not is_sealed(sealed_path)
        else:
            with pytest.raises(DataError, match="seal"):
                is_sealed(sealed_path)


@pytest.mark.parametrize(
    "line", [b"[[5,6]", b"[[9,1],[5,1]]", b"[[0,999999999999999999]]", b"[1]", b"[[01,2],]", b"[[-5,6]]"]
)
def test_a_forged_list_of_blocks_is_damage_and_not_a_crash(sealed_path: Path, line: bytes) -> None:
    sealed_path.write_bytes(CONTENT + MARK + b"0" * 64 + b" " + line + b"\n")
    with pytest.raises(DataError, match="seal"):
        is_sealed(sealed_path)


def test_bytes_after_the_seal_are_seen(sealed_path: Path) -> None:
    sealed_path.write_bytes(SEALED + b"\n")
    with pytest.raises(DataError, match="seal"):
        is_sealed(sealed_path)


def folder(path: Path | str, run_dir: str | None = None) -> RunFolder:
    return RunFolder.of(Path(path), run_dir)


@pytest.mark.parametrize("name", ["a.pt", "a b'c.pt", "a\nb", "-x.pt", "é.pt", os.fsdecode(b"\xff.pt"), ".hidden"])
def test_the_run_folder_is_the_full_file_name_with_a_suffix(tmp_path: Path, name: str) -> None:
    assert folder(tmp_path / name).root == tmp_path / (name + ".bnn")


def test_two_formats_of_one_checkpoint_have_two_folders() -> None:
    assert folder("a.pt").root != folder("a.safetensors").root


def test_a_name_too_long_for_the_suffix_gets_a_short_one(tmp_path: Path) -> None:
    root = folder(tmp_path / ("x" * 253)).root
    root.mkdir()
    assert root != folder(tmp_path / ("x" * 252 + "y")).root
    assert root.name.endswith(".bnn")
    assert folder(tmp_path / ("x" * 251)).root.name == "x" * 251 + ".bnn"


def test_two_runs_that_write_one_file_share_its_lock(tmp_path: Path) -> None:
    out = tmp_path / "out" / "x.safetensors"
    one, other = (
        folder(tmp_path / "a.pt").lock(out),
        folder(tmp_path / "b.pt").lock(tmp_path / "a" / ".." / "out" / out.name),
    )
    assert one == other


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".x", "x" * 101, "a b"])
def test_names_that_are_not_file_names_are_refused(tmp_path: Path, name: str) -> None:
    run = folder(tmp_path / "a.pt")
    with pytest.raises(UsageError, match="got"):
        run.features(name)

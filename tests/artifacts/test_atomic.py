"""Publishing: complete under the final name or not at all; the old file survives everything."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bnncli.artifacts import atomic
from bnncli.artifacts.atomic import (
    check_writable,
    dead_temporaries,
    publish,
    publish_bytes,
    publish_together,
    remove_dead_temporaries,
    write_error,
)
from bnncli.errors import OutputExists, WriteError

pytestmark = pytest.mark.core

OLD, NEW = b"old content", b"new content"
DEAD_PID = 2**22 + 7  # above the kernel's largest pid


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "artifact.bin"
    path.write_bytes(OLD)
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skipped where this process may not mount one."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True)
    except OSError:
        pytest.skip("no mount command")
    if done.returncode != 0:
        pytest.skip("this process may not mount a file system")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        publish_bytes(tmp_path / "new", NEW, may_replace=False)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("may_replace", [False, True])
def test_content_is_synced_before_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_replace: bool) -> None:
    target, seen = tmp_path / "new.bin", []

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append("folder" if path.is_dir() else path.read_bytes())
        assert target.exists() == path.is_dir()

    monkeypatch.setattr(os, "fsync", synced)
    publish_bytes(target, NEW, may_replace=may_replace)
    assert seen == [NEW, "folder"]


def test_a_replaced_file_keeps_its_mode(old: Path) -> None:
    old.chmod(0o640)
    publish_bytes(old, NEW, may_replace=True)
    assert old.read_bytes() == NEW
    assert old.stat().st_mode & 0o777 == 0o640


def test_replacing_makes_a_new_file_and_leaves_open_readers_the_old_one(old: Path) -> None:
    with open(old, "rb") as reader:
        publish_bytes(old, NEW, may_replace=True)
        assert reader.read() == OLD
    assert only(old.parent) == ["artifact.bin"]


def test_a_file_that_appeared_meanwhile_is_not_replaced(old: Path) -> None:
    with pytest.raises(OutputExists, match="written by another process"):
        publish_bytes(old, NEW, may_replace=False)
    assert old.read_bytes() == OLD
    assert only(old.parent) == ["artifact.bin"]


def test_a_file_is_published_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    publish_bytes(tmp_path / "new", NEW, may_replace=False)
    assert (tmp_path / "new").read_bytes() == NEW
    with pytest.raises(OutputExists, match="another process"):
        publish_bytes(tmp_path / "new", OLD, may_replace=False)


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(old: Path) -> None:
    def half(path: Path) -> None:
        path.write_bytes(NEW[:3])
        raise OSError(errno.EIO, "broken disk")

    with pytest.raises(WriteError, match="nothing was changed"):
        publish(old, half, may_replace=True)
    assert old.read_bytes() == OLD
    assert only(old.parent) == ["artifact.bin"]


def test_a_read_only_file_system_is_refused_before_the_work(small_disk: Path) -> None:
    check_writable(small_disk / "runs")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OutputExists, match="not writable") as caught:
        check_writable(small_disk / "runs")
    assert "\0run_dir\0" in str(caught.value.hint)
    with pytest.raises(OutputExists, match="Read-only file system"):
        publish_bytes(small_disk / "new", NEW, may_replace=False)


def test_failed_folder_sync_says_that_the_file_is_there(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = atomic.sync

    def fail(path: Path) -> None:
        if path.is_dir():
            raise OSError(errno.EIO, "x")
        plain(path)

    monkeypatch.setattr(atomic, "sync", fail)
    with pytest.raises(WriteError, match="was written, but its folder could not be synced") as caught:
        publish_bytes(old, NEW, may_replace=True)
    assert "nothing was changed" not in caught.value.message
    assert old.read_bytes() == NEW
    assert sorted(old.parent.iterdir()) == [old]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, 74),
        (errno.EDQUOT, 74),
        (errno.EIO, 74),
        (errno.EXDEV, 74),
        (errno.EROFS, 73),
        (errno.EACCES, 73),
        (errno.EPERM, 73),
        (errno.ENAMETOOLONG, 73),
    ],
)
def test_each_reason_has_its_exit_code(number: int, code: int) -> None:
    error = write_error(OSError(number, "x"), Path("out"))
    assert error.exit == code
    assert os.strerror(number) in error.message


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputExists, match="File name too long"):
        publish_bytes(tmp_path / ("x" * 300), NEW, may_replace=False)
    assert only(tmp_path) == []


def test_only_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    dead = tmp_path / f".a.h5.{DEAD_PID}.0123abcd.tmp"
    absurd = tmp_path / f".a.h5.{10**30}.0123abcd.tmp"
    alive = tmp_path / f".a.h5.{os.getpid()}.0123abcd.tmp"
    other = tmp_path / ".notes.tmp"
    for path in (dead, absurd, alive, other):
        path.write_bytes(b"")
    (tmp_path / f".b.{DEAD_PID}.0123abcd.tmp").mkdir()
    assert dead_temporaries(tmp_path) == sorted([dead, absurd])
    assert remove_dead_temporaries(tmp_path) == sorted([dead, absurd])
    assert alive.exists()
    assert other.exists()


def put(target: Path, content: bytes = NEW) -> None:
    publish_bytes(target, content, may_replace=True)


def test_files_that_belong_together_take_their_names_at_the_end_and_the_last_first(old: Path) -> None:
    other, seen = old.with_name("other.bin"), []

    def before(targets: Sequence[Path]) -> None:
        put(old.with_name("note"))  # has its name at once
        seen.extend([*targets, *(path.name for path in old.parent.glob("[!.]*"))])

    with publish_together(before):
        put(old)
        put(other)
        assert (old.read_bytes(), other.exists()) == (OLD, False)
    assert seen[:2] == [old, other]
    assert sorted(map(str, seen[2:])) == ["artifact.bin", "note"]
    assert (old.read_bytes(), other.read_bytes()) == (NEW, NEW)
    assert only(old.parent) == ["artifact.bin", "note", "other.bin"]


@pytest.mark.parametrize("where", ["inside", "before"])
def test_of_files_that_belong_together_none_takes_its_name_where_one_fails(old: Path, where: str) -> None:
    def before(targets: Sequence[Path]) -> None:
        raise WriteError("no note")

    def work() -> None:
        with publish_together(before):
            put(old)
            if where == "inside":
                raise WriteError("no disk")

    with pytest.raises(WriteError, match=r"no (note|disk)"):
        work()
    assert old.read_bytes() == OLD
    assert only(old.parent) == ["artifact.bin"]


def test_an_error_between_two_names_says_how_many_are_taken(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.replace

    def replace(source: Path, target: Path) -> None:
        if target == old:
            raise OSError(errno.EIO, "x")
        plain(source, target)

    monkeypatch.setattr(os, "replace", replace)
    message = "failed: Input/output error; 1 of 2 related files were already written: run the command again"

    def work() -> None:
        with publish_together(lambda targets: None):
            put(old)
            put(old.with_name("other.bin"))

    with pytest.raises(WriteError, match=message) as caught:
        work()
    assert "nothing was changed" not in caught.value.message
    assert only(old.parent) == ["artifact.bin", "other.bin"]
    assert old.read_bytes() == OLD

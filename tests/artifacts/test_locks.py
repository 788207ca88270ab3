"""Locks: one writer an artifact, freed by the kernel when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnncli.artifacts.run_folder import artifact_lock
from bnncli.errors import Interrupted, OutputExists, WriteError

HOLDER = """
import sys
from pathlib import Path
from bnncli.artifacts.run_folder import artifact_lock
with artifact_lock(Path(sys.argv[1]), wait=0, poll=lambda: None):
    print("held", flush=True)
    sys.stdin.read()
"""


def nothing() -> None:
    return None


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until its stdin is closed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_the_lock_of_a_killed_holder_is_free_and_its_file_stays(tmp_path: Path) -> None:
    holder = hold(tmp_path / "lock")
    holder.kill()
    holder.communicate()
    with artifact_lock(tmp_path / "lock", wait=0, poll=nothing):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "lock").exists()


def test_waiting_is_polled_for_signals(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise Interrupted(15, "interrupted")

    holder = hold(tmp_path / "lock")
    try:
        with pytest.raises(Interrupted, match="interrupted"), artifact_lock(tmp_path / "lock", wait=60, poll=interrupt):
            pass
    finally:
        holder.communicate()


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOLCK, WriteError), (errno.ENOSYS, WriteError), (errno.EACCES, OutputExists)]
)
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(error, match=r"does not support file locks|cannot lock"),
        artifact_lock(tmp_path / "x", wait=0, poll=nothing),
    ):
        pass


def test_a_lock_file_that_others_of_the_group_may_use_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with artifact_lock(tmp_path / "locks" / "x", wait=0, poll=nothing):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "locks" / "x").stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize("is_there", [True, False])
def test_a_planted_link_is_not_followed(tmp_path: Path, is_there: bool) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "x"
    if is_there:
        victim.write_text("precious")
    lock.symlink_to(victim)
    with (
        pytest.raises(OutputExists, match="x is a symbolic link, and bnncli does not write through links") as caught,
        artifact_lock(lock, wait=0, poll=nothing),
    ):
        pass
    assert caught.value.hint == "remove it"
    assert (victim.read_text() if is_there else victim.exists()) == ("precious" if is_there else False)


def test_a_full_disk_is_told_with_the_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: bytes, place: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(WriteError, match=r"writing .*/lock failed: No space left on device") as told,
        artifact_lock(tmp_path / "lock", wait=0, poll=nothing),
    ):
        pass
    assert "free space" in str(told.value.hint)

"""One writer an artifact: an exclusive flock on a file in the run folder's .locks/.

The kernel frees the lock when its holder dies, so a lock is never judged by age and its file is never removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bnncli.errors import Locked, OutputExists, WriteError
from bnncli.machine.team import is_leader
from bnncli.storage.atomic import write_error

POLL_SECONDS = 0.1
WRITING = ("another bnncli is writing this artifact", "wait for it, or use \0wait\0 SECONDS")


@contextmanager
def artifact_lock(
    path: Path, *, wait: float, poll: Callable[[], None], held: tuple[str, str] = WRITING
) -> Iterator[None]:
    """Hold the lock file `path` exclusively; of workers that share a command the first does so for all.

    Args:
        path: the lock file, made when missing.
        wait: seconds to wait for another holder; 0 fails at once.
        poll: called while waiting; raises to stop.
        held: what is said where another process holds it, and what to do.

    Raises:
        Locked: another process holds it; the message names it.
        OutputExists: the lock file cannot be written.
        WriteError: the file system has no locks, or is full.
    """
    if not is_leader():
        yield
        return
    if path.parent.is_symlink():
        raise OutputExists(
            f"{path.parent} is a symbolic link, and bnncli does not write through links",
            hint="remove it",
            code="not_writable",
            path=path,
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise write_error(error, path) from None
    try:
        _acquire(descriptor, path, wait, poll, held)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "command": sys.argv[:6]}
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        except OSError as error:
            raise write_error(error, path) from None
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, wait: float, poll: Callable[[], None], held: tuple[str, str]) -> None:
    message, hint = held
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                without = f"the file system of {path} does not support file locks"
                raise WriteError(without, hint="choose another place with \0run_dir\0", path=path) from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise OutputExists(f"cannot lock {path}: {os.strerror(error.errno)}", path=path) from None
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        poll()
        if time.monotonic() >= deadline:
            raise Locked(f"{message} ({_holder(descriptor)})", hint=hint, path=path)
        time.sleep(POLL_SECONDS)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 65536, 0))
        return f"pid {holder['pid']} on {holder['host']}: {' '.join(holder['command'])[:200]}"
    except (ValueError, KeyError, TypeError):
        return "holder unknown"

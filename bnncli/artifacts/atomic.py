"""Publish files atomically: complete under the final name, or not at all.

A temporary file in the target's folder is written, synced and renamed; the old file stays intact until then. Temporary
names contain the writer's pid, so that leftovers of dead processes can be recognised and removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from bnncli.errors import ELSEWHERE, BnnError, DeviceError, OutputExists, WriteError, resource_error
from bnncli.system import signals
from bnncli.system.workers import is_leader

SPARE_BYTES = 64 << 20
_TEMPORARY = re.compile(r"^\.(.+)\.(\d+)\.[0-9a-f]{8}\.tmp$", re.DOTALL)

_UNCHANGED = "; nothing was changed"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR}


def write_error(error: OSError, path: Path) -> BnnError:
    """Return the user-facing error for a failed write.

    Exit code 73 if the location is not writable, 69 if the machine lacks memory or open files, 74 otherwise.
    """
    if (resource := resource_error(error, f"writing {path}")) is not None:
        return resource
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NOT_WRITABLE:
        message = f"cannot write {path}: {reason}"
        return OutputExists(message, hint=ELSEWHERE, code="not_writable", path=path)
    if error.errno == errno.ELOOP:
        return OutputExists(
            f"{path} is a symbolic link, and bnncli does not write through links",
            hint="remove it",
            code="not_writable",
            path=path,
        )
    hint = f"free space on the file system of {path.parent}" if error.errno in _FULL else None
    if error.errno == errno.ENOENT:  # the folder cannot be created, as in /proc, or is gone
        hint = ELSEWHERE
    return WriteError(f"writing {path} failed: {reason}{_UNCHANGED}", hint=hint, path=path)


class PendingFile(NamedTuple):
    """A complete file under its temporary name, and its final name."""

    temporary: Path
    target: Path
    may_replace: bool


_WAITING: ContextVar[list[PendingFile] | None] = ContextVar("waiting", default=None)


def publish(target: Path, write: Callable[[Path], None], *, may_replace: bool, poll: bool = True) -> None:
    """Write a file under a temporary name and rename it into place; inside `publish_together`, at the end of the block.

    Of the workers of one command, only the first writes.

    Args:
        target: the final path; its folder is created if missing.
        write: writes the complete content to a given path.
        may_replace: if False, refuse if someone else has published meanwhile.
        poll: if False, publish despite a pending signal: for what is saved because of it.

    Raises:
        OutputExists: the folder is not writable, or the target appeared and may not be replaced.
        WriteError: disk full, quota, or I/O error; the old file is untouched. If only the folder could not be synced,
            the new file is in place, and the message says so.
    """
    if not is_leader():
        return
    temporary = target.with_name(f".{_stem(target)}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_dead_temporaries(target.parent, of=target)
        write(temporary)
        if poll:
            signals.raise_if_interrupted("publishing")
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        os.chmod(temporary, mode)
        sync(temporary)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError):
            raise write_error(error, target) from None
        raise
    waiting, file = _WAITING.get(), PendingFile(temporary, target, may_replace)
    if waiting is not None:
        waiting.append(file)
    else:
        _take_name(file)
        _sync_name(target)


@contextmanager
def publish_together(before: Callable[[Sequence[Path]], None]) -> Iterator[None]:
    """Write files under temporary names inside the block, and rename them at its end, last first.

    Args:
        before: called with the targets when all files are complete, before any rename; if it raises, none is renamed.

    Raises:
        OutputExists, WriteError: as in publish. If some files have already been renamed, the message says so.
    """
    waiting: list[PendingFile] = []
    token = _WAITING.set(waiting)
    try:
        try:
            yield
        finally:
            _WAITING.reset(token)
        targets = [file.target for file in waiting]
        before(targets)
        while waiting:
            try:
                _take_name(waiting[-1])
            except BnnError as error:
                raise _describe_partial_publish(error, len(targets) - len(waiting), len(targets)) from None
            waiting.pop()
        for folder in dict.fromkeys(target.parent for target in targets):
            _sync_name(next(target for target in targets if target.parent == folder))
    finally:
        for file in waiting:
            _remove(file.temporary)


def _describe_partial_publish(error: BnnError, num_there: int, num_files: int) -> BnnError:
    """Return the error for one of several files, stating if others have already been renamed."""
    if num_there:
        there = f"{num_there} of {num_files} related files were already written: run the command again"
        message = f"{error.message.removesuffix(_UNCHANGED)}; {there}"
        return type(error)(message, hint=error.hint, code=error.code, path=error.path)
    return error


def _take_name(file: PendingFile) -> None:
    """Rename a complete file into place. Raises OutputExists or WriteError on failure; the old file is then intact."""
    try:
        if file.may_replace:
            os.replace(file.temporary, file.target)
        else:
            _link(file.temporary, file.target)
    except FileExistsError:
        raise OutputExists(
            f"{file.target} was written by another process in the meantime",
            hint="run the command again",
            path=file.target,
        ) from None
    except OSError as error:
        raise write_error(error, file.target) from None
    finally:
        _remove(file.temporary)


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink()


def _stem(target: Path) -> str:
    """Return the part of a target's name used in the names of its temporaries."""
    return os.fsdecode(os.fsencode(target.name)[:150])


def _sync_name(target: Path) -> None:
    """Sync the name of a renamed file to disk. Raises WriteError on failure."""
    try:
        sync(target.parent)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(
            f"{target} was written, but its folder could not be synced: {reason}; the file may be lost after a "
            "power failure",
            hint="check the file system, and run the command again with \0force\0",
            path=target,
        ) from None


@contextmanager
def publish_immediately() -> Iterator[None]:
    """Publish files immediately inside the block, even inside `publish_together`."""
    token = _WAITING.set(None)
    try:
        yield
    finally:
        _WAITING.reset(token)


def publish_bytes(target: Path, content: bytes, *, may_replace: bool, poll: bool = True) -> None:
    """Publish `content` as a file; raises as publish does."""

    def write(path: Path) -> None:
        with open(path, "wb") as stream:
            reserve(stream.fileno(), len(content))
            stream.write(content)

    publish(target, write, may_replace=may_replace, poll=poll)


def reserve(descriptor: int, size: int) -> None:
    """Reserve `size` bytes on disk, so that a full disk is detected before the first write, if the system can."""
    if size == 0 or not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def check_free_space(folder: Path, size: int) -> None:
    """Raise WriteError if `size` bytes plus a tenth and 64 MiB do not fit on the folder's file system."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise write_error(error, folder) from None
    needed = int(size * 1.1) + SPARE_BYTES
    if free < needed:
        raise WriteError(
            f"{folder}: about {needed >> 20} MiB of disk space are needed (with {SPARE_BYTES >> 20} MiB to "
            f"spare), but only {free >> 20} MiB are free{_UNCHANGED}",
            hint="free space, or choose another place with \0run_dir\0",
            path=folder,
        )


_COPY_ELSEWHERE = "choose another place with \0run_dir\0 DIR (if there is a run folder already, copy it there first)"


def check_writable(folder: Path, *, hint: str = _COPY_ELSEWHERE) -> None:
    """Raise OutputExists (73), with the hint, if the folder, or its nearest existing parent, is not writable."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "is not a folder" if not place.is_dir() else "is not writable"
        raise OutputExists(
            f"{place} {reason}",
            hint=hint,
            code="not_writable",
            path=place,
        )


def check_takes_files(target: Path, *, hint: str) -> None:
    """Raise OutputExists (73), with the hint, if a file cannot be created at the target's location; creates and removes one.

    Permissions are not enough: for root they claim that /proc is writable.
    """
    if not is_leader():
        return
    trial = target.with_name(f".{_stem(target)}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        known = write_error(error, target)
        if isinstance(known, DeviceError) or error.errno in _FULL:
            raise known from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        message = f"cannot write {target}: {reason}"
        raise OutputExists(message, hint=hint, code="not_writable", path=target) from None
    _remove(trial)


def dead_temporaries(folder: Path) -> list[Path]:
    """Return temporary files under `folder` whose writer is dead."""
    return [path for path in sorted(folder.rglob(".*.tmp")) if _is_left(path)] if folder.is_dir() else []


def _is_left(path: Path) -> bool:
    """Return whether a path is a temporary file whose writer is dead."""
    match = _TEMPORARY.match(path.name)
    return match is not None and path.is_file() and not _is_alive(int(match[2]))


def remove_dead_temporaries(folder: Path, *, of: Path | None = None) -> list[Path]:
    """Remove files of dead writers directly in `folder`, of one target or any; return the removed paths."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        found = [(match[1], Path(folder, entry.name)) for entry in entries if (match := _TEMPORARY.match(entry.name))]
    dead = sorted(path for stem, path in found if (of is None or stem == _stem(of)) and _is_left(path))
    for path in dead:
        _remove(path)
    return dead


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _umask() -> int:
    """Return the process's umask, from /proc if possible, which avoids the race of setting and restoring it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Sync a file or folder to disk, if its file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # folders on some file systems
            raise
    finally:
        os.close(descriptor)


def _link(temporary: Path, target: Path) -> None:
    """Rename without replacing; without hard links, a plain rename after a check."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(target)) from None
        os.replace(temporary, target)

"""Errors that bnncli raises on purpose, each with an exit code and a stable machine-readable name.

A message states what was expected, what was found and what to do. `code` is the name that `--json` reports; it is
stable, the text is not. 65 to 78 are the values of BSD sysexits.h.
"""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from pathlib import Path

DAMAGED_HINT = "delete it, and run the command that created it again"  # for an artifact whose command is unknown
ELSEWHERE = "choose another place"  # as a hint; the command line adds the options


class Exit(IntEnum):
    """Exit codes of every command; signal n exits with 128 + n."""

    OK = 0
    BUG = 1
    USAGE = 2
    CHECK = 3
    DATA = 65
    NOINPUT = 66
    DEVICE = 69
    NUMERIC = 70
    EXISTS = 73
    IO = 74
    LOCKED = 75
    UNTRUSTED = 77
    CONFIG = 78


class BnnError(Exception):
    r"""An expected failure: a one-line message, an optional hint, an exit code.

    Args:
        message: what was expected and what was found. Options are written as their field between two NULs, such as
            \0prior_precision\0, which no file name can contain; the command line writes --prior-precision.
        hint: what to do, preferably a command to paste; options as in the message.
        code: stable name for scripts; the class's default if omitted.
        path: file that the error is about.
    """

    exit: int = Exit.BUG
    default_code: str = "bug"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str | None = None,
        path: Path | str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.path = None if path is None else str(path)

    @property
    def advice(self) -> str:
        """The hint as the end of a line: "; run: bnncli ..." for a command, "; free space", or empty."""
        if not self.hint:
            return ""
        return f"; run: {self.hint}" if self.hint.startswith("bnncli ") else f"; {self.hint}"


class BnnWarning(UserWarning):
    """A warning issued through Python's warnings."""


class UsageError(BnnError):
    """A wrong option, argument or name."""

    exit = Exit.USAGE
    default_code = "usage"


class CheckFailed(BnnError):
    """The command succeeded and a check failed."""

    exit = Exit.CHECK
    default_code = "check_failed"


class DataError(BnnError):
    """An input is corrupt, of the wrong kind, not finite, or inconsistent with the others."""

    exit = Exit.DATA
    default_code = "bad_data"


UNREADABLE = "unreadable_input"  # code of the DataError for an image or clip that cannot be decoded


class MissingInput(BnnError):
    """An input does not exist or cannot be read."""

    exit = Exit.NOINPUT
    default_code = "missing_input"


class DeviceError(BnnError):
    """The requested device is missing, or the machine lacks memory or open files."""

    exit = Exit.DEVICE
    default_code = "device"


class NumericError(BnnError):
    """A fit failed: not positive definite, not finite, every chain diverged."""

    exit = Exit.NUMERIC
    default_code = "numeric"


class OutputExists(BnnError):
    """The output exists and differs, or its folder is not writable."""

    exit = Exit.EXISTS
    default_code = "exists"


class WriteError(BnnError):
    """Writing failed: disk full, quota, input/output error."""

    exit = Exit.IO
    default_code = "write_failed"


class ReadError(BnnError):
    """Reading failed with an input/output error, which says nothing about the file's content."""

    exit = Exit.IO
    default_code = "read_failed"


class Locked(BnnError):
    """Another bnncli is writing the same artifact."""

    exit = Exit.LOCKED
    default_code = "locked"


class Untrusted(BnnError):
    """Reading the input would run its code or follow its links."""

    exit = Exit.UNTRUSTED
    default_code = "untrusted"


class ConfigError(BnnError):
    """The configuration file is wrong."""

    exit = Exit.CONFIG
    default_code = "config"


class Interrupted(BnnError):
    """A signal asked the command to stop; raised where long loops report progress."""

    default_code = "interrupted"

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit = 128 + signum

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling, to send the error to other processes."""
        return type(self), (self.exit - 128, self.message), self.__dict__


def bug(error: BaseException) -> BnnError:
    """Return the error for an unexpected exception."""
    return BnnError(f"{type(error).__name__}: {error}", hint="this is a bug in bnncli; please report it")


def left_by(error: SystemExit) -> UsageError:
    """Return the error for user code that exits the process."""
    return UsageError(f"user code called exit({error.code!r})")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Errors while reading a file that the machine or the user caused, not the file's content.
NOT_OF_CONTENT = (ReadError, DeviceError, Interrupted)


def resource_error(error: OSError, where: str = "") -> DeviceError | None:
    """Return the error for lack of memory or open files; None for any other OSError."""
    place = f"{where}: " if where else ""
    if error.errno == errno.ENOMEM:
        hint = "free memory, or use fewer rows, draws or chains"
        return DeviceError(f"{place}out of memory", code="out_of_memory", hint=hint)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit with ulimit -n, or close other programs"
        return DeviceError(f"{place}too many open files", code="too_many_files", hint=hint)
    return None


def is_short_of_memory(error: BaseException) -> bool:
    """Return whether an allocation in main memory failed, in Python, NumPy or torch."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def machine_error(error: Exception) -> BnnError | None:
    """Return the error for an unexpected failure of the operating system, memory or GPU; None for any other exception."""
    if isinstance(error, OSError):
        return _from_os_error(error)
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError"):
        message = f"the device failed: {' '.join(str(error).split())[:200]}"
        if type(error).__name__ == "OutOfMemoryError":
            return DeviceError(message, code="out_of_memory")
        return DeviceError(message, hint="run the command again, or use \0device\0 cpu")
    if is_short_of_memory(error):
        return DeviceError("out of memory", code="out_of_memory")
    if isinstance(error, ImportError) and any(text in str(error) for text in _NOT_MAPPED):
        library = str(error).partition(":")[0]
        return DeviceError(f"out of memory: {library} could not be loaded", code="out_of_memory", hint=MORE_ADDRESSES)
    return None


MORE_ADDRESSES = "raise the limit with ulimit -v"
_NOT_MAPPED = ("failed to map segment", "annot allocate memory")  # messages of the shared library loader


def _from_os_error(error: OSError) -> BnnError:
    """Return the error for an OSError; callers handle errors of input files first."""
    name = str(error.filename) if error.filename is not None else "writing or reading a file"
    if (resource := resource_error(error, name)) is not None:
        return resource
    reason = os.strerror(error.errno) if error.errno else str(error)
    message = f"{name}: {reason}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
        return OutputExists(message, code="not_writable")
    if error.errno in (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        return MissingInput(message)
    return WriteError(message, hint="free space, or choose another place" if error.errno in _FULL else None)

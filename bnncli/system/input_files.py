"""Open input files safely: a folder, a pipe or a device in a file's place is an error, not an endless wait."""

from __future__ import annotations

import difflib
import errno
import json
import os
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from bnncli.errors import BnnError, DataError, MissingInput, ReadError, resource_error
from bnncli.names import quote_name

_CANNOT_BE_HAD = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO,
    errno.ENODEV,
}  # fmt: skip
_MOST_NAMES = 2000  # of a folder that are compared with a missing name
# errors of an offset that the file cannot have, which speak of its content
_OF_ODD_CONTENT = {0, errno.EINVAL, errno.EOVERFLOW, errno.EFBIG}


@contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, checked to be a readable regular file.

    Raises:
        MissingInput: there is no such file, it cannot be read, or it is a folder, pipe, socket or device.
        DeviceError, ReadError: as read_error says, on opening and on reading inside the block.
    """
    shown = quote_name(path, limit=300)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise read_error(error, path) from error
    except ValueError:  # the name contains NUL
        raise MissingInput(f"no file {shown}", path=path) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise MissingInput(f"{shown} is {kind}, expected a file", code="not_a_file", path=path)
    with open(descriptor, "rb") as stream, convert_read_errors(path):
        yield stream


def read_error(error: OSError, path: Path, what: str = "") -> BnnError:
    """Return the error to show for a file that could not be read: of the machine, of the path, or of the disk.

    Args:
        what: the content, put before the path; ends with a space.
    """
    shown = f"{what}{quote_name(path, limit=300)}"
    reason = os.strerror(error.errno) if error.errno else str(error)
    if (resource := resource_error(error, shown)) is not None:
        return resource
    if isinstance(error, FileNotFoundError):
        return MissingInput(
            f"{shown} does not exist" if what else f"no file {shown}", path=path, hint=nearest_file(path)
        )
    if error.errno in _CANNOT_BE_HAD:
        return MissingInput(f"cannot read {shown}: {reason}", path=path)
    return ReadError(
        f"reading {shown} failed: {reason}", hint="check the disk or the network, and try again", path=path
    )


def nearest_file(path: Path) -> str | None:
    """Suggest an existing file of the same folder for one that is missing; the folder may be missing too."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name.removesuffix(".bnn") for entry in islice(entries, _MOST_NAMES)]
    except FileNotFoundError:
        return f"no folder {quote_name(path.parent, limit=300)}"
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, sorted({*names} - {path.name}), n=1)
    return f"did you mean {quote_name(path.with_name(near[0]), limit=300)}?" if near else None


def is_failure(error: BaseException) -> bool:
    """Return whether an exception raised while parsing is the system's, and says nothing about the content."""
    found = _behind(error)
    return isinstance(found, OSError) and found.errno is not None and found.errno not in _OF_ODD_CONTENT


def _behind(error: BaseException) -> BaseException | None:
    """Return the exception, or the system's error behind a BadZipFile, which zipfile raises as if the file were no archive."""
    return error.__context__ if isinstance(error, zipfile.BadZipFile) else error


@contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Raise errors of the operating system inside the block as read_error of `path`."""
    try:
        yield
    except (OSError, zipfile.BadZipFile) as error:
        found = _behind(error)
        if not isinstance(found, OSError):
            raise
        raise read_error(found, path) from error


MAX_BYTES = 1 << 26


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        MissingInput: there is no such file. DataError: it is not JSON, no object, or larger than 64 MiB.
    """
    with open_regular(path) as stream:
        raw = stream.read(MAX_BYTES + 1)
    shown = quote_name(path, limit=300)
    if len(raw) > MAX_BYTES:
        raise DataError(f"{shown} is larger than {MAX_BYTES >> 20} MiB: expected a small JSON file", path=path)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown} is not a complete JSON file: {error}", path=path) from None
    if not isinstance(found, dict):
        raise DataError(f"{shown}: expected a JSON object, got {type(found).__name__}", path=path)
    return found

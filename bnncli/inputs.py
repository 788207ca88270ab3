"""Input files, opened so that a folder, a pipe or a device in their place is an error and not an endless wait."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bnncli.errors import MissingInput
from bnncli.names import quoted


@contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """The open file, known to be a regular file that can be read.

    Raises:
        MissingInput: there is no such file, it cannot be read, or it is a folder, pipe, socket or device.
    """
    shown = quoted(path, limit=300)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "no file" if isinstance(error, FileNotFoundError) else f"cannot read ({error.strerror})"
        raise MissingInput(f"{what} {shown}", path=path) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise MissingInput(f"{shown} is {kind}, expected a file", code="not_a_file", path=path)
    with open(descriptor, "rb") as stream:
        yield stream

"""Files of lines, gzipped or not, read from any place in them: open once, and safe in other processes."""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.numerics.digests import file_sha256
from bnncli.progress import Progress
from bnncli.system.input_files import is_failure, open_regular, reading

_GZIP_MAGIC = b"\x1f\x8b"
_RUN = 1 << 22  # bytes read at once
_UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def in_utf16(path: Path) -> DataError:
    """The error for a file of text in UTF-16."""
    name = shlex.quote(str(path))
    hint = f"iconv -f UTF-16 -t UTF-8 {name} > NEW_FILE" if name.isprintable() else "iconv -f UTF-16 -t UTF-8"
    return DataError(f"{quoted(path, limit=300)} is in UTF-16, expected UTF-8", path=path, hint=hint)


class LineFile:
    """A file of text in UTF-8. What is gzipped is unpacked into a file without a name, which is gone when this is.

    Attributes:
        start: the byte where its text begins, after the mark that some editors write.
    """

    def __init__(self, path: Path) -> None:
        """Raises MissingInput, or DataError where it is damaged or in UTF-16."""
        self.path = path
        self._stream = _opened(path)
        head = os.pread(self._stream.fileno(), 3, 0)
        if head[:2] in UTF16_MARKS:
            raise in_utf16(path)
        self.start = len(_UTF8_MARK) if head == _UTF8_MARK else 0

    def __del__(self) -> None:
        if "_stream" in self.__dict__:
            self._stream.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]

    def lines(self) -> Iterator[bytes]:
        """Every line with what ends it, from the start of the text."""
        self._stream.seek(self.start)
        return iter(self._stream.readline, b"")

    def runs(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Place and bytes of runs of whole lines from `start` on, some megabytes each; the last line need not end."""
        parts: list[bytes] = []
        place = end = start
        while part := self._part(end):
            end += len(part)
            cut = part.rfind(b"\n") + 1
            parts.append(part[:cut] if cut else part)
            if cut:
                yield place, b"".join(parts)
                place, parts = end - len(part) + cut, [part[cut:]]
        if place < end:
            yield place, b"".join(parts)

    def _part(self, start: int) -> bytes:
        with reading(self.path):
            return os.pread(self._stream.fileno(), _RUN, start)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`. Raises DataError when the file has become shorter."""
        parts, place = [], start
        with reading(self.path):
            while place < stop and (part := os.pread(self._stream.fileno(), stop - place, place)):
                parts.append(part)
                place += len(part)
        if place < stop:
            raise DataError(
                f"{quoted(self.path, limit=300)} changed while it was being read", path=self.path, code="input_replaced"
            )
        return b"".join(parts)

    def digest(self, progress: Progress) -> str:
        """Of the text, whether gzipped or not."""
        with reading(self.path):
            return file_sha256(self._stream, progress)


def decoded(line: bytes, where: str) -> str:
    """The text of UTF-8 bytes. Raises DataError."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 text (byte {error.object[error.start]:#04x})",
            hint="if it is WINDOWS-1252, convert it: iconv -f WINDOWS-1252 -t UTF-8",
        ) from error


def _opened(path: Path) -> IO[bytes]:
    """The file, or what is in it, open."""
    with open_regular(path) as stream:
        if stream.read(2) != _GZIP_MAGIC:
            return os.fdopen(os.dup(stream.fileno()), "rb")
        stream.seek(0)
        # It lives as long as the data set.
        plain = cast(IO[bytes], tempfile.TemporaryFile())  # noqa: SIM115
        try:
            shutil.copyfileobj(cast(IO[bytes], gzip.GzipFile(fileobj=stream)), plain, 1 << 20)
        except (EOFError, OSError, zlib.error) as error:
            plain.close()
            if is_failure(error):
                raise
            raise DataError(f"{quoted(path, limit=300)} is not a complete gzip file: {error}", path=path) from error
    plain.flush()
    return plain

"""A file system that fails: the calls through which the product reads and writes, counted, and one of them made to fail.

What Python calls is replaced: `open` and what the file object does, the functions of `os`, and h5py's own reading and
writing. Only files under one folder are concerned. Installed in a process that ends with the command.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py

WRITES = ("create", "write", "truncate", "allocate", "sync", "rename", "link", "unlink", "mkdir", "mode", "lock")
READS = ("open", "read")
# Functions of os by the kind of call, with the arguments that are paths or descriptors.
_BY_PATH = {"replace": "rename", "rename": "rename", "link": "link", "unlink": "unlink", "remove": "unlink"}
_BY_PATH |= {"mkdir": "mkdir", "chmod": "mode", "truncate": "truncate"}
_BY_DESCRIPTOR = {"write": "write", "pwrite": "write", "fsync": "sync", "fdatasync": "sync"}
_BY_DESCRIPTOR |= {"posix_fallocate": "allocate", "ftruncate": "truncate", "read": "read", "pread": "read"}


@dataclass
class Shim:
    """Counts calls of some kinds under a folder; at the one numbered `at`, from 0, kills the process or raises.

    Attributes:
        number: the errno to raise, or 0 to kill.
        lasts: whether every later call of these kinds fails too, as on a disk that is full or read-only.
        seen: the calls so far, (kind, name of the file).
    """

    root: Path
    kinds: tuple[str, ...]
    at: int = -1
    number: int = 0
    lasts: bool = False
    seen: list[tuple[str, str]] = field(default_factory=list)

    def hit(self, kind: str, where: Any) -> None:
        """Count one call, and fail at the chosen one."""
        if kind not in self.kinds:
            return
        name = _path_of(where)
        self.seen.append((kind, os.path.relpath(name, self.root)))
        place = len(self.seen) - 1
        if place == self.at or (self.lasts and place > self.at >= 0 and kind not in ("unlink", "rename")):
            if not self.number:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.number, os.strerror(self.number), name)

    def concerns(self, where: Any) -> bool:
        """Whether a path or a descriptor is of a file under the folder."""
        name = _path_of(where)
        return name == str(self.root) or name.startswith(f"{self.root}/")

    def install(self) -> None:
        """Replace the calls, for the rest of this process."""
        plain = io.open

        def opened(
            file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
            newline: Any = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            if not self.concerns(file):
                return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                self.hit("open" if mode.strip("bt") == "r" else "create", file)
            return _stream(_File(self, file, mode, closefd, opener), mode, buffering, encoding, errors, newline)

        builtins.open = io.open = opened  # type: ignore[assignment]
        for name, kind in (_BY_PATH | _BY_DESCRIPTOR).items():
            setattr(os, name, self._watched(getattr(os, name), kind))
        self._watch_os_open()
        self._watch_h5py()

    def _watched(self, plain: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*words: Any, **names: Any) -> Any:
            if self.concerns(words[0]) or (kind in ("rename", "link") and self.concerns(words[1])):
                self.hit(kind, words[0])
            return plain(*words, **names)

        return call

    def _watch_os_open(self) -> None:
        plain = os.open

        def opened(path: Any, flags: int, *words: Any, **names: Any) -> int:
            if self.concerns(path):
                is_lock = ".locks" in os.fspath(path)
                writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
                self.hit("lock" if is_lock else "create" if writes else "open", path)
            return plain(path, flags, *words, **names)

        os.open = opened

    def _watch_h5py(self) -> None:
        """The library reads and writes by itself; its errors have the errno in their text, and may be a KeyError."""

        def watch(owner: Any, name: str, kind: str, file_of: Callable[[Any], Any]) -> None:
            plain = getattr(owner, name)

            def call(this: Any, *words: Any, **names: Any) -> Any:
                file = file_of((this, *words))
                if isinstance(file, str | os.PathLike) and self.concerns(file):
                    try:
                        self.hit(_kind(kind, words, names), file)
                    except OSError as error:
                        text = f"file descriptor = 3, errno = {error.errno}, error message = '{error.strerror}'"
                        if owner is h5py.Group and name == "__getitem__":
                            raise KeyError(f"Unable to synchronously open object ({text})") from None
                        raise OSError(error.errno, f"Unable to synchronously do it ({text})") from None
                return plain(this, *words, **names)

            setattr(owner, name, call)

        watch(h5py.File, "__init__", "open", lambda words: words[1] if len(words) > 1 else None)
        for owner, name, kind in (
            (h5py.Group, "__getitem__", "read"),
            (h5py.Dataset, "__getitem__", "read"),
            (h5py.Dataset, "__setitem__", "write"),
            (h5py.Group, "create_dataset", "write"),
            (h5py.File, "flush", "write"),
        ):
            watch(owner, name, kind, lambda words: _file_of_object(words[0]))


def _kind(kind: str, words: tuple[Any, ...], names: dict[str, Any]) -> str:
    mode = names.get("mode", words[1] if len(words) > 1 else "r")
    return "create" if kind == "open" and mode != "r" else kind


def _file_of_object(entry: Any) -> str | None:
    file = entry.file
    return file.filename if file.driver == "sec2" else None


def _path_of(where: Any) -> str:
    """The path of a file or of an open descriptor."""
    if isinstance(where, int):
        try:
            return os.readlink(f"/proc/self/fd/{where}")
        except OSError:
            return ""
    try:
        return os.path.abspath(os.fsdecode(where))
    except TypeError:
        return ""


class _File(io.FileIO):
    """An open file whose calls are counted; one that fails has written half of what it was given."""

    def __init__(self, shim: Shim, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        super().__init__(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        self._shim = shim

    def write(self, content: Any) -> int:
        place = len(self._shim.seen)
        if self._shim.at == place and "write" in self._shim.kinds:
            whole = memoryview(content).cast("B")
            super().write(whole[: len(whole) // 2])
        self._shim.hit("write", self.fileno())
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self._shim.hit("truncate", self.fileno())
        return super().truncate(size)

    def readinto(self, buffer: Any) -> int | None:
        self._shim.hit("read", self.fileno())
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._shim.hit("read", self.fileno())
        return super().readall()

    def read(self, size: int | None = -1) -> bytes | None:
        self._shim.hit("read", self.fileno())
        return super().read(-1 if size is None else size)


def _stream(raw: _File, mode: str, buffering: int, encoding: Any, errors: Any, newline: Any) -> Any:
    """The file object that `open` would have made."""
    if buffering == 0:
        return raw
    size = io.DEFAULT_BUFFER_SIZE if buffering in (-1, 1) else buffering
    kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
    buffered = kind(raw, size)  # type: ignore[type-var, arg-type]
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

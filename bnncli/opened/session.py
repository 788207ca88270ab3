"""The session of an opened run: every call sees the files as they are then, but weights are read once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from numbers import Integral
from os import PathLike, fspath
from pathlib import Path
from threading import RLock
from typing import Any

from bnncli import registry
from bnncli.artifacts.caches import State, checks_remembered, state_of
from bnncli.artifacts.run_folder import MAX_NAME_BYTES, RunFolder
from bnncli.checkpoints.shards import shards_of
from bnncli.errors import BnnError, UsageError
from bnncli.opened.messages import Listener, errors_in_python
from bnncli.options.command_line import CommandLine, Groups
from bnncli.options.common import ComputeOptions, InputOptions, NameOptions, RecordOptions, RunOptions, WriteOptions
from bnncli.options.parts import declaration
from bnncli.run.session import Run
from bnncli.system.devices import configure_torch, device_name, select_device, settings_kept


class Session:
    """What the calls on one opened run share."""

    def __init__(self, ckpt: str, run_dir: str | None, *, device: str, seed: int) -> None:
        self._ckpt, self._run_dir = ckpt, run_dir
        self._home = os.getcwd()  # relative paths are of this folder
        self._here: str | None = self._home
        self._compute = ComputeOptions(seed=seed, device=device)
        self._state: State | None = None
        self._lock = RLock()
        self._run = self._begun()

    @property
    def folder(self) -> RunFolder:
        """Where the run lies."""
        self._look_where_we_are()
        return self._run.folder

    @property
    def checkpoint_state(self) -> State | None:
        """Of the checkpoint's file as the last call saw it; what is kept of its weights is good for this one alone."""
        return self._state

    @contextmanager
    def asking(self, *, allow_stale: bool = False) -> Iterator[Run]:
        """A run that has seen no file yet, for one call; errors leave it in the words of Python.

        Calls of other threads wait: what one allows holds for no other.
        """
        with self._lock, errors_in_python(), checks_remembered():
            self._look_where_we_are()
            state = _state_of(self._run.checkpoint_path)
            if state != self._state:
                self._run, self._state = self._begun(), state
            self._run.heads.clear()
            self._run.followed.clear()
            self._run.console, self._run.inputs = Listener(), InputOptions(allow_stale=allow_stale)
            yield self._run

    @contextmanager
    def computing(self, *, allow_stale: bool = False) -> Iterator[Run]:
        """The same for a call that computes: torch is set as for a command, and afterwards as it was."""
        with self.asking(allow_stale=allow_stale) as run, settings_kept():
            configure_torch(threads=None, deterministic=False)
            select_device(run.device)
            yield run

    @contextmanager
    def computing_as_loaded(self) -> Iterator[None]:
        """For a call that computes with what is loaded, and asks nothing of any file."""
        with self._lock, errors_in_python(), settings_kept():
            configure_torch(threads=None, deterministic=False)
            yield

    def placed(self, path: str) -> str:
        """A path as it was given, where the process is still in the folder that it was given in; else the whole path."""
        return path if self._here == self._home else os.path.join(self._home, path)

    def _look_where_we_are(self) -> None:
        """Begin again when the process has gone to another folder."""
        here = _here()
        if here != self._here:
            self._here = here
            self._run, self._state = self._begun(), None

    def _begun(self) -> Run:
        return Run(
            command="",
            line=CommandLine("", (), ()),
            arguments={"ckpt": self.placed(self._ckpt)},
            console=Listener(),
            run_options=RunOptions(run_dir=None if self._run_dir is None else self.placed(self._run_dir)),
            write=WriteOptions(),
            compute=self._compute,
            naming=NameOptions(),
            makers=_makers(),
        )


def open_session(ckpt: str | PathLike[str], run_dir: str | PathLike[str] | None, *, device: str, seed: int) -> Session:
    """The session of a run that is there.

    Raises:
        MissingInput: there is none; with the command that makes it, where there is a checkpoint.
        UsageError: an argument of another type.
        DeviceError: a device that was named is not there.
    """
    with errors_in_python():
        folder = None if run_dir is None else _path("run_dir", run_dir)
        device, seed = checked_text("device", device), checked_number("seed", seed, least=0)
        if device != "auto":
            device_name(device)
        session = Session(_path("ckpt", ckpt), folder, device=device, seed=seed)
        with session.asking() as run:
            _require_run(run)
        return session


def _require_run(run: Run) -> None:
    if run.folder.root.is_dir():
        return
    raise run.no_run()


MOST = 2**31 - 1  # of anything that is counted


def checked_count(name: str, value: object) -> int:
    """The positive whole number that an argument is. Raises UsageError unless it is one that can be counted to."""
    count = checked_number(name, value, least=1)
    if count > MOST:
        raise UsageError(f"{name}: expected a whole number of at most {MOST}; got {count}"[:300])
    return count


def checked_number(name: str, value: object, *, least: int) -> int:
    """The whole number that an argument is, of Python's or of an array's. Raises UsageError unless it is one and large enough."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name}: expected a whole number; got {value!r}"[:300])
    if value < least:
        raise UsageError(f"{name}: expected a whole number of at least {least}; got {value}")
    return int(value)


def checked_text(name: str, value: object) -> str:
    """The text that an argument is. Raises UsageError unless it is one, without NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"{name}: expected a string; got {value!r}"[:300])
    return value


def _path(name: str, value: str | PathLike[str]) -> str:
    try:
        path = fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str) or not path or "\0" in path:
        raise UsageError(f"{name}: expected a path; got {value!r}"[:300])
    longest = max(len(os.fsencode(part)) for part in path.split(os.sep))
    if longest > MAX_NAME_BYTES:
        raise UsageError(f"{name}: expected a path; got a name of {longest} bytes, more than {MAX_NAME_BYTES}")
    return path


def _here() -> str | None:
    """The folder that the process is in; None where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _state_of(path: Path) -> State | None:
    """What the system says of the checkpoint's file, or files; None where there is none."""
    try:
        shards = shards_of(path)
        files = [path] if shards is None else shards.every
        return sum((state_of(file.stat()) for file in files), ())
    except (OSError, ValueError, BnnError):
        return None


@cache
def _makers() -> Mapping[str, Groups]:
    """The commands that make artifacts, each with its options: a hint repeats none but these."""
    found: dict[str, Any] = {name: declaration("stages", name, "COMMAND") for name in registry.own_names("stages")}
    return {name: command.groups for name, command in found.items() if RecordOptions in command.groups}

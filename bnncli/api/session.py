"""The session of an opened run: every call sees the files as they are then, but weights are read once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from os import PathLike, fspath
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.known_files import State, remember_checks, state_of
from bnncli.artifacts.run_folder import MAX_NAME_BYTES, RunFolder
from bnncli.data.sound import convert_clip, is_clip
from bnncli.errors import BnnError, BnnWarning, DataError, UsageError, machine_error
from bnncli.lazy import torch
from bnncli.models.sharded import shards_of
from bnncli.options.command import (
    CommandLine,
    CommonOptions,
    ComputeOptions,
    InputOptions,
    NameOptions,
    RunOptions,
    WriteOptions,
)
from bnncli.options.declaration import spelled
from bnncli.progress import SILENT, Progress, Task
from bnncli.session.run import Run
from bnncli.system.devices import configure_torch, device_name, keep_random_state, keep_settings, select_device

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.artifacts.headers import Header
    from bnncli.session.predictor import Predictor


def is_of_network(header: Header) -> bool:
    """Whether the posterior with this header is over other layers than the last."""
    return header.meta.get("layers") is not None


def network_running(predictor: Predictor) -> AbstractContextManager[object]:
    """While a posterior over other layers is opened or predicts: its network may be the user's code. For others, nothing."""
    if not is_of_network(predictor.header):
        return nullcontext()
    found = ExitStack()
    found.enter_context(keep_random_state())
    found.enter_context(exits_refused())
    found.enter_context(predictor.train.reader.recorded.visible())
    return found


_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def keywords(text: str) -> str:
    """A message with a keyword for each option that it means: as samples."""
    return str(spelled(text, str))


@contextmanager
def errors_in_python() -> Iterator[None]:
    """Errors of ours leave the block in the words of Python, what to do standing in a note that a traceback shows.

    Ctrl-C is nobody's error: a process that is not ours has it raised as KeyboardInterrupt, in code of the user's too.
    """
    try:
        yield
    except BnnError as error:
        if (pressed := _interruption(error)) is not None:
            raise pressed from None
        _say(error)
        raise
    except Exception as error:
        known = machine_error(error)
        if known is None:
            raise
        _say(known)
        raise known from error


def _say(error: BnnError) -> None:
    """Put an error into the words of Python."""
    error.message = keywords(error.message)
    shown = error.__cause__ is not None and error.code == "user_code"  # by Python itself, whatever a command would show
    error.hint = None if error.hint is None or shown else keywords(error.hint)
    error.args = (error.message,)
    note = error.advice.removeprefix("; ")
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@contextmanager
def exits_refused() -> Iterator[None]:
    """Code that calls exit() inside the block does not end the process. Raises UsageError instead, as for a command."""
    try:
        yield
    except SystemExit as error:
        raise UsageError(f"user code called exit({error.code!r})") from error


def _interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that an error was made of; None for any other."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error


class Listener:
    """What a run talks to where nobody watches a terminal: warnings become Python's, the rest is not said."""

    def __init__(self) -> None:
        self.options = CommonOptions(quiet=True)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """One warning a text, at the line of the caller's that asked."""
        text = keywords(text)
        if text not in self.warnings:
            self.warnings.append(text)
            warnings.warn(text, BnnWarning, stacklevel=_depth_of_caller())

    def debug(self, text: str) -> None:
        """Nothing."""

    def info(self, text: str) -> None:
        """Nothing."""

    def poll(self, where: str = "") -> None:
        """Nothing: Python raises KeyboardInterrupt itself."""

    def task(self, name: str, total: int) -> Task:
        """A task that reports nowhere."""
        return SILENT.task(name, total)


def _depth_of_caller() -> int:
    """How many calls up from `warn` the outermost line of this package was called, as warnings count them."""
    depth, found, frame = 1, 1, sys._getframe(1)
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
        if frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            found = depth
    return found + 1


_WHERE = "x"  # what the argument is called


def as_tensor(x: Any) -> Tensor:
    """The tensor (N, ...) of what a caller gives, where it lies, in its own type.

    Raises:
        DataError: no array of numbers, fewer than two axes, no examples.
    """
    tensor = _plain(x) if isinstance(x, torch.Tensor) else _of_array(x)
    if tensor.ndim < 2:
        message = f"{_WHERE}: expected features (N, D) or inputs (N, ...); got shape {tuple(tensor.shape)}"
        raise DataError(message, hint="for a single example, pass x[None] (N = 1)", code="bad_shape")
    if len(tensor) == 0:
        raise DataError(f"{_WHERE}: no examples", code="empty_split")
    return tensor


@dataclass(frozen=True, eq=False)
class Items:
    """Texts, PIL images or clips of sound, for the preprocessing that a model brings: a data set without labels.

    Attributes:
        items: texts, images or audio.
    """

    given: list[Any]
    items: str
    labels: None = None
    is_labeled: bool = False
    classes: None = None
    is_sized: bool = False
    names: None = None

    def __len__(self) -> int:
        return len(self.given)

    def read(self, rows: np.ndarray) -> tuple[list[Any], None]:
        """Those of the rows (n,)."""
        return [self.given[row] for row in rows.tolist()], None

    def identity(self, rows: np.ndarray, progress: Progress) -> None:
        """None: only reading everything would tell."""


def as_items(x: Any) -> Items | None:
    """The texts, images or sound of what a caller gives; None where it is something else.

    Raises:
        DataError: a single one, which is none of several; an array that is no wave.
    """
    from PIL import Image  # here, for its time

    def is_of(kind: type) -> Callable[[object], bool]:
        return lambda one: isinstance(one, kind)

    for is_one, what in ((is_of(str), "texts"), (is_of(Image.Image), "images"), (is_clip, "audio")):
        if is_one(x):
            message = f"{_WHERE}: expected a list of {what}; got a single item"
            raise DataError(message, hint="give [x]", code="bad_shape")
        given = x.tolist() if isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype.kind in "UO" else x
        if isinstance(given, list | tuple) and given and all(map(is_one, given)):
            clips = (
                [convert_clip(one, f"{_WHERE}: row {row}") for row, one in enumerate(given)]
                if what == "audio"
                else given
            )
            return Items(list(clips), what)
    return None


def is_features(tensor: Tensor, num_features: int) -> bool:
    """Whether examples (N, ...) are features (N, D) of a head: real numbers in rows of its D; else they are inputs."""
    return tensor.ndim == 2 and tensor.shape[1] == num_features and tensor.is_floating_point()


def checked_features(features: Tensor) -> Tensor:
    """Features (N, D) in float16 or float32, all finite. Raises DataError otherwise."""
    stored = features if features.dtype == torch.float16 else features.float()
    check_finite(stored)
    return stored


def check_finite(tensor: Tensor) -> None:
    """Pass when all of (N, ...) is finite. Raises DataError with the first row that is not."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return
    bad = (~torch.isfinite(tensor)).flatten(1).any(dim=1).nonzero()
    if len(bad):
        message = f"{_WHERE}: {len(bad)} rows are not finite; the first is row {int(bad[0])}"
        raise DataError(message, hint="drop them: x[np.isfinite(x).all(axis=1)]", code="not_finite")


def described(inputs: Tensor | Items) -> str:
    """Shape and type of an array, or how many texts, images or clips, for messages."""
    if isinstance(inputs, Items):
        return f"{len(inputs)} {'clips' if inputs.items == 'audio' else inputs.items}"
    return f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"


def _plain(x: Tensor) -> Tensor:
    if x.is_nested or x.is_meta or x.layout is not torch.strided or x.is_quantized:
        raise _no_numbers("a sparse, nested, quantized or meta tensor")
    if x.is_complex() or x.dtype == torch.bool:
        raise _no_numbers(f"a tensor of type {str(x.dtype).removeprefix('torch.')}")
    return x.detach()


def _of_array(x: Any) -> Tensor:
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise _no_numbers(type(x).__name__) from None
    if np.ma.is_masked(x):
        raise _no_numbers("a masked array: fill it, or drop the masked rows")
    if array.dtype.kind not in "fui":
        raise _no_numbers(f"{type(x).__name__} of type {array.dtype}" if array.ndim else type(x).__name__)
    native = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(
        np.require(native, requirements=("C", "W"))
    )  # torch takes no array that it may not write to


def _no_numbers(what: str) -> DataError:
    return DataError(f"{_WHERE}: expected a numeric array or tensor; got {what}", code="bad_dtype")


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
        with self._lock, errors_in_python(), remember_checks():
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
        with self.asking(allow_stale=allow_stale) as run, keep_settings():
            configure_torch(threads=None, deterministic=False)
            select_device(run.device)
            yield run

    @contextmanager
    def computing_as_loaded(self) -> Iterator[None]:
        """For a call that computes with what is loaded, and asks nothing of any file."""
        with self._lock, errors_in_python(), keep_settings():
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

"""The session of an opened run: every call sees the current files, but weights are read once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.artifacts.known_files import State, remember_checks, state_of
from bnncli.artifacts.run_folder import MAX_NAME_BYTES, RunFolder
from bnncli.data.columns import PAIRS
from bnncli.data.sound import convert_clip, is_clip
from bnncli.data.transform import Word
from bnncli.errors import BnnError, BnnWarning, DataError, UsageError, machine_error
from bnncli.lazy import torch
from bnncli.models.sharded import shards_of
from bnncli.names import count_noun
from bnncli.options.command import (
    CommandLine,
    CommonOptions,
    ComputeOptions,
    InputOptions,
    NameOptions,
    RunOptions,
    WriteOptions,
)
from bnncli.options.declaration import spell_options
from bnncli.progress import SILENT, Progress, Task
from bnncli.session.run import Run
from bnncli.system.devices import (
    configure_torch,
    device_name,
    has_float64,
    keep_random_state,
    keep_settings,
    select_device,
)

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.artifacts.headers import Header
    from bnncli.session.predictor import Predictor


def is_of_network(header: Header) -> bool:
    """Return whether a posterior is over layers other than the last."""
    return header.meta.get("layers") is not None


def guard_user_network(predictor: Predictor) -> AbstractContextManager[object]:
    """Return a context to open or use a posterior over other layers, whose network may be user code; empty for others."""
    if not is_of_network(predictor.header):
        return nullcontext()
    found = ExitStack()
    found.enter_context(keep_random_state())
    found.enter_context(refuse_exits())
    found.enter_context(predictor.train.reader.recorded.visible())
    return found


_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def keywords(text: str) -> str:
    """Replace options in a message by keywords, such as samples."""
    return str(spell_options(text, str))


@contextmanager
def convert_errors_to_python() -> Iterator[None]:
    """Convert bnncli errors that leave the block to Python wording, with the hint as a note in the traceback.

    Ctrl-C is not an error: if the signal handler is not ours, it is raised as KeyboardInterrupt, also from user code.
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
    """Convert an error's message to Python wording."""
    error.message = keywords(error.message)
    shown = error.__cause__ is not None and error.code == "user_code"  # Python shows the cause itself
    error.hint = None if error.hint is None or shown else keywords(error.hint)
    error.args = (error.message,)
    note = error.advice.removeprefix("; ")
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Raise UsageError if code in the block calls exit(), as a command does, instead of ending the process."""
    try:
        yield
    except SystemExit as error:
        raise UsageError(f"user code called exit({error.code!r})") from error


def _interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that caused an error, or None."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error


class Listener:
    """Messages of a run without a terminal: warnings become Python warnings, the rest is dropped."""

    def __init__(self) -> None:
        self.options = CommonOptions(quiet=True)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Issue a Python warning once per text, at the caller's line."""
        text = keywords(text)
        if text not in self.warnings:
            self.warnings.append(text)
            warnings.warn(text, BnnWarning, stacklevel=_depth_of_caller())

    def debug(self, text: str) -> None:
        """Do nothing."""

    def info(self, text: str) -> None:
        """Do nothing."""

    def poll(self, where: str = "") -> None:
        """Do nothing: Python raises KeyboardInterrupt itself."""

    def task(self, name: str, total: int) -> Task:
        """Return a task without display."""
        return SILENT.task(name, total)


def _depth_of_caller() -> int:
    """Return the stack level of this package's outermost frame above `warn`, as counted by warnings."""
    depth, found, frame = 1, 1, sys._getframe(1)
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
        if frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            found = depth
    return found + 1


_WHERE = "x"  # name of the argument


def convert_to_tensor(x: Any, shape: Callable[[], Sequence[int] | None], num_features: int | None = None) -> Tensor:
    """Return the tensor (N, ...) of the caller's array, on its device and in its type; N = 1 for one example alone.

    Args:
        shape: returns the shape of the network's input for one example; None where it is unknown.
        num_features: of an example's features; None if only inputs are expected.

    Raises:
        DataError: it is not an array of numbers, has fewer than two axes, or no examples.
    """
    tensor = _plain(x) if isinstance(x, torch.Tensor) else _convert_array(x)
    if _is_one_example(tensor, shape, num_features):
        tensor = tensor.unsqueeze(0)
    if tensor.ndim < 2:
        message = f"{_WHERE}: expected features (N, D) or inputs (N, ...); got shape {tuple(tensor.shape)}"
        raise DataError(message, hint="for a single example, pass x[None] (N = 1)", code="bad_shape")
    if len(tensor) == 0:
        raise DataError(f"{_WHERE}: no examples", code="empty_split")
    return tensor


def _is_one_example(tensor: Tensor, shape: Callable[[], Sequence[int] | None], num_features: int | None) -> bool:
    """Return whether an array can only be one example without an axis of examples."""
    if num_features is not None and tensor.is_floating_point():
        if tuple(tensor.shape) == (num_features,):
            return True
        if is_features(tensor, num_features):
            return False
    expected = tuple(shape() or ())
    alone = {expected}
    if len(expected) == 3:  # images may come without a channel axis, or with it last
        alone |= {(*expected[1:], expected[0]), *([expected[1:]] if expected[0] == 1 else [])}
    return tensor.ndim > 0 and tuple(tensor.shape) in alone


@dataclass(frozen=True, eq=False)
class Items:
    """Texts, words, PIL images or audio clips for a model with its own preprocessing, as a data set without labels.

    Attributes:
        items: texts, words, pairs, images or audio.
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
        """Return the items of the rows (n,)."""
        return [self.given[row] for row in rows.tolist()], None

    def identity(self, rows: np.ndarray, progress: Progress) -> None:
        """Return None: identity would require reading everything."""


def convert_to_items(x: Any) -> Items | None:
    """Return the caller's texts, pairs of texts, images or audio, or a single one, or the words of texts; None for anything else.

    Raises:
        DataError: a clip's array is not a waveform.
    """
    from PIL import Image  # slow to import

    def is_of(kind: type) -> Callable[[object], bool]:
        return lambda one: isinstance(one, kind)

    kinds = ((is_of(str), "texts"), (_is_pair, PAIRS), (is_of(Image.Image), "images"), (is_clip, "audio"))
    for is_one, what in kinds:
        given = (
            [x]
            if is_one(x)
            else x.tolist()
            if isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype.kind in "UO"
            else x
        )
        if isinstance(given, list | tuple) and given and all(map(is_one, given)):
            clips = (
                [convert_clip(one, f"{_WHERE}: row {row}") for row, one in enumerate(given)]
                if what == "audio"
                else given
            )
            return Items(list(clips), what)
    if isinstance(x, list | tuple) and x and all(isinstance(text, list | tuple) for text in x):
        texts = [tuple(text) for text in x]
        if all(isinstance(word, str) and word for text in texts for word in text) and any(texts):
            return Items([Word(text, place) for text in texts for place in range(len(text))], "words")
    return None


def _is_said(one: object) -> bool:
    """Return whether it is a text or a list of chat messages."""
    return isinstance(one, str) or (isinstance(one, list) and all(isinstance(message, dict) for message in one))


def _is_pair(one: object) -> bool:
    """Return whether it is two texts or chats, or a prompt and two answers."""
    return isinstance(one, tuple) and len(one) in (2, 3) and all(map(_is_said, one))


def is_features(tensor: Tensor, num_features: int) -> bool:
    """Return whether examples (N, ...) are features (N, D) of a head, that is floats in rows of D, rather than inputs."""
    return tensor.ndim == 2 and tensor.shape[1] == num_features and tensor.is_floating_point()


def convert_feature_dtype(features: Tensor) -> Tensor:
    """Return features (N, D) in float16 or float32.

    Raises:
        DataError: they are not finite.
    """
    stored = features if features.dtype == torch.float16 else features.float()
    check_finite(stored)
    return stored


def check_finite(tensor: Tensor) -> None:
    """Check that all of (N, ...) is finite.

    Raises:
        DataError: it is not; names the first such row.
    """
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return
    bad = (~torch.isfinite(tensor)).flatten(1).any(dim=1).nonzero()
    if len(bad):
        message = f"{_WHERE}: {len(bad)} rows are not finite; the first is row {int(bad[0])}"
        raise DataError(message, hint="drop them: x[np.isfinite(x).all(axis=1)]", code="not_finite")


def describe_inputs(inputs: Tensor | Items) -> str:
    """Return shape and type of an array, or the number of texts, images or clips, for messages."""
    if isinstance(inputs, Items):
        return count_noun(len(inputs), "clip" if inputs.items == "audio" else inputs.items.removesuffix("s"))
    return f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"


def _plain(x: Tensor) -> Tensor:
    if x.is_nested or x.is_meta or x.layout is not torch.strided or x.is_quantized:
        raise _not_numeric_error("a sparse, nested, quantized or meta tensor")
    if x.is_complex() or x.dtype == torch.bool:
        raise _not_numeric_error(f"a tensor of type {str(x.dtype).removeprefix('torch.')}")
    return x.detach() if has_float64(x.device) else x.detach().cpu()


def _convert_array(x: Any) -> Tensor:
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise _not_numeric_error(type(x).__name__) from None
    if np.ma.is_masked(x):
        raise _not_numeric_error("a masked array: fill it, or drop the masked rows")
    if array.dtype.kind not in "fui":
        raise _not_numeric_error(f"{type(x).__name__} of type {array.dtype}" if array.ndim else type(x).__name__)
    native = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=("C", "W")))  # torch rejects read-only arrays


def _not_numeric_error(what: str) -> DataError:
    return DataError(f"{_WHERE}: expected a numeric array or tensor; got {what}", code="bad_dtype")


class Session:
    """Shared state of the calls on one opened run.

    Attributes:
        path: the checkpoint, or the run's name, as given.
    """

    def __init__(self, ckpt: str, run_dir: str | None, *, device: str, seed: int, home: str | None = None) -> None:
        self.path, self._run_dir = ckpt, run_dir
        self._home = home or os.getcwd()  # base of relative paths
        self._here: str | None = _find_current_folder()
        self._compute = ComputeOptions(seed=seed, device=device)
        self._state: State | None = None
        self._lock = RLock()
        self._run = self._begun()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open the session again, to pickle what uses it."""
        given: dict[str, Any] = {"device": self._compute.device, "seed": self._compute.seed, "home": self._home}
        return partial(Session, self.path, self._run_dir, **given), ()

    @property
    def folder(self) -> RunFolder:
        """Return the run folder."""
        self._look_where_we_are()
        return self._run.folder

    @property
    def checkpoint_state(self) -> State | None:
        """Return the state of the checkpoint's file at the last call; cached weights are only valid for it."""
        return self._state

    @contextmanager
    def asking(self, *, allow_stale: bool = False) -> Iterator[Run]:
        """Yield a run without cached files for one call; convert errors to Python wording.

        Calls from other threads wait, because permissions apply to one call only.
        """
        with self._lock, convert_errors_to_python(), remember_checks():
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
        """Yield a run for a call that computes; torch is configured as for a command, and restored afterwards."""
        with self.asking(allow_stale=allow_stale) as run, keep_settings():
            configure_torch(threads=None, deterministic=False)
            select_device(run.device)
            yield run

    @contextmanager
    def computing_as_loaded(self) -> Iterator[None]:
        """Return a context for a call that computes with loaded objects and reads no files."""
        with self._lock, convert_errors_to_python(), keep_settings():
            configure_torch(threads=None, deterministic=False)
            yield

    def placed(self, path: str) -> str:
        """Return a path as given if the process is still in the same folder, else its absolute path."""
        return path if self._here == self._home else os.path.join(self._home, path)

    def _look_where_we_are(self) -> None:
        """Reset the session if the process has changed its folder."""
        here = _find_current_folder()
        if here != self._here:
            self._here = here
            self._run, self._state = self._begun(), None

    def _begun(self) -> Run:
        return Run(
            command="",
            line=CommandLine("", (), ()),
            arguments={"ckpt": self.placed(self.path)},
            console=Listener(),
            run_options=RunOptions(run_dir=None if self._run_dir is None else self.placed(self._run_dir)),
            write=WriteOptions(),
            compute=self._compute,
            naming=NameOptions(),
        )


def open_session(ckpt: str | PathLike[str], run_dir: str | PathLike[str] | None, *, device: str, seed: int) -> Session:
    """Return the session of an existing run.

    Raises:
        MissingInput: there is none; names the command that creates it if there is a checkpoint.
        UsageError: an argument has the wrong type.
        DeviceError: a named device is not available.
    """
    with convert_errors_to_python():
        folder = None if run_dir is None else _path("run_dir", run_dir)
        device, seed = check_text("device", device), check_number("seed", seed, least=0)
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


MOST = 2**31 - 1  # largest count


def check_count(name: str, value: object) -> int:
    """Return an argument as a positive integer.

    Raises:
        UsageError: it is not one, or too large.
    """
    count = check_number(name, value, least=1)
    if count > MOST:
        raise UsageError(f"{name}: expected a whole number of at most {MOST}; got {count}"[:300])
    return count


def check_number(name: str, value: object, *, least: int) -> int:
    """Return an argument, a Python or NumPy integer, as an int.

    Raises:
        UsageError: it is not an integer, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name}: expected a whole number; got {value!r}"[:300])
    if value < least:
        raise UsageError(f"{name}: expected a whole number of at least {least}; got {value}")
    return int(value)


def check_text(name: str, value: object) -> str:
    """Return an argument as text.

    Raises:
        UsageError: it is not a string, or contains NUL.
    """
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"{name}: expected a string; got {value!r}"[:300])
    return value


def check_typed(name: str, value: object, kind: type) -> Any:
    """Return an option's value in its own type.

    Raises:
        UsageError: the value has another type.
    """
    if kind is bool:
        if not isinstance(value, bool):
            raise UsageError(f"\0{name}\0: expected True or False; got {value!r}"[:300])
        return value
    if kind is str:
        return check_text(name, value)
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        expected = "a whole number" if kind is int else "a number"
        raise UsageError(f"\0{name}\0: expected {expected}; got {value!r}"[:300])
    return kind(value)


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


def _find_current_folder() -> str | None:
    """Return the current folder; None if it no longer exists."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _state_of(path: Path) -> State | None:
    """Return the file state of the checkpoint's file or files; None if missing."""
    try:
        shards = shards_of(path)
        files = [path] if shards is None else shards.every
        return sum((state_of(file.stat()) for file in files), ())
    except (OSError, ValueError, BnnError):
        return None

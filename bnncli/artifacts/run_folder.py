"""The run folder `CHECKPOINT.bnn/`: the path of each artifact, and one writer per artifact by flock."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bnncli.artifacts.atomic import write_error
from bnncli.errors import Locked, MissingInput, OutputExists, UsageError, WriteError
from bnncli.models.output_folders import choose_checkpoint
from bnncli.models.sharded import find_sharded_folder, shards_of
from bnncli.names import FEATURES_NAME, FORMATS, near_miss, quote_name
from bnncli.options.declaration import check_artifact_name, check_split_name
from bnncli.system.workers import is_leader

POSTERIOR_SUFFIXES = (".safetensors", ".nc")
FEATURES_SUFFIX = ".h5"
RECOMMENDED = "recommended.json"
MAX_NAME_BYTES = 255
_LOCKS = ".locks"
# How to pass a folder with this file.
_MODELS = {
    "adapter_config.json": "pass it as the model: \0model\0 peft:DIR \0base_model\0 BASE",
    "config.json": "pass it as the model: \0model\0 hf:DIR (timm:DIR if timm wrote it)",
}


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run; constructing it creates and reads nothing."""

    checkpoint: Path
    root: Path

    @classmethod
    def of(cls, checkpoint: Path, run_dir: str | None, *, is_name: bool = False) -> RunFolder:
        """Return the run folder of a checkpoint, or of a run without one, which may have the name of any folder.

        Args:
            is_name: whether a run without a checkpoint is being created.

        Raises:
            MissingInput: the checkpoint is a folder without a run, or an artifact of a run.
        """
        if checkpoint.is_dir() and not (_can_be_name(checkpoint) and (is_name or shards_of(checkpoint) is not None)):
            if not _can_be_name(checkpoint):
                raise folder_error(checkpoint)
            beside = Path(run_dir) if run_dir is not None else checkpoint.with_name(f"{checkpoint.name}.bnn")
            if not beside.is_dir():
                raise folder_error(checkpoint)
        if any(part.endswith(".bnn") for part in checkpoint.parts[:-1]):
            raise MissingInput(
                f"expected a checkpoint, but {checkpoint} is inside a run folder",
                path=checkpoint,
                hint="give the checkpoint first, and the artifact by name (\0base\0, \0posterior\0)",
            )
        if run_dir is not None:
            return cls(checkpoint, Path(run_dir))
        name = checkpoint.name + ".bnn"
        if len(os.fsencode(name)) > MAX_NAME_BYTES:
            name = hashlib.sha256(os.fsencode(checkpoint.name)).hexdigest()[:16] + ".bnn"
        return cls(checkpoint, checkpoint.with_name(name))

    def features(self, split: str) -> Path:
        """Return features/<split>.h5."""
        name = check_split_name(split, "\0split\0")
        return self.root / "features" / f"{name}{FEATURES_SUFFIX}"

    def posterior(self, name: str, *, suffix: str = ".safetensors") -> Path:
        """Return posteriors/<name>.safetensors, or .nc for draws."""
        return self.root / "posteriors" / f"{name}{suffix}"

    def check_name_is_free(self, target: Path) -> None:
        """Raise if draws and another posterior would share a name, which identifies predictions, or the network has it.

        Raises:
            UsageError: target is posteriors/map.safetensors, which only extract-features writes, or has the name under
                which evaluate lists scores of features.
            OutputExists: a posterior of another type has the name.
        """
        network = self.posterior("map")
        if target.with_suffix(network.suffix).absolute() == network.absolute():
            raise UsageError(
                f"{network} is reserved for the trained network, which later commands need; choose another \0name\0"
            )
        if target.with_suffix("").absolute() == self.posterior(FEATURES_NAME, suffix="").absolute():
            raise UsageError(
                f"the name {FEATURES_NAME!r} is reserved for scores that need no posterior; choose another \0name\0"
            )
        for suffix in POSTERIOR_SUFFIXES:
            other = target.with_suffix(suffix)
            if suffix != target.suffix and other.exists():
                raise OutputExists(
                    f"{other} has the same name as {target.name}", hint="choose another \0name\0", path=other
                )

    def predictions(self, name: str, split: str) -> Path:
        """Return predictions/<posterior>.<integrator>/<split>.h5; `name` is <posterior>.<integrator>."""
        return self.root / "predictions" / name / f"{split}.h5"

    def metrics(self, name: str) -> Path:
        """Return metrics/<posterior>.<integrator>.json."""
        return self.root / "metrics" / f"{name}.json"

    def export(self, name: str, suffix: str) -> Path:
        """Return exports/<posterior>.<integrator>.onnx, or another suffix; `name` is <posterior>.<integrator>."""
        return self.root / "exports" / f"{name}{suffix}"

    def decision(self, name: str, rule: str) -> Path:
        """Return decisions/<posterior>.<integrator>/<rule>.safetensors; `name` is <posterior>.<integrator>."""
        return self.root / "decisions" / name / f"{rule}.safetensors"

    def monitor(self, name: str) -> Path:
        """Return monitor/<name>.safetensors."""
        return self.root / "monitor" / f"{name}.safetensors"

    def _check_no_link(self, target: Path) -> None:
        """Raise OutputExists if a folder within the run folder is a symbolic link, through which its author could redirect writes."""
        if not target.is_relative_to(self.root):
            return
        for folder in [one for one in target.parents if one != self.root and one.is_relative_to(self.root)]:
            if folder.is_symlink():
                raise OutputExists(
                    f"{folder} is a symbolic link, and bnncli does not write through links", code="not_writable", path=folder,
                    hint="replace the link with a folder, or link the whole run folder",
                )  # fmt: skip

    def lock(self, target: Path) -> Path:
        """Return the lock file of an artifact: in .locks/, named by its path in the run folder; else beside it.

        Raises:
            OutputExists: a folder of the run on the artifact's path is a symbolic link.
        """
        self._check_no_link(target)
        try:
            name = "-".join(target.resolve().relative_to(self.root.resolve()).parts)
        except ValueError:  # --out: somewhere else
            return lock_beside(target.resolve())
        return self.root / _LOCKS / name

    def splits(self) -> list[str]:
        """Return the names of the splits with features, sorted, train first."""
        found = [path.stem for path in (self.root / "features").glob("[!.]*.h5")]
        return sorted(found, key=lambda name: (name != "train", name))

    def posteriors(self) -> list[Path]:
        """Return the files of the posteriors: map, temperature, calibration, laplace, refine, hmc, then the others by name."""
        order = {
            name: rank for rank, name in enumerate(("map", "temperature", "calibration", "laplace", "refine", "hmc"))
        }
        found = [path for path in (self.root / "posteriors").glob("[!.]*") if path.suffix in POSTERIOR_SUFFIXES]
        return sorted(found, key=lambda path: (order.get(path.stem, len(order)), path.name))

    def prediction_files(self) -> list[Path]:
        """Return every prediction file of the run."""
        return sorted((self.root / "predictions").glob("[!.]*/[!.]*.h5"))

    def export_files(self) -> list[Path]:
        """Return every exported model of the run."""
        found = (self.root / "exports").glob("[!.]*")
        return sorted(path for path in found if path.suffix in FORMATS.values())

    def decision_files(self, name: str = "[!.]*") -> list[Path]:
        """Return every decision file of the run, or of the predictions of this name."""
        return sorted((self.root / "decisions").glob(f"{name}/[!.]*.safetensors"))

    def monitor_files(self) -> list[Path]:
        """Return the state of every monitor of the run."""
        return sorted((self.root / "monitor").glob("[!.]*.safetensors"))

    @property
    def recommended(self) -> Path:
        """recommended.json: the posterior and integrator to predict with."""
        return self.root / RECOMMENDED

    def metrics_files(self) -> list[Path]:
        """Return every metrics file of the run."""
        return sorted((self.root / "metrics").glob("[!.]*.json"))

    def find_posterior(self, name_or_file: str, *, flag: str, maker: str, is_meant: bool = False) -> Path:
        """Return the file of the posterior called `name_or_file`, or that file itself.

        Args:
            flag: option it was given with, for messages.
            maker: command that would create it, for the hint.
            is_meant: whether the name cannot be a misspelling of another.

        Raises:
            MissingInput: neither exists; names the command that would create it.
        """
        is_path = "/" in name_or_file or name_or_file.endswith(POSTERIOR_SUFFIXES)
        if is_path:
            if Path(name_or_file).is_file():
                return Path(name_or_file)
            came = f"{name_or_file} is a folder" if Path(name_or_file).is_dir() else f"no file {name_or_file}"
            raise MissingInput(f"{flag}: expected the name or file of a posterior; {came}", path=name_or_file)
        check_artifact_name(name_or_file, flag)
        places = [self.posterior(name_or_file, suffix=suffix) for suffix in POSTERIOR_SUFFIXES]
        for path in places:
            if path.is_file():
                return path
        names = [path.stem for path in self.posteriors()]
        there, maker = ", ".join(names) or "none", (None if is_meant else near_miss(name_or_file, names)) or maker
        raise MissingInput(
            f"no posterior {name_or_file!r} for {self.checkpoint} (looked for {places[0]}; available: {there})",
            hint=maker,
            path=places[0],
        )


def _can_be_name(folder: Path) -> bool:
    """Return whether a folder's path can be the name of a run: neither a run folder, nor . or .."""
    return folder.suffix != ".bnn" and folder.name not in ("", "..")


def folder_error(folder: Path) -> MissingInput:
    """Return the error for a folder given as a checkpoint."""
    sharded = find_sharded_folder(folder)
    if sharded is not None:
        return MissingInput(f"expected one file; {sharded.what}", hint=sharded.hint, path=folder, code="sharded")
    choice = choose_checkpoint(folder)
    if choice is not None and choice.path != folder:
        is_file = choice.path.is_file()
        hint = f"give the checkpoint inside it: {choice.path}" if is_file else folder_error(choice.path).hint
        message = f"expected a checkpoint file; {folder} is a {choice.kind}, in which {quote_name(choice.path.name)} is {choice.reason}"
        return MissingInput(message, hint=hint, path=folder)
    for name, way in _MODELS.items():
        if (folder / name).is_file():
            message = f"expected a checkpoint file; {folder} is the folder of a saved model"
            return MissingInput(message, hint=way.replace("DIR", str(folder)), path=folder)
    own = folder.with_suffix("") if folder.suffix == ".bnn" else None
    hint = f"give the checkpoint itself: {own}" if own else "give the checkpoint file inside it"
    return MissingInput(f"expected a checkpoint file; {folder} is a folder", hint=hint, path=folder)


def lock_beside(target: Path) -> Path:
    """Return the lock file of something outside a run folder."""
    return target.parent / _LOCKS / target.name


POLL_SECONDS = 0.1
WRITING = ("another bnncli is writing this artifact", "wait for it, or use \0wait\0 SECONDS")


@contextmanager
def artifact_lock(
    path: Path, *, wait: float, poll: Callable[[], None], held: tuple[str, str] = WRITING
) -> Iterator[None]:
    """Hold the lock file `path` exclusively; the first worker of a command does so for all.

    Args:
        path: the lock file, created if missing.
        wait: seconds to wait for another holder; 0 fails immediately.
        poll: called while waiting; raises to stop.
        held: message and hint if another process holds it.

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

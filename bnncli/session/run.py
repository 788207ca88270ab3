"""An open run: its folder, checkpoint, device and random streams, and the result of a command."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from bnncli import registry
from bnncli.artifacts.freshness import UNKNOWN_MAKER, Followed, check_fresh, is_same_file
from bnncli.artifacts.headers import Header
from bnncli.artifacts.known_files import State, is_settled, state_of
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import BnnError, DataError, MissingInput, UsageError
from bnncli.lazy import torch
from bnncli.models import ModelRequest, SavedModel, is_kind, open_model
from bnncli.models.sharded import checkpoint_sha256
from bnncli.numerics import random
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.options.command import (
    CommandLine,
    CommonOptions,
    ComputeOptions,
    InputOptions,
    LockOptions,
    NameOptions,
    RecordOptions,
    RunOptions,
    TrackOptions,
    WriteOptions,
    format_command_line,
    own_command,
)
from bnncli.options.declaration import CheckedOptions
from bnncli.progress import SILENT, Progress
from bnncli.session.revisions import is_another
from bnncli.system.devices import CPU, configure_torch, device_name, has_float64, select_device
from bnncli.system.input_files import nearest_file, open_regular
from bnncli.system.workers import team, worker_pool

_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".distcp")  # suffixes of weight files, not run names

_DIGESTS: dict[tuple[State, ...] | None, str] = {}  # of large files by state, for repeated use


@dataclass(frozen=True)
class ModelFiles:
    """Files below a folder, by sorted relative names."""

    folder: Path
    names: tuple[str, ...]

    @classmethod
    def of(cls, files: Sequence[Path]) -> ModelFiles:
        """Create it from files, below their innermost common folder."""
        places = [os.path.abspath(file) for file in files]
        folder = os.path.commonpath([os.path.dirname(place) for place in places])
        return cls(Path(folder), tuple(sorted(os.path.relpath(place, folder) for place in places)))

    @classmethod
    def recorded(cls, record: Mapping[str, Any], root: Path) -> ModelFiles | None:
        """Return the files in a checkpoint's record, as written by to_json; None for a single file."""
        return cls(root.absolute().parent / record["path"], tuple(record["files"])) if "files" in record else None

    def to_json(self, root: Path) -> dict[str, Any]:
        """Return the entry for provenance, relative to the run folder's parent so that both can move together."""
        return {"path": os.path.relpath(self.folder, root.absolute().parent), "files": list(self.names)}

    def sha256(self, progress: Progress = SILENT) -> str:
        """Return the hexadecimal digest of names and contents.

        Raises:
            MissingInput, DeviceError, ReadError: a file cannot be read, see open_regular.
        """
        before = self.states()
        if before not in _DIGESTS:
            found, is_known_later = [], before is not None and all(map(is_settled, before))
            for name in self.names:
                with open_regular(self.folder / name) as stream:
                    found.append([name, file_sha256(stream, progress)])
            digest = json_sha256(found)
            if not is_known_later or self.states() != before:
                return digest
            _DIGESTS[before] = digest
        return _DIGESTS[before]

    def states(self) -> tuple[State, ...] | None:
        """Return the file states, which change with every change or replacement; None if a file is missing."""
        try:
            return tuple(state_of(os.stat(self.folder / name)) for name in self.names)
        except (OSError, ValueError):  # NUL in a name
            return None

    @property
    def size(self) -> int:
        """Return the total size in bytes."""
        return sum(os.stat(self.folder / name).st_size for name in self.names)


def own_files(saved: SavedModel | None, checkpoint: Path) -> ModelFiles | None:
    """Return the files of a model with its own weights; None if CKPT or a folder of weights fills the network.

    Raises:
        MissingInput: CKPT looks like a weights file and does not exist.
    """
    if saved is None or not saved.files:
        return None
    own = [place for file in saved.files for place in (file, file.parent)]
    if _may_be_weights(checkpoint) and not any(is_same_file(checkpoint, place) for place in own):
        return None
    if checkpoint.suffix in _SUFFIXES and not checkpoint.exists():
        hint = "to use the model's own weights, give its folder or any name that is not a weights file"
        raise MissingInput(f"no file {str(checkpoint)!r}", path=checkpoint, hint=hint)
    return ModelFiles.of(saved.files)


def _may_be_weights(checkpoint: Path) -> bool:
    """Return whether CKPT is a file or a folder with weights, not just a name."""
    is_folder = checkpoint.is_dir()
    return checkpoint.is_file() or (is_folder and any(one.suffix in _SUFFIXES for one in checkpoint.iterdir()))


def open_requested_model(spec: str | None, arguments: Sequence[str], **asked: Any) -> SavedModel | None:
    """Open the saved model of `--model`; None for a built-in network, a factory, or no network.

    Args:
        arguments: each as KEY=VALUE.
        asked: the other fields of ModelRequest.

    Raises the errors of open_model.
    """
    if spec is None or not is_kind(spec):
        return None
    return open_model(spec, ModelRequest(arguments_by_name(arguments), **asked))


def arguments_by_name(texts: Sequence[str]) -> dict[str, str]:
    """Parse the arguments of a network.

    Raises:
        UsageError: a text is not KEY=VALUE.
    """
    arguments = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"\0model_arg\0: expected KEY=VALUE; got {text!r}")
        arguments[key] = value
    return arguments


@dataclass(frozen=True)
class Table:
    """A table printed on stdout, followed by `notes`; `narrow` replaces it if it does not fit."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""
    notes: list[str] = field(default_factory=list)
    narrow: list[Table] = field(default_factory=list)


@dataclass
class Result:
    """Result of a command, printed by the command line as text or as one JSON document.

    Attributes:
        action: computed, up_to_date, replaced or planned; "" for commands that write nothing.
        extra: further keys of the JSON document, such as rows or posteriors.
        summary: lines for people, on stderr.
        lines: result lines on stdout; artifact paths if empty.
        failure: a negative verdict, raised after everything is written and printed.
    """

    action: str = ""
    outputs: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    failure: BnnError | None = None

    def add(self, other: Result) -> None:
        """Add the result of another artifact of the same command."""
        ranks = ("", "up_to_date", "planned", "computed", "replaced")
        self.action = max(self.action, other.action, key=ranks.index)
        self.outputs += other.outputs
        self.inputs += [entry for entry in other.inputs if entry not in self.inputs]
        self.summary += other.summary
        self.lines += other.lines
        self.failure = self.failure or other.failure


class Voice(Progress, Protocol):
    """Receiver of a run's messages: a command's console, or a listener in Python.

    Attributes:
        options: verbosity of a command.
        warnings: warnings so far, without repetition.
    """

    options: CommonOptions
    warnings: list[str]

    def debug(self, text: str) -> None:
        """Send a debug line."""

    def info(self, text: str) -> None:
        """Send an informational line."""

    def poll(self, where: str = "") -> None:
        """Raise Interrupted if a signal has arrived; `where` describes the progress."""


@dataclass
class Run:
    """One invocation of a command, passed to its `execute`.

    Attributes:
        line: the command line, with options from the environment and configuration file.
        is_named: whether CKPT is only the run's name, for a command that creates a run without checkpoint.
        has_device: whether the command computes, so that its result names the device.
        ran_network: whether a network computed features, on `network_device`.
        followed: cached information on input files, until the command writes one.
    """

    command: str
    line: CommandLine
    arguments: dict[str, Any]
    console: Voice
    run_options: RunOptions
    write: WriteOptions
    compute: ComputeOptions
    naming: NameOptions
    lock: LockOptions = field(default_factory=LockOptions)
    inputs: InputOptions = field(default_factory=InputOptions)
    record: RecordOptions = field(default_factory=RecordOptions)
    track: TrackOptions = field(default_factory=TrackOptions)
    is_named: bool = False
    started: float = field(default_factory=time.monotonic)
    heads: dict[str, tuple[str, str]] = field(default_factory=dict)
    followed: Followed = field(default_factory=dict)
    has_device: bool = False
    ran_network: bool = False

    @cached_property
    def folder(self) -> RunFolder:
        """Return the run folder of the given checkpoint."""
        return RunFolder.of(Path(self.arguments["ckpt"]), self.run_options.run_dir, is_name=self.is_named)

    @property
    def checkpoint_path(self) -> Path:
        """Return the checkpoint's path as given on the command line."""
        return self.folder.checkpoint

    def no_run(self) -> MissingInput:
        """Return the error for a checkpoint without run folder, with the likely file or the command that creates a run."""
        path = self.checkpoint_path
        if not path.exists():
            message = f"no checkpoint {path}, and no run folder {self.folder.root}"
            return MissingInput(message, hint=nearest_file(path), path=path)
        hint = self.suggest("extract-features", model="MODEL", data=["train=SPEC", "test=SPEC"])
        message = f"{path} has no run folder (looked for {self.folder.root})"
        return MissingInput(message, hint=hint, path=self.folder.root)

    def suggest(self, command: str, /, **options: object) -> str:
        """Return a quoted command on this run with these options by field, ready to paste."""
        return format_command_line(command, str(self.arguments["ckpt"]), **options, run_dir=self.run_options.run_dir)

    def remake(self, header: Header, *, force: bool = False) -> str | None:
        """Return the command that created an artifact, ready to paste, with the checkpoint's current location.

        None if the record is not a bnncli command; it is never repeated verbatim.
        """
        line = self.made_by(header)
        return None if line is None else line.having("force", force).pasted()

    def made_by(self, header: Header) -> CommandLine | None:
        """Return `remake` in parsed form; None if the record is not a bnncli command."""
        line = own_command(header.provenance["command"], str(self.arguments["ckpt"]))
        if line is None:
            return None
        takes_recommended = line.command == "predict" and not any(
            map(line.gives, ("posterior", "integrator", "layers"))
        )
        if takes_recommended and header.kind == "predictions" and self.folder.recommended.is_file():
            # Named explicitly, because the recommendation of auto may have changed.
            line = line.having("posterior", [str(header.meta["posterior"])])
            line = line.having("integrator", [str(header.meta["integrator"])])
        return line.having("run_dir", self.run_options.run_dir)

    @cached_property
    def device(self) -> torch.device:
        """Return the device to compute on, after setting threads and determinism."""
        configure_torch(threads=self.compute.threads, deterministic=self.compute.deterministic)
        device = torch.device(self.device_name)
        select_device(device)
        return device

    def require_device(self) -> None:
        """Check that a named device exists, and let the result name it; auto is resolved when first needed.

        Raises:
            UsageError, DeviceError: a named device is not available.
        """
        self.has_device = True
        if self.compute.device != "auto" or self.console.options.verbose:
            _ = self.device_name

    @cached_property
    def device_name(self) -> str:
        """Return the device to compute on (cpu, cuda:0, ...), resolved once: the CPU in place of one without float64."""
        name = device_name(self.compute.device)
        if self.compute.device == "auto" and name == "cpu":
            self.console.debug("no GPU found: computing on the CPU")
        if self.compute.device in ("auto", CPU) or has_float64(name):
            return name
        self.console.info(f"{name} has no float64: networks' forward passes run on it, everything else on the CPU")
        return CPU

    @property
    def network_device(self) -> torch.device:
        """Return the device of networks' forward passes: `device`, or the named one that has no float64."""
        device = self.device
        return device if self.compute.device in ("auto", CPU) else torch.device(device_name(self.compute.device))

    @property
    def reported_device(self) -> str:
        """Return the device that results are said to come from: that of the network where it ran."""
        return str(self.network_device) if self.ran_network else self.device_name

    def environment(self) -> dict[str, Any]:
        """Return seed, device, threads and workers for provenance."""
        others, asked = team(), worker_pool()
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        host = {"host": socket.gethostname()} if self.record.record_host else {}
        return {
            **host,
            "seed": self.compute.seed,
            "deterministic": self.compute.deterministic,
            "device": self.reported_device,
            "gpu": gpu,
            "threads": torch.get_num_threads(),
            **({} if others is None else {"workers": others.size, "shards": others.num_shards}),
            **({} if asked is None else {"workers": asked.size}),
        }

    def stream(self, name: str) -> torch.Generator:
        """Return the random stream called `name`, under the user's seed."""
        return random.stream(self.compute.seed, name)

    def belongs(self, header: Header) -> dict[str, Any] | None:
        """Check that an artifact comes from the given checkpoint, and return the checkpoint's record.

        Raises:
            MissingInput: the artifact has a checkpoint that no longer exists.
            DataError: it comes from another checkpoint.
        """
        recorded = header.provenance.get("checkpoint")
        if recorded is None:
            return None
        current = self._current_weights(recorded)
        if current != recorded["weights_digest"]:
            raise DataError(
                f"{header.path} was created from a checkpoint other than {self.checkpoint_path}",
                code="wrong_checkpoint",
                hint=self.remake(header) or UNKNOWN_MAKER,
                path=header.path,
            )
        return dict(recorded)

    def use(self, header: Header) -> None:
        """Check that an artifact is from this checkpoint and fresh, or stale with --allow-stale and a warning.

        Raises:
            DataError: it comes from another checkpoint, or is stale; names the command that recreates it.
        """
        checkpoint = self.belongs(header)
        try:
            digest = checkpoint["weights_digest"] if checkpoint else None
            check_fresh(
                header, is_another=is_another, weights_digest=digest, remake=self.remake, followed=self.followed
            )
        except DataError as error:
            if not self.inputs.allow_stale or error.code != "stale_input":
                raise
            self.console.warn(f"{error.message}; using it anyway (\0allow_stale\0)")

    def _current_weights(self, recorded: dict[str, Any]) -> str:
        """Return the digest of the checkpoint's current weights; a file with the recorded bytes is not parsed."""
        files = ModelFiles.recorded(recorded, self.folder.root)
        if files is not None:
            try:
                digest = files.sha256(self.console)
            except MissingInput as error:
                message = f"{error.message}; the run was created from this model"
                raise MissingInput(
                    message, hint="restore the model, or extract the features again", path=error.path
                ) from None
            return str(recorded["weights_digest"]) if digest == recorded["file_sha256"] else f"files:{digest}"
        if not hasattr(self, "_weights"):
            path = self.checkpoint_path
            if not path.exists():
                raise MissingInput(
                    f"no checkpoint {path}", hint="give the checkpoint that the run was created from", path=path
                )
            if checkpoint_sha256(path) == recorded["file_sha256"]:
                self._weights = str(recorded["weights_digest"])
            else:
                from bnncli.models.checkpoints import load_checkpoint

                try:
                    found = load_checkpoint(path, wanted=recorded.get("selected_key"))
                except UsageError:  # its layout has changed
                    found = load_checkpoint(path)
                self._weights = found.weights_digest
        return self._weights

    @property
    def seconds(self) -> float:
        """Return the wall time since the command started, in seconds."""
        return time.monotonic() - self.started


SHARED_OPTIONS = (
    CommonOptions,
    RunOptions,
    WriteOptions,
    LockOptions,
    InputOptions,
    ComputeOptions,
    RecordOptions,
    TrackOptions,
    NameOptions,
)


def begin_run(
    line: CommandLine, arguments: dict[str, Any], console: Voice, options: Mapping[type, Any], **beside: Any
) -> tuple[Run, Any]:
    """Return the run of a command and the command's own options.

    Args:
        options: by option class; the class that is not shared is the command's own.
        beside: further fields of the run.
    """
    found = Run(
        command=line.command,
        line=line,
        arguments=arguments,
        console=console,
        run_options=options.get(RunOptions, RunOptions()),
        write=options.get(WriteOptions, WriteOptions()),
        naming=options.get(NameOptions, NameOptions()),
        lock=options.get(LockOptions, LockOptions()),
        inputs=options.get(InputOptions, InputOptions()),
        record=options.get(RecordOptions, RecordOptions()),
        track=options.get(TrackOptions, TrackOptions()),
        **{"compute": options.get(ComputeOptions, ComputeOptions()), **beside},
    )
    return found, next((options[group] for group in line.groups if group not in SHARED_OPTIONS), None)


def run_command(run: Run, command: str, checkpoint: Any, options: CheckedOptions) -> Result:
    """Run another command on a checkpoint with the options of this run, and show its line and summary."""
    line = CommandLine.of(command, str(checkpoint), options, run.compute, run.run_options)
    run.console.info("$ " + line.pasted())
    module = registry.load_module("commands", command)
    given = [checkpoint] if module.COMMAND.arguments[0].is_many else checkpoint
    step = replace(
        run, command=command, line=line, arguments={"ckpt": given}, naming=NameOptions(), started=time.monotonic(),
        ran_network=False,
    )  # fmt: skip
    result: Result = module.execute(step, options)
    for text in result.summary:
        run.console.info("  " + text)
    return result


def result_document(run: Run, result: Result) -> dict[str, Any]:
    """Return the JSON document of a command's result."""
    document: dict[str, Any] = {"schema": "bnncli.result/1", "ok": True, "command": run.command}
    if result.action:
        document["action"] = result.action
        document["outputs"], document["inputs"] = result.outputs, result.inputs
        document["seed"] = run.compute.seed
        is_known = run.has_device or run.ran_network
        document["device"] = run.reported_device if is_known else run.__dict__.get("device_name")
    if result.metrics:
        document["metrics"] = result.metrics
    return document | result.extra | {"warnings": run.console.warnings, "seconds": round(run.seconds, 3)}


def source_json(source: Source) -> dict[str, str]:
    """Return an input's entry in the JSON result."""
    return {"role": source.role, "path": str(source.path), "content_digest": source.content_digest}


def each_checkpoint(run: Run) -> list[Run]:
    """Return a run for each checkpoint.

    Raises:
        UsageError: a checkpoint is named twice, or a run folder has several.
    """
    paths = [Path(path) for path in run.arguments["ckpt"]]
    if len(paths) > 1 and run.run_options.run_dir is not None:
        raise UsageError("\0run_dir\0 names the run folder of one checkpoint; got several checkpoints")
    runs = [replace(run, arguments={**run.arguments, "ckpt": path}, heads={}) for path in paths]
    roots = [one.folder.root.resolve() for one in runs]
    for place, root in enumerate(roots):
        if root in roots[:place]:
            raise UsageError(f"{paths[place]} is given twice; give each seed's checkpoint once")
    return runs

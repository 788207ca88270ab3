"""What every stage works with: the run's folder, checkpoint, device, streams; and what it gives back."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from bnncli.artifacts.freshness import UNKNOWN_MAKER, Followed, check_fresh
from bnncli.artifacts.headers import Header
from bnncli.artifacts.provenance import Source
from bnncli.artifacts.run_folder import RunFolder
from bnncli.errors import BnnError, DataError, MissingInput, UsageError
from bnncli.lazy import torch
from bnncli.models.sharded import checkpoint_sha256
from bnncli.numerics import random
from bnncli.options.command_line import CommandLine, own_command, pasted
from bnncli.options.common import (
    CommonOptions,
    ComputeOptions,
    InputOptions,
    LockOptions,
    NameOptions,
    RecordOptions,
    RunOptions,
    WriteOptions,
)
from bnncli.progress import Progress
from bnncli.run.model_files import ModelFiles
from bnncli.run.revisions import is_another
from bnncli.system.devices import configure_torch, device_name, select_device
from bnncli.system.input_files import nearest_file
from bnncli.system.workers import crew, team


@dataclass(frozen=True)
class Table:
    """A table for people: printed on stdout. `notes` stand below it; `narrow` takes its place where it does not fit."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""
    notes: list[str] = field(default_factory=list)
    narrow: list[Table] = field(default_factory=list)


@dataclass
class Result:
    """What a stage gives back; the command line prints it as text or as one JSON document.

    Attributes:
        action: computed, up_to_date, replaced or planned; "" for commands that write nothing.
        extra: further keys of the JSON document, such as rows or posteriors.
        summary: lines for people, on stderr.
        lines: lines of the result, on stdout (artifact paths when empty).
        failure: a negative verdict, raised after everything has been written and printed.
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
        """Take in the result of one more artifact of the same command."""
        ranks = ("", "up_to_date", "planned", "computed", "replaced")
        self.action = max(self.action, other.action, key=ranks.index)
        self.outputs += other.outputs
        self.inputs += [entry for entry in other.inputs if entry not in self.inputs]
        self.summary += other.summary
        self.lines += other.lines
        self.failure = self.failure or other.failure


class Voice(Progress, Protocol):
    """Where a run says what it has to say: the console of a command, or what listens in Python.

    Attributes:
        options: how a command talks.
        warnings: what was warned of, each text once.
    """

    options: CommonOptions
    warnings: list[str]

    def debug(self, text: str) -> None:
        """A line for whoever wants to know more."""

    def info(self, text: str) -> None:
        """A line that is no warning."""

    def poll(self, where: str = "") -> None:
        """Raise Interrupted when a signal has come; `where` says how far the work was."""


@dataclass
class Run:
    """One invocation of a command, as its stage sees it.

    Attributes:
        line: the command as it was given, with what the environment and the configuration file gave.
        is_named: whether CKPT is just the run's name: the command makes a run that has no checkpoint.
        has_device: whether the command computes, so that its result names the device.
        followed: what is known of files that artifacts were made from, until the command writes one.
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
    is_named: bool = False
    started: float = field(default_factory=time.monotonic)
    heads: dict[str, tuple[str, str]] = field(default_factory=dict)
    followed: Followed = field(default_factory=dict)
    has_device: bool = False

    @cached_property
    def folder(self) -> RunFolder:
        """The run folder of the checkpoint that was given."""
        return RunFolder.of(Path(self.arguments["ckpt"]), self.run_options.run_dir, is_name=self.is_named)

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint as it was named on the command line."""
        return self.folder.checkpoint

    def no_run(self) -> MissingInput:
        """The error for a checkpoint without a run folder: the file that may have been meant, or what makes a run."""
        path = self.checkpoint_path
        if not path.exists():
            message = f"no checkpoint {path}, and no run folder {self.folder.root}"
            return MissingInput(message, hint=nearest_file(path), path=path)
        hint = self.suggest("extract-features", model="MODEL", data=["train=SPEC", "test=SPEC"])
        message = f"{path} has no run folder (looked for {self.folder.root})"
        return MissingInput(message, hint=hint, path=self.folder.root)

    def suggest(self, command: str, /, **options: object) -> str:
        """A command on this run with these options, by field, to be pasted: quoted, and with the run folder that was given."""
        return pasted(command, str(self.arguments["ckpt"]), **options, run_dir=self.run_options.run_dir)

    def remake(self, header: Header, *, force: bool = False) -> str | None:
        """The command that made an artifact, to be pasted: on the checkpoint where it is now, if it was moved.

        None where the record is no command of ours: it is never repeated as it stands.
        """
        line = self.made_by(header)
        return None if line is None else line.having("force", force).pasted()

    def made_by(self, header: Header) -> CommandLine | None:
        """The command that made an artifact, on the checkpoint where it is now; None where the record is no command of ours."""
        line = own_command(header.provenance["command"], str(self.arguments["ckpt"]))
        if line is None:
            return None
        takes_recommended = line.command == "predict" and not any(
            map(line.gives, ("posterior", "integrator", "layers"))
        )
        if takes_recommended and header.kind == "predictions" and self.folder.recommended.is_file():
            # Named, for what auto recommends now may be another.
            line = line.having("posterior", [str(header.meta["posterior"])])
            line = line.having("integrator", [str(header.meta["integrator"])])
        return line.having("run_dir", self.run_options.run_dir)

    @cached_property
    def device(self) -> torch.device:
        """The device to compute on; threads and determinism are set with it."""
        configure_torch(threads=self.compute.threads, deterministic=self.compute.deterministic)
        device = torch.device(self.device_name)
        select_device(device)
        return device

    def require_device(self) -> None:
        """Pass when the device is there; the result names it. One that is chosen by itself is looked for when it is needed.

        Raises:
            UsageError, DeviceError: it was asked for by name, and is not there.
        """
        self.has_device = True
        if self.compute.device != "auto" or self.console.options.verbose:
            _ = self.device_name

    @cached_property
    def device_name(self) -> str:
        """The device to compute on, resolved once: cpu, cuda:0, ..."""
        name = device_name(self.compute.device)
        if self.compute.device == "auto" and name == "cpu":
            self.console.debug("no GPU found: computing on the CPU")
        return name

    def environment(self) -> dict[str, Any]:
        """Seed, device, threads and workers, as provenance records them."""
        others, asked = team(), crew()
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        host = {"host": socket.gethostname()} if self.record.record_host else {}
        return {
            **host,
            "seed": self.compute.seed,
            "deterministic": self.compute.deterministic,
            "device": str(self.device),
            "gpu": gpu,
            "threads": torch.get_num_threads(),
            **({} if others is None else {"workers": others.size, "shards": others.num_shards}),
            **({} if asked is None else {"workers": asked.size}),
        }

    def stream(self, name: str) -> torch.Generator:
        """The random stream called `name`, under the user's seed."""
        return random.stream(self.compute.seed, name)

    def belongs(self, header: Header) -> dict[str, Any] | None:
        """The checkpoint's record, once the artifact is known to come from the checkpoint that was named.

        Raises:
            MissingInput: the artifact has a checkpoint, and it is gone.
            DataError: it comes from another one.
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
        """Pass an artifact as an input: of this checkpoint, and fresh, or stale with --allow-stale and a warning.

        Raises:
            DataError: it comes from another checkpoint, or is stale, with the command that makes it again.
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
        """Digest of the checkpoint's weights as they are now; a file with the recorded bytes is not parsed."""
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
                except UsageError:  # it is laid out in another way now
                    found = load_checkpoint(path)
                self._weights = found.weights_digest
        return self._weights

    @property
    def seconds(self) -> float:
        """Wall time since the command began."""
        return time.monotonic() - self.started


def source_json(source: Source) -> dict[str, str]:
    """An input as the JSON result names it."""
    return {"role": source.role, "path": str(source.path), "content_digest": source.content_digest}

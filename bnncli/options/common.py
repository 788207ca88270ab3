"""Options that many commands share: streams, the run folder, writing, locking, computing, naming."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnncli.errors import UsageError
from bnncli.options.declaration import Checked, check_artifact_name, option


@dataclass(frozen=True)
class CommonOptions(Checked):
    """Options of every command: streams, verbosity, configuration."""

    json: bool = option(False, "Print one JSON document on stdout instead of text.", env_common=True)
    quiet: bool = option(False, "Print errors only.", short="-q", env_common=True)
    verbose: int = option(0, "Print more. Repeat it to print the libraries' messages too.", short="-v", env_common=True)
    log_format: str = option("text", "Format of log lines.", choices=("text", "json"), env_common=True)
    log_file: str | None = option(
        None, "Also write log lines to this file.", metavar="FILE", writes=True, env_common=True
    )
    progress: str = option(
        "auto",
        "Progress display. auto shows a bar on a terminal and log lines otherwise.",
        choices=("auto", "bar", "log", "none"),
        env_common=True,
    )
    config: str | None = option(
        None,
        "TOML file with option defaults. Default: $BNNCLI_CONFIG, then ./bnncli.toml.",
        metavar="FILE",
        env_common=True,
    )


@dataclass(frozen=True)
class RunOptions(Checked):
    """Options of every command that has a run."""

    run_dir: str | None = option(
        None,
        "Run folder. Default: CKPT.bnn beside the checkpoint.",
        metavar="DIR",
        env_common=True,
    )


@dataclass(frozen=True)
class WriteOptions(Checked):
    """Options of commands that write artifacts."""

    force: bool = option(False, "Recompute and replace existing output.", short="-f")
    dry_run: bool = option(False, "Print what would be done, without doing it.", short="-n")


@dataclass(frozen=True)
class LockOptions(Checked):
    """Options of commands that lock what they write."""

    wait: float = option(
        0.0,
        "Seconds to wait for another bnncli that is writing the same artifact.",
        minimum=0,
        env_common=True,
    )


@dataclass(frozen=True)
class InputOptions(Checked):
    """Options of commands that take artifacts as inputs."""

    allow_stale: bool = option(
        False,
        "Use stale inputs (made from files that have changed since). The artifact records a warning.",
        group="Inputs",
        is_rare=True,
    )


def accept_poor_network_option(*, is_recorded: bool = True) -> Any:
    """Declare the option of commands that stop on a misread network, of a group that artifacts record or of another."""
    return option(
        False,
        "Continue even if the network probably misreads its inputs or labels.",
        numeric=not is_recorded,
        group="Inputs",
        is_rare=True,
    )


@dataclass(frozen=True)
class ComputeOptions(Checked):
    """Options of commands that compute."""

    seed: int = option(0, "Random seed.", minimum=0, env_common=True)
    device: str = option("auto", "Device: auto (a GPU if there is one), cpu, cuda or cuda:N.", env_common=True)
    threads: int | None = option(None, "CPU threads. Default: all cores.", minimum=1, maximum=1024, env_common=True)
    deterministic: bool = option(False, "Use deterministic kernels only.", env_common=True)
    shards: int | None = option(
        None,
        "Sum over this many fixed parts of the data, so that results do not depend on the number of workers. "
        "Default: 64 under torchrun, else 1.",
        minimum=1,
        maximum=4096,
        env_common=True,
    )


@dataclass(frozen=True)
class RecordOptions(Checked):
    """Options of commands whose artifacts say where they come from."""

    record_host: bool = option(False, "Record this machine's name in the artifact.", env_common=True)


@dataclass(frozen=True)
class NameOptions(Checked):
    """Options that say where one artifact goes."""

    name: str | None = option(None, "Name of the artifact. Default: the method's name.", metavar="NAME", group="Output")
    out: str | None = option(
        None, "Write to this file instead of the run folder.", short="-o", metavar="FILE", writes=True, group="Output"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and self.out is not None:
            raise UsageError("\0name\0 and \0out\0 are mutually exclusive: give one of them")
        if self.out is not None and Path(self.out).name in ("", ".."):
            raise UsageError(f"\0out\0: expected a file; got {self.out!r}", hint="add a file name: \0out\0 FOLDER/NAME")
        if self.name is not None:
            check_artifact_name(self.name, "\0name\0")

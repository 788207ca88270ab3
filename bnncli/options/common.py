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
    verbose: int = option(0, "Print more; twice for the libraries' own messages.", short="-v", env_common=True)
    log_format: str = option("text", "Form of log lines: text or json.", choices=("text", "json"), env_common=True)
    log_file: str | None = option(
        None, "Write log lines to this file as well.", metavar="FILE", writes=True, env_common=True
    )
    progress: str = option(
        "auto",
        "auto (a bar on a terminal, else log lines), bar, log or none.",
        choices=("auto", "bar", "log", "none"),
        env_common=True,
    )
    config: str | None = option(
        None,
        "TOML file with defaults [BNNCLI_CONFIG, then ./bnncli.toml].",
        metavar="FILE",
        env_common=True,
    )


@dataclass(frozen=True)
class RunOptions(Checked):
    """Options of every command that has a run."""

    run_dir: str | None = option(
        None,
        "The run folder, when it is not CKPT.bnn beside the checkpoint.",
        metavar="DIR",
        env_common=True,
    )


@dataclass(frozen=True)
class WriteOptions(Checked):
    """Options of commands that write artifacts."""

    force: bool = option(False, "Recompute, and replace what is there.", short="-f")
    dry_run: bool = option(False, "Say what would be done, and do nothing.", short="-n")


@dataclass(frozen=True)
class LockOptions(Checked):
    """Options of commands that lock what they write."""

    wait: float = option(
        0.0,
        "Seconds to wait for another bnncli that writes the same artifact.",
        minimum=0,
        env_common=True,
    )


@dataclass(frozen=True)
class InputOptions(Checked):
    """Options of commands that take artifacts as inputs."""

    allow_stale: bool = option(
        False, "Use an input although what it was made from has changed since; recorded as a warning."
    )


def accept_poor_network_option(*, is_recorded: bool = True) -> Any:
    """Declare the option of commands that stop on a misread network, of a group that artifacts record or of another."""
    return option(
        False,
        "Go on where extract-features found that the network probably misreads its inputs or labels.",
        numeric=not is_recorded,
    )


@dataclass(frozen=True)
class ComputeOptions(Checked):
    """Options of commands that compute."""

    seed: int = option(0, "Seed of every random stream.", minimum=0, env_common=True)
    device: str = option("auto", "auto (a GPU where there is one), cpu, cuda or cuda:N.", env_common=True)
    threads: int | None = option(None, "CPU threads; all cores by default.", minimum=1, maximum=1024, env_common=True)
    deterministic: bool = option(False, "Use deterministic kernels only.", env_common=True)
    shards: int | None = option(
        None,
        "Parts of the examples whose sums are added in a fixed order, and networks (of fit-lbbnn and train) in batches of a "
        "fixed size: results are then the same for any number of workers. 64 under torchrun; otherwise one, unless asked.",
        minimum=1,
        maximum=4096,
        env_common=True,
    )


@dataclass(frozen=True)
class RecordOptions(Checked):
    """Options of commands whose artifacts say where they come from."""

    record_host: bool = option(False, "Record the name of this machine in the artifact.", env_common=True)


@dataclass(frozen=True)
class NameOptions(Checked):
    """Options that say where one artifact goes."""

    name: str | None = option(None, "Name of the artifact, instead of its method's.", metavar="NAME")
    out: str | None = option(None, "Write to exactly this file.", short="-o", metavar="FILE", writes=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name is not None and self.out is not None:
            raise UsageError("\0name\0 and \0out\0 exclude each other: give one")
        if self.out is not None and Path(self.out).name in ("", ".."):
            raise UsageError(f"\0out\0: expected a file; got {self.out!r}", hint="add a file name: \0out\0 FOLDER/NAME")
        if self.name is not None:
            check_artifact_name(self.name, "\0name\0")

"""Declare a command and its shared options; parse and render command lines."""

from __future__ import annotations

import functools
import shlex
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.options.declaration import (
    CheckedOptions,
    build_options,
    check_artifact_name,
    declaration,
    flag_of,
    map_options,
    option,
)


@dataclass(frozen=True)
class CommonOptions(CheckedOptions):
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
class RunOptions(CheckedOptions):
    """Options of commands that use a run folder."""

    run_dir: str | None = option(
        None,
        "Run folder. Default: CKPT.bnn beside the checkpoint.",
        metavar="DIR",
        env_common=True,
    )


@dataclass(frozen=True)
class WriteOptions(CheckedOptions):
    """Options of commands that write artifacts."""

    force: bool = option(False, "Recompute and replace existing output.", short="-f")
    dry_run: bool = option(False, "Print what would be done, without doing it.", short="-n")


@dataclass(frozen=True)
class LockOptions(CheckedOptions):
    """Options of commands that lock their outputs."""

    wait: float = option(
        0.0,
        "Seconds to wait for another bnncli that is writing the same artifact.",
        minimum=0,
        env_common=True,
    )


@dataclass(frozen=True)
class InputOptions(CheckedOptions):
    """Options of commands that take artifacts as inputs."""

    allow_stale: bool = option(
        False,
        "Use stale inputs (made from files that have changed since). The artifact records a warning.",
        group="Inputs",
        is_rare=True,
    )


def accept_poor_network_option(*, is_recorded: bool = True) -> Any:
    """Declare --accept-poor-network, recorded in artifacts if `is_recorded`."""
    return option(
        False,
        "Continue even if the network probably misreads its inputs or labels.",
        numeric=not is_recorded,
        group="Inputs",
        is_rare=True,
    )


@dataclass(frozen=True)
class ComputeOptions(CheckedOptions):
    """Options of commands that compute."""

    seed: int = option(0, "Random seed.", minimum=0, env_common=True)
    device: str = option(
        "auto", "Device: auto (a CUDA GPU if there is one), cpu, cuda, cuda:N or mps (networks only).", env_common=True
    )
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
class RecordOptions(CheckedOptions):
    """Options of commands that record provenance."""

    record_host: bool = option(False, "Record this machine's name in the artifact.", env_common=True)


TRACKERS = ("mlflow", "wandb", "tensorboard")


def check_trackers(texts: Sequence[str], flag: str) -> None:
    """Raise UsageError unless each text is the name of a tracker, or tensorboard:DIR."""
    for text in texts:
        name, colon, place = text.partition(":")
        if name not in TRACKERS or (colon and (name != "tensorboard" or not place)):
            raise UsageError(f"{flag}: expected mlflow, wandb, tensorboard or tensorboard:DIR; got {text!r}")


@dataclass(frozen=True)
class TrackOptions(CheckedOptions):
    """Options of commands whose result can be logged."""

    log_to: list[str] = option(
        [],
        "Also log the result's numbers to an experiment tracker. The tracker's own settings say where.",
        metavar="mlflow|wandb|tensorboard[:DIR]",
        env_common=True,
        check=check_trackers,
    )


@dataclass(frozen=True)
class NameOptions(CheckedOptions):
    """Options that name the output artifact."""

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


COMPUTE = (ComputeOptions, RecordOptions, WriteOptions, LockOptions, TrackOptions, RunOptions, CommonOptions)
READ = (RunOptions, CommonOptions)
# sections of the list of commands, in display order
SECTIONS = ("Start", "Fit", "Use", "Judge", "Files", "Research", "More")


@dataclass(frozen=True)
class Argument:
    """A positional argument.

    Args:
        is_many: takes one or more values.
        is_optional: may be omitted.
        writes: names a file that the command writes.
    """

    name: str
    help: str
    is_many: bool = False
    is_optional: bool = False
    writes: bool = False


CKPT = Argument("ckpt", "The checkpoint. Its artifacts are in the run folder CKPT.bnn beside it.")


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        groups: option classes; the command's own class, the one that is not shared, is passed to `run`.
        section: one of SECTIONS.
        place: sort key within the section, ascending; ties are sorted by name.
        name: set from the file name by the code that reads the declaration.
    """

    summary: str
    details: str
    groups: tuple[type, ...]
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...] = (CKPT,)
    parent: str = ""
    section: str = SECTIONS[-1]
    place: int = 1000
    name: str = ""

    @property
    def module(self) -> str:
        """Name of the module in bnncli.commands."""
        return self.name.replace("-", "_")


def own_options(**specs: Any) -> type[CheckedOptions]:
    """Build an option class from keyword arguments made by `option`; types follow the defaults."""
    found = []
    for name, spec in specs.items():
        is_list = spec.default is MISSING
        found.append((name, list[str] if is_list else str | None if spec.default is None else type(spec.default), spec))
    return make_dataclass("OwnOptions", found, bases=(CheckedOptions,), frozen=True)


Groups = Sequence[type[CheckedOptions]]
Part = tuple[str | None, str]  # option name (None for a positional argument) and value as typed
MAX_LENGTH = 10_000  # of all words together; a list of data sets may be long
# Options left to the user who pastes the command: output streams, trackers, the run folder, overwriting.
_NOT_SHOWN = {spec.name for group in (CommonOptions, TrackOptions, RunOptions) for spec in fields(group)} | {
    "force",
    "dry_run",
}
_NO_VALUE = "True"


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line of bnncli.

    Attributes:
        command: name, such as refine; a two-word name is joined with a dash.
        groups: the command's option classes.
        parts: arguments and options, in the order given.
    """

    command: str
    groups: tuple[type[CheckedOptions], ...]
    parts: tuple[Part, ...]

    @classmethod
    def parse(cls, command: str, words: Sequence[str], groups: Groups) -> CommandLine:
        """Parse the words after the command name, without checking values.

        Raises:
            LookupError: an unknown option, a missing value, or a value for a switch.
        """
        return cls(command, tuple(groups), tuple(_parse(words, tuple(groups))))

    @classmethod
    def of(cls, command: str, argument: str, *options: CheckedOptions) -> CommandLine:
        """Return the command line that sets the options that differ from their defaults."""
        line = cls(command, tuple(type(group) for group in options), ((None, argument),))
        for group in options:
            for name, value in group.given().items():
                line = line.having(name, value)
        return line

    def gives(self, name: str) -> bool:
        """Return whether an option is given."""
        return any(name == given for given, _ in self.parts)

    def having(self, name: str, value: object) -> CommandLine:
        """Return a copy with an option set to `value`: True sets a switch, False or None removes the option."""
        others = tuple(part for part in self.parts if part[0] != name)
        values = value if isinstance(value, list) else [] if value is False or value is None else [value]
        return replace(self, parts=(*others, *((name, str(one)) for one in values)))

    def of_checkpoint(self, path: str) -> CommandLine:
        """Return a copy with another CKPT, of a command that takes one."""
        return replace(self, parts=tuple((name, path if name is None else value) for name, value in self.parts))

    def pasted(self) -> str:
        """Return the command line, quoted for a shell."""
        return shlex.join(self.words())

    def words(self) -> list[str]:
        """Return the words of the command line, unquoted, starting with `bnncli`."""
        said = ["bnncli", self.command]
        for name, value in self.parts:
            if name is None:
                said.append(f"./{value}" if value.startswith("-") and value != "-" else value)
            elif _is_alone(name, self.groups):
                said.append(flag_of(name))
            else:  # a value that looks like an option is joined with =
                said += [f"{flag_of(name)}={value}"] if value.startswith("-") else [flag_of(name), value]
        return said

    def values(self) -> dict[str, object]:
        """Return the given options, each converted to its type, except the counted -v. Raises ValueError."""
        options = _options(self.groups)
        found: dict[str, object] = {}
        for name, text in self.parts:
            if name is None or name == "verbose":
                continue
            kind = _kind(options[name][1])
            if kind is list:
                found[name] = [*typing.cast(list[str], found.get(name, [])), text]
            else:
                found[name] = True if kind is bool else kind(text)
        return found


def format_command_line(command: str, /, *arguments: str, **options: object) -> str:
    """Return a shell command line: pasted("predict", "c.pt", integrator="mc", qmc=True)."""
    groups = declaration("commands", command, "COMMAND").groups
    line = CommandLine(command, groups, tuple((None, argument) for argument in arguments))
    for name, value in options.items():
        line = line.having(name, value)
    return line.pasted()


def own_command(words: Sequence[object], argument: str) -> CommandLine | None:
    """Return a recorded command `bnncli COMMAND ...`, or None unless it is a valid command of ours.

    The record may be forged, and users paste hints. The result therefore contains only known options with valid values.

    Args:
        words: recorded words, of any type.
        argument: replaces the recorded first argument, CKPT; further arguments are kept.
    """
    texts = [word for word in words if isinstance(word, str) and word.isprintable()]
    if len(texts) != len(words) or len(texts) < 3 or sum(map(len, texts)) > MAX_LENGTH:
        return None
    groups = _groups_of_maker(texts[1]) if texts[0] == "bnncli" else None
    if groups is None:
        return None
    try:
        line = CommandLine.parse(texts[1], texts[2:], groups)
        _check(line, is_of_many=_takes_many(line.command))
    except (UsageError, ValueError, LookupError, TypeError):
        return None
    first = next(place for place, (name, _) in enumerate(line.parts) if name is None)
    parts = [(None, argument) if place == first else part for place, part in enumerate(line.parts)]
    return replace(line, parts=tuple(part for part in parts if part[0] not in _NOT_SHOWN))


def _groups_of_maker(command: str) -> Groups | None:
    """Return the options of a command that makes artifacts, or None."""
    found = declaration("commands", command, "COMMAND") if registry.has_name("commands", command) else None
    return found.groups if found is not None and RecordOptions in found.groups else None


def _takes_many(command: str) -> bool:
    """Return whether a command takes further arguments after the first."""
    arguments = declaration("commands", command, "COMMAND").arguments
    return len(arguments) > 1 and bool(arguments[-1].is_many)


def _parse(words: Sequence[str], groups: tuple[type[CheckedOptions], ...]) -> Iterator[Part]:
    """Yield option names with their values as typed, and None with arguments. Raises LookupError."""
    names = {name: spec.name for spec, _ in _options(groups).values() for name in _names(spec)}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            yield from ((None, one) for one in rest)
            return
        if not word.startswith("-") or word == "-":
            yield None, word
            continue
        flag, equals, value = word.partition("=") if word.startswith("--") else (word[:2], "", "")
        name = names[flag]
        if _is_alone(name, groups):
            if equals:
                raise LookupError(word)
            if not word.startswith("--") and len(word) > 2:
                rest.insert(0, f"-{word[2:]}")  # -qf is -q -f
            yield name, _NO_VALUE
        elif not word.startswith("--") and len(word) > 2:
            yield name, word[2:]
        else:
            yield name, value if equals else rest.pop(0)


def _check(line: CommandLine, *, is_of_many: bool) -> None:
    """Raise unless the number of arguments is right and the options are valid, alone and together."""
    count = sum(name is None for name, _ in line.parts)
    if count < 1 or (count > 1 and not is_of_many):
        raise LookupError("one argument")
    values = line.values()
    for group in line.groups:
        build_options(group, values)


@functools.cache
def _options(groups: tuple[type[CheckedOptions], ...]) -> dict[str, tuple[Field[typing.Any], typing.Any]]:
    """Map each option of a command to its field and type."""
    found: dict[str, tuple[Field[typing.Any], typing.Any]] = {}
    for group in groups:
        found |= map_options(group)
    return found


def _names(spec: Field[typing.Any]) -> list[str]:
    return [flag_of(spec.name), *([spec.metadata["short"]] if spec.metadata["short"] else [])]


def _is_alone(name: str, groups: tuple[type[CheckedOptions], ...]) -> bool:
    """Return whether an option takes no value; -v is counted."""
    return name == "verbose" or _kind(_options(groups)[name][1]) is bool


def _kind(hint: typing.Any) -> typing.Any:
    """Return int for `int | None`, list for `list[str]`, the type itself otherwise."""
    if typing.get_origin(hint) is list:
        return list
    arguments = [item for item in typing.get_args(hint) if item is not type(None)]
    return arguments[0] if arguments else hint

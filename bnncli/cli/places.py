"""Check output paths: never overwrite an input, and suggest another place if one cannot be written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from bnncli import registry
from bnncli.artifacts.files import read_header
from bnncli.artifacts.freshness import carries_our_mark, is_same_file
from bnncli.artifacts.run_folder import RunFolder, lock_beside
from bnncli.cli.options import option_fields
from bnncli.errors import ELSEWHERE, BnnError, UsageError
from bnncli.models.sharded import shards_of
from bnncli.options.command import Command, CommandLine
from bnncli.options.declaration import flag_of
from bnncli.session.run import ModelFiles

_INPUT = re.compile("FILE|DIR|SPEC|MODEL")  # metavar of options whose values name input files
_BESIDE = {".csv", ".npz", ".log", ".txt", ".html"}  # suffixes of results that users may write into a folder of inputs
_WHERE = ("run_dir", "out")  # options that place an artifact, suggested when none was given


def check_outputs(command: Command, line: CommandLine, config: Path | None) -> None:
    """Raise UsageError, before any work, if a command would overwrite one of its inputs, through any path or link.

    Inputs are the files named by arguments and options, the files of data sets, the artifacts of the run and their
    sources.

    Args:
        config: the configuration file.
    """
    options, arguments = option_fields(command), [*command.arguments]
    outputs: list[tuple[str | None, str, Path]] = []
    inputs: list[tuple[str, str, bool]] = []
    checkpoints = []
    for name, value in line.parts:
        if name is None:
            one = arguments[0] if len(arguments) == 1 else arguments.pop(0)
            words, writes, is_input, below = f"{one.name.upper()} {value}", one.writes, True, one.name == "file"
            checkpoints += [value] if one.name == "ckpt" and not one.writes else []
        else:
            meta = options[name][0].metadata
            words, writes, below = f"{flag_of(name)} {value}", meta["writes"], True
            is_input = name != "run_dir" and bool(_INPUT.search(meta["metavar"]))
        if writes and os.path.isfile(value):
            outputs.append((name, words, Path(value)))
        elif is_input and not writes:
            inputs.append((words, value, below))
    if config is not None:
        inputs.append((f"the configuration file {config}", str(config), False))
    for name, words, path in outputs:
        is_own = name is None or (name == "out" and carries_our_mark(path))  # may be replaced in any folder
        found = next(
            (said for said, value, below in inputs if any(_names(value, path, below=below and not is_own))), None
        )
        is_artifact = name == "out" and "name" in options
        for checkpoint in checkpoints:
            found = found or _describe_run_use(
                checkpoint, dict(line.parts).get("run_dir"), path, is_artifact=is_artifact
            )
        if found is not None:
            hint = "choose another file" if name is None else f"choose another file for {flag_of(name)}"
            raise UsageError(f"{words} is also an input ({found})", hint=hint)


def _names(text: str, path: Path, *, below: bool = True) -> Iterator[bool]:
    """Yield, for each file that an argument or option value may name, whether it is `path`.

    Args:
        below: whether to include the files in a folder; a checkpoint's folder may hold other files.
    """
    starts = [0, *(match.end() for match in re.finditer("[=:,]", text))]
    ends = [*(match.start() for match in re.finditer("[:,@]", text)), len(text)]
    places = [Path(text[start:end]).expanduser() for start in starts for end in ends if start < end]
    yield from (is_same_file(place, path) for place in places)
    spec = re.fullmatch(r"(?:[^=:]*=)?([a-z-]+):(.+?)(?:@\d+)?", text)
    try:
        shards = shards_of(Path(text))
        files = [] if shards is None else [*shards.every]
        if spec is not None and registry.has_name("data", spec[1]):
            module = registry.load_module("data", spec[1])
            files += module.files(spec[2]) if hasattr(module, "files") else []
    except (BnnError, OSError):  # the command itself reports the error
        return
    yield from (is_same_file(file, path) for file in files)
    for folder in (place for place in {*places} if below and place.is_dir()):
        yield path.suffix not in _BESIDE and folder.resolve() in path.resolve().parents
        if path.stat().st_nlink > 1:
            found = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
            yield from (is_same_file(file, path) for file in found if file.suffix not in _BESIDE)


def _describe_run_use(checkpoint: str, run_dir: str | None, path: Path, *, is_artifact: bool) -> str | None:
    """Return how a run uses a file, as an artifact or as the source of one; None if it does not.

    Args:
        is_artifact: whether the command writes an artifact there, which may replace one of its own.
    """
    try:
        folder = RunFolder.of(Path(checkpoint), run_dir, is_name=True)
    except BnnError:
        return None
    features = [folder.features(split) for split in folder.splits()]
    others = [
        *folder.posteriors(),
        *folder.prediction_files(),
        *folder.decision_files(),
        *folder.monitor_files(),
        *folder.metrics_files(),
        *folder.export_files(),
    ]
    for artifact in features if is_artifact else [*features, *others]:
        if is_same_file(artifact, path):
            return f"{artifact} of the run"
    for artifact in features:
        try:
            header = read_header(artifact)
        except (BnnError, OSError):
            continue
        sources = [str(header.input_path(one)) for one in header.inputs if not one.get("is_artifact", True)]
        files = ModelFiles.recorded(header.provenance.get("checkpoint") or {}, folder.root)
        sources += [] if files is None else [str(files.folder / name) for name in files.names]
        if any(has for source in sources for has in _names(source, path)):
            return f"{artifact} was made from it"
    return None


def place_advice(command: Command | None, line: CommandLine | None, path: str | None) -> str:
    """Return the hint for a file that cannot be written.

    Args:
        command: the command that ran; None before it is known.
        line: its command line.
        path: the file or its lock.
    """
    options = option_fields(command) if command is not None else {}
    places = {
        name for name, (spec, _) in options.items() if {"FILE", "DIR"} & {*str(spec.metadata["metavar"]).split("|")}
    }
    parts = () if line is None or path is None else line.parts
    given = [
        name for name, value in parts if name in places and _is_at(Path(path or "").resolve(), Path(value).resolve())
    ]
    named = given[-1:] if given else [name for name in _WHERE if name in options]
    return f"{ELSEWHERE} with {' or '.join(map(flag_of, named))}" if named else ELSEWHERE


def _is_at(path: Path, place: Path) -> bool:
    """Return whether `path` is `place`, lies below it, or is its lock."""
    return path in (place, lock_beside(place)) or place in path.parents

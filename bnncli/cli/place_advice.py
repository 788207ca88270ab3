"""What helps a command that cannot write somewhere: the option that named the place, or those that choose another."""

from __future__ import annotations

from pathlib import Path

from bnncli.cli.option_values import option_fields
from bnncli.errors import ELSEWHERE
from bnncli.options.command import Command
from bnncli.options.command_line import CommandLine
from bnncli.options.declaration import flag_of
from bnncli.storage.run_folder import lock_beside

_WHERE = ("run_dir", "out")  # an artifact lies, where nothing that was given says it


def place_advice(command: Command | None, line: CommandLine | None, path: str | None) -> str:
    """What to do when a file cannot be written where it should go.

    Args:
        command: the one that ran; None before it is known.
        line: what it was given.
        path: of the file, or of its lock.
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
    """Whether a file is the one that an option's value names, lies below it, or is its lock."""
    return path in (place, lock_beside(place)) or place in path.parents

"""Files for people beside the artifacts, figures and tables: where they may go, and which of them may be made anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from bnncli.errors import OutputExists, UsageError
from bnncli.storage.atomic import check_writable
from bnncli.storage.freshness import is_same_file


def check_side_output(
    target: Path, flag: str, kind: str, *, is_ours: Callable[[Path], bool], force: bool, others: Iterable[Path]
) -> None:
    """Raise before any work when a file for people may not be written to `target`.

    Args:
        flag: the option that named it.
        kind: what is written, for messages: figure, table.
        is_ours: whether an existing file was made by this very option, and may be made anew.
        force: whether any other file may be replaced.
        others: files of this command, which are never replaced.

    Raises:
        UsageError: target is one of the others.
        OutputExists: the folder cannot be written, or a foreign file is there.
    """
    if any(is_same_file(target, other) or target.absolute() == other.absolute() for other in others):
        raise UsageError(f"{flag}: {target} is an input or another output of this command; choose another name")
    check_writable(target.parent, hint=f"choose another place with {flag}")
    if target.is_dir() or (target.exists() and not force and not (target.is_file() and is_ours(target))):
        what = "is a folder" if target.is_dir() else f"exists and is not a {kind} created by bnncli"
        hint = f"give another name to {flag}" + ("" if target.is_dir() else ", or add \0force\0 to replace it")
        raise OutputExists(f"{target} {what}", hint=hint, path=target)

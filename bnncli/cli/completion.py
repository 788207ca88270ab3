"""Shell completion of options and arguments: their choices, or the contents of the run folder on the line."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.cli.commands import own_commands
from bnncli.cli.topics import TOPICS
from bnncli.errors import BnnError
from bnncli.evaluation.scores import all_scores
from bnncli.options.declaration import choices_of
from bnncli.registry import names

if TYPE_CHECKING:
    from bnncli.artifacts.run_folder import RunFolder

_POSTERIORS = ("posterior", "base", "baseline", "truth", "reference")  # options that take the name of a posterior


def completes(name: str, meta: Any) -> Callable[..., list[str]] | None:
    """Return a completion function for an option, or None if its values are unknown."""
    if meta["choices"] or meta["family"]:
        return _of(lambda: choices_of(meta))
    if name == "integrator":
        return _of(lambda: names("integrators"))
    if name == "metric":
        return _of(_list_paired_scores)
    if name in _POSTERIORS:
        return _of(_posteriors)
    if meta["metavar"] == "SPLIT":
        return _of(lambda: [name for folder in _runs() for name in folder.splits()])
    if name == "decide":
        return _of(lambda: [path.stem for folder in _runs() for path in folder.decision_files()])
    return None


def _list_paired_scores() -> list[str]:
    return [name for name, score in all_scores().items() if score.is_paired]


def completes_argument(name: str) -> Callable[..., list[str]] | None:
    """Return a completion function for an argument: names of commands, topics and artifacts."""
    if name == "of":
        return _of(lambda: [one.name for one in own_commands()])
    if name == "topic":
        return _of(lambda: [*TOPICS, *(one.parent or one.name for one in own_commands())])
    return _of(_removable) if name == "name" else None


def _of(look_up: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    def complete() -> list[str]:
        with suppress(BnnError, OSError, ValueError):  # completion cannot report errors
            return sorted(set(look_up()))
        return []

    return complete


def _posteriors() -> list[str]:
    return [path.stem for folder in _runs() for path in folder.posteriors()]


def _removable() -> list[str]:
    return _posteriors() + [path.parent.name for folder in _runs() for path in folder.prediction_files()]


def _runs() -> list[RunFolder]:
    """Return the run folders named on the line. Typer cannot parse a line whose last option has no value yet."""
    from bnncli.artifacts.run_folder import RunFolder

    words = shlex.split(os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "")
    places = dict(pairwise(words))
    found = []
    for word in words[2:]:
        with suppress(BnnError):  # not a run folder
            folder = RunFolder.of(Path(word), places.get("--run-dir"))
            found += [folder] if folder.root.is_dir() and not word.startswith("-") else []
    return found

"""What a shell completes as the value of an option or argument: its choices, or what the run folder on the line holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from bnncli.cli.commands import COMMANDS
from bnncli.cli.topics import TOPICS
from bnncli.errors import BnnError
from bnncli.options.compare import compared
from bnncli.options.declaration import choices_of
from bnncli.registry import names

_POSTERIORS = ("posterior", "base", "baseline", "truth", "reference")  # options that take the name of one


def completes(name: str, meta: Any) -> Callable[..., list[str]] | None:
    """Return what lists the values of an option that begin with a word; None where nothing is known of them."""
    if meta["choices"] or meta["family"]:
        return _of(lambda ctx: choices_of(meta))
    if name == "integrator":
        return _of(lambda ctx: names("integrators"))
    if name == "metric":
        return _of(lambda ctx: list(compared()))
    if name in _POSTERIORS:
        return _of(_posteriors)
    if meta["metavar"] == "SPLIT":
        return _of(lambda ctx: _in_run(ctx, lambda folder: folder.splits()))
    if name == "decide":
        return _of(lambda ctx: _in_run(ctx, lambda folder: [path.stem for path in folder.decision_files()]))
    return None


def completes_argument(name: str) -> Callable[..., list[str]] | None:
    """Return the same for an argument: names of commands, topics and artifacts."""
    if name == "of":
        return _of(lambda ctx: [one.name for one in COMMANDS])
    if name == "topic":
        return _of(lambda ctx: [*TOPICS, *(one.name for one in COMMANDS)])
    return _of(_removable) if name == "name" else None


def _of(look_up: Callable[[typer.Context], list[str]]) -> Callable[..., list[str]]:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(BnnError, OSError):  # there is nobody to tell
            return sorted({one for one in look_up(ctx) if one.startswith(incomplete)})
        return []

    return complete


def _posteriors(ctx: typer.Context) -> list[str]:
    return _in_run(ctx, lambda folder: [path.stem for path in folder.posteriors()])


def _removable(ctx: typer.Context) -> list[str]:
    return _posteriors(ctx) + _in_run(ctx, lambda folder: [path.parent.name for path in folder.prediction_files()])


def _in_run(ctx: typer.Context, look_up: Callable[[Any], list[str]]) -> list[str]:
    """Return names from the run folders of the checkpoints on the line."""
    from bnncli.storage.run_folder import RunFolder

    given = ctx.params.get("ckpt") or []
    checkpoints = given if isinstance(given, list | tuple) else [given]
    run_dir = ctx.params.get("run_dir")
    return [name for one in checkpoints for name in look_up(RunFolder.of(Path(one), run_dir))]

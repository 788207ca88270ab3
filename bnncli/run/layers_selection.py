"""Which posteriors of a run are over the layers that were asked for, in the words of the commands that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from bnncli.artifacts.files import read_header
from bnncli.errors import DataError, MissingInput, UsageError
from bnncli.parameters.module import LAST
from bnncli.run.session import Run

Found = TypeVar("Found")
_UNKNOWN = "unknown layers"


def over_layers(
    run: Run,
    layers: str | None,
    found: Sequence[Found],
    file_of: Callable[[Found], Path | None] = lambda path: path,  # type: ignore[assignment,return-value]
    *,
    are_named: bool,
    what: str = "posterior",
    maker: str | None = None,
    trust_code: bool = False,
) -> list[Found]:
    """Those over these layers; all of them where none were asked for.

    Args:
        found: files of posteriors, or what has one by `file_of`.
        are_named: whether they were asked for by their names.
        what: they are, and `maker`, the command that makes one, for messages; else fit-laplace, with `trust_code`.

    Raises:
        UsageError: one that was named is over others.
        MissingInput: none is over these; names those there are.
    """
    if layers is None:
        return [*found]
    names: dict[str, dict[str, None]] = {}  # of the posteriors, by what they are over
    kept = []
    for one in found:
        path = file_of(one)
        over = layers_of(path)
        name = "?" if path is None else path.stem
        names.setdefault(over, {})[name] = None
        if over == layers or (are_named and over == _UNKNOWN):  # what cannot be read is told where it is opened
            kept.append(one)
        elif are_named:
            raise UsageError(
                f"\0posterior\0 {name} is over \0layers\0 {over}, but got \0layers\0 {layers}; give only one of the two"
            )
    if not kept:
        over_others = {} if layers == LAST else {"layers": layers, "trust_code": trust_code}
        there = "; ".join(f"over {over}: {', '.join(own)}" for over, own in names.items())
        raise MissingInput(
            f"{run.checkpoint_path} has no {what} over \0layers\0 {layers} (have: {there or 'none'})",
            hint=maker or run.suggest("fit-laplace", **over_others),
        )
    return kept


def layers_of(path: Path | None) -> str:
    """What the posterior in a file is over, as it was named; unknown layers where the file cannot be read."""
    try:
        return _UNKNOWN if path is None else str(read_header(path).meta.get("layers") or LAST)
    except (DataError, MissingInput):
        return _UNKNOWN

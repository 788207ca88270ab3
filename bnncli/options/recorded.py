"""Command lines as artifacts record them: which word is the argument, and which belong to options."""

from __future__ import annotations

import functools
import typing
from collections.abc import Sequence
from dataclasses import fields

from bnncli.option import Checked, flag_of


def argument_place(words: Sequence[str]) -> int | None:
    """The place of the argument (CKPT) in the words of a command, `bnncli COMMAND ...`; None where there is none."""
    alone, with_value = _flags(tuple(Checked.__subclasses__()))
    place = 2
    while place < len(words):
        word = words[place]
        if word == "--":
            return place + 1 if place + 1 < len(words) else None
        if not word.startswith("-") or word == "-":
            return place
        place += 2 if word in with_value and word not in alone else 1
    return None


@functools.cache
def _flags(groups: tuple[type[Checked], ...]) -> tuple[set[str], set[str]]:
    """The flags of groups of options that stand alone, and those that a value follows."""
    alone: set[str] = set()
    with_value: set[str] = set()
    for group in groups:
        hints = typing.get_type_hints(group)
        for spec in fields(group):  # type: ignore[arg-type]
            is_alone = hints[spec.name] is bool or spec.name == "verbose"  # -v is counted
            names = {flag_of(spec.name), *([spec.metadata["short"]] if spec.metadata["short"] else [])}
            (alone if is_alone else with_value).update(names)
    return alone, with_value

"""The list of commands, read from the declarations of bnncli and installed distributions without importing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from bnncli import registry
from bnncli.options.command import SECTIONS, Command
from bnncli.options.declaration import declaration

_FAMILY = "commands"


@cache
def own_commands() -> tuple[Command, ...]:
    """Return bnncli's own commands, in help order."""
    return _sort_commands(registry.own_names(_FAMILY))


@cache
def all_commands() -> tuple[Command, ...]:
    """Return bnncli's own commands and those of installed distributions. Raises UsageError if one is invalid."""
    return _sort_commands(registry.names(_FAMILY))


def find_command(words: Sequence[str]) -> Command | None:
    """Return the command that the first one or two words name, or None; reads only its file."""
    for name in ("-".join(words[:2]), *words[:1]):
        if registry.has_name(_FAMILY, name):
            command = _load_command(name)
            if bool(command.parent) == (name != words[0]):
                return command
    return None


def is_parent(words: Sequence[str]) -> bool:
    """Return whether the first word is that of a two-word command."""
    return bool(words) and any(command.parent == words[0] for command in own_commands())


def _sort_commands(names: Sequence[str]) -> tuple[Command, ...]:
    return tuple(sorted(map(_load_command, names), key=lambda one: (SECTIONS.index(one.section), one.place)))


@cache
def _load_command(name: str) -> Command:
    """Return a command's declaration. Raises UsageError if there is none."""
    command = declaration(_FAMILY, name, "COMMAND")
    if not isinstance(command, Command):
        raise registry.broken(_FAMILY, name, "it declares no COMMAND")
    return replace(command, name=name)

"""The list of commands, out of what the files of stages/ and installed distributions declare; no stage is imported for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from bnncli import registry
from bnncli.options.command import SECTIONS, Command
from bnncli.options.parts import declaration

_FAMILY = "stages"


def all_commands() -> tuple[Command, ...]:
    """Ours and those of installed distributions. Raises UsageError when one of these is no good."""
    return _declared(tuple(registry.names(_FAMILY)))


def find_command(words: Sequence[str]) -> Command | None:
    """The command that the first words name; what is installed is looked at only where it is none of ours."""
    for command in COMMANDS:
        if command.parent and list(words[:2]) == [command.parent, command.name.removeprefix(command.parent + "-")]:
            return command
        if not command.parent and list(words[:1]) == [command.name]:
            return command
    if words and registry.has_name(_FAMILY, words[0]):
        return _declared((words[0],))[0]
    return None


@cache
def _declared(names: tuple[str, ...]) -> tuple[Command, ...]:
    """The commands of these names, in the order of the help. Raises UsageError for one that declares none."""
    found = []
    for name in names:
        command = declaration(_FAMILY, name, "COMMAND")
        if not isinstance(command, Command):
            raise registry.broken(_FAMILY, name, "it declares no COMMAND")
        found.append(replace(command, name=name))
    return tuple(sorted(found, key=lambda one: (SECTIONS.index(one.section), one.place)))


COMMANDS = _declared(tuple(registry.own_names(_FAMILY)))

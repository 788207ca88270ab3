"""Command lines as artifacts record them, made anew before they are shown: a file may be forged, and hints are pasted.

Nothing of a record is repeated as it stands. What is shown is one of our own commands, with options that it has and
values that they accept, quoted for the shell; of anything else nothing is shown.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields

from bnncli.errors import UsageError
from bnncli.options.common import CommonOptions, RunOptions
from bnncli.options.declaration import Checked, flag_of

Groups = Sequence[type[Checked]]
MAX_LENGTH = 10_000  # of all words: a list of data sets may be long
# How a command talks, where its run lies, and what it may replace, is for whoever pastes it to say.
_LEFT_OUT = {spec.name for group in (CommonOptions, RunOptions) for spec in fields(group)} | {"force", "dry_run"}
_NO_VALUE = "True"


def own_command(words: Sequence[object], commands: Mapping[str, Groups], argument: str) -> list[str] | None:
    """The words of a recorded command `bnncli COMMAND ...`, to be quoted and pasted; None where it is none of ours.

    Args:
        words: as they are recorded; anything.
        commands: the options of each command that makes artifacts.
        argument: stands where the record has the command's own argument, CKPT.
    """
    texts = [word for word in words if isinstance(word, str) and word.isprintable()]
    if len(texts) != len(words) or len(texts) < 3 or sum(map(len, texts)) > MAX_LENGTH:
        return None
    if texts[0] != "bnncli" or texts[1] not in commands:
        return None
    groups = tuple(commands[texts[1]])
    try:
        parts = list(_parse(texts[2:], groups))
        _check(parts, groups)
    except (UsageError, ValueError, LookupError, TypeError):
        return None
    shown = texts[:2]
    for name, value in parts:
        if name is None:
            shown.append(argument)
        elif name not in _LEFT_OUT:
            shown += [flag_of(name)] if value == _NO_VALUE and _is_alone(name, groups) else _given(flag_of(name), value)
    return shown


def _given(flag: str, value: str) -> list[str]:
    """An option with its value; joined where the value looks like an option itself."""
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


def _parse(words: Sequence[str], groups: tuple[type[Checked], ...]) -> Iterator[tuple[str | None, str]]:
    """Names of options with their values as they were typed, and None with the argument. Raises LookupError."""
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


def _check(parts: Sequence[tuple[str | None, str]], groups: tuple[type[Checked], ...]) -> None:
    """Raise unless there is one argument, and the options accept their values, alone and together."""
    if sum(name is None for name, _ in parts) != 1:
        raise LookupError("one argument")
    options = _options(groups)
    values: dict[str, object] = {}
    for name, text in parts:
        if name is None or name == "verbose":
            continue
        kind = _kind(options[name][1])
        if kind is list:
            values[name] = [*typing.cast(list[str], values.get(name, [])), text]
        else:
            values[name] = True if kind is bool else kind(text)
    for group in groups:
        group(**{spec.name: values[spec.name] for spec in fields(group) if spec.name in values})  # type: ignore[arg-type]


@functools.cache
def _options(groups: tuple[type[Checked], ...]) -> dict[str, tuple[Field[typing.Any], typing.Any]]:
    """Every option of a command by name: its field and its type."""
    found: dict[str, tuple[Field[typing.Any], typing.Any]] = {}
    for group in groups:
        hints = typing.get_type_hints(group)
        found |= {spec.name: (spec, hints[spec.name]) for spec in fields(group)}  # type: ignore[arg-type]
    return found


def _names(spec: Field[typing.Any]) -> list[str]:
    return [flag_of(spec.name), *([spec.metadata["short"]] if spec.metadata["short"] else [])]


def _is_alone(name: str, groups: tuple[type[Checked], ...]) -> bool:
    """Whether no value follows an option; -v is counted."""
    return name == "verbose" or _kind(_options(groups)[name][1]) is bool


def _kind(hint: typing.Any) -> typing.Any:
    """int for `int | None`, list for `list[str]`, the type itself otherwise."""
    if typing.get_origin(hint) is list:
        return list
    arguments = [item for item in typing.get_args(hint) if item is not type(None)]
    return arguments[0] if arguments else hint

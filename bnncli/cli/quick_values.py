"""Texts, paths and plain numbers of a command line, read here: Typer imports pydantic to look at them, longer than many a command takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

# Numbers as nearly everybody writes them, and all readers read them.
_NUMBERS = {int: re.compile("-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,30})?([eE]-?[0-9]{1,2})?")}


class QuickCommand(TyperCommand):
    """A command whose values are read without pydantic, where that is enough."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, each set to read quickly."""
        return [_reading_quickly(one) for one in super().get_params(ctx)]


class QuickGroup(TyperGroup):
    """The same for a group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, each set to read quickly."""
        return [_reading_quickly(one) for one in super().get_params(ctx)]


def _reading_quickly(parameter: Any) -> Any:
    """The parameter, set to take texts and paths as they are; as it was where this release of Typer knows no pydantic.

    What needs conversion, and every complaint, is Typer's own.
    """
    if getattr(parameter, "_runtime_param", parameter) is None:  # how Typer reads it; None until it is first needed
        parameter._runtime_param = _AsGiven(parameter, parameter.type_descriptor.annotation)
    return parameter


@dataclass(frozen=True)
class _AsGiven:
    """Reads the values of one parameter, in the place of what Typer makes for it.

    Args:
        annotation: the type that the values shall have.
    """

    parameter: Any
    annotation: Any

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value, where it is of the type already, or a path to be; else what Typer makes of it."""
        if self.parameter.multiple or self.parameter.nargs == -1:
            of = get_args(self.annotation)
            if value is None:
                return ()
            if get_origin(self.annotation) is list and isinstance(value, list | tuple):
                read = [_quick(one, of[0]) for one in value]
                if None not in read:
                    return read
        elif value is None or (read := _quick(value, self.annotation)) is not None:
            return value if value is None else read
        self.parameter._runtime_param = None
        return self.parameter.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _quick(value: Any, kind: Any) -> Any:
    """The value as one of the kind; None where it takes more than to be looked at."""
    if isinstance(value, str) and (kind is Path or (kind in _NUMBERS and _NUMBERS[kind].fullmatch(value))):
        return kind(value)
    return value if kind in (str, bool, int, float) and type(value) is kind else None

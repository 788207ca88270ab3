"""What Typer says of a command line that it does not take, in our words: what was expected, and what came."""

from __future__ import annotations

import re
from typing import Any

from bnncli.names import counted

_EXTRA = re.compile(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)", re.DOTALL)
_EXPECTED = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
}  # by how pydantic's kinds of faults begin


def usage_words(error: Any) -> str:
    """The line for a usage error of Typer; its own where it is clear already."""
    said = str(error.format_message())
    context = getattr(error, "ctx", None)
    if (extra := _EXTRA.fullmatch(said)) and context is not None:
        taken = [str(one.name).upper() for one in context.command.params if one.param_type_name == "argument"]
        return f"expected {counted(len(taken), 'argument')}{''.join(f', {one}' for one in taken)}; got {extra[1]!r} as well"
    faults = getattr(error.__cause__, "errors", None)
    param = getattr(error, "param", None)
    if faults is None or param is None:
        return said
    first = faults()[0]
    expected = _EXPECTED.get(first["type"].partition("_")[0])
    name = param.opts[-1] if param.param_type_name == "argument" else max(param.opts, key=len)
    return said if expected is None else f"{name}: expected {expected}; got {str(first['input'])!r}"

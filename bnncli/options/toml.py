"""Read TOML files with size limits, and convert their values to option values."""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import Field
from pathlib import Path
from typing import Any

from bnncli.errors import ConfigError, UsageError
from bnncli.options.declaration import check_value
from bnncli.system.input_files import read_error

MAX_BYTES = 1 << 20


def read_toml(path: Path, *, what: str) -> tuple[bytes, dict[str, Any]]:
    """Read and parse a TOML file; return its bytes and its tables.

    Raises:
        MissingInput: the file does not exist or cannot be read.
        ConfigError: the file is not TOML or is too large.
    """
    try:
        with open(path, "rb") as stream:  # may be an endless pipe, so the read is bounded
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise read_error(error, path, what=what) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: expected a TOML file of at most {MAX_BYTES} bytes; got more", path=path)
    try:
        return raw, tomllib.loads(raw.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", path=path) from None


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Convert a UsageError inside to a ConfigError about this file."""
    try:
        yield
    except UsageError as error:
        raise ConfigError(error.message, hint=error.hint, path=path) from None


def option_value(spec: Field[Any], hint: Any, value: Any, where: str) -> Any:
    """Convert a TOML value to an option value. Raises UsageError, naming `where`, for an invalid value."""
    value = _convert_toml_value(value, hint)
    if not _has_type(value, hint):
        raise UsageError(f"{where}: expected {type_name(hint)}; got {value!r}")
    check_value(spec, value, where)
    return value


def _convert_toml_value(value: Any, hint: Any) -> Any:
    """Convert numbers to the text typed after a flag, where the option takes text."""
    base = base_type(hint)
    if base is list and isinstance(value, list):
        return [_format_number(item) for item in value]
    if base is float and _is_number(value):
        return float(value)
    return _format_number(value) if base is str else value


def _format_number(value: Any) -> Any:
    """Return the shortest text of a number; other values unchanged."""
    return repr(value).removesuffix(".0") if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def base_type(hint: Any) -> Any:
    """Return int for `int | None`, list for `list[str]`, the type itself otherwise."""
    arguments = [item for item in typing.get_args(hint) if item is not type(None)]
    if typing.get_origin(hint) is list:
        return list
    return arguments[0] if arguments else hint


def _has_type(value: Any, hint: Any) -> bool:
    base = base_type(hint)
    if base is list:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if base is float:
        return _is_number(value)
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, base)


def type_name(hint: Any) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        list: "a list of strings",
    }
    return names[base_type(hint)]


def closest(word: str, choices: list[str]) -> str:
    """Return the end of a message about an unknown word: the nearest choice, or all choices."""
    near = difflib.get_close_matches(word.replace("_", "-"), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(sorted(choices))}"


def line_of(raw: bytes, word: str, after: int = 0) -> str:
    """Return `:7` if the key or table first appears on line 7, below line `after`; empty if it does not appear."""
    name = rf"[\"']?{re.escape(word)}[\"']?"
    begins = re.compile(rf"\s*(\[\s*{name}\s*\]|{name}\s*[=.])")
    for number, line in enumerate(raw.decode("utf-8-sig", "replace").split("\n"), start=1):
        if number > after and begins.match(line):
            return f":{number}"
    return ""

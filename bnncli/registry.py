"""Families of interchangeable parts: the files of a family folder are the names a user can choose.

`flows/planar.py` is what makes `--flow planar` exist. Names are listed from the folder, without importing
anything, so that `--help` stays fast; a part is imported when it is asked for.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from bnncli.errors import UsageError

_PACKAGE = Path(__file__).parent


def names(family: str) -> list[str]:
    """The names of a family, sorted; underscores of file names become dashes, files that start with `_` are not parts."""
    return list(_listed(family))


@cache
def _listed(family: str) -> tuple[str, ...]:
    """The folder, read once: commands look names up thousands of times."""
    files = sorted((_PACKAGE / family).glob("[!_]*.py"))
    return tuple(file.stem.replace("_", "-") for file in files)


def in_order(family: str) -> list[str]:
    """The names of a family whose parts declare their `order`, lowest first."""
    return sorted(names(family), key=lambda name: (declared(family, name, "order"), name))


def declaring(family: str, attribute: str) -> list[str]:
    """The names of a family whose parts declare the attribute to be true."""
    return [name for name in names(family) if declared(family, name, attribute)]


@cache
def declared(family: str, name: str, attribute: str) -> Any:
    """The literal that a part's class has for an attribute, read from its file: nothing is imported."""
    path = _PACKAGE / family / f"{name.replace('-', '_')}.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == attribute:
            return ast.literal_eval(node.value)
    raise AttributeError(
        f"{path.name} declares no {attribute}: expected `{attribute}: ClassVar[...] = ...` in its class"
    )


def check_name(family: str, name: str, *, option: str) -> str:
    """`name` itself, when the family has it. Raises UsageError with the list of choices otherwise."""
    choices = names(family)
    if name not in choices:
        raise UsageError(f"{option}: expected one of {', '.join(choices)}; got {name!r}")
    return name


def load_module(family: str, name: str) -> ModuleType:
    """The module of one part, imported now."""
    check_name(family, name, option=family)
    return importlib.import_module(f"bnncli.{family}.{name.replace('-', '_')}")


def load_class(family: str, name: str) -> Any:
    """The class of one part: `planar` is class Planar, `plug-in` is class PlugIn."""
    class_name = "".join(word.capitalize() for word in name.split("-"))
    return getattr(load_module(family, name), class_name)

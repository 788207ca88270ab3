"""What the parts of a family declare of themselves, read from their files without importing them: that may take seconds.

A declaration is one statement, `SETTINGS = {...}` or `COMMAND = Command(...)`, at the left margin of the part's file, with the
classes, functions and imports of the file that it uses.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from bnncli import registry

# A statement at the left margin, with its decorators, up to the next one; the names that it imports or defines.
_BLOCK = re.compile(r"^(?:@.*\n(?:[ \t)\]}].*\n)*)*[A-Za-z_].*\n(?:(?:[ \t)\]}#].*)?\n)*", re.MULTILINE)
_IMPORT = re.compile(r"from ([\w.]+) import (\([^)]*\)|[^\n(]*)")
_DEFINED = re.compile(r"(?:@.*\n(?:[ \t)\]}].*\n)*)*(?:(?:class|def) (\w+)|(\w+)(?:: [^=\n]+)? = )")


@dataclass(frozen=True)
class Setting:
    """A setting of a part, which is an option of the commands that take the part.

    Args:
        text: one line of help, without the full stop; parts that share a setting have the same. `{default}` is the default.
        type: of the value; a bool is a flag, and false by default.
        default: the part's own; None where it depends.
        own: what the part makes of it, where parts that share the setting differ; `{default}` as in text.
        only_with: another setting of the part and its value, with which alone the part takes this one; none otherwise.
        at_most: what of theta's layout bounds it from above, as num_params; the default too.
        choices: the values that the part takes, where they are few.
        is_closed: whether the command line takes no others: then parts that share the setting have the same.
        minimum, maximum: bounds of a number, inclusive.
        place: among the options of the parts, ascending.
        parts: names of those that have it, once they are known.
    """

    text: str
    type: type = str
    default: Any = None
    own: str = ""
    only_with: tuple[str, Any] | None = None
    at_most: str = ""
    choices: tuple[Any, ...] = ()
    is_closed: bool = False
    minimum: float | None = None
    maximum: float | None = None
    place: int = 1000
    parts: str = ""

    def of(self, **own: Any) -> Setting:
        """The same, with what one part has for itself."""
        return replace(self, **own)

    @property
    def condition(self) -> list[str]:
        """On what the part takes it, in words: with scale low-rank."""
        return [] if self.only_with is None else ["with", *map(str, self.only_with)]


class Draws(NamedTuple):
    """How many draws a sampling integrator takes by default, and `quasi` of scrambled Sobol points."""

    default: int
    quasi: int | None = None


class Form(NamedTuple):
    """How a kind of data or of model is named, as `npz:FILE[:x,y]`, its place among the kinds, and a sentence about it."""

    text: str
    place: int = 1000
    about: str = ""


def forms(family: str = "data") -> list[str]:
    """How each kind of data, or of models, is named."""
    return [form.text for form in sorted(declarations(family, "FORM").values(), key=lambda form: form.place)]


@cache
def declaration(family: str, part: str, name: str) -> Any:
    """Return what the part's file declares as `name`; None where it does not.

    Only the statements that `name` is made of are executed, so that a command's help imports nothing of its work.

    Raises:
        UsageError: it cannot be read; one line that names the file or the distribution.
    """
    path = registry.source_of(family, part)
    blocks = _top_level_blocks(path.read_text(encoding="utf-8"))
    if name not in blocks:
        return None
    module = ModuleType(f"{__name__}:{family}/{part}")  # dataclasses and type hints look their module up by its name
    sys.modules[module.__name__] = module
    try:
        exec(compile("\n".join(_needed(name, blocks)), str(path), "exec"), module.__dict__)
    except (SyntaxError, ValueError, TypeError, LookupError, AttributeError, ImportError, NameError) as error:
        raise registry.broken(family, part, f"{name} cannot be read: {type(error).__name__}: {error}") from error
    return module.__dict__[name]


def _top_level_blocks(text: str) -> dict[str, str]:
    """Map each name that a file defines or imports at its left margin to the text of the statement."""
    found: dict[str, str] = {}
    for block in _BLOCK.findall(text + "\n"):
        imported = _IMPORT.fullmatch(block.rstrip())
        if imported is not None:
            for one in re.sub(r"[()]|#.*", "", imported[2]).split(","):
                if one.strip():
                    found[one.split()[-1]] = f"from {imported[1]} import {one.strip()}"
        elif defined := _DEFINED.match(block):
            found[defined[1] or defined[2]] = block
    return found


def _needed(name: str, blocks: Mapping[str, str]) -> list[str]:
    """Return the statements that the one of `name` needs, in the order of the file, itself last."""
    needed, waiting = {name}, [name]
    while waiting:
        tree = ast.parse(blocks[waiting.pop()])
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & blocks.keys()
        waiting += used - needed
        needed |= used
    return ["from __future__ import annotations", *(blocks[one] for one in blocks if one in needed)]


def declarations(family: str, name: str) -> dict[str, Any]:
    """What each part of a family that has it declares as `name`, by the part."""
    found = {part: declaration(family, part, name) for part in registry.names(family)}
    return {part: value for part, value in found.items() if value is not None}


def class_attribute(family: str, part: str, name: str) -> Any:
    """What the part's class gives an attribute; None where it has none.

    Read from the part's file where that says it in terms of what it declares and imports from bnncli.options and its family;
    else the part is imported.

    Raises:
        UsageError: there is no such part, or it cannot be imported.
    """
    registry.check_name(family, part, option=family)
    value = registry.declaration_of(family, part, name)
    if value is not None:
        imports = rf"^from bnncli\.(?:options[\w.]*|{family}) import (?:\([^)]*\)|[^\n(]*)$"
        text = registry.source_of(family, part).read_text(encoding="utf-8")
        space: dict[str, Any] = {"SETTINGS": declaration(family, part, "SETTINGS")}
        with contextlib.suppress(ImportError, NameError):
            exec("\n".join(re.findall(imports, text, re.MULTILINE)), space)
            return eval(compile(ast.Expression(value), part, "eval"), space)
    return getattr(registry.load_class(family, part), name, None)


@cache
def settings_of(family: str) -> Mapping[str, Setting]:
    """Every setting of the parts of a family, with the help of all of them as its text.

    Raises:
        UsageError: two parts declare one setting differently.
    """
    by_name: dict[str, dict[str, Setting]] = {}
    for part, settings in declarations(family, "SETTINGS").items():
        for name, setting in settings.items():
            by_name.setdefault(name, {})[part] = setting
            first, (example, *_) = next(iter(by_name[name])), by_name[name].values()
            if _shared(setting) != _shared(example):
                raise registry.broken(family, part, f"its setting {name} is not the one that {first} declares")
    merged = {
        name: replace(next(iter(of.values())), text=_help(of), parts=", ".join(of)) for name, of in by_name.items()
    }
    return dict(sorted(merged.items(), key=lambda item: item[1].place))


def _shared(setting: Setting) -> tuple[Any, ...]:
    """What an option has once, whichever part takes it."""
    choices = setting.choices if setting.is_closed else None
    return setting.text, setting.type, choices, setting.minimum, setting.maximum, setting.place


def _help(settings: Mapping[str, Setting]) -> str:
    """One help for a setting of several parts."""
    text = next(iter(settings.values()))
    shown = text.text.format(default=text.default)
    if any(setting.own for setting in settings.values()):
        each = (f"{part}: {setting.own.format(default=setting.default)}." for part, setting in settings.items())
        return f"{shown}. {' '.join(each)}"
    return f"{shown} ({', '.join(' '.join([part, *setting.condition]) for part, setting in settings.items())})."


RANK = Setting("Rank of the flow's update; {default} by default", int, 16, minimum=1, at_most="num_params", place=10)
HIDDEN = Setting("Hidden units of the flow's network; {default} by default", int, 64, minimum=1, place=20)


QMC = Setting("Use scrambled Sobol points instead of pseudo-random numbers", bool, False, place=10)
PROJECTION = Setting("How to project the logits first", place=20)

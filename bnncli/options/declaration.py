"""Declare options as dataclass fields (default, help, choices, bounds), and read the declarations of parts.

A declaration in a file (`SETTINGS = {...}`, `COMMAND = Command(...)`) is read without importing the file, which may
take seconds.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass, replace
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, get_type_hints

from bnncli import registry
from bnncli.errors import UsageError
from bnncli.names import unknown_value_error

# An unindented statement with its decorators; the names that it imports or defines.
_BLOCK = re.compile(r"^(?:@.*\n(?:[ \t)\]}].*\n)*)*[A-Za-z_].*\n(?:(?:[ \t)\]}#].*)?\n)*", re.MULTILINE)
_IMPORT = re.compile(r"from ([\w.]+) import (\([^)]*\)|[^\n(]*)")
_DEFINED = re.compile(r"(?:@.*\n(?:[ \t)\]}].*\n)*)*(?:(?:class|def) (\w+)|((?:\w+, )*\w+)(?:: [^=\n]+)? = )")


@dataclass(frozen=True)
class Setting:
    """A setting of a part: an option of the commands that use the part.

    Args:
        text: one line of help without the full stop, the same in all parts that share the setting. `{default}` is
            replaced by the default.
        type: type of the value; a bool is a flag that defaults to False.
        default: the part's default; None if it depends on other values.
        own: help specific to this part; `{default}` as in text.
        only_with: (setting, value) of the same part that this setting requires.
        at_most: attribute of theta's layout that bounds the value and the default, such as num_params.
        choices: values that the part accepts.
        is_closed: whether the command line accepts only `choices`; then all parts that share the setting have the same
            choices.
        minimum, maximum: inclusive bounds.
        place: sort key among the options of the parts, ascending.
        parts: names of the parts that have the setting, filled in later.
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
        """Return a copy with fields specific to one part."""
        return replace(self, **own)

    @property
    def condition(self) -> list[str]:
        """Words for the condition of the setting, such as with scale low-rank."""
        return [] if self.only_with is None else ["with", *map(str, self.only_with)]


class Draws(NamedTuple):
    """Default number of draws of a sampling integrator; `quasi` applies to scrambled Sobol points."""

    default: int
    quasi: int | None = None


class Form(NamedTuple):
    """Syntax of a kind of data or model, such as `npz:FILE[:x,y]`, with its sort key and a one-sentence description."""

    text: str
    place: int = 1000
    about: str = ""


def list_forms(family: str = "data") -> list[str]:
    """Return the syntax of each kind of data or model."""
    return [form.text for form in sorted(declarations(family, "FORM").values(), key=lambda form: form.place)]


@cache
def declaration(family: str, part: str, name: str) -> Any:
    """Return what the part's file declares as `name`, or None.

    Executes only the statements that `name` needs, so that help imports none of a command's dependencies.

    Raises:
        UsageError: the declaration cannot be read; names the file or the distribution.
    """
    path = registry.source_of(family, part)
    blocks = _top_level_blocks(path.read_text(encoding="utf-8"))
    if name not in blocks:
        return None
    module = ModuleType(f"{__name__}:{family}/{part}")  # dataclasses and type hints look up their module by name
    sys.modules[module.__name__] = module
    try:
        exec(compile("\n".join(_collect_statements(name, blocks)), str(path), "exec"), module.__dict__)
    except (SyntaxError, ValueError, TypeError, LookupError, AttributeError, ImportError, NameError) as error:
        raise registry.broken(family, part, f"{name} cannot be read: {type(error).__name__}: {error}") from error
    return module.__dict__[name]


def _top_level_blocks(text: str) -> dict[str, str]:
    """Map each name defined or imported at the top level of a file to its statement."""
    found: dict[str, str] = {}
    for block in _BLOCK.findall(text + "\n"):
        imported = _IMPORT.fullmatch(block.rstrip())
        if imported is not None:
            for one in re.sub(r"[()]|#.*", "", imported[2]).split(","):
                if one.strip():
                    found[one.split()[-1]] = f"from {imported[1]} import {one.strip()}"
        elif module := re.fullmatch(r"import (\w+)", block.rstrip()):
            found[module[1]] = module[0]
        elif defined := _DEFINED.match(block):
            found |= dict.fromkeys((defined[1] or defined[2]).split(", "), block)
    return found


def _collect_statements(name: str, blocks: Mapping[str, str]) -> list[str]:
    """Return the statements that `name` needs, in file order, its own last."""
    needed, waiting = {name}, [name]
    while waiting:
        tree = ast.parse(blocks[waiting.pop()])
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)} & blocks.keys()
        waiting += used - needed
        needed |= used
    return ["from __future__ import annotations", *dict.fromkeys(blocks[one] for one in blocks if one in needed)]


def declarations(family: str, name: str) -> dict[str, Any]:
    """Map each part of a family to what it declares as `name`; parts without the declaration are left out."""
    found = {part: declaration(family, part, name) for part in registry.names(family)}
    return {part: value for part, value in found.items() if value is not None}


def class_attribute(family: str, part: str, name: str) -> Any:
    """Return an attribute of a part's class, or None.

    Read from the part's source if the value depends only on the part's declarations and on imports from bnncli.options
    or the family. Otherwise the part is imported.

    Raises:
        UsageError: the part does not exist or cannot be imported.
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
    """Return the settings of all parts of a family, with the help texts merged.

    Raises:
        UsageError: two parts declare the same setting differently.
    """
    by_name: dict[str, dict[str, Setting]] = {}
    for part, settings in declarations(family, "SETTINGS").items():
        for name, setting in settings.items():
            by_name.setdefault(name, {})[part] = setting
            first, (example, *_) = next(iter(by_name[name])), by_name[name].values()
            if _collect_shared_fields(setting) != _collect_shared_fields(example):
                raise registry.broken(family, part, f"its setting {name} is not the one that {first} declares")
    merged = {
        name: replace(next(iter(of.values())), text=_help(of), parts=", ".join(of)) for name, of in by_name.items()
    }
    return dict(sorted(merged.items(), key=lambda item: item[1].place))


def _collect_shared_fields(setting: Setting) -> tuple[Any, ...]:
    """Return the fields that all parts must agree on."""
    choices = setting.choices if setting.is_closed else None
    return setting.text, setting.type, choices, setting.minimum, setting.maximum, setting.place


def _help(settings: Mapping[str, Setting]) -> str:
    """Merge the help texts of a setting that several parts share."""
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
_FIELD = re.compile("\0([a-z][a-z0-9_]*)\0")


def option(
    default: Any,
    text: str | Callable[[], str],
    *,
    family: str | None = None,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    short: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    numeric: bool = True,
    env_common: bool = False,
    metavar: str = "",
    writes: bool = False,
    group: str = "",
    is_rare: bool = False,
    check: Callable[[Any, str], object] | None = None,
) -> Any:
    """Declare a dataclass field with the metadata that the command line needs.

    Args:
        default: default value; a list makes the option repeatable.
        text: help, at most two sentences; a function is called when help is shown.
        family: registry folder whose file names are the choices.
        choices: allowed values, or a function that returns them; added to those of the family.
        minimum, maximum: inclusive bounds.
        writes: whether the value names a file or folder that the command writes; it is never an input.
        group: heading of the option in the command's help.
        is_rare: whether only --help-all describes the option.
        check: raises UsageError, naming the option, for an invalid value.
        numeric: False if the value does not change the numbers of the artifact that records the options; irrelevant for
            groups that no artifact records.
    """
    meta = {
        "help": text,
        "family": family,
        "choices": choices,
        "short": short,
        "minimum": minimum,
        "maximum": maximum,
        "numeric": numeric,
        "env_common": env_common,
        "metavar": metavar,
        "writes": writes,
        "group": group,
        "is_rare": is_rare,
        "check": check,
    }
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


Declared = dict[str, tuple["Field[Any]", Any]]  # option name to dataclass field and resolved type


def declare_option_group(
    source: str | Callable[[], Declared], *, recorded: tuple[str, ...] = (), numeric: bool = True
) -> Any:
    """Declare a dataclass field that collects the values of several options by name.

    Args:
        source: a family, for the settings of its parts: the field holds the values given, and the parts choose the
            rest. Or a function that returns options: the field holds all of them, defaults included.
        recorded: settings that artifacts always record; others are recorded only if given, so that a new part does not
            change existing artifacts.
        numeric: as in `option`, for all of them.
    """
    look_up = partial(_declare_part_settings, source) if isinstance(source, str) else source
    meta = {"collected": look_up, "is_complete": callable(source), "recorded": recorded, "numeric": numeric}
    return field(default_factory=dict, metadata=meta)


Options = TypeVar("Options")


def map_options(group: type) -> Declared:
    """Map each option of an option class to its dataclass field and resolved type."""
    return _map_options(group)


@cache
def _map_options(group: type) -> Declared:
    """Cached, because every command asks for the options of all commands and resolving types is slow."""
    hints, found = get_type_hints(group), Declared()
    for spec in fields(group):
        found |= spec.metadata["collected"]() if _is_collected(spec) else {spec.name: (spec, hints[spec.name])}
    return found


def build_options(group: type[Options], values: Mapping[str, Any]) -> Options:
    """Build the options from values by name; missing values take their defaults."""
    specs: tuple[Field[Any], ...] = fields(group)  # type: ignore[arg-type]
    own = {spec.name: values[spec.name] for spec in specs if spec.name in values}
    for spec in filter(_is_collected, specs):
        given = {name: values.get(name) for name in spec.metadata["collected"]()}
        own[spec.name] = {name: value for name, value in given.items() if value is not None and value is not False}
    return group(**own)


def _is_collected(spec: Field[Any]) -> bool:
    return "collected" in spec.metadata


def declare_option(name: str, hint: Any, spec: Any) -> tuple[Field[Any], Any]:
    """Return an option made by `option`, with this name and type."""
    return fields(make_dataclass("_Option", [(name, hint, spec)]))[0], hint


@cache
def _declare_part_settings(family: str) -> Declared:
    """Return options for a family's settings, unset by default so that the part chooses."""
    found = {}
    for name, setting in settings_of(family).items():
        is_flag = setting.type is bool
        hint = bool if is_flag else setting.type | None
        spec = option(
            False if is_flag else None,
            setting.text,
            minimum=setting.minimum,
            maximum=setting.maximum,
            choices=setting.choices if setting.is_closed else (),
            metavar="NAME" if setting.choices and not setting.is_closed and setting.type is str else "",
            group=f"Settings of {setting.parts}",
            is_rare=True,
        )
        found[name] = declare_option(name, hint, spec)
    return found


def help_of(spec: Field[Any]) -> str:
    """Return the help text of an option."""
    text = spec.metadata["help"]
    return str(spell_options(text() if callable(text) else text))


def flag_of(name: str) -> str:
    """Return the flag of a field: --prior-precision for prior_precision, --assert for assert_ (a Python keyword)."""
    return "--" + name.rstrip("_").replace("_", "-")


def spell_options(value: Any, spell: Callable[[str], str] = flag_of) -> Any:
    """Replace the option markers (errors.BnnError) in texts by the options as the user writes them.

    Args:
        value: a text, or nested lists and dicts that contain texts.
        spell: maps a field to its spelling; the command-line flag by default.
    """
    if isinstance(value, str):
        return _FIELD.sub(lambda found: spell(found[1]), value)
    if isinstance(value, list):
        return [spell_options(one, spell) for one in value]
    return {name: spell_options(one, spell) for name, one in value.items()} if isinstance(value, dict) else value


def choices_of(meta: Any) -> list[str]:
    """Return the values that an option allows, from its family and its own choices; empty if any value is allowed."""
    choices = meta["choices"]
    return [*(registry.names(meta["family"]) if meta["family"] else []), *(choices() if callable(choices) else choices)]


def check_value(spec: Field[Any], value: Any, where: str) -> None:
    """Raise UsageError unless the value is an allowed choice and within bounds.

    Args:
        where: source of the value, for the message.
    """
    meta = spec.metadata
    if value is None:
        return
    for item in value if isinstance(value, list) else [value]:
        if not _is_choice(meta, item):
            raise unknown_value_error(where, item, choices_of(meta))
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: expected a finite number; got {value}")
    low, high = meta["minimum"], meta["maximum"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = [f"at least {low}"] if low is not None else []
        bounds += [f"at most {high}"] if high is not None else []
        raise UsageError(f"{where}: expected a number of {' and '.join(bounds)}; got {value}")


def _check(spec: Field[Any], value: Any) -> None:
    """Raise UsageError unless the option accepts the value."""
    where = f"\0{spec.name}\0"
    check_value(spec, value, where)
    if spec.metadata["check"] is not None:
        spec.metadata["check"](value, where)


def _is_choice(meta: Any, item: Any) -> bool:
    """Return whether an option accepts a value; installed parts of a family are looked up last."""
    choices = meta["choices"]() if callable(meta["choices"]) else meta["choices"]
    if item in choices or not (choices or meta["family"]):
        return True
    return meta["family"] is not None and registry.has_name(meta["family"], item)


class CheckedOptions:
    """Base of option classes: checks choices and bounds of every field on construction."""

    def __post_init__(self) -> None:
        for spec in fields(self):  # type: ignore[arg-type]
            given = getattr(self, spec.name)
            if not _is_collected(spec):
                _check(spec, given)
                continue
            is_complete = spec.metadata["is_complete"]
            known: Declared = spec.metadata["collected"]() if given or is_complete else {}
            if is_complete:
                given = {name: one.default for name, (one, _) in known.items()} | given
                object.__setattr__(self, spec.name, given)
            for name, value in given.items():
                _check(known[name][0], value)

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        found: dict[str, Any] = {}
        for spec in fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            if _is_collected(spec):
                known: Declared = spec.metadata["collected"]() if value else {}
                found |= {name: one for name, one in value.items() if one != known[name][0].default}
            elif value != (spec.default if spec.default_factory is MISSING else spec.default_factory()):
                found[spec.name] = value
        return found

    def params(self) -> dict[str, Any]:
        """Return the options that change numbers, as recorded and hashed in the artifact."""
        found: dict[str, Any] = {}
        for spec in fields(self):  # type: ignore[arg-type]
            if spec.metadata["numeric"] and _is_collected(spec):
                found |= dict.fromkeys(spec.metadata["recorded"]) | getattr(self, spec.name)
            elif spec.metadata["numeric"]:
                found[spec.name] = getattr(self, spec.name)
        return found


def check_artifact_name(name: str, flag: str) -> str:
    """Return `name` if it is a valid artifact name. Raises UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
        raise UsageError(f"{flag}: expected letters, digits, - and _ (at most 100); got {name!r}")
    return name


def check_split_name(name: str, flag: str) -> str:
    """Return `name` if it is a valid split name: an artifact name that may contain dots. Raises UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(
            f"{flag}: expected a split name of letters, digits, dots, dashes and underscores; got {name!r}"
        )
    return name


def check_suffix(path: str, flag: str, allowed: tuple[str, ...]) -> str:
    """Return the suffix of a file name, in lower case without the dot. Raises UsageError unless it is allowed."""
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    if suffix not in allowed:
        raise UsageError(f"{flag}: expected a file ending in {', '.join('.' + kind for kind in allowed)}; got {path!r}")
    return suffix


SMALLEST, LARGEST = (
    1e-30,
    1e30,
)  # range of numbers whose squares and quotients fit float64 and which themselves fit float32


def parse_positive(text: str, flag: str, expected: str = "a positive number") -> float:
    """Parse a number between SMALLEST and LARGEST. Raises UsageError."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise UsageError(f"{flag}: expected {expected}; got {text!r}")
    if not SMALLEST <= value <= LARGEST:
        raise UsageError(f"{flag}: expected a number from {SMALLEST:g} to {LARGEST:g}; got {text!r}")
    return value

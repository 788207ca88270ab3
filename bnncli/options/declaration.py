"""Declare options as dataclass fields with default, help, choices and bounds, and read what parts of a family declare.

What a file declares (`SETTINGS = {...}`, `COMMAND = Command(...)`) is read without importing the file, which may take seconds.
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
from bnncli.names import not_one_of

# A statement at the left margin, with its decorators, up to the next one; the names that it imports or defines.
_BLOCK = re.compile(r"^(?:@.*\n(?:[ \t)\]}].*\n)*)*[A-Za-z_].*\n(?:(?:[ \t)\]}#].*)?\n)*", re.MULTILINE)
_IMPORT = re.compile(r"from ([\w.]+) import (\([^)]*\)|[^\n(]*)")
_DEFINED = re.compile(r"(?:@.*\n(?:[ \t)\]}].*\n)*)*(?:(?:class|def) (\w+)|((?:\w+, )*\w+)(?:: [^=\n]+)? = )")


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
        elif module := re.fullmatch(r"import (\w+)", block.rstrip()):
            found[module[1]] = module[0]
        elif defined := _DEFINED.match(block):
            found |= dict.fromkeys((defined[1] or defined[2]).split(", "), block)
    return found


def _needed(name: str, blocks: Mapping[str, str]) -> list[str]:
    """Return the statements that the one of `name` needs, in the order of the file, itself last."""
    needed, waiting = {name}, [name]
    while waiting:
        tree = ast.parse(blocks[waiting.pop()])
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)} & blocks.keys()
        waiting += used - needed
        needed |= used
    return ["from __future__ import annotations", *dict.fromkeys(blocks[one] for one in blocks if one in needed)]


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
    """A dataclass field with what the command line needs to know about it.

    Args:
        default: the value when nothing says otherwise; a list makes the option repeatable.
        text: at most two sentences of help; a function where it says what there is, which is looked up when help is shown.
        family: a registry folder whose file names are the choices.
        choices: the values allowed, when they are fixed, or a function that looks them up; beside a family, further ones.
        minimum, maximum: bounds of a number, inclusive.
        writes: whether the value names a file or folder that the command writes; it is never one of the command's inputs.
        group: title in the command's help of the options that this one is listed with.
        is_rare: whether only --help-all describes it.
        check: raises UsageError for a value that is none, naming the option.
        numeric: False when the value changes no number of the artifact that records the options; groups that no artifact
            records say nothing of it.
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


Declared = dict[str, tuple["Field[Any]", Any]]  # options by name, each with its dataclass field and its resolved type


def collected(source: str | Callable[[], Declared], *, recorded: tuple[str, ...] = (), numeric: bool = True) -> Any:
    """A dataclass field that stands for several options, whose values it has by name.

    Args:
        source: a family, for the settings that its parts declare: it has those that were given, and parts decide about the
            others. Or a function that looks options up: it has all of them, each with its default where nothing was given.
        recorded: settings that artifacts record even where they are not given; the others are recorded where they are,
            so that another part makes no artifact another one.
        numeric: as of option, for all of them.
    """
    look_up = partial(_of_parts, source) if isinstance(source, str) else source
    meta = {"collected": look_up, "is_complete": callable(source), "recorded": recorded, "numeric": numeric}
    return field(default_factory=dict, metadata=meta)


Options = TypeVar("Options")


def declared(group: type) -> Declared:
    """Every option of a class of options by name, with its dataclass field and its resolved type."""
    return _declared(group)


@cache
def _declared(group: type) -> Declared:
    """The same, found once: every command asks for the options of all, and resolving types is slow."""
    hints, found = get_type_hints(group), Declared()
    for spec in fields(group):
        found |= spec.metadata["collected"]() if _is_collected(spec) else {spec.name: (spec, hints[spec.name])}
    return found


def made(group: type[Options], values: Mapping[str, Any]) -> Options:
    """The options with these values by name; what is not among them has its default."""
    specs: tuple[Field[Any], ...] = fields(group)  # type: ignore[arg-type]
    own = {spec.name: values[spec.name] for spec in specs if spec.name in values}
    for spec in filter(_is_collected, specs):
        given = {name: values.get(name) for name in spec.metadata["collected"]()}
        own[spec.name] = {name: value for name, value in given.items() if value is not None and value is not False}
    return group(**own)


def _is_collected(spec: Field[Any]) -> bool:
    return "collected" in spec.metadata


def declared_as(name: str, hint: Any, spec: Any) -> tuple[Field[Any], Any]:
    """An option of this name and type, made by `option`."""
    return fields(make_dataclass("_Option", [(name, hint, spec)]))[0], hint


@cache
def _of_parts(family: str) -> Declared:
    """The options of a family's settings; None, or no flag, where the part decides."""
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
        found[name] = declared_as(name, hint, spec)
    return found


def help_of(spec: Field[Any]) -> str:
    """Return the help of an option for the command line."""
    text = spec.metadata["help"]
    return str(spelled(text() if callable(text) else text))


def flag_of(name: str) -> str:
    """The option that a field is: --prior-precision for prior_precision, --assert for assert_ (a keyword of Python)."""
    return "--" + name.rstrip("_").replace("_", "-")


def spelled(value: Any, spell: Callable[[str], str] = flag_of) -> Any:
    """A text of a room below the stages, with the options that it means (errors.BnnError) as they are written.

    Args:
        value: a text, or lists and dicts of anything in which texts are.
        spell: a field as whoever reads it writes it; as an option of a command by default.
    """
    if isinstance(value, str):
        return _FIELD.sub(lambda found: spell(found[1]), value)
    if isinstance(value, list):
        return [spelled(one, spell) for one in value]
    return {name: spelled(one, spell) for name, one in value.items()} if isinstance(value, dict) else value


def choices_of(meta: Any) -> list[str]:
    """The values an option allows, from its family folder and its fixed list; empty when anything goes."""
    choices = meta["choices"]
    return [*(registry.names(meta["family"]) if meta["family"] else []), *(choices() if callable(choices) else choices)]


def check_value(spec: Field[Any], value: Any, where: str) -> None:
    """Raise UsageError, naming `where` the value came from, unless it is one of the choices and within the bounds."""
    meta = spec.metadata
    if value is None:
        return
    for item in value if isinstance(value, list) else [value]:
        if not _is_choice(meta, item):
            raise not_one_of(where, item, choices_of(meta))
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where}: expected a finite number; got {value}")
    low, high = meta["minimum"], meta["maximum"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        bounds = [f"at least {low}"] if low is not None else []
        bounds += [f"at most {high}"] if high is not None else []
        raise UsageError(f"{where}: expected a number of {' and '.join(bounds)}; got {value}")


def _check(spec: Field[Any], value: Any) -> None:
    """Raise UsageError unless it is a value of the option."""
    where = f"\0{spec.name}\0"
    check_value(spec, value, where)
    if spec.metadata["check"] is not None:
        spec.metadata["check"](value, where)


def _is_choice(meta: Any, item: Any) -> bool:
    """Whether an option takes a value; of a family's parts those that are installed are looked at last."""
    choices = meta["choices"]() if callable(meta["choices"]) else meta["choices"]
    if item in choices or not (choices or meta["family"]):
        return True
    return meta["family"] is not None and registry.has_name(meta["family"], item)


class Checked:
    """Checks choices and bounds of every field when built, so that an options object is always valid."""

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
        """The options that have another value than their default, by name."""
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
        """The options that change numbers, as recorded and hashed in the artifact."""
        found: dict[str, Any] = {}
        for spec in fields(self):  # type: ignore[arg-type]
            if spec.metadata["numeric"] and _is_collected(spec):
                found |= dict.fromkeys(spec.metadata["recorded"]) | getattr(self, spec.name)
            elif spec.metadata["numeric"]:
                found[spec.name] = getattr(self, spec.name)
        return found


def check_artifact_name(name: str, flag: str) -> str:
    """`name` itself, when it can be a file name and a table entry. Raises UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
        raise UsageError(f"{flag}: expected letters, digits, - and _ (at most 100); got {name!r}")
    return name


def check_split_name(name: str, flag: str) -> str:
    """`name` itself, when it can name a split: as an artifact's name, dots allowed. Raises UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise UsageError(
            f"{flag}: expected a split name of letters, digits, dots, dashes and underscores; got {name!r}"
        )
    return name


def check_suffix(path: str, flag: str, allowed: tuple[str, ...]) -> str:
    """The suffix of a file's name in lower case, without its dot. Raises UsageError unless it is allowed."""
    suffix = path.rpartition(".")[2].lower() if "." in path else ""
    if suffix not in allowed:
        raise UsageError(f"{flag}: expected a file ending in {', '.join('.' + kind for kind in allowed)}; got {path!r}")
    return suffix


SMALLEST, LARGEST = (
    1e-30,
    1e30,
)  # of numbers whose squares and quotients must stay within float64, themselves in float32


def parse_positive(text: str, flag: str, expected: str = "a positive number") -> float:
    """The positive number that `text` says, from SMALLEST to LARGEST. Raises UsageError otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise UsageError(f"{flag}: expected {expected}; got {text!r}")
    if not SMALLEST <= value <= LARGEST:
        raise UsageError(f"{flag}: expected a number from {SMALLEST:g} to {LARGEST:g}; got {text!r}")
    return value

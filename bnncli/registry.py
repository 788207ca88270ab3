"""Families of interchangeable parts: the files of a family folder are the names a user can choose.

`flows/planar.py` is what makes `--flow planar` exist. Names are listed from the folder without imports, so that
`--help` stays fast; a part is imported on demand. Installed distributions add parts by entry points: group
`bnncli.flows` for flows, `bnncli.commands` for commands, and so on, with a module written like a file of the folder as
value. Scores and detectors have no folder: their families are tables in evaluation/, and this module lists only what
distributions add to them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bnncli.errors import UsageError
from bnncli.names import unknown_value_error

_PACKAGE = Path(__file__).parent
_PLAIN_BASES = ("Generic[", "nn.")  # base classes from which commands read no attributes
_IS_OURS = "bnncli has a built-in part with this name"

_FOLDERS = {
    "data": "data/kinds",
    "models": "models/kinds",
    "networks": "models/architectures",
    "covariances": "structures",
    "curvature": "structures",
    "network_curvature": "structures",
}  # default: the family's own name
# The families in structures/: a file has a class for each of them that its structure supports, by these prefixes.
_CLASS_PREFIXES = {"covariances": "", "curvature": "LastLayer", "network_curvature": "Network"}
# Required attributes of a part's module or, with a leading dot, of its class.
_NEEDS = {
    "curvature": (".fixed", ".is_exact", ".hessian", ".num_elements", ".operations", ".most_elements"),
    "network_curvature": (".fixed", ".is_exact", ".hessian", ".num_elements"),
    "covariances": (
        ".structure",
        ".unwhiten",
        ".whiten",
        ".pull_back",
        ".to_tensors",
        ".from_tensors",
    ),
    "flows": (".recipe", ".settings", ".spaces", ".maps", ".forward", ".inverse", ".to_tensors", ".from_tensors"),
    "integrators": (".needs", ".is_sampling", ".prepare", ".predict"),
    "networks": ("build",),
    "models": ("FORM", "EXTRA", "open_model"),
    "data": ("FORM", "exists", "open_dataset"),
    "scores": ("SCORE",),
    "detectors": ("DETECTOR",),
    "commands": ("COMMAND", "execute"),
}


class _Installed(NamedTuple):
    """Module and distribution of an installed part."""

    module: str
    distribution: str


def names(family: str) -> list[str]:
    """Return the names of a family, sorted: file names with dashes, except those that start with `_`."""
    return sorted({*_own(family), *_list_installed(family)})


def own_names(family: str) -> list[str]:
    """Return the names in the family's folder, sorted."""
    return list(_own(family))


def has_name(family: str, name: str) -> bool:
    """Return whether the family has a part of this name; checks installed parts last."""
    return name in _own(family) or name in _list_installed(family)


def in_order(family: str) -> list[str]:
    """Return the names of a family whose parts declare `order`, lowest first."""
    return sorted(names(family), key=lambda name: (read_declared(family, name, "order"), name))


def list_declaring(family: str, attribute: str) -> list[str]:
    """Return the names of a family whose parts declare the attribute true."""
    return [name for name in names(family) if read_declared(family, name, attribute)]


def read_declared(family: str, name: str, attribute: str) -> Any:
    """Return the literal value of a class attribute, read from the file without an import."""
    found = _attributes(family, name)
    if attribute not in found:
        why = f"it declares no {attribute}: expected `{attribute}: ClassVar[...] = ...` in its class"
        raise broken(family, name, why)
    return ast.literal_eval(found[attribute])


def declaration_of(family: str, name: str, attribute: str) -> ast.expr | None:
    """Return the expression of an annotated class attribute in the part's file, or None."""
    return _attributes(family, name).get(attribute)


@cache
def has_attribute(family: str, name: str, attribute: str) -> bool:
    """Return whether a part's class has an attribute; imports the part only if its source does not tell.

    Raises:
        UsageError: unknown part.
    """
    check_name(family, name, option=family)
    tree = ast.parse(source_of(family, name).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == _class_name(family, name):
            if attribute in _names_given(node):
                return True
            is_told = all(isinstance(one, (ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Expr)) for one in node.body)
            if is_told and all(ast.unparse(base).startswith(_PLAIN_BASES) for base in node.bases):
                return False
    return hasattr(load_class(family, name), attribute)


def _names_given(node: ast.ClassDef) -> set[str]:
    """Return the names that a class body defines or assigns."""
    found = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    targets = [target for one in node.body if isinstance(one, ast.Assign) for target in one.targets]
    targets += [one.target for one in node.body if isinstance(one, ast.AnnAssign) and one.value is not None]
    return found | {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


@cache
def _attributes(family: str, name: str) -> dict[str, ast.expr]:
    """Map the annotated class attributes in a part's file to their expressions. Cached, because parsing is slow."""
    tree = ast.parse(source_of(family, name).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if family in _CLASS_PREFIXES:
        classes = [node for node in classes if node.name == _class_name(family, name)]
    bodies = [node.body for node in classes]
    nodes = [node for body in bodies for node in body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: node.value for node in nodes if isinstance(node.target, ast.Name) and node.value}


def check_name(family: str, name: str, *, option: str, also: Sequence[str] = ()) -> str:
    """Return `name` if the family has it. Raises UsageError, with the choices and `also`, otherwise."""
    if not has_name(family, name):
        raise unknown_value_error(option, name, names(family), also=also)
    return name


@cache
def load_module(family: str, name: str) -> ModuleType:
    """Import the module of a part. Raises UsageError, naming the distribution, if an installed part is invalid."""
    check_name(family, name, option=family)
    if name in _own(family):
        module = importlib.import_module(f"bnncli.{_folder(family).replace('/', '.')}.{_file_stem(name)}")
    else:
        try:
            module = importlib.import_module(_list_installed(family)[name].module)
        except Exception as error:  # third-party code may raise anything
            raise broken(family, name, f"importing it failed with {type(error).__name__}: {error}") from error
    for need in _NEEDS.get(family, ()):
        holder = getattr(module, _class_name(family, name), None) if need.startswith(".") else module
        if not hasattr(holder, need.lstrip(".")):
            whose = f"class {_class_name(family, name)}" if need.startswith(".") else "module"
            raise broken(family, name, f"its {whose} has no {need.lstrip('.')}")
    return module


def with_installed(family: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of parts with those of distributions added, sorted by `place`, then by name.

    Raises:
        UsageError: an installed part has a name of the table, or cannot be used.
    """
    (constant,) = _NEEDS[family]
    found = dict(table)
    for name, part in _list_installed(family).items():
        key = name.replace("-", "_")
        if key in table:
            raise _refusal(family, name, part.distribution, _IS_OURS)
        found[key] = getattr(load_module(family, name), constant)
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


def load_class(family: str, name: str) -> Any:
    """Return the class of a part: `planar` is class Planar, `plug-in` class PlugIn, and `kron` of a network NetworkKron."""
    return getattr(load_module(family, name), _class_name(family, name))


def source_of(family: str, name: str) -> Path:
    """Return the file of a part without importing it. Raises UsageError if an installed part has none."""
    if name in _own(family):
        stem = _PACKAGE / _folder(family) / _file_stem(name)
        return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    path = _find_module_file(_list_installed(family)[name].module)
    if path is None:
        raise broken(family, name, f"the module {_list_installed(family)[name].module} has no file")
    return path


def _find_module_file(module: str) -> Path | None:
    """Return the file of a module without importing its packages, which finding its spec would do."""
    first, *rest = module.split(".")
    with contextlib.suppress(ImportError, ValueError):
        spec, path = importlib.util.find_spec(first), first
        for word in rest:
            path = f"{path}.{word}"
            places = spec.submodule_search_locations if spec is not None else None
            spec = PathFinder.find_spec(path, places) if places is not None else None
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            return Path(spec.origin)
    return None


def broken(family: str, name: str, why: str) -> UsageError:
    """Return the one-line error for an invalid part, naming its source."""
    why = " ".join(why.split())
    if name in _own(family):
        return UsageError(f"{source_of(family, name)}: {why}", code="broken_part")
    return _refusal(family, name, _list_installed(family)[name].distribution, why)


def _refusal(family: str, name: str, distribution: str, why: str) -> UsageError:
    message = f"the part {name!r} of {_group(family)} from the package {distribution!r} cannot be used: {why}"
    return UsageError(
        message, hint=f"pip uninstall {distribution}, or install another release of it", code="broken_part"
    )


@cache
def _own(family: str) -> tuple[str, ...]:
    """Return the names in the folder. Cached, because commands look up names thousands of times."""
    folder = _PACKAGE / _folder(family)
    found = [path for path in folder.iterdir() if not path.name.startswith("_")] if folder.is_dir() else []
    parts = [path for path in found if path.suffix == ".py" or (path / "__init__.py").is_file()]
    names = sorted(path.stem.replace("_", "-") for path in parts)
    if family in _CLASS_PREFIXES:
        names = [name for name in names if _has_class(family, name, folder / f"{_file_stem(name)}.py")]
    return tuple(names)


def _has_class(family: str, name: str, path: Path) -> bool:
    """Return whether a structure's file has the class that the family needs."""
    return f"\nclass {_class_name(family, name)}" in path.read_text(encoding="utf-8")


@cache
def _list_installed(family: str) -> dict[str, _Installed]:
    """Return a family's installed parts. Raises UsageError for a duplicate name or an invalid module name."""
    found: dict[str, _Installed] = {}
    for name, value, distribution in _entry_points().get(_group(family), ()):
        if name in _own(family):
            raise _refusal(family, name, distribution, _IS_OURS)
        if name in found and found[name].distribution != distribution:
            others = found[name].distribution
            raise _refusal(family, name, distribution, f"the package {others!r} also has a part with this name")
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
            raise _refusal(family, name, distribution, "expected a name of lowercase letters, digits and dashes")
        if not re.fullmatch(r"\w+(\.\w+)*", value):
            raise _refusal(family, name, distribution, f"expected a module such as package.module; got {value!r}")
        if _CLASS_PREFIXES.get(family):
            path = _find_module_file(value)
            if path is not None and not _has_class(family, name, path):
                continue
        found.setdefault(name, _Installed(value, distribution))  # the first on the search path is the one imported
    return found


@cache
def _entry_points() -> dict[str, list[tuple[str, str, str]]]:
    """Return name, value and distribution of every entry point in a bnncli group. Takes 1 to 2 ms if there is none."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    if not any(map(_has_parts, sys.path)):
        return found
    from importlib.metadata import distributions  # slower to import than checking that there is nothing

    for distribution in distributions():
        for entry in distribution.entry_points:
            if entry.group.startswith("bnncli."):
                found.setdefault(entry.group, []).append((entry.name, entry.value, distribution.name))
    return found


def _has_parts(folder: str) -> bool:
    """Return whether a distribution in this search path folder has a bnncli entry point."""
    with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
        for entry in entries:
            if entry.name.endswith((".dist-info", ".egg-info")):
                with contextlib.suppress(OSError), open(os.path.join(entry.path, "entry_points.txt"), "rb") as file:
                    if b"[bnncli." in file.read():
                        return True
    return False


def _folder(family: str) -> str:
    return _FOLDERS.get(family, family)


def _group(family: str) -> str:
    return "bnncli.structures" if family in _CLASS_PREFIXES else f"bnncli.{family}"


def _file_stem(name: str) -> str:
    return name.replace("-", "_")


def _class_name(family: str, name: str) -> str:
    return _CLASS_PREFIXES.get(family, "") + "".join(word.capitalize() for word in name.split("-"))

"""Load the user's own Python code by name, `package.module:factory` or `file.py:factory`, and convert arguments for it.

Naming a factory runs the user's code; that is the purpose of the name.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from bnncli.errors import BnnError, DataError, MissingInput, UsageError
from bnncli.names import format_names, near_miss, unknown_value_error

# a process must have only one copy of each
_NEVER_ASIDE = sys.stdlib_module_names | {"bnncli", "torch", "numpy", "h5py"}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@contextmanager
def running_user_code(what: str, *, but: type[Exception] | tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Run the user's code inside the block: whatever it raises is an error in `what`, not one of bnncli's.

    Args:
        but: exceptions to let through, for a caller that handles them.

    Raises:
        DataError: naming what was raised; the exception itself is its cause, shown with -v.
    """
    try:
        yield
    except (BnnError, MemoryError, SystemExit, GeneratorExit):
        raise
    except but:
        raise
    # user code may raise anything; Ctrl-C reaches a command as a flag, not as an exception
    except BaseException as error:
        first_line = _text_of(error).strip().split("\n")[0][:200]
        raise DataError(
            f"{what} raised {type(error).__name__}: {first_line}", code="user_code", hint="use -v to see where"
        ) from error


def _text_of(error: BaseException) -> str:
    """Return an exception's text, or nothing where its __str__ raises."""
    try:
        return str(error)
    except Exception:
        return ""


def load_factory(spec: str, *, option: str) -> Callable[..., Any]:
    """Import the user's code and return the callable that `package.module:factory` or `file.py:factory` names.

    Raises:
        MissingInput: the file does not exist.
        UsageError: the spec has another form, the import fails, or there is no such callable.
    """
    place, colon, attribute = spec.rpartition(":")
    if not colon or not place or not attribute.isidentifier():
        raise UsageError(f"{option}: expected package.module:factory or file.py:factory, got {spec!r}")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except (BnnError, MemoryError, SystemExit):
        raise
    except BaseException as error:
        message = f"{option}: importing {place!r} failed: {type(error).__name__}: {_text_of(error)}"
        raise UsageError(message) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        own = [name for name, value in vars(module).items() if _is_of(module, name, value)]
        there = f"it has {format_names(own, limit=10)}" if own else "it defines none"
        raise UsageError(
            f"{option}: {place!r} has no callable named {attribute!r}; {there}", hint=near_miss(attribute, own)
        )
    return typing.cast(Callable[..., Any], factory)


def _is_of(module: types.ModuleType, name: str, value: object) -> bool:
    """Return whether a name of a module is a public function or class defined in it."""
    return callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


class CodeFolder:
    """The folder of the user's code, for a process that is not ours: its modules are visible only inside `visible`.

    Two folders may each have a `blocks.py`: neither sees the other's, and the process keeps its own.
    """

    def __init__(self, spec: str) -> None:
        """Take the folder of `file.py:factory`, or the current one, where `package.module:factory` is looked up first."""
        place = spec.rpartition(":")[0]
        self._folder = Path(place).resolve().parent if place.endswith(".py") else Path.cwd().resolve()
        self._path = [str(self._folder)]  # what is added to sys.path inside
        self._modules: dict[str, types.ModuleType] = {}

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Search this folder first for imports inside the block; restore sys.path and sys.modules after it."""
        path, aside = list(sys.path), self._put_aside()
        known = {_top(name) for name in sys.modules}
        sys.path[:0] = self._path
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._path = [place for index, place in enumerate(sys.path) if index == 0 or place not in path]
            sys.path[:] = path
            own = {name for name in {_top(name) for name in sys.modules} - known if self._has_loaded(name)}
            self._modules = {name: module for name, module in sys.modules.items() if _top(name) in own}
            for name in self._modules:
                del sys.modules[name]
            sys.modules.update(aside)

    def _put_aside(self) -> dict[str, types.ModuleType]:
        """Remove from sys.modules, and return, the modules of other folders whose names this folder has too."""
        tops = {_top(name) for name in sys.modules} - _NEVER_ASIDE
        others = {name for name in tops if self._has_file(name) and not self._has_loaded(name)}
        return {name: sys.modules.pop(name) for name in list(sys.modules) if _top(name) in others}

    def _has_file(self, name: str) -> bool:
        """Return whether an import of `name` would find it here; a folder without __init__.py is found last of all."""
        place = self._folder / name
        if place.with_name(f"{name}.py").is_file() or (place / "__init__.py").is_file():
            return True
        return place.is_dir() and getattr(sys.modules.get(name), "__file__", None) is None

    def _has_loaded(self, name: str) -> bool:
        """Return whether the module of this name in sys.modules came from here."""
        module = sys.modules.get(name)
        try:
            places = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None)]
        except Exception:  # of a module that computes its attributes
            return False
        return any(isinstance(place, str) and Path(place).resolve().parent == self._folder for place in places)


def _top(name: str) -> str:
    return name.partition(".")[0]


def convert_arguments(factory: Callable[..., Any], texts: Mapping[str, str], *, option: str) -> dict[str, Any]:
    """Return keyword arguments for `factory`, each text converted to the type that its parameter declares.

    A parameter without a declared type gets the text as a Python literal, or else the text itself.

    Raises:
        UsageError: for a name that the factory does not accept, listing those it does, or a value of the wrong type.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: cannot determine the factory's arguments: {error}") from error
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = [name for name, parameter in parameters.items() if parameter.kind in _BY_NAME]
    hints = _type_hints(factory)
    for name in texts:
        if name not in accepted and not takes_any:
            raise unknown_value_error(option, name, accepted)
    return {name: _convert(text, hints.get(name), f"{option} {name}") for name, text in texts.items()}


def check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any], *, option: str) -> None:
    """Check that `factory` can be called with these arguments. Raises UsageError naming what is missing."""
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{option}: cannot call the factory: {error}") from error


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _import_module(name: str) -> types.ModuleType:
    """Import a module as `python -m` would: from the current folder too."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _import_file(path: Path) -> types.ModuleType:
    """Run a file as a module whose siblings are importable, as for a script."""
    if not path.is_file():
        raise MissingInput(f"no file {str(path)!r}", path=path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_name = path.stem if path.stem.isidentifier() else "user_code_file"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    if type(spec.loader) is SourceFileLoader:
        spec.loader = _AsItStands(module_name, str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module_name, module)
    spec.loader.exec_module(module)
    return module


class _AsItStands(SourceFileLoader):
    """Compile the file on every load: Python's cache misses a change of the same size within a second."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _type_hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the declared types of the parameters; none where a declaration cannot be resolved."""
    declared = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(declared)
    except (NameError, TypeError, AttributeError):
        return {}


def _convert(text: str, hint: Any, where: str) -> Any:
    try:
        if hint is bool:
            return _BOOLEANS[text.lower()]
        if hint in (int, float, str):
            return hint(text)
        if hint == tuple[int, ...]:
            return tuple(int(part) for part in text.split(",") if part.strip())
    except (ValueError, KeyError):
        kind = "integers such as 50,50" if hint == tuple[int, ...] else hint.__name__
        raise UsageError(f"{where}: expected {kind}, got {text!r}") from None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

"""What the columns of Arrow tables hold, and the library that reads them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.data._columns import FILE, LIST, OTHER, REAL, TEXT, WHOLE
from bnncli.errors import DataError, UsageError
from bnncli.names import by_number, is_split, listed, quoted

_NUMBERS = {"float", "double", *(f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64))}


def arrow_library(module: str, asked: str) -> Any:
    """The module of pyarrow.

    Args:
        asked: what needs it, as the user gave it.

    Raises:
        UsageError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        message = f"{asked} needs pyarrow, which {why}"
        raise UsageError(message, code="missing_library", hint="pip install 'bnncli[parquet]'") from error


def columns_of(schema: Any, asked: str, where: str) -> dict[str, str]:
    """What each column of a schema holds. Raises DataError where two have one name."""
    types = arrow_library("pyarrow", asked).types
    names = list(schema.names)
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise DataError(f"{where} has several columns named {listed(double)}")
    return {field.name: _held(field.type, types) for field in schema}


def _held(kind: Any, types: Any) -> str:
    if types.is_dictionary(kind):
        kind = kind.value_type
    checks = (
        (TEXT, ("is_string", "is_large_string", "is_string_view")),
        (WHOLE, ("is_integer", "is_boolean")),
        (REAL, ("is_floating",)),
        (LIST, ("is_list", "is_large_list", "is_fixed_size_list")),
        (FILE, ("is_binary", "is_large_binary", "is_fixed_size_binary")),
    )
    for holds, names in checks:
        if any(getattr(types, name)(kind) for name in names):
            return holds
    if types.is_struct(kind) and {"bytes", "path"} <= {kind.field(place).name for place in range(kind.num_fields)}:
        return FILE
    return OTHER


def plain_numbers(column: Any) -> np.ndarray | None:
    """The numbers (n,) of a column, (n, L) of one of lists of L; None where some are missing, or are no plain numbers."""
    if column.null_count:
        return None
    if str(column.type) in _NUMBERS:
        return np.from_dlpack(column)  # to_numpy imports pandas where that is installed
    if not str(column.type).startswith(("list<", "large_list<", "fixed_size_list<")) or len(column) == 0:
        return None
    size = getattr(column.type, "list_size", None)
    sizes = {size} if size is not None else {*np.diff(np.from_dlpack(column.offsets)).tolist()}
    inner = plain_numbers(column.flatten())
    if inner is None or inner.ndim != 1 or len(sizes) != 1 or not len(inner):
        return None
    return inner.reshape(len(column), -1)


def listed_values(column: Any) -> list[Any]:
    """The values of a column as Python has them, None for those that are missing."""
    is_plain = str(column.type) in _NUMBERS and not column.null_count
    found: list[Any] = np.from_dlpack(column).tolist() if is_plain else column.to_pylist()
    return found


def class_names_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Names of the classes that Hugging Face's datasets write into a schema."""
    try:
        stored = json.loads((metadata or {}).get(b"huggingface", b"{}"))
        return names_of_features(stored["info"]["features"])
    except (ValueError, LookupError, TypeError, RecursionError):  # others may write what they like there
        return {}


def names_of_features(features: Any) -> dict[str, tuple[str, ...]]:
    """Names of the classes of each feature that is a ClassLabel, or a list of them."""
    if not isinstance(features, Mapping):
        return {}
    inner = {name: _inner(feature) for name, feature in features.items()}
    named = {name: feature.get("names") for name, feature in inner.items() if feature.get("_type") == "ClassLabel"}
    return {name: tuple(map(str, names)) for name, names in named.items() if isinstance(names, list)}


def _inner(feature: Any) -> Mapping[str, Any]:
    """A feature, or that of a list's values, which the library has written in three ways."""
    if isinstance(feature, list) and len(feature) == 1:
        return _inner(feature[0])
    if not isinstance(feature, Mapping):
        return {}
    return (
        _inner(feature["feature"])
        if feature.get("_type") in ("Sequence", "List", "LargeList") and "feature" in feature
        else feature
    )


def files_of(place: str, suffixes: Iterable[str], spelled: str) -> tuple[Path, list[Path]]:
    """The file, folder or pattern, and the files, in the order of the numbers in their names.

    Raises:
        UsageError: a folder has the files of several splits.
        DataError: a pattern or a folder without such files.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        found = [file for suffix in suffixes for file in path.rglob(f"*{suffix}") if _is_shown(file, path)]
        splits = sorted({split for file in found if (split := _split_of(file)) is not None})
        if len(splits) > 1:
            raise UsageError(
                f"\0data\0 {spelled}: {quoted(path, limit=300)} has files from several splits: {listed(splits)}",
                hint=f"use a pattern, such as {spelled}:{path}/**/{splits[0]}-*{found[0].suffix}",
            )
    elif any(letter in place for letter in "*?[") and not path.exists():
        fixed = Path(
            *[part for part in path.parts if not any(letter in part for letter in "*?[")][: _first_pattern(path)]
        )
        found = [file for file in fixed.glob(str(path.relative_to(fixed))) if file.is_file()]
    else:
        return path, [path]
    if not found:
        what = (
            f"no {spelled} files in {quoted(path, limit=300)}"
            if path.is_dir()
            else f"no file matches {quoted(path, limit=300)}"
        )
        raise DataError(what, path=path, code="empty_split")
    return path, sorted(found, key=by_number)


def _first_pattern(path: Path) -> int:
    """How many parts of a path come before the first that is a pattern."""
    return next(place for place, part in enumerate(path.parts) if any(letter in part for letter in "*?["))


def _is_shown(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _split_of(file: Path) -> str | None:
    """The split that a file is of, where it is called as data sets of several are: train-00000-of-00002, test."""
    first = file.stem.partition("-")[0]
    return first if is_split(first) else None

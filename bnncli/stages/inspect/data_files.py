"""Files of data: what arrays or columns they have, and what they would be as --data."""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path

import numpy as np

from bnncli import registry
from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.options.command import pasted
from bnncli.stages.inspect.found import Found, data_line
from bnncli.system.input_files import is_failure

_TABLES = ("csv", "tsv", "jsonl", "parquet", "arrow")
_TEXT = ("text", "sentence", "review", "content", "comment", "body", "message", "tweet", "title", "question")
_LABEL = ("label", "labels", "target", "class", "category", "sentiment", "y")
_IDX = {b"\0\0\x08\x01": "labels", b"\0\0\x08\x03": "images"}
_LINE = 1 << 20


def can_be_read(kind: str) -> bool:
    """Whether there is such a kind of data."""
    return registry.has_name("data", kind)


def table_found(path: Path) -> Found | None:
    """What a file of rows is, by its name; None for any other."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _TABLES or not can_be_read(kind):
        return None
    found, columns = Found(kind), _columns(path, kind)
    if columns:
        found.add("columns", ", ".join(columns), key="columns")
    text = next((name for name in columns if name.lower() in _TEXT), None)
    label = next((name for name in columns if name.lower() in _LABEL), None)
    named = [
        f"{what}={name}" for what, name in (("text", text), ("label", label)) if name is not None and "," not in name
    ]
    found.suggested = data_line(f"{kind}:{path}" + (f":{','.join(named)}" if len(named) == 2 else ""))
    return found


def _columns(path: Path, kind: str) -> list[str]:
    """Names of the columns; none where they cannot be told without another library."""
    if kind in ("parquet", "arrow"):
        return []
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as stream:
        first = stream.readline(_LINE)
    if kind == "jsonl":
        try:
            row = json.loads(first)
        except (ValueError, RecursionError):
            return []
        return [str(name) for name in row] if isinstance(row, dict) else []
    csv.field_size_limit(_LINE)
    return next(iter(csv.reader([first], delimiter="\t" if kind == "tsv" else ",")), [])


def idx_found(path: Path, head: bytes) -> Found | None:
    """What a file of the MNIST family is, with its partner; None for any other."""
    what = _IDX.get(head[:4])
    if what is None:
        return None
    found = Found(f"idx {what}")
    shape = [int.from_bytes(head[place : place + 4], "big") for place in range(4, 4 + 4 * head[3], 4)]
    found.add("shape", str(tuple(shape)), key="shape")
    other = {"images": ("images-idx3", "labels-idx1"), "labels": ("labels-idx1", "images-idx3")}[what]
    partner = path.with_name(path.name.replace(*other))
    pair = [
        str(path),
        str(partner) if partner != path and partner.is_file() else "LABELS" if what == "images" else "IMAGES",
    ]
    found.suggested = data_line(f"idx:{','.join(pair if what == 'images' else pair[::-1])}")
    return found


def npz_found(path: Path) -> Found:
    """What an archive of arrays is: inputs and labels, ready features, or a linear classifier.

    Raises:
        DataError: it is damaged.
    """
    shapes = _npz_shapes(path)
    found = Found("npz")
    for name, described in shapes.items():
        found.add(f"array {quoted(name)}", f"{described[0]} {described[1]}")
    found.document["arrays"] = {name: f"{kind} {shape}" for name, (kind, shape) in shapes.items()}
    if "coef_" in shapes and registry.has_name("models", "sklearn"):
        found.suggest(path, model=f"sklearn:{path}", data="npz:TRAIN.npz")
    elif any(name.startswith("features_") for name in shapes):
        found.suggested = pasted("extract-features", str(path.with_suffix("")), from_npz=str(path))
    else:
        found.suggested = _as_split(path, shapes)
    return found


def _as_split(path: Path, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """The line for inputs x and labels y, or for those that could be them."""
    if "x" in shapes:
        return data_line(f"npz:{path}")
    inputs = [name for name, (_, shape) in shapes.items() if len(shape) >= 2]
    labels = [
        name for name, (kind, shape) in shapes.items()
        if len(shape) == 1 and kind.startswith(("int", "uint")) and inputs and shape[0] == shapes[inputs[0]][1][0]
    ]  # fmt: skip
    if not inputs:
        return None
    return data_line(f"npz:{path}:{','.join([inputs[0], *labels[:1]])}")


def _npz_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each array, from their headers."""
    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as stream:
                    version = np.lib.format.read_magic(stream)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(stream)
                    found[name.removesuffix(".npy")] = (str(dtype), tuple(shape))
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        if is_failure(error):
            raise
        raise DataError(
            f"{quoted(path, limit=300)}: the npz archive is damaged", code="truncated", path=path
        ) from error
    return found

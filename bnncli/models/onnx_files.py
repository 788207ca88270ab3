"""Find the external tensor files of an ONNX graph without the onnx package.

Parses only what leads to tensor locations in the protocol buffer: a field's number and type, then its bytes. Source:
onnx.proto3 (ModelProto.graph, .functions; GraphProto.node, .initializer; AttributeProto.t, .g, .tensors, .graphs;
TensorProto.external_data).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from bnncli.errors import DataError, Untrusted
from bnncli.names import quote_name
from bnncli.system.input_files import open_regular

# Fields that lead to a tensor, by kind of message: field number to kind of its content.
_WAYS = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "place"},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def onnx_files(path: Path) -> tuple[Path, ...]:
    """Return the graph's file, followed by its external tensor files.

    Raises:
        MissingInput: a file is missing.
        DataError: it is not an ONNX graph.
        Untrusted: it refers to a file outside its folder.
    """
    with open_regular(path) as stream:
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if not any(field == 7 for field, _, _ in fields_of(content, 0, len(content))):
                    raise ValueError("it has no graph")
                names = sorted(set(_places(content, 0, len(content), "model")))
        except (ValueError, IndexError, RecursionError) as error:
            why = f"{error}" if len(str(error)) < 80 else type(error).__name__
            raise DataError(
                f"{quote_name(path, limit=300)} is not an ONNX graph, or is damaged ({why})", code="not_onnx", path=path
            ) from error
    files = [path]
    for name in names:
        if "\0" in name:
            message = f"{quote_name(path, limit=300)} refers to a file whose name contains NUL: {quote_name(name)}"
            raise DataError(message, code="not_onnx", path=path)
        file = path.parent / name
        if not file.resolve().is_relative_to(path.parent.resolve()):
            raise Untrusted(
                f"{quote_name(path, limit=300)} refers to a file outside its folder: {quote_name(name)}",
                code="outside",
                path=path,
            )
        with open_regular(file):
            files.append(file)
    return tuple(files)


def _places(content: mmap.mmap, start: int, end: int, kind: str) -> Iterator[str]:
    """Yield the file names in a message."""
    for field, at, until in fields_of(content, start, end):
        inner = _WAYS[kind].get(field)
        if inner == "place":
            entry = {number: content[low:high] for number, low, high in fields_of(content, at, until)}
            if entry.get(1) == b"location":
                yield entry.get(2, b"").decode()
        elif inner is not None:
            yield from _places(content, at, until, inner)


def fields_of(content: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each bytes field in a message, and its start and end."""
    while start < end:
        key, start = _number(content, start)
        wire = key & 7
        if wire == _VARINT:
            _, start = _number(content, start)
        elif wire in (_FIXED64, _FIXED32):
            start += 8 if wire == _FIXED64 else 4
        elif wire == _BYTES:
            size, start = _number(content, start)
            if start + size > end:
                raise ValueError("a field extends past the end of the file")
            yield key >> 3, start, start + size
            start += size
        else:
            raise ValueError(f"unknown field type {wire}")
    if start != end:
        raise ValueError("a field extends past the end of the file")


def _number(content: mmap.mmap, at: int) -> tuple[int, int]:
    """Return a varint, and where it ends."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if not byte & 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")

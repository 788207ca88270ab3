"""Arrays of numbers out of MATLAB files of level 5, which versions 5 to 7 write; scipy.io, which reads all that is in them, is slow to import.

Source: The MathWorks, MAT-File Format, "Level 5 MAT-File Format".
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from bnncli.data._arrays import can_hold, check_memory
from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.system.input_files import is_failure, open_regular

_HEADER = 128
_ORDERS = {b"IM": "<", b"MI": ">"}
_MATRIX, _COMPRESSED = 14, 15
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_COMPLEX = 0x0800


def read_mat(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Arrays of real numbers by their names. Raises MissingInput; DataError for a damaged file, or one without one of them."""
    shown = quoted(path, limit=300)
    with open_regular(path) as stream:
        data = memoryview(stream.read())
    try:
        order = _ORDERS[bytes(data[_HEADER - 2 : _HEADER])]
        found = {name: array for name, array in _matrices(data[_HEADER:], order, shown) if name in names}
    except (
        KeyError,
        ValueError,
        TypeError,
        RuntimeError,
        struct.error,
        zlib.error,
    ) as error:  # RuntimeError: too few parts
        if is_failure(error):
            raise
        why = "it does not start with a level 5 header" if isinstance(error, KeyError) else error
        message = f"{shown} is not a complete MATLAB file: {why}"
        raise DataError(message, path=path, hint="copy or download it again") from error
    for name in names:
        if name not in found:
            raise DataError(f"{shown} has no numeric array {quoted(name)}", path=path)
    return found


def _matrices(data: memoryview, order: str, shown: str) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of the arrays of real numbers."""
    for kind, content in _elements(data, order):
        if kind == _COMPRESSED:
            kind, content = next(_elements(_unpacked(content, order, shown), order))
        if kind != _MATRIX:
            continue
        parts = _elements(content, order)
        flags = struct.unpack_from(f"{order}I", next(parts)[1])[0]
        shape = np.frombuffer(next(parts)[1], f"{order}i4").tolist()
        name = bytes(next(parts)[1]).decode()
        if flags & 0xFF in _CLASSES and not flags & _COMPLEX:
            stored, values = next(parts, (9, memoryview(b"")))
            array = np.frombuffer(values, f"{order}{_STORED.get(stored)}")
            if len(array) != math.prod(shape):
                raise ValueError(f"{quoted(name)} has {len(array)} numbers, which do not match shape {tuple(shape)}")
            yield name, array.astype(_CLASSES[flags & 0xFF]).reshape(shape, order="F")


def _unpacked(content: memoryview, order: str, shown: str) -> memoryview:
    """One element, unpacked; as many bytes as it says that it has."""
    packed = zlib.decompressobj()
    head = packed.decompress(content, 8)
    size = struct.unpack(f"{order}II", head)[1]
    if not can_hold(len(content), size):
        raise ValueError(f"{len(content)} compressed bytes cannot hold {size} bytes")
    check_memory(size, shown)
    body = packed.decompress(packed.unconsumed_tail, max(size, 1))
    packed.decompress(packed.unconsumed_tail, 1)
    if not packed.eof:  # where its checksum is
        raise ValueError("it is truncated")
    return memoryview(head + body)


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and content of each element; small ones lie in their own head."""
    place = 0
    while place < len(data):
        kind, size = struct.unpack_from(f"{order}II", data, place)
        if kind >> 16:
            yield kind & 0xFFFF, data[place + 4 : place + 4 + (kind >> 16)]
            place += 8
            continue
        if place + 8 + size > len(data):
            raise ValueError("it is truncated")
        yield kind, data[place + 8 : place + 8 + size]
        place += 8 + (size if kind == _COMPRESSED else -(-size // 8) * 8)

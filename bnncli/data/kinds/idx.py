"""`idx:IMAGES,LABELS`: MNIST's own file format, gzipped or not.

Format: two zero bytes, a type code, the number of axes, each size as a big-endian 32-bit number, then the elements.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from bnncli.data.arrays import ArrayDataset, array_dataset, can_inflate_to, check_memory
from bnncli.data.pixels import Preprocess
from bnncli.errors import DataError
from bnncli.names import quote_name
from bnncli.options.declaration import Form
from bnncli.system.input_files import is_failure, open_regular

FORM = Form("idx:IMAGES,LABELS", 20, "Files in the MNIST format; may be gzipped.")

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_AXES = 8
_GZIP_MAGIC = b"\x1f\x8b"


def exists(place: str) -> bool:
    """Return whether the text as it stands names files."""
    return all(path.is_file() for path in _divide(place))


def open_dataset(place: str, preprocess: Preprocess) -> ArrayDataset:
    """Open images, and labels if a second file is named.

    Raises:
        MissingInput: a file does not exist.
        DataError: a file is not idx, or labels break a rule.
    """
    arrays = [read_idx(path) for path in _divide(place)]
    return array_dataset(arrays[0], arrays[1] if len(arrays) == 2 else None, where=f"idx:{place}")


def read_idx(path: Path) -> np.ndarray:
    """Read the array in an idx file, in native byte order. Raises MissingInput or DataError."""
    with open_regular(path) as stream:
        is_zipped = stream.read(2) == _GZIP_MAGIC
        stream.seek(0)
        size = os.fstat(stream.fileno()).st_size
        plain = cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if is_zipped else stream
        try:
            return _parse(plain, size, is_zipped=is_zipped)
        except (ValueError, EOFError, OSError, zlib.error, struct.error) as error:
            if is_failure(error):
                raise
            raise DataError(f"{quote_name(path, limit=300)} is not a complete idx file: {error}", path=path) from error


def _parse(stream: IO[bytes], size: int, *, is_zipped: bool) -> np.ndarray:
    """Read the array of an open file of `size` bytes, and nothing that the header does not announce."""
    zeros, code, num_axes = struct.unpack(">HBB", stream.read(4))
    if zeros != 0 or code not in _TYPES or num_axes == 0:
        raise ValueError("it does not start with the idx magic number")
    if num_axes > _MOST_AXES:
        raise ValueError(f"its header has {num_axes} axes, expected at most {_MOST_AXES}")
    shape = struct.unpack(f">{num_axes}I", stream.read(4 * num_axes))
    dtype = np.dtype(_TYPES[code])
    expected = math.prod(shape) * dtype.itemsize
    most = size - 4 - 4 * num_axes
    if expected > most and not (is_zipped and can_inflate_to(size, expected)):
        raise ValueError(
            f"shape {shape} needs {expected} bytes, but there are {most}{' compressed' if is_zipped else ''}"
        )
    check_memory(2 * expected, f"shape {shape}")  # as stored, and in native byte order
    data = bytearray()
    while block := stream.read(min(1 << 24, expected + 1 - len(data))):
        data += block
    if len(data) != expected:
        came = "more" if len(data) > expected else f"{len(data)}"
        raise ValueError(f"shape {shape} needs {expected} bytes, but there are {came}")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _divide(place: str) -> list[Path]:
    """Split into one or two files, at the comma that divides existing files, or else the last one."""
    whole = Path(place).expanduser()
    commas = [i for i, letter in enumerate(place) if letter == ","]
    if whole.exists() or not commas:
        return [whole]
    choices = [[Path(place[:i]).expanduser(), Path(place[i + 1 :]).expanduser()] for i in commas]
    return next((pair for pair in choices if all(path.is_file() for path in pair)), choices[-1])

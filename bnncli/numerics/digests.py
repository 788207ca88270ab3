"""Digests of arrays, of files and of JSON values.

`bnn-sha256/1` is SHA-256 over the entries of a dictionary of arrays, sorted by name. Each entry is one line of
canonical JSON `[name, dtype, shape]`, a newline, and the elements as little-endian bytes in row-major order. Arrays of
strings have dtype `utf8` and are the canonical JSON of their flat list of strings. The line determines how many bytes
follow, so different dictionaries give different streams.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    from torch import Tensor

ALGORITHM = "bnn-sha256/1"
_SURROGATE = re.compile("[\ud800-\udfff]")
_BLOCK = 1 << 23


def canonical_json(value: object) -> str:
    """Return `value` as JSON with sorted keys and no spaces: equal values give equal text.

    Bytes of file names that are not UTF-8 (lone surrogates in Python) are written as JSON escapes and preserved.

    Raises:
        ValueError: the value contains NaN or infinity, which JSON lacks.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def json_sha256(value: object) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def tensor_digest(tensors: Mapping[str, Tensor | np.ndarray]) -> str:
    """Return the `bnn-sha256/1:...` digest of named arrays, independent of library, device and strides.

    Args:
        tensors: name to torch tensor or numpy array; numpy arrays of strings are supported.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, blocks = _entry(tensors[name])
        header = canonical_json([name, dtype, shape])
        digest.update(header.encode("utf-8", "surrogatepass") + b"\n")
        for block in blocks:
            digest.update(block)
    return f"{ALGORITHM}:{digest.hexdigest()}"


def file_sha256(source: Path | str | IO[bytes], progress: Progress = SILENT) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes; an open file is read from its start and left at its end."""
    if isinstance(source, (str, Path)):
        with open(source, "rb") as stream:
            return file_sha256(stream, progress)
    size = source.seek(0, 2)
    source.seek(0)
    task = progress.task("hash", size)
    digest = hashlib.sha256()
    while block := source.read(_BLOCK):
        digest.update(block)
        task.advance(len(block))
    return digest.hexdigest()


def _entry(array: Any) -> tuple[str, list[int], Iterable[bytes | memoryview]]:
    """Return type name, shape and bytes of an array, in blocks."""
    if isinstance(array, (np.ndarray, np.generic)):
        return _numpy_entry(np.asarray(array))
    import torch

    flat = array.detach().to("cpu").contiguous().reshape(-1)
    dtype = str(array.dtype).removeprefix("torch.")
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return dtype, list(array.shape), [raw.data]


def _numpy_entry(array: np.ndarray) -> tuple[str, list[int], Iterable[bytes | memoryview]]:
    shape = list(array.shape)
    if array.dtype.kind in "OSUT":
        texts = [item.decode() if isinstance(item, bytes) else str(item) for item in array.reshape(-1).tolist()]
        return "utf8", shape, [canonical_json(texts).encode("utf-8", "surrogatepass")]
    # Draws in a file may have another memory order: copy them into row-major order one row of the first axis at a time.
    is_whole = array.ndim < 2 or array.flags.c_contiguous
    return array.dtype.name, shape, (_little_endian(part) for part in ([array] if is_whole else array))


def _little_endian(array: np.ndarray) -> memoryview:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data

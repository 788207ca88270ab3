"""What is recorded of a file that a command wrote: its header line by line, and of each array a few numbers.

Files are read with the libraries that made their containers (safetensors' layout, HDF5, npz, JSON, PNG) and with nothing of bnncli, so
that a record says what is in them whatever becomes of the code that reads them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

# Values of these keys tell of the machine and the moment; the key stays.
PASSING = {
    "created_at",
    "document_sha256",  # of a document that holds times
    "seconds",
    "git_sha",
    "git_dirty",
    "platform",
    "threads",
    "gpu",
    "device",
    "creation_library_version",
}
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "U8": "uint8"}
SAFETENSORS |= {"I8": "int8", "I16": "int16", "BOOL": "bool"}
REFERENCES = ("DIMENSION_LIST", "REFERENCE_LIST")  # HDF5 attributes that point elsewhere in the file
SHORT = 6  # entries of a list or object that stands within a line


def describe(path: Path, is_strict: bool) -> list[str]:
    """The lines of one file.

    Args:
        is_strict: every number in full, and a digest of every array; else 6 digits.
    """
    kinds = {".safetensors": _safetensors, ".h5": _hdf5, ".nc": _hdf5, ".json": _json, ".csv": _text, ".npz": _npz}
    lines = kinds.get(path.suffix, _other)(path, is_strict)
    return [f"mode {path.stat().st_mode & 0o777:o}", *lines]


def flatten(value: Any, is_strict: bool, name: str = "") -> Iterator[str]:
    """JSON as lines `path: value`: an object with its scalars is one line, what is nested in it follows.

    Objects of the same keys in a list have them said once; a longer list of numbers is an array.
    """
    value = _without_machine(value)
    if isinstance(value, dict):
        nested = {key: inner for key, inner in value.items() if not _is_short(inner)}
        yield f"{name}: {_dump({key: '...' if key in nested else inner for key, inner in value.items()}, is_strict)}"
        for key, inner in nested.items():
            yield from flatten(inner, is_strict, f"{name}.{key}")
    elif _is_short(value):
        yield f"{name}: {_dump(value, is_strict)}"
    elif all(isinstance(one, int | float) for one in value):
        yield _summary(name, np.array(value, dtype=np.float64), is_strict)
    elif all(isinstance(one, str) for one in value):
        yield f"{name}: {_dump(value, is_strict)}"
    else:
        keys: list[str] = []
        for position, one in enumerate(value):
            if isinstance(one, dict) and all(_is_short(inner) for inner in one.values()):
                if (said := [_key(key, inner) for key, inner in one.items()]) != keys:
                    keys = said
                    yield f"{name}: [{', '.join(keys)}]"
                values = [list(inner.values()) if isinstance(inner, dict) else inner for inner in one.values()]
                yield f"{name}.{position}: {_dump(values, is_strict)}"
            else:
                yield from flatten(one, is_strict, f"{name}.{position}")


def _without_machine(value: Any) -> Any:
    """The same without what tells of the machine and the moment; of versions only the packages."""
    if isinstance(value, list):
        return [_without_machine(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {key: "-" if key in PASSING or "seconds" in key else _without_machine(one) for key, one in value.items()}
    return kept | ({"versions": sorted(kept["versions"])} if "versions" in kept else {})


def _key(key: str, value: Any) -> str:
    return f"{key} {{{', '.join(value)}}}" if isinstance(value, dict) else key


def _is_short(value: Any) -> bool:
    """True of what stands within a line: a scalar, a few scalars, a small object of scalars."""
    if isinstance(value, dict):
        return len(value) <= SHORT and not any(isinstance(one, dict | list) for one in value.values())
    if isinstance(value, list):
        return len(value) <= SHORT and not any(isinstance(one, dict | list) for one in value)
    return True


def _dump(value: Any, is_strict: bool) -> str:
    return json.dumps(value if is_strict else _rounded(value), ensure_ascii=False, separators=(", ", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if isinstance(value, dict) else value


def _summary(name: str, array: np.ndarray[Any, Any], is_strict: bool) -> str:
    """Name, dtype and shape, then mean, root mean square, first and last; of texts the first and the last."""
    start = f"array {name} {array.dtype} {list(array.shape)}"
    end = (
        f" {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
        if is_strict and array.dtype != object
        else ""
    )
    if not array.size:
        return start
    if array.dtype.kind not in "fiub":
        shown = [one.decode() if isinstance(one, bytes) else str(one) for one in array.ravel()[[0, -1]]]
        return f"{start} {shown}{end}"
    values = array.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    start += f" {values.size - finite.size} not finite" if finite.size < values.size else ""
    mean, square = (finite.mean(), (finite**2).mean()) if finite.size else (0.0, 0.0)
    numbers = (mean, np.sqrt(square), values[0], values[-1])
    return f"{start}: " + " ".join(f"{number:.17g}" if is_strict else f"{number:.6g}" for number in numbers) + end


def _safetensors(path: Path, is_strict: bool) -> list[str]:
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    entries = json.loads(content[8:start])
    lines = []
    for key, text in entries.pop("__metadata__", {}).items():
        lines += flatten(json.loads(text), is_strict, key)
    for name, entry in sorted(entries.items()):
        begin, end = (start + offset for offset in entry["data_offsets"])
        array = np.frombuffer(content[begin:end], dtype=SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
        lines.append(_summary(name, array, is_strict))
    return lines


def _hdf5(path: Path, is_strict: bool) -> list[str]:
    lines = []
    with h5py.File(path) as file:

        def visit(name: str, item: Any) -> None:
            attributes = {key: "" if key in REFERENCES else _plain(item.attrs[key]) for key in sorted(item.attrs)}
            if attributes:
                lines.extend(flatten(attributes, is_strict, f"attributes {name}"))
            if isinstance(item, h5py.Dataset) and name in ("meta", "provenance"):
                lines.extend(flatten(json.loads(item[()]), is_strict, name))
            elif isinstance(item, h5py.Dataset):
                stored = f" {item.compression} chunks {item.chunks}" if item.compression or item.chunks else ""
                lines.append(_summary(name + stored, np.asarray(item[()]), is_strict))

        if file.attrs:
            visit("/", file)
        file.visititems(visit)
    return lines


def _plain(value: Any) -> Any:
    """An attribute's value as JSON has it."""
    if isinstance(value, np.ndarray):
        return [_plain(one) for one in value.tolist()]
    if isinstance(value, bytes):
        return value.decode()
    return value.item() if isinstance(value, np.generic) else value


def _json(path: Path, is_strict: bool) -> list[str]:
    return list(flatten(json.loads(path.read_text()), is_strict, ""))


def _text(path: Path, is_strict: bool) -> list[str]:
    """A header, the first and last rows; in full, a digest of all."""
    lines = path.read_text().splitlines()
    shown = [f"{len(lines)} lines", *lines[:3], lines[-1]]
    return [*shown, hashlib.sha256(path.read_bytes()).hexdigest()] if is_strict else shown


def _npz(path: Path, is_strict: bool) -> list[str]:
    with np.load(path) as arrays:
        return [_summary(name, arrays[name], is_strict) for name in arrays.files]


def _other(path: Path, is_strict: bool) -> list[str]:
    """That it is there; in full, a picture's width and height and a digest."""
    content = path.read_bytes()
    is_png = content.startswith(b"\x89PNG")
    if not is_strict:  # the fonts decide the size in pixels
        return ["png"] if is_png else []
    size = ["png {} x {}".format(*struct.unpack(">II", content[16:24]))] if is_png else []
    return [*size, hashlib.sha256(content).hexdigest()]

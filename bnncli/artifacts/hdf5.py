"""Read and write HDF5 artifacts.

A file is written whole and sealed with a digest of its structure. It is read only if it contains nothing but plain
arrays.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from bnncli.artifacts.atomic import publish, publish_bytes, reserve
from bnncli.artifacts.headers import SCHEMA, Header, check_header, check_is_file, parse_json
from bnncli.artifacts.known_files import (
    State,
    is_checked,
    is_settled,
    recall_header,
    remember,
    remember_header,
    state_of,
)
from bnncli.errors import DAMAGED_HINT, DataError, Untrusted
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.system.input_files import convert_read_errors, is_failure, read_error

MAX_OBJECTS = 10_000
_PLAIN = (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT)


def check_objects(path: Path, file: h5py.h5f.FileID) -> None:
    """Refuse anything that our writer does not produce.

    Raises:
        DataError: there are too many objects, cyclic groups, unexpected storage, or inconsistent sizes.
        Untrusted: there are links, external storage or virtual datasets.
    """
    declared, count, groups = 0, 0, [h5py.h5g.open(file, b"/")]
    seen = set()
    while groups:
        group = groups.pop()
        if hash(group) in seen:
            raise DataError(f"{path}: its groups form a cycle", path=path)
        seen.add(hash(group))
        for link in group:
            count += 1
            if count > MAX_OBJECTS:
                raise DataError(f"{path}: it has more than {MAX_OBJECTS} objects", path=path)
            name = link.decode("utf-8", "surrogateescape")
            if group.links.get_info(link).type != h5py.h5l.TYPE_HARD:
                raise Untrusted(f"{path}: {name!r} is a link, which is not allowed", code="hdf5_link", path=path)
            entry = h5py.h5o.open(group, link)
            if isinstance(entry, h5py.h5g.GroupID):
                groups.append(entry)
            elif isinstance(entry, h5py.h5d.DatasetID):
                declared += _check_dataset(path, name, entry)
            else:
                raise DataError(f"{path}: {name!r} is neither an array nor a group", path=path)
    if declared > path.stat().st_size:
        raise DataError(
            f"{path}: it declares {declared} bytes of data but has only {path.stat().st_size}",
            code="size_mismatch",
            path=path,
        )


def _check_dataset(path: Path, name: str, entry: h5py.h5d.DatasetID) -> int:
    """Return the declared bytes of a dataset."""
    made, space = entry.get_create_plist(), entry.get_space()
    layout = made.get_layout()
    if layout == h5py.h5d.VIRTUAL or made.get_external_count():
        raise Untrusted(
            f"{path}: {name!r} stores its data in another file, which is not allowed", code="hdf5_external", path=path
        )
    if layout not in _PLAIN or made.get_nfilters() or space.get_simple_extent_type() == h5py.h5s.NULL:
        raise DataError(f"{path}: {name!r} does not use bnncli's storage layout", path=path)
    kind, size = entry.dtype, space.get_simple_extent_npoints()
    if not is_text(kind) and kind.kind not in "fiubS":
        raise DataError(f"{path}: {name!r} has unexpected type {kind}", path=path)
    if not is_text(kind) and size and entry.get_storage_size() != size * kind.itemsize:
        raise DataError(f"{path}: {name!r} declares more data than it has", code="size_mismatch", path=path)
    return int(size) * kind.itemsize


def is_text(kind: np.dtype[Any]) -> bool:
    """Return whether a stored type is a variable-length text; fixed-length texts are ordinary arrays."""
    found = h5py.check_string_dtype(kind)
    return found is not None and found.length is None


MARK = b"\nbnncli-seal/1 "
MAX_SEAL_BYTES = 1 << 16
SKIP_BYTES = 1 << 16
_PAIR = re.compile(rb"\[(\d{1,18}),(\d{1,18})\]")
_LINE = re.compile(rb"([0-9a-f]{64}) (\[(?:\[\d{1,18},\d{1,18}\],?)*\])\n")
_BLOCK = 1 << 20


def make_seal(stream: IO[bytes], blocks: Iterable[tuple[int, int]]) -> bytes:
    """Return the seal of an open file.

    Args:
        blocks: offset and length in bytes of each array; those of 64 KiB or more are excluded from the digest.
    """
    size = stream.seek(0, 2)
    skipped = sorted([offset, length] for offset, length in blocks if length >= SKIP_BYTES)
    return MARK + f"{_digest(stream, size, skipped)} {canonical_json(skipped)}\n".encode()


def is_sealed(path: Path) -> bool:
    """Return True if the structure matches the seal, False if the file has no seal.

    Raises:
        DataError: the structure does not match the seal.
    """
    with convert_read_errors(path), open(path, "rb") as stream:
        start = max(0, stream.seek(0, 2) - MAX_SEAL_BYTES)
        stream.seek(start)
        tail = stream.read()
        position = tail.rfind(MARK)
        if position < 0:
            return False
        line = _LINE.fullmatch(tail, position + len(MARK))
        skipped = [[int(number) for number in block] for block in _PAIR.findall(line[2])] if line else []
        size = start + position
        is_whole = line is not None and _is_inside(skipped, size)
        if not is_whole or _digest(stream, size, skipped) != line[1].decode():  # type: ignore[index]
            raise DataError(
                f"{path} is damaged: its structure does not match its seal",
                code="damaged",
                hint=DAMAGED_HINT,
                path=path,
            )
    return True


def _is_inside(blocks: Sequence[Sequence[int]], size: int) -> bool:
    """Return whether blocks (offset, length) are ascending, disjoint and within `size` bytes."""
    position = 0
    for offset, length in blocks:
        if offset < position:
            return False
        position = offset + length
    return position <= size


def _digest(stream: IO[bytes], size: int, skipped: Sequence[Sequence[int]]) -> str:
    """Return the SHA-256 of the first `size` bytes without the skipped blocks, and of their positions."""
    digest = hashlib.sha256(canonical_json([size, skipped]).encode())
    position = 0
    for offset, length in [*skipped, [size, 0]]:
        stream.seek(position)
        while position < offset and (block := stream.read(min(_BLOCK, offset - position))):
            digest.update(block)
            position += len(block)
        position = offset + length
    return digest.hexdigest()


IN_MEMORY_LIMIT = 1 << 27  # the image is held up to four times while it is created and sealed
BLOCK_BYTES = 64 << 20
_STRING = h5py.string_dtype("utf-8")
_PROVENANCE, _META = "provenance", "meta"

Array = np.ndarray[Any, Any]
Text = str | list[str]


def content_digest(arrays: Mapping[str, Array], texts: Mapping[str, Text], meta: Mapping[str, Any]) -> str:
    """Return the digest of arrays, texts and meta: the content without its provenance."""
    entries: dict[str, Any] = dict(arrays)
    described = canonical_json({"meta": meta, "texts": dict(texts)}).encode()
    entries["//description"] = np.frombuffer(described, dtype=np.uint8)
    return tensor_digest(entries)


def write_hdf5(
    target: Path,
    arrays: Mapping[str, Array],
    texts: Mapping[str, Text],
    *,
    kind: str,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
    decorate: Callable[[h5py.File], None] | None = None,
) -> str:
    """Publish an HDF5 artifact and return its content digest.

    Args:
        arrays: dataset path to array; stored contiguous and uncompressed.
        texts: dataset path to a UTF-8 text (scalar), or a list of texts (one axis).
        meta: JSON metadata of the kind.
        decorate: adds attributes and dimension scales before the file is closed.
    """
    digest = content_digest(arrays, texts, meta)
    marks = {"bnncli_kind": kind, "bnncli_schema": SCHEMA, "bnncli_content_digest": digest}
    arrays = {name: _mark_encoding(array) for name, array in arrays.items()}
    documents = {**texts, _META: canonical_json(meta), _PROVENANCE: canonical_json(provenance)}

    def fill(file: h5py.File) -> None:
        for name, text in documents.items():
            file.create_dataset(name, data=text, dtype=_STRING)
        if decorate is not None:
            decorate(file)
        file.attrs.update(marks)
        file.attrs["bnncli_complete"] = 1

    if sum(array.nbytes for array in arrays.values()) <= IN_MEMORY_LIMIT:
        with h5py.File.in_memory() as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array)
            fill(file)
            file.flush()
            image = file.id.get_file_image()
            seal = make_seal(io.BytesIO(image), _blocks(file, arrays))
        publish_bytes(target, image + seal, may_replace=may_replace)
    else:
        publish(target, lambda path: _write_allocated(path, arrays, fill), may_replace=may_replace)
    return digest


def _mark_encoding(array: Array) -> Array:
    """Return the array as stored: fixed-length bytes are marked as UTF-8."""
    return array.view(h5py.string_dtype("utf-8", array.dtype.itemsize)) if array.dtype.kind == "S" else array


def _write_allocated(path: Path, arrays: Mapping[str, Array], fill: Callable[[h5py.File], None]) -> None:
    """Allocate all datasets on disk before writing, so that a full disk is an OSError rather than a crash."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            group = file.require_group(os.path.dirname("/" + name) or "/")
            space, kind = h5py.h5s.create_simple(array.shape), h5py.h5t.py_create(array.dtype, logical=True)
            h5py.h5d.create(group.id, os.path.basename(name).encode(), kind, space, dcpl=properties)
    with open(path, "r+b") as stream:
        reserve(stream.fileno(), os.fstat(stream.fileno()).st_size + (1 << 20))
    with h5py.File(path, "r+") as file:
        for name, array in arrays.items():
            rows = max(1, BLOCK_BYTES // max(1, array[:1].nbytes))
            for start in range(0, len(array), rows):
                file[name][start : start + rows] = array[start : start + rows]
        fill(file)
        file.flush()
        blocks = _blocks(file, arrays)
    with open(path, "r+b") as stream:
        seal = make_seal(stream, blocks)
        stream.seek(0, os.SEEK_END)
        stream.write(seal)


def _blocks(file: h5py.File, arrays: Mapping[str, Array]) -> list[tuple[int, int]]:
    """Return offset and length in bytes of every array in a written file."""
    found = [(file[name].id.get_offset(), file[name].id.get_storage_size()) for name in arrays]
    return [(offset, length) for offset, length in found if offset is not None]


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file for reading, after checking every object in it, once per command.

    Raises:
        MissingInput: there is no such file.
        DataError: it is truncated or incomplete, or sizes are inconsistent.
        Untrusted: it has links, external storage or virtual datasets.
    """
    check_is_file(path)
    with convert_read_errors(path):
        before = state_of(path.stat())
    is_settled_file, is_known = is_settled(before), is_checked(before)
    has_seal = is_known or is_sealed(path)
    try:
        file = h5py.File(path, "r", locking=False)
    except (OSError, ValueError) as error:
        _raise_if_unreadable(path, error)
        raise DataError(
            f"{path} is truncated, or not an HDF5 file", code="truncated", hint=DAMAGED_HINT, path=path
        ) from None
    with file:
        is_same = _state(file) == before
        if not (is_known and is_same):
            _check_whole(path, file, has_seal=is_sealed(path) if is_known else has_seal)
            if is_same and is_settled_file:
                remember(before)
        try:
            yield file
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise _damage_error(path, error) from None


def _check_whole(path: Path, file: h5py.File, *, has_seal: bool) -> None:
    """Raise unless every object is one that our writer produces, and writing was completed."""
    try:
        check_objects(path, file.id)
        complete = file.attrs.get("bnncli_complete", 0)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise _damage_error(path, error) from None
    if not has_seal or not isinstance(complete, int | np.integer) or complete != 1:
        raise DataError(f"{path} is incomplete, or not a bnncli artifact", code="incomplete", path=path)


def _damage_error(path: Path, error: BaseException) -> DataError:
    """Return the error for content that the HDF5 library cannot parse. Raises if the operating system is to blame."""
    _raise_if_unreadable(path, error)
    what = " ".join(str(error).split())[:120]
    return DataError(f"{path} is damaged: {what}", code="damaged", hint=DAMAGED_HINT, path=path)


def _raise_if_unreadable(path: Path, error: BaseException) -> None:
    """Raise the operating system's error if the HDF5 library passed one on, which it does as text in a KeyError."""
    told = re.search(r"file descriptor = \d+, errno = ([1-9]\d*),", str(error))
    found = error if isinstance(error, OSError) or told is None else OSError(int(told[1]), os.strerror(int(told[1])))
    if isinstance(found, OSError) and is_failure(found):
        raise read_error(found, path) from None


def read_text(file: h5py.File, name: str) -> str:
    """Read a scalar text dataset."""
    value = file[name][()]
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def read_texts(file: h5py.File, name: str) -> list[str]:
    """Read a list of texts, such as the class names."""
    return [value.decode("utf-8") for value in file[name][()]]


def header_of(path: Path, file: h5py.File) -> Header:
    """Return the header of an open artifact; once per unchanged file and command."""
    before = _state(file)
    known: Header | None = None if before is None else recall_header(before)
    if known is not None:
        return replace(known, path=path)
    header = _read_header(path, file)
    if before is not None and is_checked(before) and _state(file) == before:
        remember_header(before, header)
    return header


def _state(file: h5py.File) -> State | None:
    """Return the kernel's state of an open file; None if it is in memory."""
    return state_of(os.fstat(file.id.get_vfd_handle())) if file.driver == "sec2" else None


def _read_header(path: Path, file: h5py.File) -> Header:
    attrs = file.attrs
    for name in (_PROVENANCE, _META):
        if name not in file:
            raise DataError(f"{path}: not a bnncli artifact (no {name})", code="wrong_kind", path=path)
    provenance, meta = (parse_json(path, read_text(file, name)) for name in (_PROVENANCE, _META))
    kind, schema, digest = (attrs.get(f"bnncli_{key}") for key in ("kind", "schema", "content_digest"))
    return check_header(path, kind, schema, digest, provenance, meta)


def read_hdf5_header(path: Path) -> Header:
    """Read the header of an HDF5 artifact; raises as open_hdf5 does."""
    with open_hdf5(path) as file:
        return header_of(path, file)


def read_contents(
    path: Path, file: h5py.File, *, mapped: Collection[str] = ()
) -> tuple[dict[str, Array], dict[str, Text]]:
    """Return all arrays and texts of the file, as passed to write_hdf5.

    Args:
        mapped: arrays to memory-map copy-on-write instead of reading.
    """
    arrays: dict[str, Array] = {}
    texts: dict[str, Text] = {}

    def visit(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset) and name not in (_PROVENANCE, _META):
            if not is_text(entry.dtype):
                arrays[name] = _map(file, entry) if name in mapped else entry[()]
            else:
                texts[name] = read_text(file, name) if entry.shape == () else read_texts(file, name)

    file.visititems(visit)
    return arrays, texts


def _map(file: h5py.File, entry: h5py.Dataset) -> Array:
    """Return a contiguous dataset as a copy-on-write memory map; read it if it cannot be mapped."""
    offset, kind = entry.id.get_offset(), entry.dtype
    if not offset or offset % kind.alignment or not kind.isnative or not entry.size or file.driver != "sec2":
        array: Array = entry[()]
        return array
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset - start + entry.size * kind.itemsize
    # Use h5py's own descriptor: the path may name another file by now.
    pages = mmap.mmap(file.id.get_vfd_handle(), length, access=mmap.ACCESS_COPY, offset=start)
    return np.frombuffer(pages, kind, count=entry.size, offset=offset - start).reshape(entry.shape)


def check_digest(path: Path, header: Header, arrays: Mapping[str, Array], texts: Mapping[str, Text]) -> None:
    """Raise DataError if the content differs from what was written."""
    if content_digest(arrays, texts, header.meta) != header.content_digest:
        raise DataError(
            f"{path}: its content does not match its digest",
            code="digest_mismatch",
            hint=DAMAGED_HINT,
            path=path,
        )


def array_shapes(path: Path) -> dict[str, str]:
    """Return type and shape of every dataset by name, without reading data."""
    found: dict[str, str] = {}
    with open_hdf5(path) as file:

        def visit(name: str, entry: Any) -> None:
            if isinstance(entry, h5py.Dataset) and name not in (_PROVENANCE, _META):
                kind = "text" if h5py.check_string_dtype(entry.dtype) is not None else str(entry.dtype)
                found[name] = f"{kind} {entry.shape}"

        file.visititems(visit)
    return found

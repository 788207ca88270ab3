"""Exported models: ONNX graphs or torch programs with the same header as every artifact.

The header is one JSON document in the format's place for metadata: metadata_props of an ONNX model, or an extra file in
a torch archive. It is appended to the content, and read without the libraries that run the file. A file of tensors is
an artifact like posteriors (`posteriors.write_tensors`).
"""

from __future__ import annotations

import io
import mmap
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bnncli.artifacts.atomic import publish_bytes
from bnncli.artifacts.headers import MAX_JSON_BYTES, SCHEMA, Header, add_digest, check_header, parse_document
from bnncli.artifacts.posteriors import METADATA_KEY, read_tensors
from bnncli.errors import DAMAGED_HINT, DataError
from bnncli.models.onnx_files import fields_of
from bnncli.numerics.digests import canonical_json, tensor_digest
from bnncli.system.input_files import open_regular

KIND = "export"
EXPORT_MAGIC = (b"PK\x03\x04", b"\x08")  # of a torch archive, and of a protocol buffer that begins with a version
_EXTRA = f"extra/{METADATA_KEY}.json"
_METADATA_FIELD = 14  # of ModelProto
_ENTRY = METADATA_KEY.encode()


class _FileContent(NamedTuple):
    """A file's header, and its content by part."""

    text: bytes
    parts: Mapping[str, bytes]


def write_export(
    target: Path, content: bytes, *, meta: Mapping[str, Any], provenance: Mapping[str, Any], may_replace: bool
) -> str:
    """Publish an ONNX graph or torch archive with its header, and return its content digest."""
    digest = _digest(_parts(content), meta)
    document = {
        "kind": KIND,
        "schema": SCHEMA,
        "content_digest": digest,
        "provenance": dict(provenance),
        "meta": dict(meta),
    }
    text = canonical_json(add_digest(document)).encode()
    whole = _build_archive(content, text) if content.startswith(EXPORT_MAGIC[0]) else content + _entry(text)
    publish_bytes(target, whole, may_replace=may_replace)
    return digest


def read_export_header(path: Path) -> Header:
    """Read the header of an exported model, but not its content.

    Raises:
        MissingInput: there is no such file.
        DataError: it is not bnncli's, or damaged.
    """
    return _header(path, _read_content(path, is_whole=False).text)


def check_export(path: Path) -> Header:
    """Read the header after verifying every byte. Raises DataError if that fails."""
    with open_regular(path) as stream:
        is_tensors = stream.read(9)[8:] == b"{"
    if is_tensors:
        return read_tensors(path, kind=KIND)[1]
    found = _read_content(path, is_whole=True)
    header = _header(path, found.text)
    if _digest(found.parts, header.meta) != header.content_digest:
        message = f"{path}: its content does not match its digest"
        raise DataError(message, code="digest_mismatch", hint=DAMAGED_HINT, path=path)
    return header


def _header(path: Path, text: bytes) -> Header:
    document = parse_document(path, text)
    if canonical_json(add_digest(document)).encode() != text:
        raise DataError(f"{path}: its header does not match its digest", code="bad_header", path=path)
    header = check_header(
        path, *(document.get(name) for name in ("kind", "schema", "content_digest", "provenance", "meta"))
    )
    if header.kind != KIND:
        raise DataError(f"{path}: expected an export, got {header.kind}", code="wrong_kind", path=path)
    return header


def _read_content(path: Path, *, is_whole: bool) -> _FileContent:
    """Return a file's header, and its content if requested."""
    try:
        with open_regular(path) as stream:
            if stream.read(4) == EXPORT_MAGIC[0]:
                with zipfile.ZipFile(stream) as archive:
                    return _read_archive(path, archive, is_whole=is_whole)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _read_graph(path, content, is_whole=is_whole)
    except (zipfile.BadZipFile, ValueError, IndexError, EOFError, NotImplementedError, RuntimeError) as error:
        why = " ".join(str(error).split())[:80]
        raise DataError(
            f"{path} is truncated, or not a bnncli artifact ({why})", code="not_an_artifact", path=path
        ) from error


def _read_archive(path: Path, archive: zipfile.ZipFile, *, is_whole: bool) -> _FileContent:
    names = archive.namelist()
    own = [name for name in names if name.partition("/")[2] == _EXTRA]
    if len(own) != 1 or len(set(names)) != len(names) or archive.getinfo(own[0]).file_size > MAX_JSON_BYTES:
        raise _foreign_file_error(path)
    parts = {name: archive.read(name) for name in names if name != own[0]} if is_whole else {}
    return _FileContent(archive.read(own[0]), parts)


def _read_graph(path: Path, content: mmap.mmap, *, is_whole: bool) -> _FileContent:
    fields = list(fields_of(content, 0, len(content)))
    if not fields or fields[-1][0] != _METADATA_FIELD:
        raise _foreign_file_error(path)
    _, start, end = fields[-1]
    entry = {number: content[low:high] for number, low, high in fields_of(content, start, end)}
    if entry.get(1) != _ENTRY or 2 not in entry:
        raise _foreign_file_error(path)
    begin = len(content) - len(_entry(entry[2]))
    return _FileContent(entry[2], {"graph": content[:begin]} if is_whole else {})


def _foreign_file_error(path: Path) -> DataError:
    return DataError(f"{path} is not a model exported by bnncli", code="not_an_artifact", path=path)


def _parts(content: bytes) -> Mapping[str, bytes]:
    """Return the content by part, as it is found in the file."""
    if not content.startswith(EXPORT_MAGIC[0]):
        return {"graph": content}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _digest(parts: Mapping[str, bytes], meta: Mapping[str, Any]) -> str:
    described = {**parts, "//description": canonical_json(meta).encode()}
    return tensor_digest({name: np.frombuffer(part, dtype=np.uint8) for name, part in described.items()})


def _build_archive(content: bytes, text: bytes) -> bytes:
    """Add a member without date to a torch archive."""
    stream = io.BytesIO(content)
    with zipfile.ZipFile(stream, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(zipfile.ZipInfo(f"{root}/{_EXTRA}"), text)
    return stream.getvalue()


def _entry(text: bytes) -> bytes:
    """Encode a metadata entry of ModelProto as a protocol buffer field."""
    inner = _field(1, _ENTRY) + _field(2, text)
    return _field(_METADATA_FIELD, inner)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)

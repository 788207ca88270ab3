"""Files that are programs: TorchScript, exported programs, ONNX graphs, skops. Their members and headers are read, and nothing runs."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bnncli import registry
from bnncli.names import listed
from bnncli.stages.inspect.found import Found

_MODEL = {"torchscript": "jit", "pt2": "export", "onnx": "onnx", "skops": "sklearn"}
PROGRAMS = {
    "torchscript": "TorchScript program",
    "pt2": "exported program",
    "onnx": "ONNX graph",
    "skops": "skops file",
}
_MAX_VERSION = 64


def program_found(path: Path, kind: str) -> Found:
    """What a program is, and the line that runs its graph.

    Args:
        kind: torchscript, pt2, onnx or skops.
    """
    found = Found(PROGRAMS[kind])
    if kind == "onnx":
        _add_onnx(found, path)
    else:
        with zipfile.ZipFile(path) as archive:
            _add_members(found, archive, kind)
    model = _MODEL[kind]
    if registry.has_name("models", model):
        found.suggest(path, model=f"{model}:{path}", data="npz:TRAIN.npz")
    return found


def _add_members(found: Found, archive: zipfile.ZipFile, kind: str) -> None:
    """What a zip archive says of itself."""
    members = {member.filename: member.file_size for member in archive.infolist()}
    found.add("members", f"{len(members)}, {sum(members.values()) / 1e6:.1f} MB")
    for name in members:
        last = name.rpartition("/")[2]
        if last in ("version", "archive_version", ".format_version") and members[name] <= _MAX_VERSION:
            found.add(last, archive.read(name).decode("utf-8", "replace").strip())
    if kind == "torchscript":
        code = [name for name in members if "/code/" in name and name.endswith(".py")]
        found.add("code", f"{len(code)} files: {listed([name.partition('/code/')[2] for name in code])}")
    if kind == "skops" and members["schema.json"] < 1 << 24:
        schema = json.loads(archive.read("schema.json"))
        for name in ("__class__", "__module__", "_skops_version", "protocol"):
            if name in schema:
                found.add(name.strip("_"), schema[name])


def _add_onnx(found: Found, path: Path) -> None:
    """The versions in the header of an ONNX model."""
    names = {1: "ir version", 2: "producer", 3: "producer version"}
    with open(path, "rb") as stream:
        for field, value in _fields(stream):
            if field in names:
                found.add(names[field], value if isinstance(value, int) else value.decode("utf-8", "replace"))
            elif field == 8 and isinstance(value, bytes):
                opset = dict(_fields_of(value))
                domain, version = opset.get(1, b""), opset.get(2)
                text = domain.decode("utf-8", "replace") if isinstance(domain, bytes) else ""
                found.add("opset", f"{version if isinstance(version, int) else 0} {text}".strip())


def _fields(stream: IO[bytes]) -> Iterator[tuple[int, int | bytes]]:
    """The short fields of a protobuf message; long ones are passed over."""
    size = os.fstat(stream.fileno()).st_size
    while (tag := _varint(stream)) is not None:
        wire = tag & 7
        length = _varint(stream)
        if length is None or wire not in (0, 2) or (wire == 2 and length > size - stream.tell()):
            return
        if wire == 0:
            yield tag >> 3, length
        elif length <= 4096:
            yield tag >> 3, stream.read(length)
        else:
            stream.seek(length, os.SEEK_CUR)


def _fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a short message."""
    place = 0
    while place < len(message):
        tag, place = _number(message, place)
        value, place = _number(message, place)
        if tag & 7 == 2:
            yield tag >> 3, message[place : place + value]
            place += value
        else:
            yield tag >> 3, value


def _number(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message):
        byte = message[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            break
    return value, place


def _varint(stream: IO[bytes]) -> int | None:
    """The next number; None at the end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None

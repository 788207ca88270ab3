"""What kind of file a checkpoint really is, judged by its first bytes and its zip members, never by its name."""

from __future__ import annotations

import os
import re
import zipfile
from typing import IO

from bnncli.errors import DataError
from bnncli.names import listed, quoted
from bnncli.system.input_files import is_failure

# The integer 0x1950a86a20f9469cfc6c, pickled: what torch wrote at the start of every file before version 1.6.
LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LOCAL_HEADER_SIZE = 30
_HEAD_SIZE = 512
_MAX_SAFETENSORS_HEADER = 100_000_000
_MAGIC = {
    b"version https://git-lfs.github.com/spec": "git-lfs",
    b"\x89HDF\r\n\x1a\n": "hdf5",
    b"\x93NUMPY": "npy",
    b"\x1f\x8b": "gzip",
}


def sniff(stream: IO[bytes]) -> str:
    """The kind of an open file, by its first bytes.

    One of empty, zip, torch-legacy, safetensors, pickle, git-lfs, html, hdf5, npy, gzip, onnx, tar, unknown.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    head = stream.read(_HEAD_SIZE)
    stream.seek(0)
    if size == 0:
        return "empty"
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head.startswith(b"PK\x03\x04") or head.startswith(b"PK\x05\x06"):
        return "zip"
    if re.match(rb"\s*(<!doctype html|<html|<\?xml|<head)", head, re.IGNORECASE):
        return "html"
    if head[:1] == b"\x80" and LEGACY_MAGIC in head[:32]:
        return "torch-legacy"
    # Before safetensors: "\x80\x04" is also a small header length, but no pickle has "{" as its ninth byte.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER:
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    if _is_onnx(head):
        return "onnx"
    return "tar" if head[257:262] == b"ustar" else "unknown"


def _is_onnx(head: bytes) -> bool:
    """Whether a file begins as an ONNX model does: with its version, and a field of those that come next."""
    # Of onnx.ModelProto: ir_version is field 1; producer_name, producer_version, graph, opset_import are 2, 3, 7, 8.
    return head[:1] == b"\x08" and head[1:2] <= b"\x40" and head[2:3] in (b"\x12", b"\x1a", b"\x3a", b"\x42")


def sniff_zip(stream: IO[bytes]) -> str:
    """The kind of a zip file by its members: torch-zip, torchscript, pt2, torch-package, skops, npz or zip.

    Raises:
        DataError: truncated, or a member is compressed, encrypted, duplicated, overlapping or outside the archive.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        if is_failure(error):  # of the disk: nothing is known of the archive
            raise
        raise DataError(
            f"the file is a truncated or damaged zip archive ({error})",
            code="truncated",
            hint="copy or download it again",
        ) from error
    members = archive.infolist()
    names = [member.filename for member in members]
    inner = {name.partition("/")[2] for name in names}
    if any(name.endswith(".npy") for name in names) and all(name.endswith(".npy") for name in names):
        return "npz"
    kind = _zip_kind(inner, names)
    # TorchScript compresses its code members; it is refused as code, not as damaged.
    if kind in ("torch-zip", "zip"):
        check_members(members, start_dir=archive.start_dir, size=size)
    return kind


def _zip_kind(inner: set[str], names: list[str]) -> str:
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return "torchscript"
    if "archive_format" in inner and any(re.fullmatch(r"models/.*\.json", name) for name in inner):
        return "pt2"
    if ".data/extern_modules" in inner or ".data/extern_modules" in names:
        return "torch-package"
    if "schema.json" in names:
        return "skops"
    return "torch-zip" if "data.pkl" in inner else "zip"


def check_members(members: list[zipfile.ZipInfo], *, start_dir: int, size: int) -> None:
    """Nothing, when every member is stored as it is, once, inside the archive, and the sizes add up.

    Raises:
        DataError: naming the first member that is not.
    """
    seen: set[str] = set()
    end = 0
    for member in sorted(members, key=lambda member: member.header_offset):
        name = member.filename
        fault = None
        if name in seen:
            fault = "appears twice"
        elif name.startswith("/") or "\\" in name or ".." in name.split("/"):
            fault = "points outside the archive"
        elif member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            fault = "is compressed, but torch stores members uncompressed"
        elif member.flag_bits & 1:
            fault = "is encrypted"
        elif member.header_offset < end:
            fault = "overlaps another"
        if fault:
            raise DataError(f"zip member {quoted(name)} {fault}", code="bad_zip")
        seen.add(name)
        end = member.header_offset + _LOCAL_HEADER_SIZE + len(name.encode()) + member.file_size
    if end > start_dir or end > size:
        raise DataError(f"zip members claim {end} bytes, but the file has only {min(start_dir, size)}", code="bad_zip")


def describe_wrong_kind(kind: str, members: list[str] | None = None) -> str:
    """What a file that is no checkpoint is, in words."""
    text = {
        "empty": "the file is empty",
        "git-lfs": "the file is a git-LFS pointer, not the checkpoint itself",
        "html": "the file is a web page, not a checkpoint (did the download need a login?)",
        "hdf5": "the file is HDF5, not a torch or safetensors checkpoint",
        "npy": "the file is a NumPy array, not a checkpoint",
        "npz": "the file is an npz archive, not a checkpoint",
        "gzip": "the file is gzip-compressed",
        "onnx": "the file is an ONNX graph, not a checkpoint",
        "skops": "the file is a skops file with a scikit-learn estimator, not a checkpoint",
        "tar": "the file is a tar archive (saved before torch 0.4?), which is not supported",
        "zip": "the file is a zip archive without data.pkl, not a torch checkpoint",
    }.get(kind, "the file is neither a torch nor a safetensors checkpoint")
    return f"{text} (it holds {listed(members)})" if members else text


HINTS = {
    "empty": "copy or download it again",
    "git-lfs": "git lfs pull",
    "html": "download the file itself",
    "gzip": "decompress it with gunzip",
    "onnx": "run its graph: \0model\0 onnx:FILE",
    "skops": "use its linear classifier: \0model\0 sklearn:FILE",
    "npz": "to use your own features and labels, pass \0from_npz\0 FILE",
}

"""Detect the kind of a checkpoint file by its first bytes, and load its pickles without running code."""

from __future__ import annotations

import argparse
import math
import os
import pickle
import pickletools
import re
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from bnncli.errors import DataError, Untrusted, is_short_of_memory
from bnncli.lazy import torch
from bnncli.names import format_names, quote_name
from bnncli.options.command import format_command_line
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import is_failure

_BLOCK = 1 << 20
UNCHECKED = "its members have no checksums (written after set_crc32_options(False)), so damage cannot be detected"


def check_checksums(stream: IO[bytes], progress: Progress = SILENT) -> bool:
    """Return True if every member of an open archive matches its checksum, False if it was written without checksums.

    Raises:
        DataError: names the first member that is damaged or unreadable.
    """
    stream.seek(0)
    name = ""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            if not any(member.CRC for member in members) and any(member.file_size for member in members):
                return False
            task = progress.task("check", sum(member.file_size for member in members))
            for member in members:
                name = member.filename
                with archive.open(member) as content:
                    while block := content.read(_BLOCK):
                        task.advance(len(block))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        if is_failure(error):
            raise
        what = f"zip member {quote_name(name)} is damaged" if name else "the zip archive is damaged"
        reason = "checksum mismatch" if "CRC" in str(error) else " ".join(str(error).split())[:120]
        raise DataError(f"{what}: {reason}", code="damaged", hint="copy or download it again") from error
    return True


# The pickled integer 0x1950a86a20f9469cfc6c, with which files by torch before version 1.6 begin.
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
    """Return the kind of an open file by its first bytes.

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
    # Before pickle: "\x80\x04" is also a small header length, but no pickle has "{" as its ninth byte.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER:
        return "safetensors"
    if head[:1] == b"\x80" and head[1:2] in (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    if _is_onnx(head):
        return "onnx"
    return "tar" if head[257:262] == b"ustar" else "unknown"


def _is_onnx(head: bytes) -> bool:
    """Return whether a file begins like an ONNX model: with its version and one of the next fields."""
    # In onnx.ModelProto, ir_version is field 1; producer_name, producer_version, graph, opset_import are 2, 3, 7, 8.
    return head[:1] == b"\x08" and head[1:2] <= b"\x40" and head[2:3] in (b"\x12", b"\x1a", b"\x3a", b"\x42")


def sniff_zip(stream: IO[bytes]) -> str:
    """Return the kind of a zip file by its members: torch-zip, torchscript, pt2, torch-package, skops, npz or zip.

    Raises:
        DataError: the file is truncated, or a member is compressed, encrypted, duplicated, overlapping or outside the
            archive.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    try:
        archive = zipfile.ZipFile(stream)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        if is_failure(error):  # disk failure: says nothing about the archive
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
    """Check that every member is stored uncompressed, once, inside the archive, and that the sizes add up.

    Raises:
        DataError: names the first member that violates this.
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
            raise DataError(f"zip member {quote_name(name)} {fault}", code="bad_zip")
        seen.add(name)
        end = member.header_offset + _LOCAL_HEADER_SIZE + len(name.encode()) + member.file_size
    if end > start_dir or end > size:
        raise DataError(f"zip members claim {end} bytes, but the file has only {min(start_dir, size)}", code="bad_zip")


def describe_wrong_kind(kind: str, members: list[str] | None = None) -> str:
    """Describe a file that is not a checkpoint."""
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
    return f"{text} (it holds {format_names(members)})" if members else text


HINTS = {
    "empty": "copy or download it again",
    "git-lfs": "git lfs pull",
    "html": "download the file itself",
    "gzip": "decompress it with gunzip",
    "onnx": "run its graph: \0model\0 onnx:FILE",
    "skops": "use its linear classifier: \0model\0 sklearn:FILE",
    "npz": "to use your own features and labels, pass \0from_npz\0 FILE",
}


_NUMBER = re.compile(r"[iuf][1248]|b1")


class NumberType:
    """Stand-in for numpy.dtype: a name such as f8, and the byte order."""

    def __init__(self, name: str, *others: object) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.order = state[1]


class Array:
    """Stand-in for numpy.ndarray, which is not read; no weights are stored this way."""

    def __setstate__(self, state: object) -> None:
        pass


def number(kind: NumberType, content: bytes) -> bool | int | float:
    """Decode a number from bytes; NaN for unsupported types."""
    name = f"{kind.order}{kind.name}".lstrip("=|")
    if not isinstance(content, bytes) or not _NUMBER.fullmatch(name.lstrip("<>")):
        return math.nan
    found: bool | int | float = np.frombuffer(content, name)[0].item()
    return found


def array(*arguments: object) -> Array:
    """Create an array stand-in before its content is set."""
    return Array()


def path(*parts: str) -> str:
    """Join path parts as text."""
    return "/".join(str(part).rstrip("/") for part in parts)


_OF_NUMPY = {"scalar": number, "_reconstruct": array}
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
# By full name in pickles, for every release of NumPy and Python.
STAND_INS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": NumberType,
    "numpy.ndarray": Array,
    **{f"numpy.{core}.multiarray.{name}": made for core in ("core", "_core") for name, made in _OF_NUMPY.items()},
    **{f"{module}.{name}": path for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


# Everything that damaged pickles or archives have been seen to raise; other errors are bugs of ours.
_DAMAGE = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    AssertionError, OverflowError, struct.error, zipfile.BadZipFile, MemoryError, OSError,
)  # fmt: skip
_HARMLESS = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_\w+|torch\.(\w+Storage|Size|device|dtype)"
    r"|torch\.storage\.(Untyped|Typed)Storage|torch\.serialization\._get_layout|torch\.nn\.parameter\.Parameter|_codecs\.encode"
)
_OF_RANKS = "torch.distributed.tensor."  # needs the processes that saved it
_MAX_PICKLES = 5
_MAX_OPCODES = 1_000_000


def trust_hint(source: str = "IN", target: str = "OUT") -> str:
    """Return what to do with a file that would run code."""
    return f"if you trust this file, run: {format_command_line('convert', source, target, trust_pickle=True)}"


def load_tensors(stream: IO[bytes], *, kind: str) -> Any:
    """Load the contents of a torch file on the CPU without running any code in it.

    Args:
        stream: an open torch-zip or torch-legacy file.

    Raises:
        Untrusted: loading would need code; the message lists it.
        DataError: the file is truncated or damaged, or one rank's part of a network.
        OSError, MemoryError, RuntimeError: disk or machine failed; see is_failure and is_short_of_memory.
    """
    _refuse_parts(stream, kind)
    with torch.serialization.safe_globals([(made, name) for name, made in STAND_INS.items()]):
        if unsafe := _list_unsafe_globals(stream, kind):
            raise needs_trust(unsafe)
        stream.seek(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of unusual pickles; unreadable ones raise anyway
                return torch.load(stream, map_location="cpu", weights_only=True)
        except _DAMAGE as error:
            if is_failure(error) or (kind == "torch-zip" and is_short_of_memory(error)):
                raise
            if suspicious := harmful(list_globals(stream, kind)):
                raise needs_trust(suspicious) from None
            raise DataError(
                f"the checkpoint is truncated or damaged ({type(error).__name__} while reading it)",
                code="truncated", hint="copy or download it again",
            ) from None  # fmt: skip


def load_trusted(stream: IO[bytes]) -> Any:
    """Load a pickle or torch file with all its code: the file can do whatever the user can."""
    kind = sniff(stream)
    if kind != "pickle":
        _refuse_parts(stream, "torch-zip" if kind == "zip" else kind)
    stream.seek(0)
    if (folder := str(Path.cwd())) not in sys.path:  # the likely location of the user's classes, as for python -m
        sys.path.insert(0, folder)
    try:
        if kind == "pickle":
            return pickle.load(stream)
        return torch.load(stream, map_location="cpu", weights_only=False)
    except (*_DAMAGE, ImportError) as error:
        raise DataError(
            f"cannot load the pickle: {type(error).__name__}: {_plain(str(error))}", code="unpicklable",
            hint="the modules that define its classes must be importable",
        ) from error  # fmt: skip


def _refuse_parts(stream: IO[bytes], kind: str) -> None:
    """Raise DataError if a torch file holds one rank's part of a network."""
    if any(name.startswith(_OF_RANKS) for name in list_globals(stream, kind)):
        raise DataError(
            "the file holds one rank's shards of a distributed network (DTensor)", code="sharded",
            hint="save the full state where it was trained (get_model_state_dict with full_state_dict=True), or save "
                "a folder with torch.distributed.checkpoint and merge it with bnncli convert",
        )  # fmt: skip


def needs_trust(names: list[str]) -> Untrusted:
    """Return the error that lists the functions and classes a pickle needs, and what to do."""
    return Untrusted(
        f"loading this file would run code: {format_names(names, limit=10)}; nothing was run",
        code="needs_code", hint=trust_hint(),
    )  # fmt: skip


def list_globals(stream: IO[bytes], kind: str) -> list[str]:
    """Return the sorted names of functions and classes that a file's pickles refer to, without loading them."""
    stream.seek(0)
    if kind == "torch-zip":
        try:
            with zipfile.ZipFile(stream) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                return sorted({found for name in names for found in _scan(archive.open(name))})
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            if is_failure(error):
                raise
            return []
    return sorted(_scan(stream))


def harmful(names: list[str]) -> list[str]:
    """Return the names that are not basic building blocks of tensors and dictionaries."""
    return [name for name in names if name not in STAND_INS and not _HARMLESS.fullmatch(name)]


def _list_unsafe_globals(stream: IO[bytes], kind: str) -> list[str]:
    """Return torch's own list for a zip file; for the old format there is none, and the loader itself refuses."""
    if kind != "torch-zip":
        return []
    stream.seek(0)
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    except _DAMAGE as error:
        if is_failure(error):
            raise
        return harmful(list_globals(stream, kind))


def _scan(stream: IO[bytes]) -> set[str]:
    """Return names in the first pickles of a stream, as far as it can be parsed."""
    found: set[str] = set()
    for _ in range(_MAX_PICKLES):
        texts: list[str] = []
        memo: dict[int, str] = {}
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
                _step(opcode.name, argument, texts, memo, found)
                if count > _MAX_OPCODES:
                    return found
        except (ValueError, UnicodeDecodeError, OverflowError):
            return found
        if not _has_more(stream):
            return found
    return found


def _step(name: str, argument: Any, texts: list[str], memo: dict[int, str], found: set[str]) -> None:
    """Track the strings that a pickle pushes, so that globals named from the stack are found too."""
    if name in ("GLOBAL", "INST"):
        found.add(str(argument).replace(" ", "."))
    elif name == "STACK_GLOBAL":
        found.add(".".join(texts[-2:]) if len(texts) >= 2 else "unknown")
    elif "UNICODE" in name or name in ("STRING", "BINSTRING", "SHORT_BINSTRING"):
        texts.append(str(argument))
    elif name == "MEMOIZE":
        memo[len(memo)] = texts[-1] if texts else ""
    elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
        memo[int(argument)] = texts[-1] if texts else ""
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        texts.append(memo.get(int(argument), "unknown"))


def _has_more(stream: IO[bytes]) -> bool:
    byte = stream.read(1)
    if byte:
        stream.seek(-1, os.SEEK_CUR)
    return bool(byte)


def _plain(text: str) -> str:
    """Return foreign text in one line, truncated and without colour codes."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).split())[:300]

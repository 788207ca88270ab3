"""Arrays in memory as a data set, and arrays out of npz files without pickle."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import numpy as np

from bnncli.data._labels import check_labels
from bnncli.data._transform import settled
from bnncli.errors import DataError, DeviceError, Untrusted
from bnncli.names import listed, quoted
from bnncli.progress import Progress
from bnncli.system.devices import available_memory
from bnncli.system.input_files import is_failure, open_regular

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_IDS = "input_ids"  # what tokenizers call them, and networks that take them
# Deflate cannot shrink data further than this; what claims more is a bomb.
_MAX_RATIO = 1032
_SLACK = 4096
_LOCAL_HEADER, _NAME_SIZES = (
    30,
    slice(26, 30),
)  # of a zip member: bytes before its name, and where name and extra have their sizes
MAPPED_BYTES = 1 << 26  # arrays from this size on stay in their file, where it has them as they are
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError,
    ValueError, EOFError, KeyError, NotImplementedError, OSError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Inputs (rows, ...) and labels (rows,) or (rows, L) in memory, in the type they were stored in."""

    inputs: np.ndarray | Tensor
    labels: np.ndarray | None
    classes: tuple[str, ...] | None = None
    is_sized: bool = False
    names: None = None
    items: str = "arrays"

    @property
    def is_labeled(self) -> bool:
        """Whether there are labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray | Tensor, np.ndarray | None]:
        """Inputs and labels of the rows; a run of neighbours is not copied."""
        index = places(rows)
        return self.inputs[index], None if self.labels is None else self.labels[index]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray | Tensor]:
        """The arrays themselves, and the rows."""
        found = {"x": self.inputs, "rows": rows}
        return found if self.labels is None else {**found, "y": self.labels}


@dataclass(frozen=True, eq=False)
class NamedArrays:
    """Arrays (rows, ...) by the names of a network's arguments, and labels (rows,), in memory."""

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray | None
    classes: None = None
    is_sized: bool = False
    names: None = None
    items: str = "arrays"

    @property
    def is_labeled(self) -> bool:
        """Whether there are labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def read(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Inputs by name and labels of the rows."""
        index = places(rows)
        inputs = {name: settled(array[index]) for name, array in self.inputs.items()}
        return inputs, None if self.labels is None else self.labels[index]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """The arrays themselves, and the rows."""
        found = {**{f"x.{name}": array for name, array in self.inputs.items()}, "rows": rows}
        return found if self.labels is None else {**found, "y": self.labels}


def named_arrays(inputs: Mapping[str, np.ndarray], labels: np.ndarray | None, *, where: str) -> NamedArrays:
    """A data set of several arrays, checked.

    Raises:
        DataError: an array of no numbers, other numbers of rows, labels that break a rule.
    """
    sizes = {name: len(array) if array.ndim else 0 for name, array in inputs.items()}
    for name, array in inputs.items():
        if array.dtype.kind not in "fiub":
            raise DataError(f"{where}: array {quoted(name)} has type {array.dtype}, expected numbers")
    if len({*sizes.values()}) != 1:
        said = ", ".join(f"{quoted(name)} {size}" for name, size in sizes.items())
        raise DataError(f"{where}: the arrays have different numbers of rows ({said})")
    num_rows = next(iter(sizes.values()))
    checked = None if labels is None else check_labels(labels, num_rows=num_rows, where=where)
    return NamedArrays(dict(inputs), checked)


def places(rows: np.ndarray) -> slice | np.ndarray:
    """What takes rows (n,) out of an array: a run of neighbours as a slice, which copies nothing."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if bool((np.diff(rows) == 1).all()) else rows


def array_dataset(inputs: np.ndarray, labels: np.ndarray | None, *, where: str) -> ArrayDataset:
    """A data set of NumPy arrays, checked.

    Raises:
        DataError: inputs without rows or of an odd type, labels that break a rule.
    """
    if inputs.ndim < 2:
        raise DataError(f"{where}: expected inputs (N, ...) with at least two axes, got shape {inputs.shape}")
    if inputs.dtype.kind in "iu" and inputs.dtype != np.uint8 and inputs.size:
        raise DataError(
            f"{where}: expected inputs of type uint8 or floating point, got integers ({inputs.dtype}) from "
            f"{inputs.min()} to {inputs.max()}",
            hint="save pixels as uint8; for token ids (N, L), give the name of the network's argument "
            "(npz:FILE:input_ids,y); for precomputed features, use \0from_npz\0",
        )
    if inputs.dtype != np.uint8 and inputs.dtype.kind != "f":
        raise DataError(
            f"{where}: expected inputs of type uint8 or floating point, got {inputs.dtype}",
            hint="save them as uint8 (scaled to [0, 1] when read) or float32 (used unchanged)",
        )
    native = np.ascontiguousarray(inputs, dtype=inputs.dtype.newbyteorder("="))
    if native.dtype.itemsize > 8:
        native = native.astype(np.float64)
    checked = None if labels is None else check_labels(labels, num_rows=len(inputs), where=where)
    return ArrayDataset(native, checked)


def npz_names(path: Path) -> list[str]:
    """Names of the arrays in an npz file. Raises MissingInput or DataError."""
    with open_regular(path) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                members = archive.namelist()
        except _DAMAGE as error:
            if is_failure(error):
                raise
            raise DataError(f"{quoted(path, limit=300)} is not an npz file ({error})", path=path) from error
    names = [name.removesuffix(".npy") for name in members if name.endswith(".npy")]
    if not names and any(name.endswith("/data.pkl") for name in members):
        raise DataError(
            f"{quoted(path, limit=300)} is a PyTorch checkpoint, not an npz file", path=path, code="wrong_kind",
            hint="save the arrays with np.savez; pass a checkpoint as the first argument",
        )  # fmt: skip
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{quoted(path, limit=300)} has several arrays with the same name: {listed(twice)}", path=path, code="bad_keys",
            hint="save it again with np.savez",
        )  # fmt: skip
    return names


def npz_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of every array in an npz file; none is read. Raises MissingInput or DataError."""
    found = {}
    names = npz_names(path)
    with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
        for name in names:
            try:
                shape, _, dtype, _ = _header_of(archive, f"{name}.npy")
            except _DAMAGE as error:
                raise _damaged(error, name, path) from error
            found[name] = shape, dtype
    return found


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The named arrays of an npz file; pickled objects in it are never loaded.

    Raises:
        MissingInput: no such file.
        DataError: not an npz file, damaged, no such array, or sizes that do not add up.
        Untrusted: an array of Python objects, which only a pickle can hold.
    """
    available = npz_names(path)
    arrays = {}
    with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
        for name in names:
            if name not in available:
                raise DataError(
                    f"{quoted(path, limit=300)} has no array {quoted(name)}; it has {listed(available, limit=20)}",
                    hint="name the arrays: npz:FILE:INPUTS,LABELS", path=path,
                )  # fmt: skip
            try:
                arrays[name] = _read_member(archive, f"{name}.npy", path)
            except _DAMAGE as error:
                raise _damaged(error, name, path) from error
    return arrays


def _damaged(error: Exception, name: str, path: Path) -> DataError:
    """The error for an array that cannot be read. Raises what the system is to blame for."""
    if is_failure(error):
        raise error
    return DataError(f"{quoted(path, limit=300)}: array {quoted(name)} is truncated or damaged ({error})", path=path)


def can_hold(compressed: int, size: int) -> bool:
    """Whether so many bytes of Deflate can be made into `size` bytes; where they cannot, the size is a lie."""
    return size <= _MAX_RATIO * compressed + _SLACK


def check_memory(size: int, what: str) -> None:
    """Raise DeviceError, before anything is allocated, when `size` bytes do not fit into the memory that is free."""
    free = available_memory("cpu")
    if size > free:
        raise DeviceError(
            f"{what} needs {size >> 20} MiB, but only {free >> 20} MiB of memory are free", code="out_of_memory",
            hint="free memory, or save fewer rows",
        )  # fmt: skip


def _header_of(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, whether it is in Fortran's order, type, and where the numbers begin in a member."""
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return (*read_header(member), member.tell())


def _read_member(archive: zipfile.ZipFile, name: str, path: Path) -> np.ndarray:
    """One array, after its header was checked against the archive."""
    info = archive.getinfo(name)
    shape, is_fortran, dtype, start = _header_of(archive, name)
    if dtype.hasobject:
        raise Untrusted(
            f"{quoted(path, limit=300)}: array {quoted(name.removesuffix('.npy'))} holds Python objects, which "
                "need unpickling; bnncli does not unpickle data",
            hint="save it as a plain array of numbers", path=path,
        )  # fmt: skip
    if start + math.prod(shape) * dtype.itemsize != info.file_size:
        raise ValueError(f"shape {shape} does not match {info.file_size} bytes of data")
    if not can_hold(info.compress_size, info.file_size):
        raise ValueError(f"{info.compress_size} compressed bytes cannot hold {info.file_size} bytes")
    if info.compress_type == zipfile.ZIP_STORED and info.file_size >= MAPPED_BYTES and not is_fortran:
        return _mapped(archive, info, start, shape, dtype)
    check_memory(info.file_size, f"{quoted(path, limit=300)}: array {quoted(name.removesuffix('.npy'))}")
    with archive.open(name) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
    return array


def _mapped(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, start: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """An array that lies in the archive as it is, in the file's own pages, once its checksum is known to be right.

    Args:
        start: of the numbers, behind the member's own header.
    """
    with archive.open(info) as member:
        while member.read(1 << 22):  # the last read tells a wrong checksum
            pass
    stream = cast(IO[bytes], archive.fp)
    stream.seek(info.header_offset + _NAME_SIZES.start)
    first = info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", stream.read(4))) + start
    return np.memmap(stream, dtype, "c", first, shape)  # writable, for torch; what is written stays here

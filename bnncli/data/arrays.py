"""Arrays as data: in memory, in npz files without pickle, in MATLAB files, and extracted features (`--from-npz`)."""

from __future__ import annotations

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from bnncli.data.labels import FROM_1, check_labels, common_task, number_groups
from bnncli.data.transform import normalise_dtype
from bnncli.errors import DataError, DeviceError, Untrusted
from bnncli.likelihoods import likelihood_of
from bnncli.names import format_names, quote_name
from bnncli.progress import Progress
from bnncli.system.devices import available_memory
from bnncli.system.input_files import is_failure, open_regular

if TYPE_CHECKING:
    from torch import Tensor


TOKEN_IDS = "input_ids"  # the name that tokenizers and networks use
# Deflate cannot compress further; a larger claim is a decompression bomb.
_MAX_RATIO = 1032
_SLACK = 4096
_LOCAL_HEADER, _NAME_SIZES = (
    30,
    slice(26, 30),
)  # of a zip member: bytes before its name, and the position of the sizes of name and extra field
MAPPED_BYTES = 1 << 26  # arrays from this size on are memory-mapped if stored uncompressed
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError,
    ValueError, EOFError, KeyError, NotImplementedError, OSError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Inputs (rows, ...) and labels (rows,) or (rows, L) in memory, in their stored type."""

    inputs: np.ndarray | Tensor
    labels: np.ndarray | None
    classes: tuple[str, ...] | None = None
    is_sized: bool = False
    names: None = None
    items: str = "arrays"
    groups: np.ndarray | None = None

    @property
    def is_labeled(self) -> bool:
        """Return whether there are labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray | Tensor, np.ndarray | None]:
        """Return inputs and labels of the rows; consecutive rows are not copied."""
        index = row_index(rows)
        return self.inputs[index], None if self.labels is None else self.labels[index]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray | Tensor]:
        """Return the arrays themselves, and the rows."""
        return with_known({"x": self.inputs, "rows": rows}, y=self.labels, groups=self.groups)


@dataclass(frozen=True, eq=False)
class NamedArrays:
    """Arrays (rows, ...) by argument name of the network, and labels (rows,), in memory."""

    inputs: Mapping[str, np.ndarray]
    labels: np.ndarray | None
    classes: None = None
    is_sized: bool = False
    names: None = None
    items: str = "arrays"
    groups: np.ndarray | None = None

    @property
    def is_labeled(self) -> bool:
        """Return whether there are labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def read(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Return inputs by name and labels of the rows."""
        index = row_index(rows)
        inputs = {name: normalise_dtype(array[index]) for name, array in self.inputs.items()}
        return inputs, None if self.labels is None else self.labels[index]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return the arrays themselves, and the rows."""
        inputs = {f"x.{name}": array for name, array in self.inputs.items()}
        return with_known({**inputs, "rows": rows}, y=self.labels, groups=self.groups)


def check_named_arrays(inputs: Mapping[str, np.ndarray], labels: np.ndarray | None, *, where: str) -> NamedArrays:
    """Check several arrays and return them as a data set.

    Raises:
        DataError: an array is not numeric, numbers of rows differ, or labels break a rule.
    """
    sizes = {name: len(array) if array.ndim else 0 for name, array in inputs.items()}
    for name, array in inputs.items():
        if array.dtype.kind not in "fiub":
            raise DataError(f"{where}: array {quote_name(name)} has type {array.dtype}, expected numbers")
    if len({*sizes.values()}) != 1:
        said = ", ".join(f"{quote_name(name)} {size}" for name, size in sizes.items())
        raise DataError(f"{where}: the arrays have different numbers of rows ({said})")
    num_rows = next(iter(sizes.values()))
    checked = None if labels is None else check_labels(labels, num_rows=num_rows, where=where)
    return NamedArrays(dict(inputs), checked)


def with_known(arrays: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return the arrays with those of the others that are not None."""
    return {**arrays, **{name: array for name, array in others.items() if array is not None}}


def row_index(rows: np.ndarray) -> slice | np.ndarray:
    """Return an index for rows (n,); consecutive rows become a slice, which copies nothing."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if bool((np.diff(rows) == 1).all()) else rows


def array_dataset(inputs: np.ndarray, labels: np.ndarray | None, *, where: str) -> ArrayDataset:
    """Check arrays and return them as a data set.

    Raises:
        DataError: the inputs have no rows or an unsupported type, or labels break a rule.
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


def check_groups(groups: np.ndarray, *, num_rows: int, where: str) -> np.ndarray:
    """Return the group of each row, as `number_groups` does. Raises DataError unless there is one text or number per row."""
    if groups.shape != (num_rows,) or groups.dtype.kind not in "iufU":
        found = f"type {groups.dtype} and shape {groups.shape}"
        raise DataError(f"{where} has {found}, expected texts or numbers of shape ({num_rows},)", code="bad_groups")
    return number_groups(groups.tolist(), where=where)


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in an npz file. Raises MissingInput or DataError."""
    with open_regular(path) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                members = archive.namelist()
        except _DAMAGE as error:
            if is_failure(error):
                raise
            raise DataError(f"{quote_name(path, limit=300)} is not an npz file ({error})", path=path) from error
    names = [name.removesuffix(".npy") for name in members if name.endswith(".npy")]
    if not names and any(name.endswith("/data.pkl") for name in members):
        raise DataError(
            f"{quote_name(path, limit=300)} is a PyTorch checkpoint, not an npz file", path=path, code="wrong_kind",
            hint="save the arrays with np.savez; pass a checkpoint as the first argument",
        )  # fmt: skip
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{quote_name(path, limit=300)} has several arrays with the same name: {format_names(twice)}", path=path, code="bad_keys",
            hint="save it again with np.savez",
        )  # fmt: skip
    return names


def npz_shapes(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and type of every array in an npz file without reading it. Raises MissingInput or DataError."""
    found = {}
    names = npz_names(path)
    with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
        for name in names:
            try:
                shape, _, dtype, _ = _header_of(archive, f"{name}.npy")
            except _DAMAGE as error:
                raise _damage_error(error, name, path) from error
            found[name] = shape, dtype
    return found


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the named arrays of an npz file; never loads pickled objects.

    Raises:
        MissingInput: there is no such file.
        DataError: the file is not npz or damaged, has no such array, or its sizes are inconsistent.
        Untrusted: an array has Python objects, which only a pickle can hold.
    """
    available = npz_names(path)
    arrays = {}
    with open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
        for name in names:
            if name not in available:
                raise DataError(
                    f"{quote_name(path, limit=300)} has no array {quote_name(name)}; it has {format_names(available, limit=20)}",
                    hint="name the arrays: npz:FILE:INPUTS,LABELS", path=path,
                )  # fmt: skip
            try:
                arrays[name] = _read_member(archive, f"{name}.npy", path)
            except _DAMAGE as error:
                raise _damage_error(error, name, path) from error
    return arrays


def _damage_error(error: Exception, name: str, path: Path) -> DataError:
    """Return the error for an unreadable array, or re-raise the error if the system is to blame."""
    if is_failure(error):
        raise error
    return DataError(
        f"{quote_name(path, limit=300)}: array {quote_name(name)} is truncated or damaged ({error})", path=path
    )


def can_inflate_to(compressed: int, size: int) -> bool:
    """Return whether `compressed` bytes of Deflate can expand to `size` bytes; if not, the size is false."""
    return size <= _MAX_RATIO * compressed + _SLACK


def check_memory(size: int, what: str) -> None:
    """Raise DeviceError, before anything is allocated, if `size` bytes exceed the free memory."""
    free = available_memory("cpu")
    if size > free:
        raise DeviceError(
            f"{what} needs {size >> 20} MiB, but only {free >> 20} MiB of memory are free", code="out_of_memory",
            hint="free memory, or save fewer rows",
        )  # fmt: skip


def _header_of(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return shape, whether in Fortran order, type, and the offset of the data in a member."""
    with archive.open(name) as member:
        return (*_read_header(member), member.tell())


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, whether in Fortran order, and type, from the start of an npy file."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def read_npy(stream: IO[bytes], where: str, path: Path | None = None) -> np.ndarray:
    """Read the array of an npy file. Raises DataError, or Untrusted for Python objects."""
    try:
        size = stream.seek(0, 2)
        stream.seek(0)
        shape, _, dtype = _read_header(stream)
        _check_no_objects(dtype, where, path)
        if stream.tell() + math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"shape {shape} does not match {size} bytes of data")
        stream.seek(0)
        array: np.ndarray = np.lib.format.read_array(stream, allow_pickle=False)
    except _DAMAGE as error:
        if is_failure(error):
            raise
        why = " ".join(str(error).split())[:120]
        raise DataError(f"{where} is truncated or damaged ({why})", path=path) from error
    return array


def _check_no_objects(dtype: np.dtype, where: str, path: Path | None) -> None:
    """Raise Untrusted for an array of Python objects."""
    if dtype.hasobject:
        raise Untrusted(
            f"{where} holds Python objects, which need unpickling; bnncli does not unpickle data",
            hint="save it as a plain array of numbers", path=path,
        )  # fmt: skip


def _read_member(archive: zipfile.ZipFile, name: str, path: Path) -> np.ndarray:
    """Read an array after checking its header against the archive."""
    info = archive.getinfo(name)
    shape, is_fortran, dtype, start = _header_of(archive, name)
    where = f"{quote_name(path, limit=300)}: array {quote_name(name.removesuffix('.npy'))}"
    _check_no_objects(dtype, where, path)
    if start + math.prod(shape) * dtype.itemsize != info.file_size:
        raise ValueError(f"shape {shape} does not match {info.file_size} bytes of data")
    if not can_inflate_to(info.compress_size, info.file_size):
        raise ValueError(f"{info.compress_size} compressed bytes cannot hold {info.file_size} bytes")
    if info.compress_type == zipfile.ZIP_STORED and info.file_size >= MAPPED_BYTES and not is_fortran:
        return _map_array(archive, info, start, shape, dtype)
    check_memory(info.file_size, where)
    with archive.open(name) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
    return array


def _map_array(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, start: int, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Memory-map an uncompressed array in the archive, after verifying its checksum.

    Args:
        start: offset of the data, after the member's own header.
    """
    with archive.open(info) as member:
        while member.read(1 << 22):  # the last read raises if the checksum is wrong
            pass
    stream = cast(IO[bytes], archive.fp)
    stream.seek(info.header_offset + _NAME_SIZES.start)
    first = info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", stream.read(4))) + start
    return np.memmap(stream, dtype, "c", first, shape)  # writable for torch, but copy-on-write


_HEADER = 128
_ORDERS = {b"IM": "<", b"MI": ">"}
_MATRIX, _COMPRESSED = 14, 15
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_COMPLEX = 0x0800


def read_mat(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Read real arrays by name. Raises MissingInput, or DataError if the file is damaged or lacks an array."""
    shown = quote_name(path, limit=300)
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
            raise DataError(f"{shown} has no numeric array {quote_name(name)}", path=path)
    return found


def _matrices(data: memoryview, order: str, shown: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and values of the real arrays."""
    for kind, content in _elements(data, order):
        if kind == _COMPRESSED:
            kind, content = next(_elements(_decompress_element(content, order, shown), order))
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
                raise ValueError(
                    f"{quote_name(name)} has {len(array)} numbers, which do not match shape {tuple(shape)}"
                )
            yield name, array.astype(_CLASSES[flags & 0xFF]).reshape(shape, order="F")


def _decompress_element(content: memoryview, order: str, shown: str) -> memoryview:
    """Decompress an element to the size that it states."""
    packed = zlib.decompressobj()
    head = packed.decompress(content, 8)
    size = struct.unpack(f"{order}II", head)[1]
    if not can_inflate_to(len(content), size):
        raise ValueError(f"{len(content)} compressed bytes cannot hold {size} bytes")
    check_memory(size, shown)
    body = packed.decompress(packed.unconsumed_tail, max(size, 1))
    packed.decompress(packed.unconsumed_tail, 1)
    if not packed.eof:  # the checksum is at the end
        raise ValueError("it is truncated")
    return memoryview(head + body)


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Yield type and content of each element; small ones are inside their tag."""
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


_FEATURES, _LABELS, _NAMES, _GROUPS = "features_", "labels_", "names_", "groups_"
_EXPECTED = (
    "features_<split> (N, D), labels_<split> (N,) or (N, L), names_<split> (N,), groups_<split> (N,), head_weight (K, D), "
    "head_bias (K,)"
)


@dataclass(frozen=True, eq=False)
class FeatureDataset:
    """Features (rows, D) float32; labels (rows,) int64 or (rows, L) uint8, a text per row and groups (rows,) int64, or None."""

    features: np.ndarray
    labels: np.ndarray | None
    texts: np.ndarray | None
    classes: None = None
    is_sized: bool = True
    items: str = "arrays"
    groups: np.ndarray | None = None

    @property
    def is_labeled(self) -> bool:
        """Return whether there are labels."""
        return self.labels is not None

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the examples."""
        return None if self.texts is None else tuple(self.texts.tolist())

    def __len__(self) -> int:
        return len(self.features)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return features and labels of the rows; consecutive rows are not copied."""
        index = row_index(rows)
        return self.features[index], None if self.labels is None else self.labels[index]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return the rows and all their contents."""
        features, labels = self.read(rows)
        texts = None if self.texts is None else self.texts[rows]
        groups = None if self.groups is None else self.groups[rows]
        return with_known({"features": features, "sample_id": rows}, labels=labels, names=texts, groups=groups)


@dataclass(frozen=True)
class FeatureArrays:
    """Contents of an npz file of features.

    Attributes:
        splits: by name.
        head_weight, head_bias: (K, D) and (K,) float32; None without a head or bias.
        likelihood: of the labels, by name; None for mutually exclusive classes.
    """

    splits: Mapping[str, FeatureDataset]
    head_weight: np.ndarray | None
    head_bias: np.ndarray | None
    likelihood: str | None = None

    @property
    def num_features(self) -> int:
        """D, the same for all splits."""
        return next(iter(self.splits.values())).features.shape[1]


def feature_splits(path: Path | str) -> list[str]:
    """Return the splits with features in an npz file, from its names only. Raises MissingInput or DataError."""
    return [name.removeprefix(_FEATURES) for name in npz_names(Path(path)) if name.startswith(_FEATURES)]


def read_feature_arrays(path: Path | str, *, unlabeled: Collection[str] = (), task: str | None = None) -> FeatureArrays:
    """Read features, labels and head from an npz file, and check shapes, types and values.

    Args:
        unlabeled: splits whose labels to ignore: out-of-distribution data has other classes.
        task: kind of the labels, one of bnncli.likelihoods.TASKS; None to infer it.

    Raises:
        MissingInput: there is no such file.
        DataError: there are no features, labels without features, unknown arrays, mismatched shapes, NaN or infinite
            values, or labels that break a rule or are not classes of the head.
        Untrusted: an array has Python objects.
    """
    path = Path(path)
    names = npz_names(path)
    splits = feature_splits(path)
    known = {f"{kind}{split}" for split in splits for kind in (_FEATURES, _LABELS, _NAMES, _GROUPS)} | {
        "head_weight",
        "head_bias",
    }
    unknown = [name for name in names if name not in known]
    if not splits or unknown:
        came = (
            f"unexpected {', '.join(map(repr, unknown))[:200]}" if unknown else f"only {', '.join(names) or 'nothing'}"
        )
        raise DataError(f"{path}: expected arrays {_EXPECTED}; got {came}", path=path)
    arrays = read_npz(path, names)
    head_weight, head_bias = (_floats(arrays.get(name), name, path) for name in ("head_weight", "head_bias"))
    features = {split: _finite(arrays[f"{_FEATURES}{split}"], f"{_FEATURES}{split}", path) for split in splits}
    _check_shapes(features, head_weight, head_bias, path)
    labels = {
        split: check_labels(arrays[key], num_rows=len(features[split]), where=f"{path}: {key}")
        for split in splits if (key := f"{_LABELS}{split}") in arrays
    }  # fmt: skip
    labels = {split: array for split, array in labels.items() if split not in unlabeled}
    likelihood = common_task({f"{path}: {_LABELS}{split}": array for split, array in labels.items()}, task)
    if head_weight is not None:
        _check_range(labels, len(head_weight), path)
    texts = {
        split: _texts(arrays[key], key, len(features[split]), path)
        for split in splits if (key := f"{_NAMES}{split}") in arrays
    }  # fmt: skip
    groups = {
        split: check_groups(arrays[key], num_rows=len(features[split]), where=f"{path}: {key}")
        for split in splits if (key := f"{_GROUPS}{split}") in arrays
    }  # fmt: skip
    found = {
        split: FeatureDataset(array, labels.get(split), texts.get(split), groups=groups.get(split))
        for split, array in features.items()
    }
    return FeatureArrays(found, head_weight, head_bias, likelihood)


def _texts(array: np.ndarray, name: str, num_rows: int, path: Path) -> np.ndarray:
    """Return the array. Raises DataError unless it has one text per row."""
    if array.dtype.kind != "U" or array.shape != (num_rows,):
        raise DataError(
            f"{path}: {name} has type {array.dtype} and shape {array.shape}, expected strings of shape ({num_rows},)",
            path=path,
        )
    return array


def _floats(array: np.ndarray | None, name: str, path: Path) -> np.ndarray | None:
    return None if array is None else _finite(array, name, path)


def _finite(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    """Return the array as float32. Raises DataError for other types and non-finite values."""
    if array.dtype.kind != "f":
        raise DataError(f"{path}: {name} has type {array.dtype}, expected floating point", path=path)
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(array, np.float32)
    bad = np.argwhere(~np.isfinite(narrow))
    if len(bad):
        raise DataError(
            f"{path}: {name} has {len(bad)} values that are not finite in float32; the first is in row {bad[0][0]}",
            code="not_finite", path=path,
        )  # fmt: skip
    return narrow


def _check_shapes(
    features: Mapping[str, np.ndarray], weight: np.ndarray | None, bias: np.ndarray | None, path: Path
) -> None:
    """Raise DataError unless all features have the head's D, and the bias fits the weight."""
    for split, array in features.items():
        if array.ndim != 2 or 0 in array.shape:
            expected = "expected (N, D) with N > 0 and D > 0"
            raise DataError(f"{path}: features_{split} has shape {array.shape}, {expected}", path=path)
    shapes = {split: array.shape[1] for split, array in features.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"{path}: splits have different numbers of features: {shapes}", path=path)
    num_features = next(iter(shapes.values()))
    if weight is None and bias is not None:
        raise DataError(f"{path}: has head_bias but no head_weight", path=path)
    if weight is not None and weight.ndim == 2 and weight.shape[1] != num_features == weight.shape[0]:
        raise DataError(
            f"{path}: head_weight has shape {weight.shape}, expected (K, {num_features}); it looks transposed",
            hint="save head_weight.T", path=path,
        )  # fmt: skip
    if weight is not None and (weight.ndim != 2 or weight.shape[1] != num_features or not len(weight)):
        raise DataError(f"{path}: head_weight has shape {weight.shape}, expected (K, {num_features})", path=path)
    if weight is not None and bias is not None and bias.shape != (len(weight),):
        raise DataError(f"{path}: head_bias has shape {bias.shape}, expected ({len(weight)},)", path=path)


def _check_range(labels: Mapping[str, np.ndarray], num_outputs: int, path: Path) -> None:
    num_classes = likelihood_of(num_outputs).num_classes
    for split, array in labels.items():
        if array.ndim == 2:
            if array.shape[1] != num_outputs:
                message = (
                    f"{path}: labels_{split} has {array.shape[1]} labels per example, but the head has "
                    f"{num_outputs} outputs"
                )
                raise DataError(message, code="bad_labels", path=path)
            continue
        bad = np.flatnonzero(array >= num_classes)
        if len(bad):
            raise DataError(
                f"{path}: labels_{split} row {bad[0]} is {int(array[bad[0]])}, expected 0 to {num_classes - 1}",
                code="bad_labels", path=path, hint=FROM_1 if array.min() == 1 and array.max() == num_classes else None,
            )  # fmt: skip

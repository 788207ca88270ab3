"""What lies in an HDF5 file, looked at before any data: groups and plain arrays of its own, and nothing else.

By h5py's low-level interface: a command looks at hundreds of objects, and the other one makes several of its own for each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from bnncli.errors import DataError, Untrusted

MAX_OBJECTS = 10_000
_PLAIN = (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT)


def check_objects(path: Path, file: h5py.h5f.FileID) -> None:
    """Refuse anything that our writer never makes.

    Raises:
        DataError: too many objects, groups in a loop, arrays stored otherwise, sizes that do not add up.
        Untrusted: links, external storage or virtual datasets.
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
    """Bytes the dataset declares."""
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
    """Whether a stored type is that of a text; texts of one length are arrays like any other."""
    found = h5py.check_string_dtype(kind)
    return found is not None and found.length is None

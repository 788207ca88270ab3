"""Any artifact, told by its first bytes: what it says of itself, whatever kind of file it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bnncli.errors import DataError
from bnncli.machine.input_files import reading
from bnncli.storage.exports import EXPORT_MAGIC, read_export_header
from bnncli.storage.headers import Header, check_is_file
from bnncli.storage.known_files import is_settled, known_header, remember_header, state_of
from bnncli.storage.metrics import read_metrics_header
from bnncli.storage.posteriors import read_posterior_header


def read_header(path: Path) -> Header:
    """The header of any artifact, by its magic bytes; data are not read. A command reads that of an unchanged file once.

    Raises:
        MissingInput: no such file, or it cannot be read.
        DeviceError, ReadError: the machine or the disk failed.
        DataError: not one of ours, truncated, incomplete, of another schema.
        Untrusted: an HDF5 file with links to other files.
    """
    check_is_file(path)
    with reading(path):
        before = state_of(path.stat())
    known: Header | None = known_header(before)
    if known is not None:
        return replace(known, path=path)
    is_settled_file, header = is_settled(before), _read_header(path)
    with reading(path):
        is_same = state_of(path.stat()) == before
    if is_same and is_settled_file:
        remember_header(before, header)
    return header


def _read_header(path: Path) -> Header:
    with reading(path), open(path, "rb") as stream:
        magic = stream.read(16)
    if magic.startswith(b"\x89HDF\r\n\x1a\n"):
        from bnncli.storage.hdf5 import read_hdf5_header  # numpy and h5py are slow to import

        return read_hdf5_header(path)
    if magic.lstrip().startswith(b"{"):
        return read_metrics_header(path)
    if len(magic) > 8 and magic[8:9] == b"{":
        return read_posterior_header(path)
    if magic.startswith(EXPORT_MAGIC):
        return read_export_header(path)
    what = "empty" if not magic else "truncated, or not a bnncli artifact"
    raise DataError(f"{path} is {what}", code="not_an_artifact", path=path)

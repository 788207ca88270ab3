"""The seal: every byte of an HDF5 file's structure is vouched for before the HDF5 library reads it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bnncli.artifacts.hdf5 import MARK, SKIP_BYTES, is_sealed, make_seal
from bnncli.errors import DataError

CONTENT = bytes(range(256)) * 1024
BLOCK = (1000, SKIP_BYTES + 5)
SEALED = CONTENT + make_seal(io.BytesIO(CONTENT), [BLOCK, (200_000, 10)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_a_sealed_file_is_whole(path: Path) -> None:
    path.write_bytes(SEALED)
    assert is_sealed(path)


def test_a_file_without_a_seal_is_not_sealed(path: Path) -> None:
    path.write_bytes(CONTENT)
    assert not is_sealed(path)


@pytest.mark.parametrize("offset", [0, 999, 1000 + SKIP_BYTES + 5, 200_005, len(CONTENT) - 1])
def test_any_changed_byte_of_the_structure_is_seen(path: Path, offset: int) -> None:
    changed = bytearray(SEALED)
    changed[offset] ^= 1
    path.write_bytes(changed)
    with pytest.raises(DataError, match="does not match its seal"):
        is_sealed(path)


def test_large_arrays_are_left_to_the_content_digest(path: Path) -> None:
    changed = bytearray(SEALED)
    changed[BLOCK[0]] ^= 1
    changed[sum(BLOCK) - 1] ^= 1
    path.write_bytes(changed)
    assert is_sealed(path)


def test_every_changed_byte_of_the_seal_itself_is_seen(path: Path) -> None:
    for offset in range(len(CONTENT), len(SEALED)):
        changed = bytearray(SEALED)
        changed[offset] ^= 1
        path.write_bytes(changed)
        if offset < len(CONTENT) + len(MARK):
            assert not is_sealed(path)
        else:
            with pytest.raises(DataError, match="seal"):
                is_sealed(path)


@pytest.mark.parametrize(
    "line", [b"[[5,6]", b"[[9,1],[5,1]]", b"[[0,999999999999999999]]", b"[1]", b"[[01,2],]", b"[[-5,6]]"]
)
def test_a_forged_list_of_blocks_is_damage_and_not_a_crash(path: Path, line: bytes) -> None:
    path.write_bytes(CONTENT + MARK + b"0" * 64 + b" " + line + b"\n")
    with pytest.raises(DataError, match="seal"):
        is_sealed(path)


def test_bytes_after_the_seal_are_seen(path: Path) -> None:
    path.write_bytes(SEALED + b"\n")
    with pytest.raises(DataError, match="seal"):
        is_sealed(path)

"""The seal of an HDF5 artifact: one line after the end of what HDF5 reads, with a digest of the file's structure.

On some damaged files the HDF5 library loops for ever or crashes, so the structure is checked before the library sees
it. Large arrays are left out: the content digest covers them. Other readers ignore what follows the HDF5 data.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from bnncli.errors import DAMAGED_HINT, DataError
from bnncli.machine.input_files import reading
from bnncli.numerics.digests import canonical_json

MARK = b"\nbnncli-seal/1 "
MAX_SEAL_BYTES = 1 << 16
SKIP_BYTES = 1 << 16
_PAIR = re.compile(rb"\[(\d{1,18}),(\d{1,18})\]")
_LINE = re.compile(rb"([0-9a-f]{64}) (\[(?:\[\d{1,18},\d{1,18}\],?)*\])\n")
_BLOCK = 1 << 20


def make_seal(stream: IO[bytes], blocks: Iterable[tuple[int, int]]) -> bytes:
    """The seal for everything in an open file.

    Args:
        blocks: offset and length in bytes of each array; those of 64 KiB and more are left out of the digest.
    """
    size = stream.seek(0, 2)
    skipped = sorted([offset, length] for offset, length in blocks if length >= SKIP_BYTES)
    return MARK + f"{_digest(stream, size, skipped)} {canonical_json(skipped)}\n".encode()


def is_sealed(path: Path) -> bool:
    """True when the structure is as it was written, False when the file has no seal.

    Raises:
        DataError: the structure does not match the seal.
    """
    with reading(path), open(path, "rb") as stream:
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
    """True for ascending blocks (offset, length) that lie inside `size` bytes and do not overlap."""
    position = 0
    for offset, length in blocks:
        if offset < position:
            return False
        position = offset + length
    return position <= size


def _digest(stream: IO[bytes], size: int, skipped: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the first `size` bytes without the skipped blocks, and of where these lie."""
    digest = hashlib.sha256(canonical_json([size, skipped]).encode())
    position = 0
    for offset, length in [*skipped, [size, 0]]:
        stream.seek(position)
        while position < offset and (block := stream.read(min(_BLOCK, offset - position))):
            digest.update(block)
            position += len(block)
        position = offset + length
    return digest.hexdigest()

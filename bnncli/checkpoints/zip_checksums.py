"""Whether the members of a zip archive are as they were written: every member has a CRC-32, and torch looks at none.

torch writes them unless torch.serialization.set_crc32_options(False) was called: then every one of them is zero, and
what was changed since cannot be told. safetensors files and torch files of before version 1.6 have no checksums at all.
"""

from __future__ import annotations

import zipfile
import zlib
from typing import IO

from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import is_failure

_BLOCK = 1 << 20
UNCHECKED = "its members have no checksums (written after set_crc32_options(False)), so damage cannot be detected"


def check_checksums(stream: IO[bytes], progress: Progress = SILENT) -> bool:
    """True when every member of an open archive gives its checksum, False when the archive was written without any.

    Raises:
        DataError: naming the first member that does not, or that cannot be read.
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
        what = f"zip member {quoted(name)} is damaged" if name else "the zip archive is damaged"
        reason = "checksum mismatch" if "CRC" in str(error) else " ".join(str(error).split())[:120]
        raise DataError(f"{what}: {reason}", code="damaged", hint="copy or download it again") from error
    return True

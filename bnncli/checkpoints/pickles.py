"""What a pickle would call if it were loaded, found without loading it; and torch files loaded without code.

Nothing here unpickles outside torch's weights_only loader, except `load_trusted`, which the user must ask for.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import struct
import sys
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

from bnncli.checkpoints.sniff import sniff
from bnncli.checkpoints.stand_ins import STAND_INS
from bnncli.errors import DataError, Untrusted, is_short_of_memory
from bnncli.lazy import torch
from bnncli.names import listed
from bnncli.options.command_line import pasted
from bnncli.system.input_files import is_failure

# Everything that a damaged pickle or archive has been seen to raise; a bug of ours is still a bug.
_DAMAGE = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    AssertionError, OverflowError, struct.error, zipfile.BadZipFile, MemoryError, OSError,
)  # fmt: skip
_HARMLESS = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_\w+|torch\.(\w+Storage|Size|device|dtype)"
    r"|torch\.storage\.(Untyped|Typed)Storage|torch\.serialization\._get_layout|torch\.nn\.parameter\.Parameter|_codecs\.encode"
)
_OF_RANKS = "torch.distributed.tensor."  # which ask for the processes that saved them
_MAX_PICKLES = 5
_MAX_OPCODES = 1_000_000


def trust_hint(source: str = "IN", target: str = "OUT") -> str:
    """What to do with a file that would run code."""
    return f"if you trust this file, run: {pasted('convert', source, target, trust_pickle=True)}"


def load_tensors(stream: IO[bytes], *, kind: str) -> Any:
    """What a torch file holds, loaded on the CPU without running any code of the file.

    Args:
        stream: an open torch-zip or torch-legacy file.

    Raises:
        Untrusted: loading it would need code; the message lists which.
        DataError: truncated or damaged, or one rank's part of a network.
        OSError, MemoryError, RuntimeError: the disk or the machine failed, as is_failure and is_short_of_memory tell.
    """
    _refuse_parts(stream, kind)
    with torch.serialization.safe_globals([(made, name) for name, made in STAND_INS.items()]):
        if unsafe := _unsafe_globals(stream, kind):
            raise needs_trust(unsafe)
        stream.seek(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of odd pickles; what cannot be read is an error anyway
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
    """What a pickle or torch file holds, loaded with all its code: the file can do whatever the user can."""
    kind = sniff(stream)
    if kind != "pickle":
        _refuse_parts(stream, "torch-zip" if kind == "zip" else kind)
    stream.seek(0)
    if (folder := str(Path.cwd())) not in sys.path:  # where the user's own classes most likely are, as for python -m
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
    """Nothing, unless a torch file holds one rank's part of a network: then DataError."""
    if any(name.startswith(_OF_RANKS) for name in list_globals(stream, kind)):
        raise DataError(
            "the file holds one rank's shards of a distributed network (DTensor)", code="sharded",
            hint="save the full state where it was trained (get_model_state_dict with full_state_dict=True), or save "
                "a folder with torch.distributed.checkpoint and merge it with bnncli convert",
        )  # fmt: skip


def needs_trust(names: list[str]) -> Untrusted:
    """The error that says which functions and classes a pickle asks for, and what to do."""
    return Untrusted(
        f"loading this file would run code: {listed(names, limit=10)}; nothing was run",
        code="needs_code", hint=trust_hint(),
    )  # fmt: skip


def list_globals(stream: IO[bytes], kind: str) -> list[str]:
    """Names of the functions and classes that the pickles in a file refer to, sorted; nothing is loaded."""
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
    """Those names that are not the plain building blocks of tensors and dictionaries."""
    return [name for name in names if name not in STAND_INS and not _HARMLESS.fullmatch(name)]


def _unsafe_globals(stream: IO[bytes], kind: str) -> list[str]:
    """Torch's own list for a zip file; torch has none for the old format, where the loader itself refuses."""
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
    """Names in the first pickles of a stream, as far as it can be parsed."""
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
    """Follows the strings that a pickle pushes, so that a global named from the stack is known too."""
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
    """Foreign text without colour codes, in one line, cut short."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).split())[:300]

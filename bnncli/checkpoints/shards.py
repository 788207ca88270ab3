"""Checkpoints in several files: which kind they are, and the command that makes one file of them.

Distributed checkpoints are those of torch.distributed.checkpoint (.distcp files beside .metadata); shards are named
NAME-00001-of-00003.safetensors or .bin, with NAME.index.json beside them, as Hugging Face's libraries save them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from bnncli.names import quoted

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin|pt|pth)")
_JOIN = {
    "safetensors": "import sys; from safetensors.torch import load_file, save_file; "
    "save_file({k: v for f in sys.argv[2:] for k, v in load_file(f).items()}, sys.argv[1])",
    "torch": "import sys, torch; "
    "torch.save({k: v for f in sys.argv[2:] for k, v in torch.load(f, weights_only=True).items()}, sys.argv[1])",
}


class Sharded(NamedTuple):
    """What a checkpoint in several files is, in words, and what makes one file of it."""

    what: str
    hint: str


def sharded_folder(folder: Path) -> Sharded | None:
    """The checkpoint in several files that a folder is; None for any other folder."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    parts = [name for name in names if name.endswith(".distcp")]
    if parts:
        out = folder.absolute().parent / f"{folder.absolute().name}.pt"
        words = ["python", "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch", str(folder), str(out)]
        what = f"{quoted(folder, limit=300)} is a distributed checkpoint of torch ({len(parts)} .distcp files)"
        return Sharded(what, f"make one file of it: {shlex.join(words)}")
    matches = [match for name in names if (match := _SHARD.fullmatch(name)) and int(match[3]) > 1]
    if not matches:
        return None
    stem, total, suffix = matches[0][1], int(matches[0][3]), matches[0][4]
    shards = [str(folder / match[0]) for match in matches if (match[1], match[4]) == (stem, suffix)]
    kind = "safetensors" if suffix == "safetensors" else "torch"
    out = folder / f"{stem}-joined.{'safetensors' if kind == 'safetensors' else 'pt'}"
    what = f"{quoted(folder, limit=300)} is a checkpoint in {total} shards"
    if len(shards) != total:
        return Sharded(f"{what}, of which {len(shards)} are there", "copy or download all of them")
    return Sharded(what, f"make one file of them: {shlex.join(['python', '-c', _JOIN[kind], str(out), *shards])}")


def sharded_file(path: Path) -> Sharded | None:
    """What a file that is a part of a checkpoint in several files belongs to; None for any other file."""
    match = _SHARD.fullmatch(path.name)
    is_part = path.suffix == ".distcp" or path.name == ".metadata" or path.name.endswith(".index.json")
    if not is_part and not (match and int(match[3]) > 1):
        return None
    whole = sharded_folder(path.parent)
    part = f"one of {int(match[3])} shards of a checkpoint" if match else "a part of a checkpoint in several files"
    if whole is None:
        return Sharded(f"the file is {part}, and the others are not beside it", "copy or download all of them")
    return Sharded(f"the file is {part}: {whole.what}", whole.hint)

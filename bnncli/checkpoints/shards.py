"""Checkpoints in several files: which kind they are, and which files they are made of. Nothing of their tensors is read here.

Shards are named NAME-00001-of-00003.safetensors or .bin, with NAME.index.json beside them that says which tensor is where, as
Hugging Face's libraries save them: the folder or the index file is the checkpoint. Distributed checkpoints are those of
torch.distributed.checkpoint (.distcp files beside .metadata), and those of DeepSpeed: convert makes one file of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bnncli.errors import DataError, MissingInput
from bnncli.names import listed, quoted
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.options.command_line import pasted
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import open_regular, reading

INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin|pt|pth)")
_DEEPSPEED = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|.*zero_pp_rank_\d+_.*_optim_states\.pt")


@dataclass(frozen=True)
class Shards:
    """A checkpoint whose tensors lie in several files of one folder.

    Attributes:
        files: that hold the tensors, in order.
        index: the file that says where each is; None without one.
        weight_map: the file of each tensor, as the index says it; empty without one.
    """

    files: tuple[Path, ...]
    index: Path | None
    weight_map: dict[str, str]

    @property
    def every(self) -> tuple[Path, ...]:
        """All files, the index too."""
        return self.files if self.index is None else (self.index, *self.files)


class Sharded(NamedTuple):
    """What a checkpoint in several files is that is not read as it is, in words, and what makes one file of it.

    Attributes:
        kind: distributed or deepspeed; empty for a single shard.
        folder: where the files are.
    """

    what: str
    hint: str
    kind: str = ""
    folder: Path = Path()


def shards_of(path: Path) -> Shards | None:
    """The files that a folder or an index file stands for; None for any other place.

    Raises:
        MissingInput: some of them are not there.
        DataError: the index is damaged, or the folder holds several checkpoints.
    """
    with reading(path):
        if path.is_dir():
            names = sorted(entry.name for entry in path.iterdir())
            return _shards_in(path, names)
        return _indexed(path) if path.name.endswith(INDEX_SUFFIX) and path.is_file() else None


def checkpoint_sha256(path: Path, progress: Progress = SILENT) -> str:
    """The hexadecimal digest of a checkpoint's bytes; of several files, of their names and bytes.

    Raises:
        MissingInput, DeviceError, ReadError: a file cannot be read, as open_regular says.
        DataError: as shards_of says.
    """
    shards = shards_of(path)
    if shards is None:
        with open_regular(path) as stream:
            return file_sha256(stream, progress)
    found = []
    for file in shards.every:
        with open_regular(file) as stream:
            found.append([file.name, file_sha256(stream, progress)])
    return json_sha256(sorted(found))


def sharded_folder(folder: Path) -> Sharded | None:
    """The distributed checkpoint that a folder is; None for any other folder."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    distcp = [name for name in names if name.endswith(".distcp")]
    states = [name for name in names if _DEEPSPEED.fullmatch(name)]
    if distcp:
        kind, what = "distributed", f"a torch distributed checkpoint ({len(distcp)} .distcp files)"
    elif states:
        kind, what = "deepspeed", f"a DeepSpeed checkpoint ({len(states)} files)"
    else:
        below = _tagged(folder) if "latest" in names else None
        return None if below is None else sharded_folder(below)
    out = folder.absolute().parent / f"{folder.absolute().name}.safetensors"
    hint = f"merge it into one file: {pasted('convert', str(folder), str(out))}"
    return Sharded(f"{quoted(folder, limit=300)} is {what}", hint, kind, folder)


def sharded_file(path: Path) -> Sharded | None:
    """What a file that is a part of a checkpoint in several files belongs to; None for any other file."""
    match = _SHARD.fullmatch(path.name)
    if path.suffix == ".distcp" or path.name == ".metadata":
        whole = sharded_folder(path.parent)
        if whole is not None:
            return Sharded(f"the file is part of a sharded checkpoint: {whole.what}", whole.hint)
        what = "the file is part of a sharded checkpoint, but the other files are not in its folder"
        return Sharded(what, "copy or download all of them")
    if match is None or int(match[3]) < 2:
        return None
    what = f"the file is one of {int(match[3])} shards of a checkpoint"
    return Sharded(what, f"give the folder: {path.parent}")


def _tagged(folder: Path) -> Path | None:
    """The folder that DeepSpeed's `latest` names."""
    try:
        tag = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    below = folder / tag
    return below if tag and "/" not in tag and tag not in (".", "..") and below.is_dir() else None


def _shards_in(folder: Path, names: list[str]) -> Shards | None:
    """The shards in a folder: by its index, of safetensors files before others, or by their names alone."""
    for suffix in ("safetensors", "bin"):
        indexes = [name for name in names if name.endswith(f".{suffix}{INDEX_SUFFIX}")]
        if len(indexes) > 1:
            raise DataError(
                f"{quoted(folder, limit=300)} holds {len(indexes)} sharded checkpoints: {listed(indexes)}",
                code="several_states", hint=f"give one index: {folder / indexes[0]}",
            )  # fmt: skip
        if indexes:
            return _indexed(folder / indexes[0])
    matches = [match for name in names if (match := _SHARD.fullmatch(name)) and int(match[3]) > 1]
    kinds = sorted({(match[4] != "safetensors", match[1], match[3], match[4]) for match in matches})
    if not kinds:
        return None
    _, stem, total, suffix = kinds[0]
    files = [f"{stem}-{place:05}-of-{total}.{suffix}" for place in range(1, int(total) + 1)]
    return _found(folder, files, None, {})


def _indexed(index: Path) -> Shards:
    """The shards that an index names."""
    with open_regular(index) as stream:
        text = stream.read()
    try:
        content: Any = json.loads(text)
        places = content["weight_map"]
        weight_map = {name: str(file) for name, file in places.items()}
        is_plain = all(isinstance(file, str) for file in places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_plain, weight_map = False, {}
    if not is_plain or not weight_map:
        raise DataError(
            f"{quoted(index, limit=300)} lists no shards: expected a weight_map from tensors to files",
            code="bad_index", path=index, hint="copy or download it again",
        )  # fmt: skip
    odd = sorted({file for file in weight_map.values() if "/" in file or "\0" in file or file in ("", ".", "..")})
    if odd:
        raise DataError(
            f"{quoted(index, limit=300)} refers to {quoted(odd[0])}, which is outside its folder", code="bad_index"
        )
    return _found(index.parent, sorted(set(weight_map.values())), index, weight_map)


def _found(folder: Path, names: list[str], index: Path | None, weight_map: dict[str, str]) -> Shards:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise MissingInput(
            f"{quoted(folder, limit=300)} is missing {len(missing)} of its {len(names)} shards: {listed(missing)}",
            code="missing_shards", path=folder, hint="copy or download all of them",
        )  # fmt: skip
    return Shards(tuple(folder / name for name in names), index, weight_map)

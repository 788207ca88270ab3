"""Checkpoints as people save them, read as a plain dictionary of named tensors without running any of their code.

Reads torch's zip format (1.6 and later), its older pickle format, and safetensors, in one file or in shards. The format is
what the first bytes say, whatever the file is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from bnncli.checkpoints.pickles import list_globals, load_tensors, load_trusted, trust_hint
from bnncli.checkpoints.shards import Sharded, Shards, checkpoint_sha256, sharded_file, sharded_folder, shards_of
from bnncli.checkpoints.sniff import HINTS, describe_wrong_kind, sniff, sniff_zip
from bnncli.checkpoints.state_dicts import clean_names, select_state
from bnncli.checkpoints.zip_checksums import UNCHECKED, check_checksums
from bnncli.errors import DataError, Untrusted
from bnncli.lazy import torch
from bnncli.names import listed, quoted
from bnncli.numerics.digests import file_sha256, tensor_digest
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from torch import Tensor

_SHARED, _SMALL = 16, 1 << 24
_SAVE_TENSORS = "save the network's state_dict() on a machine where you trust the program, and use that file"
# What it is, and the way out; FILE stands for the file.
_CODE_KINDS = {
    "torchscript": ("a TorchScript program", f"run its graph: \0model\0 jit:FILE; or {_SAVE_TENSORS}"),
    "pt2": ("an exported program (.pt2)", f"run its graph: \0model\0 export:FILE; or {_SAVE_TENSORS}"),
    "torch-package": ("a torch.package archive", _SAVE_TENSORS),
}


@dataclass(frozen=True)
class Checkpoint:
    """A state dict and where it came from.

    Attributes:
        state: tensors by name, on the CPU, in the type they were saved in, names without wrapper prefixes.
        format: torch-zip, torch-legacy or safetensors; with -shards where there are several files.
        selected_key: dotted path of the state dict inside the file, None where the file is the state dict.
        stripped_prefixes: prefixes removed from the names, in the order they were removed.
        file_sha256: hexadecimal digest of the file's bytes; of several, of their names and bytes.
        weights_digest: digest of the state, the same for every file format.
        size: bytes.
        notes: what a reader should be told, such as that averaged weights were picked.
    """

    state: dict[str, Tensor]
    format: str
    selected_key: str | None
    stripped_prefixes: tuple[str, ...]
    file_sha256: str
    weights_digest: str
    size: int
    path: Path
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_finite(self.state)


def load_checkpoint(path: Path | str, *, wanted: str | None = None, progress: Progress = SILENT) -> Checkpoint:
    """The state dict in a checkpoint file, read without running any code of the file.

    Args:
        wanted: which state of several, as select_state takes it; None for the usual one.

    Raises:
        MissingInput: no such file, not readable, not a regular file.
        DataError: empty, truncated, damaged, another kind of file, no state dict in it, NaN or infinite weights. Of a
            torch file since version 1.6 every changed byte of the content shows by its checksums; a safetensors file or
            an older torch file has none, and only sizes, types and places can be checked.
        Untrusted: the file is a program, or loading it would call code that it names.
    """
    return load_whole(path, wanted=wanted, progress=progress)[0]


def load_whole(path: Path | str, *, wanted: str | None = None, progress: Progress = SILENT) -> tuple[Checkpoint, Any]:
    """The state dict in a checkpoint file, and all that the file holds. Raises what load_checkpoint raises."""
    path = Path(path)
    shards = shards_of(path)
    if shards is None:
        _check_whole(path)
    parts = [_read_file(file, progress) for file in ([path] if shards is None else shards.files)]
    try:
        saved = parts[0].saved if shards is None else _joined(shards, parts)
        state, selected_key, notes = select_state(saved, wanted)
        state, stripped, name_notes = clean_names(state)
        size = sum(part.size for part in parts)
        check_sizes(state, size)
        content_notes = dict.fromkeys(note for part in parts for note in part.notes)
        checkpoint = Checkpoint(
            state=state,
            format=parts[0].kind if shards is None else f"{parts[0].kind}-shards",
            selected_key=selected_key,
            stripped_prefixes=stripped,
            file_sha256=parts[0].sha256 if shards is None else checkpoint_sha256(path, progress),
            weights_digest=tensor_digest(state),
            size=size,
            path=path,
            notes=(*notes, *name_notes, *content_notes),
        )
        return checkpoint, saved
    except (DataError, Untrusted) as error:
        raise _about(error, path) from error.__cause__


def _check_whole(path: Path) -> None:
    """Nothing, unless a file is a part of a checkpoint in several files: then DataError, with what to give instead."""
    if (sharded := sharded_file(path)) is not None and path.is_file():
        raise DataError(f"{quoted(path, limit=300)}: {sharded.what}", code="sharded", hint=sharded.hint, path=path)


class _Part(NamedTuple):
    """What one file of a checkpoint holds."""

    saved: Any
    kind: str
    notes: tuple[str, ...]
    sha256: str
    size: int


def _read_file(path: Path, progress: Progress) -> _Part:
    """One file, read without running any code of it."""
    with open_regular(path) as stream:
        try:
            kind = _checkpoint_kind(stream)
            notes = _check_content(stream, kind, progress)
            saved = _load_safetensors(stream) if kind == "safetensors" else load_tensors(stream, kind=kind)
            return _Part(saved, kind, notes, file_sha256(stream, progress), stream.seek(0, 2))
        except (DataError, Untrusted) as error:
            raise _about(error, path) from error.__cause__


def _joined(shards: Shards, parts: Sequence[_Part]) -> dict[str, Any]:
    """The tensors of all shards, each there once, and where the index says.

    Raises:
        DataError: it is not.
    """
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for file, part in zip(shards.files, parts, strict=True):
        if not isinstance(part.saved, Mapping):
            raise DataError(f"{quoted(file.name)} does not hold a dictionary of tensors", code="no_state_dict")
        if twice := part.saved.keys() & found.keys():
            name = min(twice, key=str)
            raise DataError(
                f"{quoted(name)} is in both {quoted(places[name])} and {quoted(file.name)}", code="duplicate_key"
            )
        found |= part.saved
        places |= dict.fromkeys(part.saved, file.name)
    wrong = sorted(
        name
        for name in {*places, *shards.weight_map}
        if shards.index and places.get(name) != shards.weight_map.get(name)
    )
    if wrong:
        there, said = (where.get(wrong[0], "no file") for where in (places, shards.weight_map))
        raise DataError(
            f"the index does not match the shards: {quoted(wrong[0])} is in {quoted(there)}, but the index says "
                f"{quoted(said)}",
            code="bad_index", hint="copy or download all files again",
        )  # fmt: skip
    return found


def convert_checkpoint(
    path: Path | str,
    *,
    trust_pickle: bool,
    wanted: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, Tensor]:
    """The tensors of a checkpoint, names cleaned up; with trust_pickle, of any pickle, whose code is then run.

    Args:
        path: a file, or the folder of a checkpoint in several.
        wanted: which state of several, as select_state takes it; None for the usual one.
        say: told what a reader should know of the weights.

    Raises:
        What load_checkpoint raises; with trust_pickle, DataError when the pickle cannot be loaded.
    """
    path = Path(path)
    if path.is_dir() and (sharded := sharded_folder(path)) is not None:
        return _distributed(sharded, wanted, say)
    if not trust_pickle or path.is_dir() or shards_of(path) is not None:
        checkpoint = load_checkpoint(path, wanted=wanted)
        for note in checkpoint.notes:
            say(note)
        return checkpoint.state
    _check_whole(path)
    with open_regular(path) as stream:
        try:
            kind = sniff(stream)
            if kind != "pickle":
                kind = _checkpoint_kind(stream)
                _check_content(stream, kind, SILENT)
            saved = _load_safetensors(stream) if kind == "safetensors" else load_trusted(stream)
            state, _, _ = select_state(saved.state_dict() if isinstance(saved, torch.nn.Module) else saved, wanted)
            state, _, _ = clean_names(state)
            check_sizes(state, stream.seek(0, 2))
            check_finite(state)
        except (DataError, Untrusted) as error:
            raise _about(error, path) from error.__cause__
    return state


def _distributed(sharded: Sharded, wanted: str | None, say: Callable[[str], object]) -> dict[str, Tensor]:
    """The tensors of a checkpoint of a cluster."""
    from bnncli.checkpoints.distributed import read_deepspeed, read_distributed

    if sharded.kind == "deepspeed":
        saved, note = read_deepspeed(sharded.folder)
        say(note)
    else:
        saved = read_distributed(sharded.folder)
    state, _, notes = select_state(saved, wanted)
    state, _, name_notes = clean_names(state)
    check_finite(state)
    for note in (*notes, *name_notes):
        say(note)
    return state


def check_finite(state: Mapping[str, Tensor]) -> None:
    """Nothing, when all weights are finite. Raises DataError with the first tensor that is not, and how many are."""
    bad = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() or tensor.is_complex():
            values = tensor if tensor.dtype.itemsize > 1 else tensor.float()
            if count := int((~torch.isfinite(values)).sum()):
                bad[name] = count
    if bad:
        name, count = next(iter(bad.items()))
        raise DataError(
            f"weights are not finite: {quoted(name)} has {count} NaN or infinite values, and {len(bad) - 1} "
                "other tensors are affected",
            code="not_finite", hint="the training run probably diverged: use an earlier checkpoint",
        )  # fmt: skip


def check_sizes(state: Mapping[str, Tensor], size: int) -> None:
    """Raise DataError when the tensors claim far more bytes than the file has: one number may stand for very many.

    Tensors may share their numbers (tied weights), so that more is claimed than is there; hardly sixteen times as much.
    """
    claimed = sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.values())
    if claimed > _SHARED * size + _SMALL:
        raise DataError(
            f"the tensors claim {claimed} bytes, but the file has {size}", code="size_mismatch",
            hint="save them with .contiguous().clone()",
        )  # fmt: skip


def _checkpoint_kind(stream: IO[bytes]) -> str:
    """torch-zip, torch-legacy or safetensors; raises for everything else."""
    kind = sniff(stream)
    if kind == "zip":
        kind = sniff_zip(stream)
    stream.seek(0)
    if kind in ("torch-zip", "torch-legacy", "safetensors"):
        return kind
    if kind in _CODE_KINDS:
        what, hint = _CODE_KINDS[kind]
        raise Untrusted(f"the file is {what}, which contains code as well as tensors", code="program", hint=hint)
    if kind == "pickle":
        raise Untrusted(_raw_pickle(stream), code="needs_code", hint=trust_hint())
    raise DataError(describe_wrong_kind(kind), code=f"is_{kind}", hint=HINTS.get(kind))


def _check_content(stream: IO[bytes], kind: str, progress: Progress) -> tuple[str, ...]:
    """What a reader should be told of the file's checksums. Raises DataError when they say that it is damaged."""
    is_checked = kind != "torch-zip" or check_checksums(stream, progress)
    stream.seek(0)
    return () if is_checked else (UNCHECKED,)


def _raw_pickle(stream: IO[bytes]) -> str:
    names = list_globals(stream, "pickle")
    asks = f"; it refers to {listed(names, limit=10)}" if names else ""
    return f"the file is a raw pickle, not a torch checkpoint; bnncli does not load it directly{asks}"


def _load_safetensors(stream: IO[bytes]) -> dict[str, Tensor]:
    """Tensors of a safetensors file whose header names everything once.

    Of tensors that share their numbers safetensors.torch.save_model stores one; its header's metadata say the others' names.
    """
    import safetensors
    import safetensors.torch

    data = stream.read()
    length = int.from_bytes(data[:8], "little")
    if 8 + length > len(data):
        raise DataError(
            f"the safetensors header is {length} bytes long, but the file has only {len(data)}", code="truncated"
        )
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)
        stored = safetensors.torch.load(data)  # which refuses headers of other types
        shared = header.get("__metadata__") or {}
        return stored | {name: stored[kept] for name, kept in shared.items() if name not in stored and kept in stored}
    except (safetensors.SafetensorError, ValueError, RecursionError, KeyError) as error:
        text = " ".join(str(error).split())[:200]
        raise DataError(f"the safetensors file is truncated or damaged: {text}", code="truncated") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys; the library itself would keep the last one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the safetensors header has {quoted(twice)} twice", code="duplicate_key")
    return found


def _about(error: DataError | Untrusted, path: Path) -> DataError | Untrusted:
    """The same error, naming the file."""
    message = f"{quoted(path, limit=300)}: {error.message}"
    is_pickle = error.code == "needs_code"
    suffix = ".npz" if "'sklearn." in error.message else ".safetensors"  # of a linear classifier, its arrays
    hint = trust_hint(str(path), str(path.with_suffix(suffix))) if is_pickle else error.hint
    if hint is not None and error.code in ("program", "is_onnx", "is_skops"):
        hint = hint.replace("FILE", str(path))
    return type(error)(message, hint=hint, code=error.code, path=path)

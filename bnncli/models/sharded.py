"""Checkpoints in several files: indices of shards, torch.distributed.checkpoint (FSDP) and DeepSpeed (ZeRO)."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import DataError, MissingInput, Untrusted
from bnncli.lazy import torch
from bnncli.models.checkpoint_files import check_checksums, harmful, load_tensors, needs_trust
from bnncli.names import format_names, quote_name
from bnncli.numerics.digests import file_sha256, json_sha256
from bnncli.options.command import format_command_line
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import convert_read_errors, open_regular

if TYPE_CHECKING:
    from torch import Tensor


INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin|pt|pth)")
_OF_ACCELERATE = re.compile(r"pytorch_model_fsdp_\d+")  # beside optimizer_0
_DEEPSPEED = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|.*zero_pp_rank_\d+_.*_optim_states\.pt")


@dataclass(frozen=True)
class Shards:
    """A checkpoint whose tensors are in several files of one folder.

    Attributes:
        files: with the tensors, in order.
        index: file with the location of each; None without one.
        weight_map: file of each tensor, from the index; empty without one.
    """

    files: tuple[Path, ...]
    index: Path | None
    weight_map: dict[str, str]

    @property
    def every(self) -> tuple[Path, ...]:
        """All files, including the index."""
        return self.files if self.index is None else (self.index, *self.files)


class ShardedCheckpoint(NamedTuple):
    """A description of a checkpoint in several files that must be converted first, and how to do that.

    Attributes:
        kind: distributed or deepspeed; empty for a single shard.
        folder: of the files.
        merged: the file that convert writes.
        command: the command line that does so.
    """

    what: str
    hint: str
    kind: str = ""
    folder: Path = Path()
    merged: Path = Path()
    command: str = ""


def shards_of(path: Path) -> Shards | None:
    """Return the shards of a folder or index file; None for any other path.

    Raises:
        MissingInput: some of them do not exist.
        DataError: the index is damaged, or the folder has several checkpoints.
    """
    with convert_read_errors(path):
        if path.is_dir():
            names = sorted(entry.name for entry in path.iterdir())
            return _shards_in(path, names)
        return _read_index(path) if path.name.endswith(INDEX_SUFFIX) and path.is_file() else None


def checkpoint_sha256(path: Path, progress: Progress = SILENT) -> str:
    """Return the hexadecimal digest of a checkpoint's bytes; for several files, of their names and bytes.

    Raises:
        MissingInput, DeviceError, ReadError: a file cannot be read; see open_regular.
        DataError: as in shards_of.
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


def find_sharded_folder(folder: Path) -> ShardedCheckpoint | None:
    """Return the distributed checkpoint in a folder; None for any other folder."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    distcp = [name for name in names if name.endswith(".distcp")]
    states = [name for name in names if _DEEPSPEED.fullmatch(name)]
    if distcp:
        kind, what = "distributed", f"a torch distributed checkpoint ({len(distcp)} .distcp files)"
    elif states:
        kind, what = "deepspeed", f"a DeepSpeed checkpoint ({len(states)} files)"
    else:
        of_accelerate = next((folder / name for name in names if _OF_ACCELERATE.fullmatch(name)), None)
        below = _read_latest_tag(folder) if "latest" in names else of_accelerate
        inner = None if below is None else find_sharded_folder(below)
        return None if inner is None else _describe_merge(folder, inner.what, inner.kind, inner.folder)
    return _describe_merge(folder, f"{quote_name(folder, limit=300)} is {what}", kind, folder)


def _describe_merge(folder: Path, what: str, kind: str, inner: Path) -> ShardedCheckpoint:
    out = folder.absolute().parent / f"{folder.absolute().name}.safetensors"
    command = format_command_line("convert", str(folder), str(out))
    return ShardedCheckpoint(what, f"merge it into one file: {command}", kind, inner, out, command)


def find_sharded_file(path: Path) -> ShardedCheckpoint | None:
    """Return the checkpoint in several files to which a file belongs; None for any other file."""
    match = _SHARD.fullmatch(path.name)
    if path.suffix == ".distcp" or path.name == ".metadata":
        whole = find_sharded_folder(path.parent)
        if whole is not None:
            return ShardedCheckpoint(f"the file is part of a sharded checkpoint: {whole.what}", whole.hint)
        what = "the file is part of a sharded checkpoint, but the other files are not in its folder"
        return ShardedCheckpoint(what, "copy or download all of them")
    if match is None or int(match[3]) < 2:
        return None
    what = f"the file is one of {int(match[3])} shards of a checkpoint"
    return ShardedCheckpoint(what, f"give the folder: {path.parent}")


def _read_latest_tag(folder: Path) -> Path | None:
    """Return the folder named in DeepSpeed's `latest`."""
    try:
        tag = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    below = folder / tag
    return below if tag and "/" not in tag and tag not in (".", "..") and below.is_dir() else None


def _shards_in(folder: Path, names: list[str]) -> Shards | None:
    """Return the shards in a folder, by its index or else by name; safetensors first."""
    for suffix in ("safetensors", "bin"):
        indexes = [name for name in names if name.endswith(f".{suffix}{INDEX_SUFFIX}")]
        if len(indexes) > 1:
            raise DataError(
                f"{quote_name(folder, limit=300)} holds {len(indexes)} sharded checkpoints: {format_names(indexes)}",
                code="several_states", hint=f"give one index: {folder / indexes[0]}",
            )  # fmt: skip
        if indexes:
            return _read_index(folder / indexes[0])
    matches = [match for name in names if (match := _SHARD.fullmatch(name)) and int(match[3]) > 1]
    kinds = sorted({(match[4] != "safetensors", match[1], match[3], match[4]) for match in matches})
    if not kinds:
        return None
    _, stem, total, suffix = kinds[0]
    files = [f"{stem}-{place:05}-of-{total}.{suffix}" for place in range(1, int(total) + 1)]
    return _check_shards(folder, files, None, {})


def _read_index(index: Path) -> Shards:
    """Return the shards of an index."""
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
            f"{quote_name(index, limit=300)} lists no shards: expected a weight_map from tensors to files",
            code="bad_index", path=index, hint="copy or download it again",
        )  # fmt: skip
    odd = sorted({file for file in weight_map.values() if "/" in file or "\0" in file or file in ("", ".", "..")})
    if odd:
        raise DataError(
            f"{quote_name(index, limit=300)} refers to {quote_name(odd[0])}, which is outside its folder",
            code="bad_index",
        )
    return _check_shards(index.parent, sorted(set(weight_map.values())), index, weight_map)


def _check_shards(folder: Path, names: list[str], index: Path | None, weight_map: dict[str, str]) -> Shards:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise MissingInput(
            f"{quote_name(folder, limit=300)} is missing {len(missing)} of its {len(names)} shards: {format_names(missing)}",
            code="missing_shards", path=folder, hint="copy or download all of them",
        )  # fmt: skip
    return Shards(tuple(folder / name for name in names), index, weight_map)


METADATA = ".metadata"
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip
_OPTIMIZER = re.compile(r"optim|lr_sched", re.IGNORECASE)
_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_SHARED, _SMALL = 16, 1 << 24
_DAMAGE = (KeyError, TypeError, AttributeError, ValueError, IndexError, RuntimeError)


def read_distributed(folder: Path) -> dict[str, Any]:
    """Read the tensors of a torch distributed checkpoint, nested as saved; skips optimizers and other objects.

    Raises:
        MissingInput: a file does not exist.
        DataError: it is damaged, or uses extensions.
        Untrusted: its metadata refers to a class other than tensor descriptions.
    """
    try:
        return _load_distributed_state(folder)
    except (*_DAMAGE, EOFError, OverflowError, pickle.UnpicklingError, MemoryError) as error:
        what = f"{quote_name(folder, limit=300)}: the distributed checkpoint is damaged"
        raise DataError(f"{what}: {type(error).__name__}: {str(error)[:120]}", code="truncated") from error


def describe_tensors(folder: Path) -> dict[str, str]:
    """Return type and shape of each tensor in a distributed checkpoint's metadata. Raises as read_distributed does."""
    try:
        with open_regular(folder / METADATA) as stream:
            entries = _Descriptions(stream).load().state_dict_metadata
        return {
            str(name): f"{str(entry.properties.dtype).removeprefix('torch.')} {tuple(entry.size)}"
            for name, entry in entries.items() if hasattr(entry, "chunks")
        }  # fmt: skip
    except (*_DAMAGE, EOFError, OverflowError, pickle.UnpicklingError, MemoryError) as error:
        what = f"{quote_name(folder, limit=300)}: the distributed checkpoint is damaged"
        raise DataError(f"{what}: {type(error).__name__}: {str(error)[:120]}", code="truncated") from error


def _load_distributed_state(folder: Path) -> dict[str, Any]:
    with open_regular(folder / METADATA) as stream:
        metadata = _Descriptions(stream).load()
    kept = {
        name: entry for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks") and not any(_OPTIMIZER.match(str(part)) for part in _path(metadata, name))
    }  # fmt: skip
    _check_size(folder, (math.prod(entry.size) * entry.properties.dtype.itemsize for entry in kept.values()))
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in kept.items()}
    places: dict[str, list[Any]] = {}
    for index, place in metadata.storage_data.items():
        if index.fqn in state:
            places.setdefault(place.relative_path, []).append((index, place))
    is_filled = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in state.items()}
    for name in sorted(places):
        if "/" in name or name in ("", ".", ".."):
            raise DataError(
                f"{quote_name(folder, limit=300)} refers to {quote_name(name)}, which is outside the folder",
                code="bad_index",
            )
        with open_regular(folder / name) as stream:
            for index, place in places[name]:
                part = _slice(stream, place)
                _part_of(state[index.fqn], index, part).copy_(part)
                numbers = _part_of(is_filled[index.fqn], index, part)
                if bool(numbers.any()):
                    message = f"{quote_name(folder, limit=300)} has overlapping parts of {quote_name(index.fqn)}"
                    raise DataError(message, code="bad_index")
                numbers.fill_(True)
    if short := [name for name, numbers in is_filled.items() if not bool(numbers.all())]:
        raise DataError(f"{quote_name(folder, limit=300)} is missing parts of {format_names(short)}", code="truncated")
    nested: dict[str, Any] = {}
    for name, tensor in state.items():
        *above, last = _path(metadata, name)
        inner = nested
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = tensor
    return nested


class _Descriptions(pickle.Unpickler):
    """Unpickles tensor descriptions, and refuses every other class or function before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _OF_METADATA.get(module, ()) and not is_type:
            raise Untrusted(
                f"the checkpoint's {METADATA} refers to {quote_name(f'{module}.{name}')}, which is not needed to "
                "describe tensors; nothing was run",
                code="needs_code",
            )
        return super().find_class(module, name)


def _path(metadata: Any, name: str) -> Sequence[Any]:
    """Return the path of a tensor in the saved object."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return paths.get(name) or (name,)


def _slice(stream: IO[bytes], place: Any) -> Tensor:
    """Load the tensor in a section of a file."""
    if getattr(place, "transform_descriptors", None):
        raise DataError(
            f"its files use unsupported transforms: {format_names(place.transform_descriptors)}", code="packed"
        )
    is_there = place.offset >= 0 and 0 < place.length <= stream.seek(0, 2) - place.offset
    stream.seek(place.offset if is_there else 0)
    tensor = None
    if is_there:
        content = io.BytesIO(stream.read(place.length))
        check_checksums(content)
        content.seek(0)
        tensor = load_tensors(content, kind="torch-zip")
    if not isinstance(tensor, torch.Tensor):
        raise DataError("a .distcp file is truncated, or holds no tensor", code="truncated")
    return tensor


def _part_of(whole: Tensor, index: Any, part: Tensor) -> Tensor:
    """Return the view of a tensor to which a part belongs."""
    target = whole
    for axis, (start, length) in enumerate(zip(index.offset or [0] * part.ndim, part.shape, strict=True)):
        target = target.narrow(axis, start, length)
    return target


def _check_size(folder: Path, claimed: Iterator[int]) -> None:
    total, there = sum(claimed), sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if total > _SHARED * there + _SMALL:
        raise DataError(f"the tensors claim {total} bytes, but the files have {there}", code="size_mismatch")


def read_deepspeed(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Read the weights of a DeepSpeed checkpoint: the optimizer's float32, else those of the running network; say which.

    Raises:
        MissingInput: a rank's file does not exist.
        DataError: it is damaged, or split over tensor-parallel ranks.
        Untrusted: a file needs code.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    models = [name for name in names if name.endswith("_model_states.pt")]
    if any("mp_rank_00" not in name for name in models):
        raise DataError(
            f"{quote_name(folder, limit=300)} is split across tensor-parallel ranks, which is not supported",
            code="packed",
        )
    if not models:
        raise MissingInput(f"no ..._model_states.pt in {quote_name(folder, limit=300)}", path=folder)
    saved = _load_with_stand_ins(folder / models[0])
    optimizers = {rank: name for name in names if name.endswith("_optim_states.pt") for rank in [_rank_of(name)]}
    try:
        if not optimizers:
            return _read_running_weights(
                folder, saved
            ), "the weights in the network's own precision; the optimizer's float32 copies are missing"
        lack = sorted({*range(max(optimizers) + 1)} - {*optimizers})
        ranks = [_load_with_stand_ins(folder / optimizers[rank])["optimizer_state_dict"] for rank in sorted(optimizers)]
        count = ranks[0]["partition_count"]
        count = max(count) if isinstance(count, Sequence) else count
        if lack or len(ranks) != count:
            raise MissingInput(
                f"{quote_name(folder, limit=300)} has optimizer files from {len(ranks)} ranks, expected {count}",
                code="missing_shards", path=folder, hint="copy or download all of them",
            )  # fmt: skip
        shapes = {name: shape for group in saved["param_shapes"] for name, shape in group.items()}
        _check_size(folder, (4 * math.prod(shape) for shape in shapes.values()))
        merged = (
            _join_slices(saved["param_shapes"], ranks)
            if ranks[0]["zero_stage"] <= 2
            else _gather_partitions(shapes, ranks)
        )
        state = {**_select_buffers(saved), **merged}
        state |= {
            name: state[other] for name, other in dict(saved.get("shared_params") or {}).items() if other in state
        }
        return state, f"float32 weights from {len(ranks)} ranks"
    except _DAMAGE as error:
        what = f"{quote_name(folder, limit=300)}: the DeepSpeed checkpoint is damaged or has an unknown layout"
        raise DataError(f"{what}: {type(error).__name__}: {str(error)[:120]}", code="truncated") from error


def _read_running_weights(folder: Path, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    state = dict(saved["module"])
    if any(tensor.numel() == 0 and name in _names_of_parameters(saved) for name, tensor in state.items()):
        raise MissingInput(
            f"no ..._optim_states.pt in {quote_name(folder, limit=300)}; these files hold the weights", path=folder
        )
    return state


def _names_of_parameters(saved: Mapping[str, Any]) -> set[str]:
    return {name for group in saved.get("param_shapes") or [] for name, shape in group.items() if math.prod(shape)}


def _select_buffers(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return buffers and frozen parameters, if every rank has all of them."""
    module, buffers = saved["module"], saved.get("buffer_names") or []
    frozen = saved.get("frozen_param_fragments") or {}
    shapes = saved.get("frozen_param_shapes") or {}
    whole = {name: part for name, part in frozen.items() if part.numel() == math.prod(shapes[name])}
    if split := frozen.keys() - whole.keys():
        raise ValueError(f"frozen parameters are split across ranks: {format_names(sorted(split))}")
    return {
        **{name: module[name].float() for name in buffers},
        **{n: p.float().view(shapes[n]) for n, p in whole.items()},
    }


def _join_slices(groups: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """ZeRO 1 and 2: each rank has a section of every flat group."""
    found: dict[str, Tensor] = {}
    for place, shapes in enumerate(groups):
        flat = torch.cat([rank["single_partition_of_fp32_groups"][place] for rank in ranks])
        sizes = [math.prod(shape) for shape in shapes.values()]
        parts = flat[: sum(sizes)].split(sizes)  # the rest is padding
        found |= {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return found


def _gather_partitions(shapes: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """ZeRO 3: each rank has a section of every parameter."""
    flat = [torch.cat(list(rank["fp32_flat_groups"])) for rank in ranks]
    found: dict[str, Tensor] = {}
    start = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        length = math.ceil(size / len(flat))
        found[name] = torch.cat([part.narrow(0, start, length) for part in flat])[:size].reshape(shape)
        start += length
    return found


def _rank_of(name: str) -> int:
    found = _RANK.search(name)
    return int(found[1]) if found else 0


def _load_with_stand_ins(path: Path) -> Any:
    """Load a DeepSpeed file with inert stand-ins for its own classes."""
    with open_regular(path) as stream:
        check_checksums(stream)
        stream.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
        if foreign := harmful([name for name in names if not name.startswith("deepspeed.")]):
            raise needs_trust(foreign)
        stream.seek(0)
        stand_ins: list[Any] = [
            (type("StandIn", (_StandIn,), {}), name) for name in names if name.startswith("deepspeed.")
        ]
        with torch.serialization.safe_globals(stand_ins):
            return load_tensors(stream, kind="torch-zip")


class _StandIn:
    """Stand-in for a DeepSpeed class: accepts anything and stores nothing."""

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

"""Read checkpoints of any origin as a plain dictionary of named tensors, without running any of their code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from bnncli.errors import DataError, Untrusted, UsageError
from bnncli.lazy import torch
from bnncli.models.checkpoint_files import (
    HINTS,
    UNCHECKED,
    check_checksums,
    describe_wrong_kind,
    list_globals,
    load_tensors,
    load_trusted,
    sniff,
    sniff_zip,
    trust_hint,
)
from bnncli.models.sharded import (
    ShardedCheckpoint,
    Shards,
    checkpoint_sha256,
    find_sharded_file,
    find_sharded_folder,
    shards_of,
)
from bnncli.names import format_names, is_averaged, prefixes_of, quote_name
from bnncli.numerics.digests import file_sha256, tensor_digest
from bnncli.progress import SILENT, Progress
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from torch import Tensor


_PACKED = "._packed_params._packed_params"
_BESIDE_PACKED = ("._packed_params.dtype", ".scale", ".zero_point")
_ROWS = ".SCB"
_LARGEST = 127
_FOREIGN = {
    ".qweight": "GPTQ or AWQ",
    ".weight.absmax": "4-bit bitsandbytes",
    ".weight.quant_state.bitsandbytes__nf4": "4-bit bitsandbytes",
    ".weight.quant_state.bitsandbytes__fp4": "4-bit bitsandbytes",
    ".weight_scale_inv": "block-wise float8",
}


def dequantise(state: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], tuple[str, ...]]:
    """Return the state with quantised layers as float32 weights and biases, and notes for the user.

    Raises:
        DataError: a layer uses an unsupported quantisation.
    """
    names = [name for name in state if isinstance(name, str)]
    for name in names:
        for suffix, library in _FOREIGN.items():
            if name.endswith(suffix):
                raise DataError(
                    f"{quote_name(name)}: the weights are quantised ({library}), which is not supported", code="quantised",
                    hint="save the network before quantisation, or dequantise it with its library and save the result",
                )  # fmt: skip
    packed = [name.removesuffix(_PACKED) for name in names if name.endswith(_PACKED)]
    rows = [name.removesuffix(_ROWS) for name in names if name.endswith(_ROWS)]
    if not packed and not rows:
        return state, ()
    gone = {layer + suffix for layer in packed for suffix in (_PACKED, *_BESIDE_PACKED)}
    gone |= {layer + suffix for layer in rows for suffix in (_ROWS, ".weight_format")}
    found: dict[Any, Any] = {}
    for name, value in state.items():  # in the network's order
        layer = name.removesuffix(_PACKED) if isinstance(name, str) else name
        if layer in packed and layer != name:
            found |= _unpack_quantised_linear(layer, value)
        elif name not in gone:
            found[name] = value
    for layer in rows:
        found[f"{layer}.weight"] = _dequantise_rows(layer, state)
    note = (
        f"dequantised {len(packed) + len(rows)} int8 layers: the network runs in float32 and does not round activations"
    )
    return found, (note,)


def _unpack_quantised_linear(layer: str, value: Any) -> dict[str, Tensor]:
    """Return weight and bias of a torch dynamically quantised linear layer."""
    weight, bias = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
    if not isinstance(weight, torch.Tensor) or not weight.is_quantized or weight.ndim != 2:
        raise DataError(
            f"{quote_name(layer)} is packed, but is not a torch linear layer; it is not supported", code="quantised"
        )
    found = {f"{layer}.weight": weight.dequantize()}
    return found | ({f"{layer}.bias": bias} if isinstance(bias, torch.Tensor) else {})


def _dequantise_rows(layer: str, state: Mapping[Any, Any]) -> Tensor:
    """Return the weight of a bitsandbytes int8 layer, which has row-wise scales."""
    weight, scale, weight_format = (state.get(layer + suffix) for suffix in (".weight", _ROWS, ".weight_format"))
    is_plain = (isinstance(weight_format, torch.Tensor) and not bool(weight_format.any())) or weight_format is None
    if (
        not isinstance(weight, torch.Tensor)
        or not isinstance(scale, torch.Tensor)
        or weight.dtype != torch.int8
        or weight.ndim != 2
        or scale.numel() != weight.shape[0]
        or not is_plain
    ):
        raise DataError(
            f"{quote_name(layer + _ROWS)} has no matching int8 weight; it is not supported", code="quantised"
        )
    return weight.float() * scale.float().reshape(-1, 1) / _LARGEST


# Averaged weights first, since their owner evaluates them; then the usual keys, most explicit first.
KEYS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "state_dict", "model", "model_state_dict", "model_state", "net",
    "net_state_dict", "network", "module", "weights", "params", "ema",
)  # fmt: skip
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
# Of data parallel training, torch.compile, FSDP, activation checkpointing and Fabric; the second to fourth also occur
# inside names.
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_WRAPPERS = ("module.", *_INNER, "_forward_module.")
_ATTRIBUTES = ("model.", "net.")
_MAX_DEPTH = 5
_MAX_PREFIX = 3
_MAX_CHOICES = 5
_OPTIMIZER = re.compile(r"optim|lr_sched", re.IGNORECASE)
# torch.optim.swa_utils.AveragedModel stores its count beside the network.
_COUNTER = "n_averaged"
_LIGHTNINGS_RAW = "current_model_state"

_QUANTISED = (
    "save the network before quantisation; or save it with torch.jit.trace and run it unchanged: \0model\0 "
    "jit:FILE \0last_layer\0 identity"
)


def select_state(saved: Any, wanted: str | None = None) -> tuple[dict[str, Tensor], str | None, tuple[str, ...]]:
    """Return the state dict in a loaded checkpoint, its dotted key (None at the top level), and notes.

    Args:
        wanted: selects the state with this key or name prefix, or the averaged one (ema); None for the usual one.

    Raises:
        DataError: there is none, or the choice is ambiguous.
        UsageError: there is no state `wanted`.
    """
    if wanted is not None:
        return _find_state(saved, wanted)
    path = _usual_path(saved)
    notes = tuple(f"using the averaged weights {quote_name(key)}, not the raw ones" for key in path if key in _AVERAGED)
    state, own_notes = dequantise(_follow_path(saved, path))
    plain = _check_state(state)
    return plain, ".".join(path) or None, (*(notes or _other_weights(saved, ".".join(path), plain)), *own_notes)


def _other_weights(saved: Mapping[str, Any], key: str, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return a note if raw or averaged weights exist for the same names as those chosen under `key`."""
    if _is_lightnings_average(saved, key):
        return (f"using the averaged weights {quote_name(key)}, not the raw ones in {quote_name(_LIGHTNINGS_RAW)}",)
    own = _strip_parallel_prefix(state)
    for path, other in _dictionaries(saved):
        name, theirs = ".".join(path), _strip_parallel_prefix(other)
        if name != key and is_averaged(name) and own.keys() <= theirs.keys():
            is_same = all(torch.equal(own[one], theirs[one]) for one in own if isinstance(theirs[one], torch.Tensor))
            return (
                () if is_same else (f"using the raw weights, not the averaged ones (to use those: \0state\0 {name})",)
            )
    return ()


def _strip_parallel_prefix(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by name without the `module.` of data parallel training and averages."""
    return {name.removeprefix("module."): value for name, value in state.items()}


def _is_lightnings_average(saved: Any, key: str) -> bool:
    """Return whether Lightning's WeightAveraging callback has put averaged weights in the place of the raw ones."""
    return isinstance(saved, Mapping) and key == "state_dict" and {_LIGHTNINGS_RAW, "averaging_state"} <= saved.keys()


class FoundState(NamedTuple):
    """A state in a checkpoint: its dotted key, empty at the top level; for a copy within a state, ending with its prefix."""

    key: str
    num_tensors: int
    is_averaged: bool


def find_states(saved: Any) -> list[FoundState]:
    """Return all state dicts in a loaded checkpoint except those of optimizers, and averaged copies within them."""
    found = []
    for path, state in _dictionaries(saved):
        key = ".".join(path)
        found.append(FoundState(key, len(state), is_averaged(key) or _is_lightnings_average(saved, key)))
        for prefix in _find_averaged_prefixes(state):
            count = sum(name.startswith(prefix) for name in state)
            found.append(FoundState(".".join((*path, prefix[:-1])), count, True))
    return found


def _find_state(saved: Any, wanted: str) -> tuple[dict[str, Tensor], str | None, tuple[str, ...]]:
    """Return the state with this name, its dotted key, and notes."""
    states = find_states(saved)
    keys = [wanted]
    if wanted == "ema" and not any(one.key == wanted for one in states):
        averaged = [one.key for one in states if one.is_averaged]
        keys = averaged if len(averaged) == 1 else []
    else:
        with suppress(DataError):
            keys.append(".".join((*_usual_path(saved), wanted)))
    for key in keys:
        for path, state in _dictionaries(saved):
            own = ".".join(path)
            prefix = key[len(own) + bool(own) :] + "."
            if key == own:
                plain, notes = dequantise(state)
                return _check_state(plain), key or None, notes
            if key.startswith(own) and any(name.startswith(prefix) for name in state):
                inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
                plain, notes = dequantise(inside)
                return _check_state(plain), key, notes
    there = format_names([one.key for one in states if one.key], limit=10) or "only one, at the top level"
    raise UsageError(f"\0state\0: the checkpoint has no state {quote_name(wanted)}; it has {there}")


def _dictionaries(saved: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield every dictionary of tensors with its path, outermost first, skipping optimizers."""
    if not isinstance(saved, Mapping) or not saved or len(path) > _MAX_DEPTH:
        return
    if not all(isinstance(key, str) for key in saved) or (path and _OPTIMIZER.match(path[-1])):
        return
    values = [value for name, value in saved.items() if not name.endswith("_extra_state")]
    if values and all(isinstance(value, (torch.Tensor, tuple, torch.dtype)) for value in values):
        if any(
            isinstance(value, torch.Tensor) and value.ndim for value in values
        ):  # otherwise counters, or scores of earlier epochs
            yield path, saved
        return
    for key, value in saved.items():
        yield from _dictionaries(value, (*path, key))


def _find_averaged_prefixes(state: Mapping[str, Tensor]) -> list[str]:
    """Return prefixes that mark averages and have the same names as another prefix."""
    near = [prefix for prefix in prefixes_of(state) if 1 <= prefix.count(".") <= _MAX_PREFIX]
    averaged = [prefix for prefix in near if is_averaged(prefix[:-1])]
    if not averaged:
        return []
    behind = {
        prefix: frozenset(name[len(prefix) :] for name in state if name.startswith(prefix)) for prefix in ("", *near)
    }
    others = {behind[prefix] for prefix in near if not is_averaged(prefix[:-1])}
    found: list[str] = []
    for prefix in averaged:
        if behind[prefix] in others and not prefix.startswith(tuple(found or ["\0"])):
            found.append(prefix)
    return found


def _usual_path(saved: Any) -> tuple[str, ...]:
    """Return the keys to the default state dict."""
    path: tuple[str, ...] = ()
    for _ in range(_MAX_DEPTH):
        if not isinstance(saved, Mapping):
            where = f" under {quote_name('.'.join(path))}" if path else ""
            raise DataError(
                f"expected a dictionary of tensors{where}, got {type(saved).__name__}", code="no_state_dict"
            )
        key = _next_key(saved)
        if key is None:
            return path
        path, saved = (*path, key), saved[key]
    raise DataError(
        f"no state dict within {_MAX_DEPTH} nested dictionaries ({quote_name('.'.join(path))})",
        code="no_state_dict",
    )


def _follow_path(saved: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        saved = saved[key]
    return saved


def clean_names(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """Remove wrapper prefixes from the names; return the state, the removed prefixes in order, and notes.

    Wrapper prefixes such as `module.` (data parallel) and `_orig_mod.` (compile) are removed as long as all names have
    them, some also inside names; a leading `model.` or `net.` only if every name has it.

    Raises:
        DataError: two names become equal.
    """
    notes: tuple[str, ...] = ()
    if _COUNTER in state and all(name == _COUNTER or name.startswith("module.") for name in state):
        state = {name: tensor for name, tensor in state.items() if name != _COUNTER}
        notes = ("averaged weights (AveragedModel): ignored their counter",)
    stripped: list[str] = []
    names = {name: name for name in state}
    while prefix := _common_prefix(names.values()):
        names = {original: name.removeprefix(prefix) for original, name in names.items()}
        stripped.append(prefix)
    for wrapper in _INNER:
        if any(wrapper in name for name in names.values()):
            names = {original: name.replace(wrapper, "") for original, name in names.items()}
            stripped.append(f".{wrapper}")
    if len(set(names.values())) != len(names):
        raise DataError("two tensors have the same name after removing wrapper prefixes", code="duplicate_key")
    return {names[original]: tensor for original, tensor in state.items()}, tuple(stripped), notes


def _next_key(saved: Mapping[Any, Any]) -> str | None:
    """Return the key to descend into; None if this dictionary is the state dict."""
    for key in KEYS:
        if isinstance(saved.get(key), Mapping) and saved[key]:
            return key
    if not saved or any(isinstance(value, torch.Tensor) for value in saved.values()):
        return None
    inner = [
        key for key, value in saved.items()
        if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values())
    ]  # fmt: skip
    if len(inner) == 1 and isinstance(inner[0], str):
        return inner[0]
    states = find_states(saved)
    if len(states) == 1:
        return next(key for key in saved if f"{states[0].key}.".startswith(f"{key}."))
    hint = f"expected tensors, or a dictionary of tensors under one of {', '.join(KEYS)}"
    if states:
        hint = "choose one: " + ", ".join(f"\0state\0 {one.key}" for one in states[:_MAX_CHOICES])
    raise DataError(f"no state dict found: the file holds {format_names(saved)}", code="no_state_dict", hint=hint)


def _check_state(saved: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Check that all names are text and all values ordinary tensors; skip extra state."""
    state = {}
    for name, value in saved.items():
        if not isinstance(name, str):
            raise DataError(f"expected tensor names, got the key {quote_name(name)}", code="no_state_dict")
        if name.endswith("_extra_state"):
            continue
        if not isinstance(value, torch.Tensor):
            raise DataError(f"{quote_name(name)} is {type(value).__name__}, expected a tensor", code="no_state_dict")
        if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise DataError(
                f"{quote_name(name)} is a sparse, nested, quantized or meta tensor, expected a dense one",
                code="odd_tensor",
                hint=_QUANTISED if value.is_quantized else None,
            )
        state[name] = value.detach().resolve_conj().resolve_neg()
    if not state:
        raise DataError("the file holds no tensors", code="no_state_dict")
    return state


def _common_prefix(names: Any) -> str | None:
    """Return a removable prefix common to all names: a wrapper's, or else an attribute's."""
    every = list(names)
    for prefix in (*_WRAPPERS, *_ATTRIBUTES):
        if every and all(name.startswith(prefix) and name != prefix for name in every):
            return prefix
    return None


_SHARED, _SMALL = 16, 1 << 24
_SAVE_TENSORS = "save the network's state_dict() on a machine where you trust the program, and use that file"
# Description, and advice; FILE stands for the file.
_CODE_KINDS = {
    "torchscript": ("a TorchScript program", f"run its graph: \0model\0 jit:FILE; or {_SAVE_TENSORS}"),
    "pt2": ("an exported program (.pt2)", f"run its graph: \0model\0 export:FILE; or {_SAVE_TENSORS}"),
    "torch-package": ("a torch.package archive", _SAVE_TENSORS),
}


@dataclass(frozen=True)
class Checkpoint:
    """A state dict and its origin.

    Attributes:
        state: tensors by name, on the CPU, in their stored type, without wrapper prefixes.
        format: torch-zip, torch-legacy or safetensors; with -shards for several files.
        selected_key: dotted path of the state dict inside the file; None if the file is the state dict.
        stripped_prefixes: removed prefixes, in order.
        file_sha256: hexadecimal digest of the file's bytes; for several files, of their names and bytes.
        weights_digest: digest of the state, the same for every file format.
        size: bytes.
        notes: for the user, such as that averaged weights were chosen.
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
    """Load the state dict in a checkpoint file without running any code in it.

    Args:
        wanted: which of several states, as in select_state; None for the usual one.

    Raises:
        MissingInput: there is no such file, or it is not readable or not regular.
        DataError: the file is empty, truncated, damaged, of another kind, has no state dict, or has NaN or infinite
            weights. Checksums reveal any changed content of torch files since version 1.6; safetensors and older torch
            files have none, so only sizes, types and positions can be checked.
        Untrusted: the file is a program, or loading it would call code.
    """
    return load_whole(path, wanted=wanted, progress=progress)[0]


def load_whole(path: Path | str, *, wanted: str | None = None, progress: Progress = SILENT) -> tuple[Checkpoint, Any]:
    """Return the state dict in a checkpoint file, and everything in the file. Raises as load_checkpoint does."""
    path = Path(path)
    shards = shards_of(path)
    if shards is None:
        _check_whole(path)
    parts = [_read_file(file, progress) for file in ([path] if shards is None else shards.files)]
    try:
        saved = parts[0].saved if shards is None else _join_shards(shards, parts)
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
        raise _add_path(error, path) from error.__cause__


def _check_whole(path: Path) -> None:
    """Raise DataError, with what to give instead, if a file is part of a checkpoint in several files."""
    if (sharded := find_sharded_file(path)) is not None and path.is_file():
        raise DataError(f"{quote_name(path, limit=300)}: {sharded.what}", code="sharded", hint=sharded.hint, path=path)


class _Part(NamedTuple):
    """The contents of one file of a checkpoint."""

    saved: Any
    kind: str
    notes: tuple[str, ...]
    sha256: str
    size: int


def _read_file(path: Path, progress: Progress) -> _Part:
    """Read one file without running any code in it."""
    with open_regular(path) as stream:
        try:
            kind = _checkpoint_kind(stream)
            notes = _check_content(stream, kind, progress)
            saved = _load_safetensors(stream) if kind == "safetensors" else load_tensors(stream, kind=kind)
            return _Part(saved, kind, notes, file_sha256(stream, progress), stream.seek(0, 2))
        except (DataError, Untrusted) as error:
            raise _add_path(error, path) from error.__cause__


def _join_shards(shards: Shards, parts: Sequence[_Part]) -> dict[str, Any]:
    """Return the tensors of all shards; each must occur once, in the file that the index states.

    Raises:
        DataError: this does not hold.
    """
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for file, part in zip(shards.files, parts, strict=True):
        if not isinstance(part.saved, Mapping):
            raise DataError(f"{quote_name(file.name)} does not hold a dictionary of tensors", code="no_state_dict")
        if twice := part.saved.keys() & found.keys():
            name = min(twice, key=str)
            raise DataError(
                f"{quote_name(name)} is in both {quote_name(places[name])} and {quote_name(file.name)}",
                code="duplicate_key",
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
            f"the index does not match the shards: {quote_name(wrong[0])} is in {quote_name(there)}, but the index says "
                f"{quote_name(said)}",
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
    """Return the tensors of a checkpoint with clean names; with trust_pickle, of any pickle, running its code.

    Args:
        path: a file, or the folder of a checkpoint in several.
        wanted: which of several states, as in select_state; None for the usual one.
        say: called with notes on the weights.

    Raises:
        As load_checkpoint does; with trust_pickle, DataError if the pickle cannot be loaded.
    """
    path = Path(path)
    if path.is_dir() and (sharded := find_sharded_folder(path)) is not None:
        return _load_distributed(sharded, wanted, say)
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
            raise _add_path(error, path) from error.__cause__
    return state


def _load_distributed(
    sharded: ShardedCheckpoint, wanted: str | None, say: Callable[[str], object]
) -> dict[str, Tensor]:
    """Return the tensors of a distributed checkpoint."""
    from bnncli.models.sharded import read_deepspeed, read_distributed

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
    """Raise DataError if weights are not finite, with the first such tensor and their number."""
    bad = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() or tensor.is_complex():
            values = tensor if tensor.dtype.itemsize > 1 else tensor.float()
            if count := int((~torch.isfinite(values)).sum()):
                bad[name] = count
    if bad:
        name, count = next(iter(bad.items()))
        raise DataError(
            f"weights are not finite: {quote_name(name)} has {count} NaN or infinite values, and {len(bad) - 1} "
                "other tensors are affected",
            code="not_finite", hint="the training run probably diverged: use an earlier checkpoint",
        )  # fmt: skip


def check_sizes(state: Mapping[str, Tensor], size: int) -> None:
    """Raise DataError if the tensors claim far more bytes than the file has, as zero-stride tensors can.

    Tensors may share storage (tied weights) and so claim more than is stored, but hardly sixteen times as much.
    """
    claimed = sum(tensor.numel() * tensor.dtype.itemsize for tensor in state.values())
    if claimed > _SHARED * size + _SMALL:
        raise DataError(
            f"the tensors claim {claimed} bytes, but the file has {size}", code="size_mismatch",
            hint="save them with .contiguous().clone()",
        )  # fmt: skip


def _checkpoint_kind(stream: IO[bytes]) -> str:
    """Return torch-zip, torch-legacy or safetensors; raise for anything else."""
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
    """Return notes on the file's checksums. Raises DataError if they show damage."""
    is_checked = kind != "torch-zip" or check_checksums(stream, progress)
    stream.seek(0)
    return () if is_checked else (UNCHECKED,)


def _raw_pickle(stream: IO[bytes]) -> str:
    names = list_globals(stream, "pickle")
    asks = f"; it refers to {format_names(names, limit=10)}" if names else ""
    return f"the file is a raw pickle, not a torch checkpoint; bnncli does not load it directly{asks}"


def _load_safetensors(stream: IO[bytes]) -> dict[str, Tensor]:
    """Load the tensors of a safetensors file whose header has no duplicate names.

    Of tensors that share storage, safetensors.torch.save_model stores one; its header's metadata has the other names.
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
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_reject_duplicate_keys)
        stored = safetensors.torch.load(data)  # refuses headers of other types
        shared = header.get("__metadata__") or {}
        return stored | {name: stored[kept] for name, kept in shared.items() if name not in stored and kept in stored}
    except (safetensors.SafetensorError, ValueError, RecursionError, KeyError) as error:
        text = " ".join(str(error).split())[:200]
        raise DataError(f"the safetensors file is truncated or damaged: {text}", code="truncated") from error


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without duplicate keys; the library would keep the last one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the safetensors header has {quote_name(twice)} twice", code="duplicate_key")
    return found


def _add_path(error: DataError | Untrusted, path: Path) -> DataError | Untrusted:
    """Return the same error with the name of the file."""
    message = f"{quote_name(path, limit=300)}: {error.message}"
    is_pickle = error.code == "needs_code"
    suffix = ".npz" if "'sklearn." in error.message else ".safetensors"  # the arrays of a linear classifier
    hint = trust_hint(str(path), str(path.with_suffix(suffix))) if is_pickle else error.hint
    if hint is not None and error.code in ("program", "is_onnx", "is_skops"):
        hint = hint.replace("FILE", str(path))
    return type(error)(message, hint=hint, code=error.code, path=path)

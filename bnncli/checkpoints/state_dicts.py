"""The state dict inside what a checkpoint holds, and its names without the prefixes that wrappers add."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.checkpoints.quantised import dequantised
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.names import is_averaged, listed, prefixes_of, quoted

if TYPE_CHECKING:
    from torch import Tensor

# Averaged weights first: they are what their owner evaluates. Then the usual words, most explicit first.
KEYS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "state_dict", "model", "model_state_dict", "model_state", "net",
    "net_state_dict", "network", "module", "weights", "params", "ema",
)  # fmt: skip
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
# Of data parallel training, torch.compile, FSDP, activation checkpointing and Fabric; the second to fourth also inside names.
_INNER = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_WRAPPERS = ("module.", *_INNER, "_forward_module.")
_ATTRIBUTES = ("model.", "net.")
_MAX_DEPTH = 5
_MAX_PREFIX = 3
_MAX_CHOICES = 5
_OPTIMIZER = re.compile(r"optim|lr_sched", re.IGNORECASE)
# torch.optim.swa_utils.AveragedModel keeps its count beside the network.
_COUNTER = "n_averaged"
_LIGHTNINGS_RAW = "current_model_state"

_QUANTISED = (
    "save the network before quantisation; or save it with torch.jit.trace and run it unchanged: \0model\0 "
    "jit:FILE \0last_layer\0 identity"
)


def select_state(saved: Any, wanted: str | None = None) -> tuple[dict[str, Tensor], str | None, tuple[str, ...]]:
    """The state dict in a loaded checkpoint, the dotted key it was under (None: at the top), and notes.

    Args:
        wanted: the state of this key, of this prefix of names, or the averaged one (ema); None for the usual one.

    Raises:
        DataError: there is none, or the choice is not clear.
        UsageError: there is none that is called `wanted`.
    """
    if wanted is not None:
        return _wanted_state(saved, wanted)
    path = _usual_path(saved)
    notes = tuple(f"using the averaged weights {quoted(key)}, not the raw ones" for key in path if key in _AVERAGED)
    state, own_notes = dequantised(_below(saved, path))
    plain = _checked(state)
    return plain, ".".join(path) or None, (*(notes or _other_weights(saved, ".".join(path), plain)), *own_notes)


def _other_weights(saved: Mapping[str, Any], key: str, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What a reader should be told of other weights for the same names, where those of `key` are taken: raw or averaged ones."""
    if _is_lightnings_average(saved, key):
        return (f"using the averaged weights {quoted(key)}, not the raw ones in {quoted(_LIGHTNINGS_RAW)}",)
    own = _by_plain_names(state)
    for path, other in _dictionaries(saved):
        name, theirs = ".".join(path), _by_plain_names(other)
        if name != key and is_averaged(name) and own.keys() <= theirs.keys():
            is_same = all(torch.equal(own[one], theirs[one]) for one in own if isinstance(theirs[one], torch.Tensor))
            return (
                () if is_same else (f"using the raw weights, not the averaged ones (to use those: \0state\0 {name})",)
            )
    return ()


def _by_plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by their names without the `module.` of data parallel training and of averages."""
    return {name.removeprefix("module."): value for name, value in state.items()}


def _is_lightnings_average(saved: Any, key: str) -> bool:
    """Whether Lightning's callback WeightAveraging has exchanged the weights: the averaged ones stand where the raw ones do else."""
    return isinstance(saved, Mapping) and key == "state_dict" and {_LIGHTNINGS_RAW, "averaging_state"} <= saved.keys()


class StateInside(NamedTuple):
    """One of the states in a checkpoint: its dotted key, empty at the top; a copy within a state has its prefix at the end."""

    key: str
    num_tensors: int
    is_averaged: bool


def states_in(saved: Any) -> list[StateInside]:
    """Every state dict in a loaded checkpoint but those of optimizers, and the averaged copies within them."""
    found = []
    for path, state in _dictionaries(saved):
        key = ".".join(path)
        found.append(StateInside(key, len(state), is_averaged(key) or _is_lightnings_average(saved, key)))
        for prefix in _averaged_copies(state):
            count = sum(name.startswith(prefix) for name in state)
            found.append(StateInside(".".join((*path, prefix[:-1])), count, True))
    return found


def _wanted_state(saved: Any, wanted: str) -> tuple[dict[str, Tensor], str | None, tuple[str, ...]]:
    """The state that is called so, its dotted key, and notes."""
    states = states_in(saved)
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
                plain, notes = dequantised(state)
                return _checked(plain), key or None, notes
            if key.startswith(own) and any(name.startswith(prefix) for name in state):
                inside = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
                plain, notes = dequantised(inside)
                return _checked(plain), key, notes
    there = listed([one.key for one in states if one.key], limit=10) or "only one, at the top level"
    raise UsageError(f"\0state\0: the checkpoint has no state {quoted(wanted)}; it has {there}")


def _dictionaries(saved: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Every dictionary of tensors with its path, outermost first; what optimizers keep is not looked at."""
    if not isinstance(saved, Mapping) or not saved or len(path) > _MAX_DEPTH:
        return
    if not all(isinstance(key, str) for key in saved) or (path and _OPTIMIZER.match(path[-1])):
        return
    values = [value for name, value in saved.items() if not name.endswith("_extra_state")]
    if values and all(isinstance(value, (torch.Tensor, tuple, torch.dtype)) for value in values):
        if any(
            isinstance(value, torch.Tensor) and value.ndim for value in values
        ):  # else counters, or the scores of earlier epochs
            yield path, saved
        return
    for key, value in saved.items():
        yield from _dictionaries(value, (*path, key))


def _averaged_copies(state: Mapping[str, Tensor]) -> list[str]:
    """Prefixes that say that they are averages, with the same names behind them as behind another."""
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
    """The keys to the state dict that is meant where nobody says which."""
    path: tuple[str, ...] = ()
    for _ in range(_MAX_DEPTH):
        if not isinstance(saved, Mapping):
            where = f" under {quoted('.'.join(path))}" if path else ""
            raise DataError(
                f"expected a dictionary of tensors{where}, got {type(saved).__name__}", code="no_state_dict"
            )
        key = _next_key(saved)
        if key is None:
            return path
        path, saved = (*path, key), saved[key]
    raise DataError(
        f"no state dict within {_MAX_DEPTH} nested dictionaries ({quoted('.'.join(path))})",
        code="no_state_dict",
    )


def _below(saved: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        saved = saved[key]
    return saved


def clean_names(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """The state with wrapper prefixes gone from its names, the prefixes in the order they went, and notes.

    Those of wrappers, as `module.` (data parallel) and `_orig_mod.` (compile), go as often as all names have them, some also
    from inside names; a leading `model.` or `net.` goes only if every name has it.

    Raises:
        DataError: two names become one.
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
    """The key to go into; None when this dictionary is the state dict."""
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
    states = states_in(saved)
    if len(states) == 1:
        return next(key for key in saved if f"{states[0].key}.".startswith(f"{key}."))
    hint = f"expected tensors, or a dictionary of tensors under one of {', '.join(KEYS)}"
    if states:
        hint = "choose one: " + ", ".join(f"\0state\0 {one.key}" for one in states[:_MAX_CHOICES])
    raise DataError(f"no state dict found: the file holds {listed(saved)}", code="no_state_dict", hint=hint)


def _checked(saved: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The dictionary, when all names are text and all values are ordinary tensors; extra state is left out."""
    state = {}
    for name, value in saved.items():
        if not isinstance(name, str):
            raise DataError(f"expected tensor names, got the key {quoted(name)}", code="no_state_dict")
        if name.endswith("_extra_state"):
            continue
        if not isinstance(value, torch.Tensor):
            raise DataError(f"{quoted(name)} is {type(value).__name__}, expected a tensor", code="no_state_dict")
        if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise DataError(
                f"{quoted(name)} is a sparse, nested, quantized or meta tensor, expected a dense one",
                code="odd_tensor",
                hint=_QUANTISED if value.is_quantized else None,
            )
        state[name] = value.detach().resolve_conj().resolve_neg()
    if not state:
        raise DataError("the file holds no tensors", code="no_state_dict")
    return state


def _common_prefix(names: Any) -> str | None:
    """A prefix that all names have and may lose: a wrapper's, or else an attribute's."""
    every = list(names)
    for prefix in (*_WRAPPERS, *_ATTRIBUTES):
        if every and all(name.startswith(prefix) and name != prefix for name in every):
            return prefix
    return None

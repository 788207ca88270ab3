"""The state dict inside what a checkpoint holds, and its names without the prefixes that wrappers add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bnncli.errors import DataError
from bnncli.names import listed, quoted

# Averaged weights first: they are what their owner evaluates. Then the usual words, most explicit first.
KEYS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "state_dict", "model", "model_state_dict", "model_state", "net",
    "net_state_dict", "network", "module", "weights", "params", "ema",
)  # fmt: skip
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
_WRAPPERS = ("module.", "_orig_mod.")
_ATTRIBUTES = ("model.", "net.")
_MAX_DEPTH = 5
# torch.optim.swa_utils.AveragedModel keeps its count beside the network.
_COUNTER = "n_averaged"


def select_state(saved: Any) -> tuple[dict[str, Tensor], str | None, tuple[str, ...]]:
    """The state dict in a loaded checkpoint, the dotted key it was under (None: at the top), and notes.

    Raises:
        DataError: there is none, or the choice is not clear.
    """
    path: list[str] = []
    notes: list[str] = []
    for _ in range(_MAX_DEPTH):
        if not isinstance(saved, Mapping):
            where = f" under {quoted('.'.join(path))}" if path else ""
            raise DataError(
                f"expected a dictionary of tensors{where}, got {type(saved).__name__}", code="no_state_dict"
            )
        key = _next_key(saved)
        if key is None:
            return _checked(saved), ".".join(path) or None, tuple(notes)
        if key in _AVERAGED:
            notes.append(f"averaged weights {quoted(key)} were picked, not the raw ones")
        path.append(key)
        saved = saved[key]
    raise DataError(
        f"no state dict within {_MAX_DEPTH} nested dictionaries ({quoted('.'.join(path))})",
        code="no_state_dict",
    )


def clean_names(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[str, ...]]:
    """The state with wrapper prefixes gone from its names, the prefixes in the order they went, and notes.

    `module.` (data parallel) and `_orig_mod.` (compile) go as often as all names have them, `_orig_mod.` also from
    inside names; a leading `model.` or `net.` goes only if every name has it.

    Raises:
        DataError: two names become one.
    """
    notes: tuple[str, ...] = ()
    if _COUNTER in state and all(name == _COUNTER or name.startswith("module.") for name in state):
        state = {name: tensor for name, tensor in state.items() if name != _COUNTER}
        notes = ("averaged weights (AveragedModel): its count was left out",)
    stripped: list[str] = []
    names = {name: name for name in state}
    while prefix := _common_prefix(names.values()):
        names = {original: name.removeprefix(prefix) for original, name in names.items()}
        stripped.append(prefix)
    if any("_orig_mod." in name for name in names.values()):
        names = {original: name.replace("_orig_mod.", "") for original, name in names.items()}
        stripped.append("._orig_mod.")
    if len(set(names.values())) != len(names):
        raise DataError("two tensors have the same name once wrapper prefixes are removed", code="duplicate_key")
    return {names[original]: tensor for original, tensor in state.items()}, tuple(stripped), notes


def _next_key(saved: Mapping[Any, Any]) -> str | None:
    """The key to go into; None when this dictionary is the state dict."""
    for key in KEYS:
        if isinstance(saved.get(key), Mapping) and saved[key]:
            return key
    if not saved or any(isinstance(value, Tensor) for value in saved.values()):
        return None
    inner = [
        key for key, value in saved.items()
        if isinstance(value, Mapping) and value and all(isinstance(item, Tensor) for item in value.values())
    ]  # fmt: skip
    if len(inner) == 1 and isinstance(inner[0], str):
        return inner[0]
    raise DataError(
        f"no state dict found: the file holds {listed(saved)}", code="no_state_dict",
        hint=f"expected tensors, or a dictionary of tensors under one of {', '.join(KEYS)}",
    )  # fmt: skip


def _checked(saved: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The dictionary, when all names are text and all values are ordinary tensors; extra state is left out."""
    state = {}
    for name, value in saved.items():
        if not isinstance(name, str):
            raise DataError(f"expected names of tensors, got the key {quoted(name)}", code="no_state_dict")
        if name.endswith("_extra_state"):
            continue
        if not isinstance(value, Tensor):
            raise DataError(f"{quoted(name)} is {type(value).__name__}, expected a tensor", code="no_state_dict")
        if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            raise DataError(
                f"{quoted(name)} is a sparse, nested, quantized or empty tensor, expected a plain one",
                code="odd_tensor",
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

"""The inputs of a split as posteriors over other layers than the last take them: preprocessed, in memory, as one tensor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bnncli import data
from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.models.features import MASK
from bnncli.progress import SILENT, Progress
from bnncli.run.inputs import RESIDENT_SHARE
from bnncli.system.devices import available_memory
from bnncli.system.memory import require

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = 512  # examples read at once
_MOST_WORKERS = 8
_HINT = "use fewer rows (SPLIT=SPEC@N), or a machine with more memory"


def read_inputs(split: data.InputSplit, module: nn.Module, *, progress: Progress = SILENT) -> Tensor:
    """All inputs (N, ...) of a split, float32, on the CPU; texts as packed arguments (N, arguments, longest), token ids as real numbers.

    Args:
        module: the network, whose configuration says what texts are padded with.

    Raises:
        DeviceError: they do not fit in memory.
        DataError: arguments that cannot be packed, or texts that are padded and a network that cannot tell.
    """
    what, task = f"the inputs of {split.name or split.spec}", progress.task(f"read {split.name}".strip(), len(split))
    whole: Tensor | None = None
    packed: list[Tensor] = []
    start = 0
    for batch in split.batches(BATCH, num_workers=_workers(split)):
        part = packed_inputs(batch)
        if isinstance(batch.inputs, dict) and has_tokens(batch.inputs):
            if not packed:
                require(2 * part[0].nbytes * len(split), "cpu", what=what, hint=_HINT)
            packed.append(part)
        else:
            if whole is None:
                require(part[0].nbytes * len(split), "cpu", what=what, hint=_HINT)
                whole = torch.empty((len(split), *part.shape[1:]), dtype=part.dtype)
            if part.shape[1:] != whole.shape[1:]:
                raise _unsupported(f"they have shapes {tuple(whole.shape[1:])} and {tuple(part.shape[1:])}")
            whole[start : start + len(part)] = part
        start += len(part)
        task.advance(len(part))
    return _joined(packed, list(batch.inputs), module) if whole is None else whole


def near(inputs: Tensor, device: torch.device) -> Tensor:
    """The inputs on the device where they leave room there; else where they are: blocks of them travel."""
    return inputs.to(device) if inputs.nbytes <= RESIDENT_SHARE * available_memory(device) else inputs


def packed_inputs(batch: data.Batch) -> Tensor:
    """A batch as one tensor: as it is, or the network's arguments side by side, (n, arguments, ...).

    Raises:
        DataError: several arguments of different shapes or of real numbers; clips that the network sees each without its padding.
    """
    if batch.lengths is not None and len({*batch.lengths}) > 1:
        raise _unsupported("it processes each example without its padding")
    if not isinstance(batch.inputs, dict):
        return batch.inputs.float()
    parts = list(batch.inputs.values())
    if len({part.shape for part in parts}) > 1 or (len(parts) > 1 and parts[0].is_floating_point()):
        raise _unsupported("it takes several inputs that differ in shape or are not integers")
    return torch.stack([part.float() for part in parts], dim=1)


def has_tokens(inputs: data.Inputs) -> bool:
    """Whether inputs are token ids, perhaps with what goes with them."""
    parts = inputs.values() if isinstance(inputs, dict) else [inputs]
    return not any(part.is_floating_point() for part in parts)


def _unsupported(why: str) -> DataError:
    message = f"\0layers\0: cannot read the network's inputs as one tensor: {why}; only its last layer is supported"
    return DataError(message, code="unsupported_inputs")


def _joined(parts: list[Tensor], names: list[str], module: nn.Module) -> Tensor:
    """Packed batches as one, each padded behind to the longest of all with what the network takes for padding."""
    longest, count = max(part.shape[-1] for part in parts), sum(map(len, parts))
    is_padded = any(part.shape[-1] != longest for part in parts)
    if is_padded and (getattr(getattr(module, "config", None), "pad_token_id", None) or 0) < 0:
        raise _unsupported("its tokenizer has no padding token")
    if MASK not in names and is_padded:
        raise _unsupported(f"it has no attention mask ({MASK}) for padded texts")
    padding = torch.zeros(len(names), 1, dtype=parts[0].dtype)
    if "input_ids" in names:
        padding[names.index("input_ids")] = getattr(getattr(module, "config", None), "pad_token_id", None) or 0
    whole = padding.expand(count, len(names), longest).clone()
    start = 0
    for part in parts:
        whole[start : start + len(part), :, : part.shape[-1]] = part
        start += len(part)
    return whole


def _workers(split: data.InputSplit) -> int:
    """Processes that decode images; other data are read faster than they could be handed over."""
    is_much = split.items == "images" and len(split) > BATCH
    return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if is_much else 0

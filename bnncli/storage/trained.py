"""Checkpoints that train writes: safetensors state dicts that say what they were trained with, and what that cost.

To anything else they are checkpoints like others, whose metadata nobody need read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnncli.errors import BnnError
from bnncli.storage.headers import Header
from bnncli.storage.posteriors import read_posterior_header, read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

KIND = "checkpoint"
# The options of train that say which network it is and what is done to its inputs.
PREPROCESSING = ("mean", "std", "resize", "crop")
RECORDED_NETWORK = ("model", "model_arg", *PREPROCESSING)
RAW, AVERAGED = "model.", "model_ema."  # stand before the names where there are both, which --state tells apart


def write_trained(
    target: Path,
    state: Mapping[str, Tensor],
    *,
    averaged: Mapping[str, Tensor] | None,
    meta: Mapping[str, Any],
    provenance: Mapping[str, Any],
    may_replace: bool,
) -> str:
    """Publish a trained network's state dict, with the averaged one where it is there, and return its content digest."""
    tensors = dict(state)
    if averaged is not None:
        tensors = {f"{RAW}{name}": value for name, value in state.items()}
        tensors |= {f"{AVERAGED}{name}": value for name, value in averaged.items()}
    return write_tensors(target, tensors, kind=KIND, meta=meta, provenance=provenance, may_replace=may_replace)


def read_trained(path: Path) -> tuple[dict[str, Tensor], Header]:
    """All tensors of such a checkpoint and its header, after a full check; raises as read_posterior."""
    return read_tensors(path, kind=KIND)


def trained_header(path: Path) -> Header | None:
    """What a checkpoint says of its training; None for one that train did not write, or nothing that can be read."""
    try:
        with open(path, "rb") as stream:
            is_safetensors = stream.read(9)[8:] == b"{"
        header = read_posterior_header(path) if is_safetensors else None
    except (BnnError, OSError):  # whoever reads the weights says what is wrong with it
        return None
    return header if header is not None and header.kind == KIND else None


def gradient_passes(path: Path) -> int | None:
    """How often training went over its data with gradients, to the end of which the checkpoint is; None where it does not say."""
    header = trained_header(path)
    return None if header is None else header.meta.get("gradient_passes")

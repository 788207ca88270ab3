"""Classifiers with an adapter of the library peft merged into them; nothing of either may be missing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.models._extra import require
from bnncli.models._hf_folder import classified_by, safetensors_shapes
from bnncli.models._hf_network import check_filled, load, load_config, pickled_state, settled, told
from bnncli.names import listed, quoted

if TYPE_CHECKING:
    from torch import nn

_COPIES = ".modules_to_save."  # with bias="all" the library writes the biases of modules that are saved whole twice
_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"


def adapted(folder: Path, base: Path, kind: str, architecture: str | None, *, is_merged: bool = True) -> nn.Module:
    """The classifier of a base folder with an adapter merged into it, or beside it, in evaluation mode, float32, on the CPU.

    What the adapter has whole (modules_to_save, such as the classifier) may be missing from the base; and where the base is
    no classifier, its own head is left out.

    Args:
        kind: Sequence, Image or Audio.
        architecture: the class that the base was saved from.

    Raises:
        DataError: a weight is missing, unknown or of another shape, or the libraries cannot make the network.
    """
    auto = getattr(require("transformers", extra="hf"), f"AutoModelFor{kind}Classification")
    saved = {
        name.removeprefix(_PREFIX): shape
        for name, shape in safetensors_shapes(folder / _WEIGHTS).items() if ".lora_" not in name
    }  # fmt: skip
    config = load_config(base)
    with told(base), torch.device("meta"):
        empty = auto.from_config(config)
    labels = _num_labels(empty, config, saved)
    if labels is not None:
        config = load_config(base, num_labels=labels)
    network, info = load(type(empty), base, config, pickled_state(base))
    check_filled(
        info,
        what=f"the base model does not match {type(network).__name__}",
        folder=base,
        may_miss=lambda name: name in saved,
        may_have=lambda name: classified_by(architecture) is None,
    )
    return settled(_with_adapter(network, folder, is_merged=is_merged))


def _num_labels(empty: nn.Module, config: Any, saved: Mapping[str, tuple[int, ...]]) -> int | None:
    """Outputs of the adapter's own head, where they are not as many as the base's config says."""
    own = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    found = {
        shape[0]
        for name, shape in saved.items()
        if name in own and shape and own[name][1:] == shape[1:] and own[name][0] == config.num_labels != shape[0]
    }
    return found.pop() if len(found) == 1 else None


def _unknown(weights: Path, names: Sequence[str]) -> list[str]:
    """Names that the library could not place, but for copies of tensors that it could."""
    with safe_open(weights, "pt") as stored:
        known = {*stored.keys()}
        return [
            name
            for name in names
            if _COPIES not in name
            or (own := name.replace(_COPIES, ".")) not in known
            or not torch.equal(stored.get_tensor(name), stored.get_tensor(own))
        ]


def _with_adapter(network: nn.Module, folder: Path, *, is_merged: bool) -> nn.Module:
    """The network with the adapter's changes in its own weights, or in layers around its own.

    Raises:
        DataError: names of the adapter's file are missing or unknown, or its kind cannot be merged.
    """
    peft = require("peft", extra="peft")
    with told(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about names, which are errors here
        config = peft.PeftConfig.from_pretrained(str(folder))
        model = peft.get_peft_model(network, config)
        found = model.load_adapter(str(folder), "default", is_trainable=False, torch_device="cpu")
    parts = [
        f"{what} ({len(names)}): {listed(sorted(names))}"
        for what, names in (
            ("missing from the adapter", found.missing_keys),
            ("not in the network", _unknown(folder / _WEIGHTS, found.unexpected_keys)),
        )
        if names
    ]
    if parts:
        message = (
            f"{quoted(folder, limit=300)}: the adapter does not match {type(network).__name__}; {'; '.join(parts)}"
        )
        raise DataError(message, code="wrong_weights", path=folder)
    if not hasattr(model.base_model, "merge_and_unload"):
        message = f"{quoted(folder, limit=300)}: adapters of kind {config.peft_type} cannot be merged into the weights"
        raise DataError(message, code="not_supported", path=folder)
    if not is_merged:
        apart: nn.Module = model.base_model.model
        return apart
    with told(folder):
        merged: nn.Module = model.merge_and_unload(safe_merge=True)
    return merged

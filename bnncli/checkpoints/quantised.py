"""Quantised weights in a state dict: as numbers where those are exactly what the file says, else a clear refusal.

Torch's dynamically quantised linear layers hold their weight packed with its scales; bitsandbytes' int8 layers hold whole
numbers and the largest magnitude of each row, which stands for 127. GPTQ's, AWQ's and 4-bit weights are laid out for their kernels.

Source: torch.ao.nn.quantized.Linear._save_to_state_dict; Dettmers et al. 2022, arXiv 2208.07339, equation 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.names import quoted

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


def dequantised(state: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], tuple[str, ...]]:
    """The state with float32 weights and biases for layers that are quantised, and what a reader should be told of it.

    Raises:
        DataError: a layer is quantised in a way that is not read.
    """
    names = [name for name in state if isinstance(name, str)]
    for name in names:
        for suffix, library in _FOREIGN.items():
            if name.endswith(suffix):
                raise DataError(
                    f"{quoted(name)}: the weights are quantised ({library}), which is not supported", code="quantised",
                    hint="save the network before quantisation, or dequantise it with its library and save the result",
                )  # fmt: skip
    packed = [name.removesuffix(_PACKED) for name in names if name.endswith(_PACKED)]
    rows = [name.removesuffix(_ROWS) for name in names if name.endswith(_ROWS)]
    if not packed and not rows:
        return state, ()
    gone = {layer + suffix for layer in packed for suffix in (_PACKED, *_BESIDE_PACKED)}
    gone |= {layer + suffix for layer in rows for suffix in (_ROWS, ".weight_format")}
    found: dict[Any, Any] = {}
    for name, value in state.items():  # in the order of the network
        layer = name.removesuffix(_PACKED) if isinstance(name, str) else name
        if layer in packed and layer != name:
            found |= _unpacked(layer, value)
        elif name not in gone:
            found[name] = value
    for layer in rows:
        found[f"{layer}.weight"] = _of_rows(layer, state)
    note = (
        f"dequantised {len(packed) + len(rows)} int8 layers: the network runs in float32 and does not round activations"
    )
    return found, (note,)


def _unpacked(layer: str, value: Any) -> dict[str, Tensor]:
    """Weight and bias of a dynamically quantised linear layer of torch's."""
    weight, bias = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
    if not isinstance(weight, torch.Tensor) or not weight.is_quantized or weight.ndim != 2:
        raise DataError(
            f"{quoted(layer)} is packed, but is not a torch linear layer; it is not supported", code="quantised"
        )
    found = {f"{layer}.weight": weight.dequantize()}
    return found | ({f"{layer}.bias": bias} if isinstance(bias, torch.Tensor) else {})


def _of_rows(layer: str, state: Mapping[Any, Any]) -> Tensor:
    """The weight of an int8 layer of bitsandbytes', whose rows are scaled."""
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
        raise DataError(f"{quoted(layer + _ROWS)} has no matching int8 weight; it is not supported", code="quantised")
    return weight.float() * scale.float().reshape(-1, 1) / _LARGEST

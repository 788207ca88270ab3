"""Whether padding a text to the length of others changes what the network makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bnncli.data import Inputs

MASK = "attention_mask"  # what networks call the input that says which positions are a text's own
MUCH = 1e-3  # of the largest feature: rounding is less


def padding_effect(read: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, features: Tensor) -> float | None:
    """How far the features of the most padded text are from those that it has alone, in units of the largest of them.

    Args:
        read: gives features (n, D) and the output for inputs.
        inputs: of a batch, by name, with an attention mask (n, L) of zeros and ones; for others the answer is None.
        features: that the batch gave, (n, D).
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not isinstance(inputs, Mapping):
        return None
    lengths = mask.sum(dim=1)
    row = int(lengths.argmin())
    if not 0 < int(lengths[row]) < mask.shape[1]:
        return None
    own = mask[row].bool()
    alone = {
        name: value[row : row + 1, own] if value.shape[:2] == mask.shape else value[row : row + 1]
        for name, value in inputs.items()
    }
    found = read(alone)[0][0].double()
    with torch.inference_mode():
        scale = found.abs().max().clamp(min=1e-30)
        return float((features[row].double() - found).abs().max() / scale)

"""Padding to the length of others: whether it changes what the network makes of a text, and networks that see none of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bnncli.data._split import Inputs
from bnncli.lazy import torch
from bnncli.names import percent

if TYPE_CHECKING:
    from torch import Tensor

MASK = "attention_mask"  # what networks call the input that says which positions are a text's own
MUCH = 1e-3  # of the largest feature: rounding is less
AT_ONCE = 1 << 20  # values of clips in one pass, a minute at 16 kHz: the first layers make hundreds of channels of them


def padding_effect(read: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, features: Tensor) -> float | None:
    """How far the features of the most padded text are from those that it has alone, in units of the largest of them.

    Args:
        read: gives features (n, D) and the output for inputs.
        inputs: of a batch, by name, with an attention mask (n, L) of zeros and ones; for others the answer is None.
        features: that the batch gave, (n, D).
    """
    mask = inputs.get(MASK) if isinstance(inputs, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or not isinstance(inputs, Mapping):
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


def padding_warning(split: str, effect: float | None) -> str | None:
    """Return what is to be said of a `padding_effect`; None where it is rounding, or there was no padding."""
    if effect is None or effect <= MUCH:
        return None
    return (
        f"{split}: padding changes the features: for one text they differ by {percent(effect, '.2g')} from its "
        "unpadded features (\0batch_size\0 1 pads least)"
    )


def unpadded(
    read: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs, lengths: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """What `read` gives for a batch whose examples are padded, each seen by the network as if it were alone: (n, D) and (n, K).

    Examples of one length go through together, as many as have `AT_ONCE` values: clips are long.

    Args:
        lengths: of each example along the second axis of its inputs; None where the network takes the batch as it is.
    """
    if lengths is None:
        return read(inputs)
    named = inputs if isinstance(inputs, Mapping) else {"": inputs}
    longest = max(lengths)
    order: list[int] = []
    parts: list[tuple[Tensor, Tensor]] = []
    for length in sorted({*lengths}):
        same = [row for row, own in enumerate(lengths) if own == length]
        for rows in _passes(same, next(iter(named.values()))[0, :length].numel()):
            own = {name: _cut(value[rows], length, longest) for name, value in named.items()}
            parts.append(read(own if isinstance(inputs, Mapping) else own[""]))
            order += rows
    if parts[0][0].ndim != 2:  # no features: whoever checks them says so
        return parts[0]
    back = torch.tensor(order).argsort()
    with torch.inference_mode():
        features, output = (torch.cat(found) for found in zip(*parts, strict=True))
        return features[back.to(features.device)], output[back.to(output.device)]


def _passes(rows: list[int], num_values: int) -> list[list[int]]:
    """Rows of so many values each, divided into passes through the network."""
    size = max(1, AT_ONCE // num_values)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _cut(value: Tensor, length: int, longest: int) -> Tensor:
    return value[:, :length] if value.ndim > 1 and value.shape[1] == longest else value

"""What the inputs of a split are like: range, mean and deviation of real numbers, and the commonest of token ids.

Sums over the batches that go through the network anyway, of some rows of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bnncli.data._split import Inputs
from bnncli.extraction.padding import MASK
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _VALUES = 64, 1 << 18  # of a batch that are looked at, at most
_NUM_TOKENS = 256  # the commonest that are recorded
_MOST_CHANNELS = 16
_SUM, _SQUARES, _ABSOLUTE, _NEGATIVE, _ZERO, _COUNT, _MIN, _MAX = range(8)


class InputSums(NamedTuple):
    """Sums over some examples, on the CPU.

    Attributes:
        shape: of one example, int64; without its length where the inputs are token ids.
        table: (8, C) float64: by channel, or of all values where there are no channels; C = 0 without real numbers.
        tokens: (2, U) int64, token ids and how often each is there; U = 0 without token ids.
    """

    num_rows: int
    shape: Tensor
    table: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> InputSums:
        """Of a batch; of several inputs those of real numbers come first, then token ids."""
        named: Mapping[str, Tensor] = inputs if isinstance(inputs, dict) else {"": inputs}
        num_rows = len(next(iter(named.values())))
        real = next((one for one in named.values() if one.is_floating_point()), None)
        with torch.inference_mode():
            if real is not None:
                shape = torch.tensor(real.shape[1:], dtype=torch.int64)
                return cls(num_rows, shape, _table(real), torch.zeros(2, 0, dtype=torch.int64))
            ids = named.get("input_ids", next(iter(named.values())))
            mask = named.get(MASK)
            kept = ids[mask != 0] if mask is not None and mask.shape == ids.shape else ids.flatten()
            found = torch.stack(torch.unique(kept.long(), return_counts=True)).cpu()
            return cls(num_rows, torch.zeros(0, dtype=torch.int64), torch.zeros(8, 0, dtype=torch.float64), found)

    def plus(self, other: InputSums | None) -> InputSums:
        """The sums over the examples of both; of the first where they are of other kinds."""
        if other is None or self.table.shape != other.table.shape:
            return self
        table = self.table + other.table
        table[_MIN] = torch.minimum(self.table[_MIN], other.table[_MIN])
        table[_MAX] = torch.maximum(self.table[_MAX], other.table[_MAX])
        both = torch.cat([self.tokens, other.tokens], dim=1)
        ids, places = torch.unique(both[0], return_inverse=True)
        counts = torch.zeros_like(ids).index_add(0, places, both[1])
        return InputSums(self.num_rows + other.num_rows, self.shape, table, torch.stack([ids, counts]))

    def statistics(self) -> dict[str, Any]:
        """As they are recorded: mean and std by channel, shares of values; the commonest token ids and how often each is there."""
        found: dict[str, Any] = {"num_rows": self.num_rows}
        if self.table.shape[1]:
            count = self.table[_COUNT]
            mean = self.table[_SUM] / count
            variance = (self.table[_SQUARES] / count - mean**2).clamp(min=0)
            total = float(count.sum())
            shares = {"zeros": _ZERO, "negative": _NEGATIVE}
            found |= {
                "shape": self.shape.tolist(),
                "min": _short(float(self.table[_MIN].min())),
                "max": _short(float(self.table[_MAX].max())),
                "mean": [_short(value) for value in mean.tolist()],
                "std": [_short(value) for value in variance.sqrt().tolist()],
                "mean_absolute": _short(float(self.table[_ABSOLUTE].sum()) / total),
                **{name: _short(float(self.table[place].sum()) / total) for name, place in shares.items()},
            }
        if self.tokens.shape[1]:
            ids, counts = self.tokens
            order = torch.argsort(counts, descending=True, stable=True)[:_NUM_TOKENS]  # ids ascend
            found["tokens"] = {
                "num": int(counts.sum()),
                "commonest": ids[order].tolist(),
                "counts": counts[order].tolist(),
            }
        return found


def _table(inputs: Tensor) -> Tensor:
    """(8, C) of images (n, C, H, W), or (8, 1) of other real inputs (n, ...)."""
    size = max(1, min(_ROWS, _VALUES // max(1, inputs[0].numel())))
    some = inputs[:: -(-len(inputs) // size)]
    has_channels = some.ndim == 4 and some.shape[1] <= _MOST_CHANNELS
    values = some.transpose(0, 1).flatten(1) if has_channels else some.reshape(1, -1)
    if not bool(values.sum().isfinite()):
        values = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    each = torch.full((len(values),), values.shape[1], device=values.device)
    counts = [(values < 0).sum(dim=1), each - values.count_nonzero(dim=1), each]
    sums = [values.sum(dim=1, dtype=torch.float64), values.double().square().sum(dim=1)]
    found: list[Tensor] = [*sums, values.abs().sum(dim=1, dtype=torch.float64), *counts, *values.aminmax(dim=1)]
    return torch.stack([one.double() for one in found]).cpu()


def _short(value: float) -> float:
    return float(f"{value:.6g}")

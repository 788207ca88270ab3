"""What a file takes and is checked with: features as they are stored, or the inputs that the run's data have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli import data
from bnncli.errors import DataError
from bnncli.export.graphs import FEATURES, INPUTS, has_length
from bnncli.export.network import FeatureNetwork, Halved
from bnncli.lazy import torch
from bnncli.models.huggingface import with_plain_attention
from bnncli.session.inputs import Split
from bnncli.session.network_splits import NetworkReader
from bnncli.session.run import Run

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_ROWS = 2000  # of a split that a whole network is checked on: each is a pass, twice
BATCH = 256


@dataclass(frozen=True)
class GoesIn:
    """What goes into a file.

    Attributes:
        name: of the input, where it has no name of its own. rows: (n,) of the split, those that are checked.
        trunk: from inputs to features; None where features go in.
        read: inputs (B, ...) of the examples at some of the positions among `rows`.
        preprocessing: what of it is inside, in words.
        split: whose examples they are; None for features.
    """

    name: str
    rows: np.ndarray
    trunk: nn.Module | None
    preprocessing: str
    stored: Tensor | None = None
    split: data.InputSplit | None = None
    is_raw: bool = False

    def batches(self, most: int | None = None, *, size: int = BATCH) -> Iterator[data.Inputs]:
        """Inputs (B, ...) of the rows in order, at most so many of them, B at once."""
        count = len(self.rows) if most is None else min(most, len(self.rows))
        if self.stored is not None:
            for start in range(0, count, size):
                yield self.stored[self.rows[start : min(start + size, count)]].float()
            return
        assert self.split is not None
        if not self.is_raw:
            for batch in self.split.take(np.arange(count)).batches(size):
                yield batch.inputs
            return
        dataset: Any = getattr(self.split.dataset, "opened", self.split.dataset)
        for start in range(0, count, size):
            raw = dataset.read(self.split.rows[start : min(start + size, count)])[0]
            tensor = torch.as_tensor(np.ascontiguousarray(raw) if isinstance(raw, np.ndarray) else raw)
            yield tensor.float() if tensor.is_floating_point() else tensor

    def first(self, count: int) -> data.Inputs:
        """So many inputs: the first rows, from the start again where there are fewer."""
        found = next(self.batches(count, size=count))
        if isinstance(found, dict):
            return {name: one[torch.arange(count) % len(one)] for name, one in found.items()}
        return found[torch.arange(count) % len(found)]

    def described(self, example: data.Inputs) -> list[dict[str, Any]]:
        """As files say it, one entry an input."""
        named = example if isinstance(example, dict) else {self.name: example}
        has_names = isinstance(example, dict)
        return [
            {
                "name": name,
                "type": str(one.dtype).removeprefix("torch."),
                "shape": ["batch", "sequence"] if has_names and has_length(one) else ["batch", *one.shape[1:]],
                "preprocessing": self.preprocessing,
            }
            for name, one in named.items()
        ]


def features_in(split: Split) -> GoesIn:
    """Features of all rows."""
    rows = np.arange(len(split.content.features))
    return GoesIn(FEATURES, rows, None, "none: the file takes features", stored=split.stored)


def inputs_in(run: Run, split: Split, *, trusts_code: bool, is_halved: bool) -> GoesIn:
    """Inputs of at most MOST_ROWS rows, evenly spaced, and the network that made their features, on the CPU.

    Raises:
        Untrusted, MissingInput, DataError: the network or the data cannot be had, or cannot be exported.
    """
    header = split.content.header
    assert header is not None
    reader = NetworkReader(run, trusts_code)
    whole = reader.input_split(split, header)
    count = min(MOST_ROWS, len(whole))
    rows = np.arange(count) * len(whole) // count
    chosen, recorded = whole.take(rows), reader.recorded
    with recorded.visible():
        head = recorded.network.head(chosen)
        recorded.check_head(head)
        assert head is not None
        _check_padding(chosen)
        model = with_plain_attention(recorded.network.module.eval().requires_grad_(False).cpu())
    is_raw = _is_inside(chosen)
    trunk: nn.Module = FeatureNetwork(model, head, chosen.preprocess if is_raw else None).eval()
    trunk = Halved(trunk).eval() if is_halved else trunk
    words = _in_words(chosen.preprocess) if is_raw else "outside: the file takes inputs as the network does"
    return GoesIn(INPUTS, rows, trunk, words, split=chosen, is_raw=is_raw)


def _check_padding(split: data.InputSplit) -> None:
    """Pass where the network takes a batch as it is. Raises DataError where it sees each example without its padding."""
    if next(split.take(np.arange(1)).batches(1)).lengths is not None:
        raise DataError(
            "the network processes each example without its padding, which an exported file cannot",
            hint="export only the head: \0head_only\0",
            code="not_exportable",
        )


def _is_inside(split: data.InputSplit) -> bool:
    """Whether stored inputs can go in: arrays that no image library has to decode or resize."""
    done, is_sized = split.preprocess, split.dataset.is_sized
    is_plain = done.transform is None and split.shift is None and split.items == "arrays"
    return is_plain and (is_sized or (done.resize is None and done.crop is None)) and not _is_named(split)


def _is_named(split: data.InputSplit) -> bool:
    """Whether an example is several arrays by name."""
    dataset: Any = getattr(split.dataset, "opened", split.dataset)
    return isinstance(dataset.read(split.rows[:1])[0], Mapping)


def _in_words(done: data.Preprocess) -> str:
    parts = ["uint8 to [0, 1], channels first"]
    parts += [f"mean {', '.join(map(str, done.mean))}"] if done.mean else []
    parts += [f"std {', '.join(map(str, done.std))}"] if done.std else []
    return f"inside: {'; '.join(parts)}"

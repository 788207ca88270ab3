"""What a model brings, small enough to be worked out by hand: words numbered by their length, images by their brightness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from bnncli.data.transform import TransformedInputs


@dataclass(frozen=True)
class WordLengths:
    """Each word's length as its token id, zeros to `max_length`; the attention mask tells the words."""

    max_length: int = 4
    takes: str = "texts"
    mode: str = ""

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        words = [(item if isinstance(item, str) else " ".join(item)).split() for item in items]
        ids = np.zeros((len(items), self.max_length), np.int32)
        for row, each in enumerate(words):
            kept = each[: self.max_length]
            ids[row, : len(kept)] = [len(word) for word in kept]
        cut = sum(len(each) > self.max_length for each in words)
        return TransformedInputs({"input_ids": ids, "attention_mask": ids > 0}, cut)

    def to_json(self) -> dict[str, Any]:
        return {"tokenizer": "word lengths", "max_length": self.max_length}


@dataclass(frozen=True)
class Halved:
    """Images of any size as 2 x 2 pixels, channels first, in [-1, 1]."""

    mode: str = "RGB"
    takes: str = "images"

    def __call__(self, items: Sequence[Image.Image]) -> TransformedInputs:
        assert all(item.mode == self.mode for item in items)
        arrays = [np.array(item.resize((2, 2), Image.Resampling.BOX)).reshape(2, 2, -1) for item in items]
        return TransformedInputs(np.stack(arrays).transpose(0, 3, 1, 2) / 127.5 - 1)

    def to_json(self) -> dict[str, Any]:
        return {"processor": "halved", "mode": self.mode}

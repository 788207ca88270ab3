"""Forward passes in lower precision (torch.autocast), and how far they are from float32's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

AUTOCAST: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PrecisionLoss(NamedTuple):
    """What lower precision changes in the logits of some examples, against float32.

    Attributes:
        num_rows: examples compared.
        largest: greatest difference of a logit.
        spread: standard deviation of float32's logits about their mean over the classes; with one logit about zero.
        num_same: examples whose predicted class is the same.
    """

    num_rows: int
    largest: float
    spread: float
    num_same: int

    @classmethod
    def between(cls, logits: Tensor, exact: Tensor) -> PrecisionLoss:
        """Of logits (n, K) and float32's (n, K)."""
        is_single = exact.shape[1] == 1
        centered = exact if is_single else exact - exact.mean(dim=1, keepdim=True)
        classes = [one[:, 0] > 0 if is_single else one.argmax(dim=1) for one in (logits, exact)]
        return cls(
            len(exact),
            float((logits - exact).abs().max()),
            float(centered.double().square().mean().sqrt()),
            int((classes[0] == classes[1]).sum()),
        )

    def __str__(self) -> str:
        return (
            f"on the first {self.num_rows} rows, logits differ from float32 by at most {self.largest:.2g} "
            f"(spread of the logits: {self.spread:.2g}); {self.num_same} of {self.num_rows} predicted classes "
            "are the same"
        )

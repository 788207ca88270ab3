"""A linear classifier behind scalers of single features, as a network."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from bnncli.errors import DataError


class ScaledLinear(nn.Module):
    """Features (n, D), shifted and divided by, through a linear layer."""

    shift: Tensor
    scale: Tensor

    def __init__(self, head: nn.Linear, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("shift", shift)
        self.register_buffer("scale", scale)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (n, K) of inputs (n, D) or (n, ...)."""
        features = inputs.flatten(1)
        if features.shape[1] != self.head.in_features:
            raise DataError(
                f"the classifier expects {self.head.in_features} features, got inputs of shape {tuple(inputs.shape)}",
                code="wrong_inputs", hint="give the features that it was fitted on, such as \0data\0 train=npz:FILE",
            )  # fmt: skip
        logits: Tensor = self.head((features - self.shift) / self.scale)
        return logits


def linear_network(
    coefficients: np.ndarray, intercepts: np.ndarray | None, shift: np.ndarray | None, scale: np.ndarray | None
) -> nn.Module:
    """The network of coefficients (K, D), intercepts (K,) and what features (D,) are shifted and divided by."""
    num_outputs, num_features = coefficients.shape
    head = nn.Linear(num_features, num_outputs, bias=intercepts is not None)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(coefficients.astype(np.float32)))
        if intercepts is not None:
            head.bias.copy_(torch.from_numpy(intercepts.astype(np.float32)))
    before = [
        torch.full((num_features,), value) if array is None else torch.from_numpy(array.astype(np.float32))
        for array, value in ((shift, 0.0), (scale, 1.0))
    ]
    return ScaledLinear(head, *before).eval()

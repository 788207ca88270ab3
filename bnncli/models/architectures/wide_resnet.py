"""Wide residual networks, WRN-depth-width, for 32 x 32 images; WRN-16-4 by default.

Source: Zagoruyko, Komodakis 2016, "Wide residual networks" (arXiv 1605.07146), table 1, pre-activation blocks.
Keys: `conv1`, `block1.layer.0.bn1` ... `block3.layer.1.conv2`, `convShortcut` where the width changes, `bn1`, `fc`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bnncli.errors import UsageError


class PreActivationBlock(nn.Module):
    """Normalise, ReLU, convolve, twice; with a shortcut, through a 1 x 1 convolution if sizes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.convShortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if inputs != outputs else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, inputs, height, width) to (N, outputs, height / stride, width / stride)."""
        active = torch.relu(self.bn1(inputs))
        residual: Tensor = self.conv2(torch.relu(self.bn2(self.conv1(active))))
        return residual + (inputs if self.convShortcut is None else self.convShortcut(active))


class Stage(nn.Module):
    """Blocks of one width; the first has the stride."""

    def __init__(self, inputs: int, outputs: int, *, num_blocks: int, stride: int) -> None:
        super().__init__()
        first = PreActivationBlock(inputs, outputs, stride)
        self.layer = nn.Sequential(first, *(PreActivationBlock(outputs, outputs, 1) for _ in range(num_blocks - 1)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, inputs, height, width) to (N, outputs, height / stride, width / stride)."""
        outputs: Tensor = self.layer(inputs)
        return outputs


class WideResnet(nn.Module):
    """Three stages of (depth - 4) / 6 blocks, 16, 32 and 64 times `width` channels wide."""

    def __init__(self, depth: int, width: int, channels: int, classes: int) -> None:
        super().__init__()
        num_blocks = (depth - 4) // 6
        widths = [16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.block1 = Stage(16, widths[0], num_blocks=num_blocks, stride=1)
        self.block2 = Stage(widths[0], widths[1], num_blocks=num_blocks, stride=2)
        self.block3 = Stage(widths[1], widths[2], num_blocks=num_blocks, stride=2)
        self.bn1 = nn.BatchNorm2d(widths[2])
        self.fc = nn.Linear(widths[2], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, K) for images (N, channels, height, width)."""
        hidden = self.block3(self.block2(self.block1(self.conv1(images))))
        logits: Tensor = self.fc(torch.relu(self.bn1(hidden)).mean(dim=(2, 3)))
        return logits


def build(*, depth: int = 16, width: int = 4, channels: int = 3, classes: int = 10) -> nn.Module:
    """Return a wide residual network with random weights.

    Raises:
        UsageError: depth is not 6 n + 4 with n at least 1, or width is below 1.
    """
    if depth < 10 or (depth - 4) % 6 != 0:
        raise UsageError(f"depth: expected 10, 16, 22, 28, ... (6 n + 4); got {depth}")
    if width < 1:
        raise UsageError(f"width: expected at least 1, got {width}")
    return WideResnet(depth, width, channels, classes)


def arguments_from(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Infer all arguments of `build` from a state dict's shapes."""
    needed = ("conv1.weight", "block1.layer.0.conv1.weight", "fc.weight")
    if any(key not in state or state[key].ndim < 2 for key in needed):
        return {}
    stem, first, head = (state[key].shape for key in needed)
    num_blocks = sum(key.startswith("block1.layer.") and key.endswith(".conv1.weight") for key in state)
    width = max(first[0] // 16, 1)
    return {"depth": 6 * num_blocks + 4, "width": width, "channels": stem[1], "classes": head[0]}

"""ResNet-20 for 32 x 32 images, with parameter-free shortcuts.

Source: He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", section 4.2, shortcut option A.
Keys: `conv1`, `bn1`, `layer1.0.conv1` ... `layer3.2.bn2`, `linear`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDTHS = (16, 32, 64)
_BLOCKS_PER_STAGE = 3


class BasicBlock(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (N, inputs, height, width) to (N, outputs, height / stride, width / stride)."""
        hidden = torch.relu(self.bn1(self.conv1(inputs)))
        residual = self.bn2(self.conv2(hidden))
        return torch.relu(residual + self.shortcut(inputs))

    def shortcut(self, inputs: Tensor) -> Tensor:
        """Return the input subsampled by the stride, zero-padded in the channels, half before and half after."""
        if self.stride == 1 and self.padding == 0:
            return inputs
        sampled = inputs[:, :, :: self.stride, :: self.stride]
        return functional.pad(sampled, (0, 0, 0, 0, self.padding, self.padding))


class Resnet20(nn.Module):
    """Three stages of three blocks, 16, 32 and 64 channels wide, global average pooling, one linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        self.layer1 = _stage(_WIDTHS[0], _WIDTHS[0], stride=1)
        self.layer2 = _stage(_WIDTHS[0], _WIDTHS[1], stride=2)
        self.layer3 = _stage(_WIDTHS[1], _WIDTHS[2], stride=2)
        self.linear = nn.Linear(_WIDTHS[2], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, K) for images (N, channels, height, width)."""
        hidden = torch.relu(self.bn1(self.conv1(images)))
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        logits: Tensor = self.linear(hidden.mean(dim=(2, 3)))
        return logits


def _stage(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(_BLOCKS_PER_STAGE - 1)))


def build(*, channels: int = 3, classes: int = 10) -> nn.Module:
    """Return a ResNet-20 with random weights."""
    return Resnet20(channels, classes)


def arguments_from(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Infer the arguments of `build` from a state dict's shapes."""
    axes = {"channels": ("conv1.weight", 1), "classes": ("linear.weight", 0)}
    return {name: state[key].shape[axis] for name, (key, axis) in axes.items() if key in state and state[key].ndim}

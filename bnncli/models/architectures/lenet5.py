"""LeNet-5 with ReLU and max-pooling, for small grey images.

Source: LeCun, Bottou, Bengio, Haffner 1998, "Gradient-based learning applied to document recognition", with the
activations in use today. Keys: `features.0`, `features.3` (convolutions), `features.7`, `features.9` (linear), `ll`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class Lenet5(nn.Module):
    """Two convolutions of size 5 (6 and 16 channels), then 120, 84 and `classes` units."""

    def __init__(self, channels: int, flattened: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(flattened, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        self.ll = nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, K) for images (N, channels, height, width)."""
        logits: Tensor = self.ll(self.features(images))
        return logits


def build(*, channels: int = 1, flattened: int = 256, classes: int = 10) -> nn.Module:
    """Return a LeNet-5 with random weights; `flattened` is 256 for images of 28 x 28 and 400 for 32 x 32."""
    return Lenet5(channels, flattened, classes)


def arguments_from(state: Mapping[str, Tensor]) -> dict[str, int]:
    """Infer the arguments of `build` from a state dict's shapes."""
    axes = {
        "channels": ("features.0.weight", 1),
        "flattened": ("features.7.weight", 1),
        "classes": ("ll.weight", 0),
    }
    return {name: state[key].shape[axis] for name, (key, axis) in axes.items() if key in state and state[key].ndim}

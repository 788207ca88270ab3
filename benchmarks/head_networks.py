"""Small networks with random weights, one for each way in which the last step of a network is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

CLASSES, WIDTH = 3, 6


class Network(nn.Module):
    """Images (n, 3, 8, 8) to maps (n, 6, 8, 8), and what `after` makes of them with the layers of `parts`."""

    def __init__(self, parts: dict[str, Any], after: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
        for name, part in parts.items():
            setattr(self, name, part)
        self._after = after

    def forward(self, images: Tensor) -> Any:
        return self._after(self, self.body(images))


class LowRank(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 2), nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 0.5 * self.up(self.down(x))
        return y


def pooled(maps: Tensor) -> Tensor:
    return maps.mean((2, 3))


def linear(num_outputs: int = CLASSES) -> nn.Linear:
    return nn.Linear(WIDTH, num_outputs)


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def convolution(size: int = 1) -> nn.Conv2d:
    return nn.Conv2d(WIDTH, CLASSES, size)


class Output:
    """What is no tensor and has logits."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@dataclass(frozen=True)
class Form:
    """A network of our own.

    Attributes:
        parts: makes its layers.
        after: what it returns.
        words: of the command line.
        link: what it makes of its logits.
        of: which of its outputs they are.
    """

    parts: Callable[[], dict[str, Any]]
    after: Callable[[Any, Tensor], Any]
    words: tuple[str, ...] = ()
    link: Callable[[Tensor], Tensor] = lambda logits: logits
    of: Callable[[Any], Tensor] = lambda returned: returned


FORMS: dict[str, Form] = {
    "linear layer": Form(lambda: {"head": linear()}, lambda self, maps: self.head(pooled(maps))),
    "behind dropout, in a Sequential": Form(lambda: {"head": nn.Sequential(nn.Dropout(), linear())}, lambda self, maps: self.head(pooled(maps))),
    "1x1 convolution after pooling": Form(lambda: {"head": convolution()}, lambda self, maps: self.head(maps.mean((2, 3), keepdim=True)).flatten(1)),
    "1x1 convolution, then pooling": Form(lambda: {"head": convolution()}, lambda self, maps: self.head(maps).mean((2, 3))),
    "1x1 convolution over one position": Form(lambda: {"head": convolution()}, lambda self, maps: self.head(maps[:, :, :1, :1]).squeeze(3).squeeze(2)),
    "convolution over the whole map": Form(lambda: {"head": convolution(8)}, lambda self, maps: self.head(maps).flatten(1)),
    "functional linear": Form(
        lambda: {"weight": weights(CLASSES, WIDTH), "bias": weights(CLASSES)}, lambda self, maps: functional.linear(pooled(maps), self.weight, self.bias)
    ),
    "matrix product": Form(lambda: {"weight": weights(WIDTH, CLASSES), "bias": weights(CLASSES)}, lambda self, maps: pooled(maps) @ self.weight + self.bias),
    "tied weights": Form(lambda: {"words": nn.Embedding(CLASSES, WIDTH)}, lambda self, maps: pooled(maps) @ self.words.weight.T),
    "weight norm": Form(lambda: {"head": parametrizations.weight_norm(linear())}, lambda self, maps: self.head(pooled(maps))),
    "a dict": Form(lambda: {"head": linear()}, lambda self, maps: {"out": self.head(pooled(maps))}, of=lambda returned: returned["out"]),
    "an object with logits": Form(lambda: {"head": linear()}, lambda self, maps: Output(self.head(pooled(maps))), of=lambda returned: returned.logits),
    "two heads, one named": Form(
        lambda: {"first": linear(5), "second": linear()}, lambda self, maps: {"a": self.first(pooled(maps)), "b": self.second(pooled(maps))},
        ("--last-layer", "second"), of=lambda returned: returned["b"],
    ),
    "two heads, an output named": Form(
        lambda: {"first": linear(5), "second": linear()}, lambda self, maps: (self.first(pooled(maps)), self.second(pooled(maps))),
        ("--output", "1"), of=lambda returned: returned[1],
    ),
    "features and logits": Form(
        lambda: {"first": linear(5), "head": nn.Linear(5, CLASSES)}, lambda self, maps: ((x := self.first(pooled(maps))), self.head(x)),
        of=lambda returned: returned[1],
    ),
    "averaged heads": Form(
        lambda: {"heads": nn.ModuleList(linear() for _ in range(3))}, lambda self, maps: sum(head(pooled(maps)) for head in self.heads) / 3
    ),
    "an adapter of low rank": Form(lambda: {"head": LowRank()}, lambda self, maps: self.head(pooled(maps))),
    "batch norm after": Form(lambda: {"head": linear(), "norm": nn.BatchNorm1d(CLASSES)}, lambda self, maps: self.norm(self.head(pooled(maps)))),
    "scaled": Form(lambda: {"head": linear()}, lambda self, maps: self.head(pooled(maps)) / 4),
    "log-softmax": Form(lambda: {"head": linear()}, lambda self, maps: self.head(pooled(maps)).log_softmax(1), link=lambda x: x.log_softmax(1)),
    "softmax": Form(lambda: {"head": linear()}, lambda self, maps: self.head(pooled(maps)).softmax(1), link=lambda x: x.softmax(1)),
    "sigmoid of one output": Form(lambda: {"head": linear(1)}, lambda self, maps: self.head(pooled(maps)).sigmoid().squeeze(1), link=torch.sigmoid),
    "sigmoid of several labels": Form(
        lambda: {"head": linear()}, lambda self, maps: self.head(pooled(maps)).sigmoid(), ("--task", "multilabel"), link=torch.sigmoid
    ),
    "every position, the last taken": Form(lambda: {"head": linear()}, lambda self, maps: self.head(maps.flatten(2).mT)[:, -1]),
    "ReLU and average behind it": Form(
        lambda: {"head": convolution()}, lambda self, maps: self.head(maps).relu().mean((2, 3)), ("--last-layer", "identity")
    ),
}  # fmt: skip


def make(form: str) -> nn.Module:
    """The network of a form: the factory that the command line names."""
    return Network(FORMS[form].parts(), FORMS[form].after)


def drawn(network: nn.Module) -> Any:
    """In evaluation mode, with random weights and running averages."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(
                torch.randn(tensor.shape, generator=generator)
                / max(1, tensor[0].numel() if tensor.ndim > 1 else 1) ** 0.5
            )
            if name.endswith("running_var"):
                tensor.abs_().add_(0.1)
    return network.eval()

"""How the weights and biases of a fully connected network lie in theta, and its logits under many theta.

theta is what torch.nn.utils.parameters_to_vector gives for a chain of linear layers: each layer's weight (out, in)
row-major, then its bias. Without hidden layers that is the head's own layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood, likelihood_of, name_to_record, recorded_name
from bnncli.theta.head import HeadLayout
from bnncli.theta.layout import LogitMaker, ParamPart, consecutive, parts_to_json

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 2**18  # weights of a block


@dataclass(frozen=True)
class NetworkLayout:
    """Sizes of a network of linear layers with ReLU between them.

    Args:
        sizes: (D, hidden ..., K): inputs of the first layer, then outputs of each.
        likelihood_name: of the outputs' likelihood, None where their number says it.
    """

    sizes: tuple[int, ...]
    likelihood_name: str | None = None

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ValueError(f"a network needs at least one layer, and sizes from 1; got {self.sizes}")
        _ = self.likelihood  # an unknown name is told here

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each layer's weight."""
        return tuple((outputs, inputs) for inputs, outputs in pairwise(self.sizes))

    @property
    def num_layers(self) -> int:
        """Linear layers."""
        return len(self.sizes) - 1

    @property
    def num_features(self) -> int:
        """D."""
        return self.sizes[0]

    @property
    def num_outputs(self) -> int:
        """K."""
        return self.sizes[-1]

    @property
    def likelihood(self) -> Likelihood:
        """What the K logits say of a label."""
        return likelihood_of(self.num_outputs, self.likelihood_name)

    @property
    def num_classes(self) -> int:
        """Classes that the likelihood tells apart."""
        return self.likelihood.num_classes

    @property
    def widest(self) -> int:
        """Its classes, or its widest layer."""
        return max(self.num_classes, *self.sizes[1:])

    @property
    def num_weights(self) -> int:
        """Of all layers, without biases."""
        return sum(outputs * inputs for outputs, inputs in self.shapes)

    @property
    def num_biases(self) -> int:
        """Of all layers."""
        return sum(self.sizes[1:])

    @property
    def num_params(self) -> int:
        """P: weights and biases."""
        return self.num_weights + self.num_biases

    @property
    def head(self) -> HeadLayout | None:
        """The same as a head, where there is one layer alone."""
        if self.num_layers > 1:
            return None
        return HeadLayout(self.num_outputs, self.num_features, likelihood_name=self.likelihood_name)

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """Weight and bias of each layer."""
        found: list[tuple[str, tuple[int, ...], bool]] = []
        for index, shape in enumerate(self.shapes):
            found += [(f"layers.{index}.weight", shape, False), (f"layers.{index}.bias", shape[:1], True)]
        return consecutive(found)

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it: name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """The sizes as JSON."""
        return {"sizes": list(self.sizes), **name_to_record(self.likelihood_name)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> NetworkLayout:
        """The inverse of to_meta."""
        return cls(tuple(int(size) for size in meta["sizes"]), recorded_name(meta))

    def weights(self, flat: Tensor) -> list[Tensor]:
        """Each layer's weight (..., out, in), a view of the weights of all layers (..., W)."""
        parts = flat.split([outputs * inputs for outputs, inputs in self.shapes], dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def blocks(self, *flats: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Index of a layer and the same rows (R, rows, in) of its weight in each of (R, W): blocks that stay in a CPU's cache."""
        layers = [self.weights(flat) for flat in flats]
        for index, ((outputs, _), rows) in enumerate(zip(self.shapes, self._block_rows(flats[0]), strict=True)):
            for first in range(0, outputs, rows):
                yield index, [views[index][:, first : first + rows] for views in layers]

    def chunks(self, *flats: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """The same for work that is alike in all layers: 0, and the same columns (R, n) of each of (R, W), of any layers."""
        num_weights, size = flats[0].shape[1], self._chunk_size(flats[0])
        if size >= num_weights:
            yield 0, list(flats)
            return
        for first in range(0, num_weights, size):
            yield 0, [flat[:, first : first + size] for flat in flats]

    def _chunk_size(self, flat: Tensor) -> int:
        """Columns of a chunk."""
        return max(1, _BLOCK // flat.shape[0]) if flat.device.type == "cpu" else flat.shape[1]

    def _block_rows(self, flat: Tensor) -> list[int]:
        """Rows of each layer's blocks."""
        if flat.device.type != "cpu":
            return [outputs for outputs, _ in self.shapes]
        return [min(outputs, max(1, _BLOCK // (inputs * flat.shape[0]))) for outputs, inputs in self.shapes]

    def block_size(self, flat: Tensor) -> int:
        """Numbers in the largest block or chunk of (R, W)."""
        rows, chunk = self._block_rows(flat), min(self._chunk_size(flat), flat.shape[1])
        blocks = (count * inputs for count, (_, inputs) in zip(rows, self.shapes, strict=True))
        return flat.shape[0] * max(chunk, *blocks)

    def biases(self, flat: Tensor) -> list[Tensor]:
        """Each layer's bias (..., out), a view of the biases of all layers (..., B)."""
        return list(flat.split(list(self.sizes[1:]), dim=-1))

    def join(self, weights: Tensor, biases: Tensor) -> Tensor:
        """theta (..., P) of weights (..., W) and biases (..., B)."""
        parts: list[Tensor] = []
        for weight, bias in zip(self.weights(weights), self.biases(biases), strict=True):
            parts += [weight.flatten(-2), bias]
        return torch.cat(parts, dim=-1)

    def split(self, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's weight (..., out, in) and bias (..., out), views of theta (..., P)."""
        sizes: list[int] = []
        for outputs, inputs in self.shapes:
            sizes += [outputs * inputs, outputs]
        parts = theta.split(sizes, dim=-1)
        pairs = zip(parts[::2], parts[1::2], self.shapes, strict=True)
        return [(weight.unflatten(-1, shape), bias) for weight, bias, shape in pairs]

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of features (N, D) under theta (S, P)."""
        return apply_layers(features, self.split(theta))

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """The logits under each of theta (S, P), layer by layer; the center is the first network's, whatever the weights."""

        def at(features: Tensor) -> tuple[Tensor, Callable[[slice], Tensor]]:
            def logits(some: slice) -> Tensor:
                return self.logits(features, theta[some]).transpose(1, 2)

            return logits(slice(0, 1))[0], logits

        return at

    @property
    def takes_any_length(self) -> bool:
        """False."""
        return False

    def can_replace(self, head: HeadLayout) -> bool:
        """Whether a theta of this layout can stand where a network has such a head: it brings its own layers."""
        return True


def apply_layers(features: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Logits (S, N, K) of features (N, D) under weights (S, out, in) and biases (S, out), ReLU between the layers."""
    hidden: Tensor | None = None
    for weight, bias in layers:
        if hidden is None:
            # All draws share the features: one product.
            flat = features @ weight.reshape(-1, weight.shape[-1]).T
            hidden = flat.unflatten(1, weight.shape[:2]).transpose(0, 1) + bias.unsqueeze(1)
        else:
            hidden = torch.baddbmm(bias.unsqueeze(1), hidden.relu(), weight.transpose(1, 2))
    assert hidden is not None
    return hidden

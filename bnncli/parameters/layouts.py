"""How parameters lie in one flat vector theta: of a last layer, of a fully connected network, of plain vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood, likelihood_of, name_to_record, recorded_name

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleNetwork


class ParamPart(NamedTuple):
    """A weight or a bias in theta.

    Args:
        name: as posterior files have it.
        shape: of the tensor, which lies row-major.
        offset: its first place in theta.
        is_bias: whether its prior is that of the biases.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    is_bias: bool

    @property
    def place(self) -> slice:
        """Where it lies in theta."""
        return slice(self.offset, self.offset + math.prod(self.shape))


class ParamLayout(Protocol):
    """How parameters lie in theta (P,), whatever they are parameters of."""

    @property
    def num_params(self) -> int:
        """P."""

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """All of theta, in order."""

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it: name, shape and offset of each part."""

    def to_meta(self) -> dict[str, Any]:
        """Its sizes as JSON, from which a posterior that is read makes it again."""


class MatrixLayout(ParamLayout, Protocol):
    """How parameters lie that are one matrix (K, F): a row an output, a column a feature, the bias last where there is one."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def num_features(self) -> int:
        """D: F, less the bias."""

    @property
    def has_bias(self) -> bool:
        """Whether there is a column for the bias: F = D + 1."""

    def augment(self, theta: Tensor) -> Tensor:
        """The matrix (..., K, F) of theta (..., P)."""

    def flatten(self, augmented: Tensor) -> Tensor:
        """theta (..., P) of the matrix: the inverse of augment."""


# Given features (n, D): logits (K, n) near the middle of the draws, and a function that gives those of a slice of them, (s, K, n).
LogitMaker: TypeAlias = "Callable[[Tensor], tuple[Tensor, Callable[[slice], Tensor]]]"


class ClassifierLayout(ParamLayout, Protocol):
    """How parameters lie that turn features into logits: of a head, or of a network."""

    @property
    def num_features(self) -> int:
        """D."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def takes_any_length(self) -> bool:
        """Whether an input may have more or fewer numbers than D."""

    @property
    def likelihood_name(self) -> str | None:
        """The name of their likelihood, None where their number says it."""

    @property
    def likelihood(self) -> Likelihood:
        """What the K logits say of a label."""

    @property
    def num_classes(self) -> int:
        """Classes that the likelihood tells apart."""

    @property
    def widest(self) -> int:
        """The most numbers that an example has at once on its way to class probabilities."""

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of features (N, D) under theta (S, P)."""

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """The logits under each of theta (S, P), block by block; weights (S,) of the draws, None for equal ones."""

    def can_replace(self, head: HeadLayout) -> bool:
        """Whether a theta of this layout can stand where a network has such a head."""


class LogitLayout(ParamLayout, Protocol):
    """How parameters lie that turn inputs into logits, which are linear in them or can be linearised."""

    @property
    def num_outputs(self) -> int:
        """K."""

    @property
    def head(self) -> HeadLayout | None:
        """The same as a last layer, where it is one: its logits' Gaussian has short ways."""

    @property
    def network(self) -> ModuleNetwork | None:
        """The module that makes the logits, whose layers can be looked at one by one; None where none does."""

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of inputs (N, ...) under theta (S, P)."""

    def jacobian(self, features: Tensor, theta: Tensor) -> Tensor:
        """The logits' derivatives by theta, (N, K, P), at inputs (N, ...) and one theta (P,)."""


def consecutive(parts: Sequence[tuple[str, tuple[int, ...], bool]]) -> tuple[ParamPart, ...]:
    """Parts that lie one behind the other, of their names, shapes, and whether they are biases."""
    offsets = [0]
    for _, shape, _ in parts:
        offsets.append(offsets[-1] + math.prod(shape))
    return tuple(
        ParamPart(name, shape, offset, is_bias) for (name, shape, is_bias), offset in zip(parts, offsets, strict=False)
    )


def parts_to_json(parts: Sequence[ParamPart]) -> list[dict[str, object]]:
    """Parts as posterior files state them: name, shape and offset of each."""
    return [{"name": part.name, "shape": list(part.shape), "offset": part.offset} for part in parts]


def vector_layout(size: int) -> MatrixLayout:
    """The layout of so many numbers: one row, so that what couples the features of an output couples all of them."""
    return HeadLayout(1, size, has_bias=False)


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


@dataclass(frozen=True)
class HeadLayout:
    """Sizes of the last linear layer: K outputs, D features, with or without a bias; and what the outputs mean.

    Args:
        likelihood_name: of the outputs' likelihood, None where their number says it.
    """

    num_outputs: int
    num_features: int
    has_bias: bool = True
    likelihood_name: str | None = None

    def __post_init__(self) -> None:
        if self.num_outputs < 1 or self.num_features < 1:
            raise ValueError(f"a head needs at least one output and one feature, got {self!r}")
        _ = self.likelihood  # an unknown name is told here

    def __str__(self) -> str:
        outputs = f"{self.num_outputs} output{'s' * (self.num_outputs > 1)}"
        meant = "" if self.likelihood_name is None else f" ({self.likelihood_name})"
        return f"{outputs} of {self.num_features} features{'' if self.has_bias else ', without bias'}{meant}"

    @property
    def num_params(self) -> int:
        """P: K * D, plus K with a bias."""
        return self.num_outputs * (self.num_features + self.has_bias)

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
        """Its classes."""
        return self.num_classes

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight (..., K, D) and bias (..., K), or None, as views of theta (..., P)."""
        size = self.num_outputs * self.num_features
        weight = theta[..., :size].unflatten(-1, (self.num_outputs, self.num_features))
        return weight, theta[..., size:] if self.has_bias else None

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """theta (..., P) from weight (..., K, D) and bias (..., K); the inverse of split."""
        flat = weight.flatten(-2)
        return flat if bias is None else torch.cat([flat, bias], dim=-1)

    def augment(self, theta: Tensor) -> Tensor:
        """theta (..., P) as one matrix (..., K, D + 1) whose last column is the bias; (..., K, D) without a bias."""
        weight, bias = self.split(theta)
        return weight if bias is None else torch.cat([weight, bias.unsqueeze(-1)], dim=-1)

    def flatten(self, augmented: Tensor) -> Tensor:
        """theta (..., P) from the matrix that augment made."""
        if not self.has_bias:
            return augmented.flatten(-2)
        return self.join(augmented[..., :-1], augmented[..., -1])

    def augment_features(self, features: Tensor) -> Tensor:
        """Features (N, D) with a column of ones for the bias, (N, D + 1); unchanged without a bias."""
        if not self.has_bias:
            return features
        return torch.cat([features, features.new_ones(features.shape[0], 1)], dim=1)

    def places(self, device: torch.device) -> Tensor:
        """Where each output's parameters (the bias last) lie in theta, (K, D + 1); (K, D) without a bias."""
        return self.augment(torch.arange(self.num_params, device=device))

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Logits (S, N, K) of features (N, D) under theta (S, P), as one matrix product."""
        weight, bias = self.split(theta)
        stacked = weight.reshape(-1, self.num_features)
        flat = features @ stacked.T
        out = flat.unflatten(1, (theta.shape[0], self.num_outputs)).transpose(0, 1)
        return out if bias is None else out + bias.unsqueeze(1)

    @property
    def network(self) -> None:
        """None: features times weights."""
        return None

    @property
    def head(self) -> HeadLayout:
        """Itself."""
        return self

    def jacobian(self, features: Tensor, theta: Tensor | None = None) -> Tensor:
        """The logits' derivatives by theta, (N, K, P), at features (N, D) and any theta.

        An output's parameters move that output alone.
        """
        outputs = torch.eye(self.num_outputs, dtype=features.dtype, device=features.device)
        rows = outputs.unsqueeze(2) * self.augment_features(features)[:, None, None]
        return self.flatten(rows)

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """The logits under each of theta (S, P), one product for all; the center is at their mean, weighted by weights (S,)."""
        augmented = self.augment(theta)
        if weights is None:
            center = augmented.mean(dim=0)
        else:
            center = torch.tensordot(weights.to(theta), augmented, dims=1)

        def at(features: Tensor) -> tuple[Tensor, Callable[[slice], Tensor]]:
            columns = self.augment_features(features).T

            def logits(some: slice) -> Tensor:
                chunk = augmented[some]
                return (chunk.flatten(0, 1) @ columns).unflatten(0, chunk.shape[:2])

            return center @ columns, logits

        return at

    @property
    def takes_any_length(self) -> bool:
        """False."""
        return False

    def can_replace(self, head: HeadLayout) -> bool:
        """Whether a theta of this layout can stand where a network has such a head: one of the same, or with a bias beside."""
        return self == head or (self.has_bias and replace(self, has_bias=False) == head)

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """The weight, and the bias where there is one."""
        weight = ("head.weight", (self.num_outputs, self.num_features), False)
        return consecutive([weight, ("head.bias", (self.num_outputs,), True)] if self.has_bias else [weight])

    def to_json(self) -> list[dict[str, object]]:
        """The layout as posterior files state it: name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """The sizes as JSON."""
        sizes = {"num_outputs": self.num_outputs, "num_features": self.num_features, "has_bias": self.has_bias}
        return {**sizes, **name_to_record(self.likelihood_name)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> HeadLayout:
        """The inverse of to_meta."""
        sizes = int(meta["num_outputs"]), int(meta["num_features"])
        return cls(*sizes, bool(meta["has_bias"]), recorded_name(meta))


def reduced_layout(layout: HeadLayout, rank: int) -> HeadLayout:
    """The layout of theta inside a span of so many dimensions of the features."""
    return replace(layout, num_features=rank)

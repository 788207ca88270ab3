"""Layouts of parameters in one flat vector theta: of a last layer, of a fully connected network, of plain vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from bnncli.lazy import torch
from bnncli.likelihoods import Likelihood, likelihood_of, name_to_record, read_recorded_name

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleNetwork


class ParamPart(NamedTuple):
    """A weight or bias in theta.

    Args:
        name: as in posterior files.
        shape: of the tensor, in row-major order.
        offset: its first index in theta.
        is_bias: whether it has the prior of the biases.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    is_bias: bool

    @property
    def place(self) -> slice:
        """Its slice of theta."""
        return slice(self.offset, self.offset + math.prod(self.shape))


class ParamLayout(Protocol):
    """The layout of any parameters in theta (P,)."""

    @property
    def num_params(self) -> int:
        """Number of parameters, P."""

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """The parts of theta, in order."""

    def to_json(self) -> list[dict[str, object]]:
        """Return the layout for posterior files: name, shape and offset of each part."""

    def to_meta(self) -> dict[str, Any]:
        """Return the sizes as JSON, from which a posterior's layout is rebuilt."""


class MatrixLayout(ParamLayout, Protocol):
    """The layout of a matrix (K, F): one row per output, one column per feature, optional bias last."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs, K."""

    @property
    def num_features(self) -> int:
        """Number of features without the bias, D."""

    @property
    def has_bias(self) -> bool:
        """Return whether there is a bias column: F = D + 1."""

    def augment(self, theta: Tensor) -> Tensor:
        """Return the matrix (..., K, F) of theta (..., P)."""

    def flatten(self, augmented: Tensor) -> Tensor:
        """Return theta (..., P) of the matrix: the inverse of augment."""


# From features (n, D): logits (K, n) at a centre of the draws, and a function that returns those of a slice of draws,
# (s, K, n).
LogitMaker: TypeAlias = "Callable[[Tensor], tuple[Tensor, Callable[[slice], Tensor]]]"


class ClassifierLayout(ParamLayout, Protocol):
    """The layout of parameters that map features to logits: of a head, or of a network."""

    @property
    def num_features(self) -> int:
        """Number of features, D."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs, K."""

    @property
    def takes_any_length(self) -> bool:
        """Return whether inputs may have another length than D."""

    @property
    def likelihood_name(self) -> str | None:
        """Name of the likelihood; None if implied by the number of outputs."""

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the labels given the K logits."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the likelihood."""

    @property
    def widest(self) -> int:
        """Largest number of values that an example has at once on its way to class probabilities."""

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Return logits (S, N, K) for features (N, D) under theta (S, P)."""

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """Return the logits under each theta (S, P), block by block; weights (S,) of the draws, None for equal ones."""

    def can_replace(self, head: HeadLayout) -> bool:
        """Return whether a theta of this layout can replace such a head of a network."""


class LogitLayout(ParamLayout, Protocol):
    """The layout of parameters whose logits are linear in them, or can be linearised."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs, K."""

    @property
    def head(self) -> HeadLayout | None:
        """The layout as a last layer if it is one, which allows shortcuts for the logits' Gaussian."""

    @property
    def network(self) -> ModuleNetwork | None:
        """The module that computes the logits, with layers to inspect; None without one."""

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Return logits (S, N, K) for inputs (N, ...) under theta (S, P)."""

    def jacobian(self, features: Tensor, theta: Tensor) -> Tensor:
        """Return the derivatives of the logits with respect to theta, (N, K, P), at inputs (N, ...) and one theta (P,)."""


def consecutive_parts(parts: Sequence[tuple[str, tuple[int, ...], bool]]) -> tuple[ParamPart, ...]:
    """Return consecutive parts, given names, shapes, and whether they are biases."""
    offsets = [0]
    for _, shape, _ in parts:
        offsets.append(offsets[-1] + math.prod(shape))
    return tuple(
        ParamPart(name, shape, offset, is_bias) for (name, shape, is_bias), offset in zip(parts, offsets, strict=False)
    )


def parts_to_json(parts: Sequence[ParamPart]) -> list[dict[str, object]]:
    """Return parts for posterior files: name, shape and offset of each."""
    return [{"name": part.name, "shape": list(part.shape), "offset": part.offset} for part in parts]


def vector_layout(size: int) -> MatrixLayout:
    """Return the layout of a plain vector: one row, so that structures that couple an output's features couple all of it."""
    return HeadLayout(1, size, has_bias=False)


_BLOCK = 2**18  # weights of a block


@dataclass(frozen=True)
class NetworkLayout:
    """Sizes of a network of linear layers with ReLU between them.

    Args:
        sizes: (D, hidden ..., K): inputs of the first layer, then outputs of each.
        likelihood_name: of the outputs; None if implied by their number.
    """

    sizes: tuple[int, ...]
    likelihood_name: str | None = None

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise ValueError(f"a network needs at least one layer, and sizes from 1; got {self.sizes}")
        _ = self.likelihood  # raises for an unknown name

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of each layer's weight."""
        return tuple((outputs, inputs) for inputs, outputs in pairwise(self.sizes))

    @property
    def num_layers(self) -> int:
        """Number of linear layers."""
        return len(self.sizes) - 1

    @property
    def num_features(self) -> int:
        """Number of features, D."""
        return self.sizes[0]

    @property
    def num_outputs(self) -> int:
        """Number of outputs, K."""
        return self.sizes[-1]

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the labels given the K logits."""
        return likelihood_of(self.num_outputs, self.likelihood_name)

    @property
    def num_classes(self) -> int:
        """Number of classes of the likelihood."""
        return self.likelihood.num_classes

    @property
    def widest(self) -> int:
        """Number of classes, or width of the widest layer."""
        return max(self.num_classes, *self.sizes[1:])

    @property
    def num_weights(self) -> int:
        """Number of weights in all layers, without biases."""
        return sum(outputs * inputs for outputs, inputs in self.shapes)

    @property
    def num_biases(self) -> int:
        """Number of biases in all layers."""
        return sum(self.sizes[1:])

    @property
    def num_params(self) -> int:
        """Number of weights and biases, P."""
        return self.num_weights + self.num_biases

    @property
    def head(self) -> HeadLayout | None:
        """The layout as a head if there is only one layer."""
        if self.num_layers > 1:
            return None
        return HeadLayout(self.num_outputs, self.num_features, likelihood_name=self.likelihood_name)

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """Weight and bias of each layer."""
        found: list[tuple[str, tuple[int, ...], bool]] = []
        for index, shape in enumerate(self.shapes):
            found += [(f"layers.{index}.weight", shape, False), (f"layers.{index}.bias", shape[:1], True)]
        return consecutive_parts(found)

    def to_json(self) -> list[dict[str, object]]:
        """Return the layout for posterior files: name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """Return the sizes as JSON."""
        return {"sizes": list(self.sizes), **name_to_record(self.likelihood_name)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> NetworkLayout:
        """Invert to_meta."""
        return cls(tuple(int(size) for size in meta["sizes"]), read_recorded_name(meta))

    def weights(self, flat: Tensor) -> list[Tensor]:
        """Return each layer's weight (..., out, in), as views of all weights (..., W)."""
        parts = flat.split([outputs * inputs for outputs, inputs in self.shapes], dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def blocks(self, *flats: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield a layer's index and the same rows (R, rows, in) of its weight in each of (R, W), in cache-sized blocks."""
        layers = [self.weights(flat) for flat in flats]
        for index, ((outputs, _), rows) in enumerate(zip(self.shapes, self._block_rows(flats[0]), strict=True)):
            for first in range(0, outputs, rows):
                yield index, [views[index][:, first : first + rows] for views in layers]

    def chunks(self, *flats: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield 0 and the same columns (R, n) of each of (R, W), across layers, for work that is equal in all layers."""
        num_weights, size = flats[0].shape[1], self._chunk_size(flats[0])
        if size >= num_weights:
            yield 0, list(flats)
            return
        for first in range(0, num_weights, size):
            yield 0, [flat[:, first : first + size] for flat in flats]

    def _chunk_size(self, flat: Tensor) -> int:
        """Return the columns per chunk."""
        return max(1, _BLOCK // flat.shape[0]) if flat.device.type == "cpu" else flat.shape[1]

    def _block_rows(self, flat: Tensor) -> list[int]:
        """Return the rows of each layer's blocks."""
        if flat.device.type != "cpu":
            return [outputs for outputs, _ in self.shapes]
        return [min(outputs, max(1, _BLOCK // (inputs * flat.shape[0]))) for outputs, inputs in self.shapes]

    def block_size(self, flat: Tensor) -> int:
        """Return the size of the largest block or chunk of (R, W)."""
        rows, chunk = self._block_rows(flat), min(self._chunk_size(flat), flat.shape[1])
        blocks = (count * inputs for count, (_, inputs) in zip(rows, self.shapes, strict=True))
        return flat.shape[0] * max(chunk, *blocks)

    def biases(self, flat: Tensor) -> list[Tensor]:
        """Return each layer's bias (..., out), as views of all biases (..., B)."""
        return list(flat.split(list(self.sizes[1:]), dim=-1))

    def join(self, weights: Tensor, biases: Tensor) -> Tensor:
        """Return theta (..., P) from weights (..., W) and biases (..., B)."""
        parts: list[Tensor] = []
        for weight, bias in zip(self.weights(weights), self.biases(biases), strict=True):
            parts += [weight.flatten(-2), bias]
        return torch.cat(parts, dim=-1)

    def split(self, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's weight (..., out, in) and bias (..., out), as views of theta (..., P)."""
        sizes: list[int] = []
        for outputs, inputs in self.shapes:
            sizes += [outputs * inputs, outputs]
        parts = theta.split(sizes, dim=-1)
        pairs = zip(parts[::2], parts[1::2], self.shapes, strict=True)
        return [(weight.unflatten(-1, shape), bias) for weight, bias, shape in pairs]

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Return logits (S, N, K) for features (N, D) under theta (S, P)."""
        return apply_layers(features, self.split(theta))

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """Return the logits under each theta (S, P), layer by layer; the centre is the first network's, for any weights."""

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
        """Return True: it replaces all layers."""
        return True


def apply_layers(features: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return logits (S, N, K) for features (N, D) under weights (S, out, in) and biases (S, out), with ReLU between layers."""
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
    """Sizes of the last linear layer: K outputs, D features, with or without bias; and the meaning of the outputs.

    Args:
        likelihood_name: of the outputs; None if implied by their number.
    """

    num_outputs: int
    num_features: int
    has_bias: bool = True
    likelihood_name: str | None = None

    def __post_init__(self) -> None:
        if self.num_outputs < 1 or self.num_features < 1:
            raise ValueError(f"a head needs at least one output and one feature, got {self!r}")
        _ = self.likelihood  # raises for an unknown name

    def __str__(self) -> str:
        outputs = f"{self.num_outputs} output{'s' * (self.num_outputs > 1)}"
        meant = "" if self.likelihood_name is None else f" ({self.likelihood_name})"
        return f"{outputs} of {self.num_features} features{'' if self.has_bias else ', without bias'}{meant}"

    @property
    def num_params(self) -> int:
        """Number of parameters, P: K * D, plus K with a bias."""
        return self.num_outputs * (self.num_features + self.has_bias)

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the labels given the K logits."""
        return likelihood_of(self.num_outputs, self.likelihood_name)

    @property
    def num_classes(self) -> int:
        """Number of classes of the likelihood."""
        return self.likelihood.num_classes

    @property
    def widest(self) -> int:
        """Number of classes."""
        return self.num_classes

    def split(self, theta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight (..., K, D) and bias (..., K), or None, as views of theta (..., P)."""
        size = self.num_outputs * self.num_features
        weight = theta[..., :size].unflatten(-1, (self.num_outputs, self.num_features))
        return weight, theta[..., size:] if self.has_bias else None

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return theta (..., P) from weight (..., K, D) and bias (..., K); the inverse of split."""
        flat = weight.flatten(-2)
        return flat if bias is None else torch.cat([flat, bias], dim=-1)

    def augment(self, theta: Tensor) -> Tensor:
        """Return theta (..., P) as a matrix (..., K, D + 1) whose last column is the bias; (..., K, D) without a bias."""
        weight, bias = self.split(theta)
        return weight if bias is None else torch.cat([weight, bias.unsqueeze(-1)], dim=-1)

    def flatten(self, augmented: Tensor) -> Tensor:
        """Return theta (..., P) from the matrix of augment."""
        if not self.has_bias:
            return augmented.flatten(-2)
        return self.join(augmented[..., :-1], augmented[..., -1])

    def augment_features(self, features: Tensor) -> Tensor:
        """Return features (N, D) with a column of ones for the bias, (N, D + 1); unchanged without a bias."""
        if not self.has_bias:
            return features
        return torch.cat([features, features.new_ones(features.shape[0], 1)], dim=1)

    def places(self, device: torch.device) -> Tensor:
        """Return the indices in theta of each output's parameters, bias last, (K, D + 1); (K, D) without a bias."""
        return self.augment(torch.arange(self.num_params, device=device))

    def logits(self, features: Tensor, theta: Tensor) -> Tensor:
        """Return logits (S, N, K) for features (N, D) under theta (S, P), as one matrix product."""
        weight, bias = self.split(theta)
        stacked = weight.reshape(-1, self.num_features)
        flat = features @ stacked.T
        out = flat.unflatten(1, (theta.shape[0], self.num_outputs)).transpose(0, 1)
        return out if bias is None else out + bias.unsqueeze(1)

    @property
    def network(self) -> None:
        """None: the logits are features times weights."""
        return None

    @property
    def head(self) -> HeadLayout:
        """The layout itself."""
        return self

    def jacobian(self, features: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the derivatives of the logits with respect to theta, (N, K, P), at features (N, D) and any theta.

        An output depends only on its own parameters.
        """
        outputs = torch.eye(self.num_outputs, dtype=features.dtype, device=features.device)
        rows = outputs.unsqueeze(2) * self.augment_features(features)[:, None, None]
        return self.flatten(rows)

    def logit_draws(self, theta: Tensor, weights: Tensor | None = None) -> LogitMaker:
        """Return the logits under each theta (S, P), as one product; the centre is at their mean, weighted by weights (S,)."""
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
        """Return whether a theta of this layout can replace such a head of a network: equal, or with an additional bias."""
        return self == head or (self.has_bias and replace(self, has_bias=False) == head)

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """The weight, and the bias if there is one."""
        weight = ("head.weight", (self.num_outputs, self.num_features), False)
        return consecutive_parts([weight, ("head.bias", (self.num_outputs,), True)] if self.has_bias else [weight])

    def to_json(self) -> list[dict[str, object]]:
        """Return the layout for posterior files: name, shape and offset of each part."""
        return parts_to_json(self.parts)

    def to_meta(self) -> dict[str, Any]:
        """Return the sizes as JSON."""
        sizes = {"num_outputs": self.num_outputs, "num_features": self.num_features, "has_bias": self.has_bias}
        return {**sizes, **name_to_record(self.likelihood_name)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> HeadLayout:
        """Invert to_meta."""
        sizes = int(meta["num_outputs"]), int(meta["num_features"])
        return cls(*sizes, bool(meta["has_bias"]), read_recorded_name(meta))


def reduced_layout(layout: HeadLayout, rank: int) -> HeadLayout:
    """Return the layout of theta inside a span of `rank` dimensions of the features."""
    return replace(layout, num_features=rank)

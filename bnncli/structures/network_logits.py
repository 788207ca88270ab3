"""The covariance of a network's logits under a Sigma with one block per layer: sum_l J_l Sigma_l J_l^T.

One forward and K backward passes over a block of examples record each layer's inputs, and its output gradients for each
output. From these, the Jacobian in a layer's weights, (n, K, P_l), is formed one layer at a time; that in all of theta
never is. A weight used once per example needs no Jacobian either: J_l Sigma_l J_l^T = G diag(v) G^T, with G (K,
outputs) the output gradients and v the variances of the layer's outputs, in the basis in which Sigma_l is diagonal.

A search for the prior precision tau needs C(tau) = J (H + tau I)^-1 J^T = sum_i c_i c_i^T / (s_i + tau) at many tau. One
pass computes C at fixed precisions tau_g, and C(tau) is interpolated as sum_g w_g C(tau_g), with the weights for which
sum_g w_g / (s + tau_g) is closest to 1 / (s + tau) over all s from 0 to infinity. The largest relative error there bounds
the error of C(tau) in every direction, so it stays positive definite. This holds for every H, and if only the weights
have the precision tau: parameters with another precision contribute as s = infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from bnncli.lazy import torch
from bnncli.numerics.random import row_keys
from bnncli.parameters.layouts import ParamPart
from bnncli.parameters.module import ModuleLayout
from bnncli.structures import Covariance
from bnncli.structures.logits import Pulled
from bnncli.structures.network_sums import (
    Piece,
    coordinates,
    find_checked,
    forward,
    gradients,
    matrices_of,
    place_of,
    row_coordinates,
    scales_of,
)
from bnncli.system.signals import raise_if_interrupted
from bnncli.targets.blocks import slices

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleNetwork


_CACHED_COVARIANCES = 2**25  # values of the logits' covariances that are cached, at most
_BLOCK_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}  # of a block of examples: recorded values, gradients and Jacobians


class BlockRoot(Protocol):
    """L^T of one block of Sigma, applied to Jacobians.

    Attributes:
        num_copies: peak number of four-byte values per element of the Jacobian, including the Jacobian.
    """

    num_copies: ClassVar[int]

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return roots (n, K, r) from Jacobians (n, K, p)."""

    def turn(self, layer: MatrixDerivatives) -> Turned:
        """Return the Jacobian in the bases in which the block is simple, if the block is that of one matrix."""

    def of_turned(self, turned: Turned) -> Tensor:
        """Return roots (n, K, r) from a Jacobian in these bases."""

    def turns_as(self, other: BlockRoot) -> bool:
        """Return whether another block at the same place has the same bases."""

    @property
    def spectrum(self) -> tuple[Tensor, float] | None:
        """Curvature (outputs, F) along the bases, and the precision added to it; None if they do not give the variances."""


Blocks: TypeAlias = "Callable[[Sequence[slice]], Sequence[tuple[slice, BlockRoot]]]"


def by_layer(
    layout: ModuleLayout, theta: Tensor, blocks: Blocks, known: Callable[[Tensor], Tensor] | None = None
) -> Pulled:
    """Return sum_l J_l Sigma_l J_l^T for a network linearised at theta (P,).

    Args:
        blocks: returns the blocks of Sigma and their places in theta, given the places of parameters that are used
            together.
        known: returns the covariances of inputs from a cache, (n, K, K), in place of `blocks`.
    """
    every = _each_block(layout, theta, [blocks])
    cached: list[Kept] = []

    def roots(inputs: Tensor) -> Iterator[Iterable[Tensor]]:
        if not len(inputs):
            yield (inputs.new_zeros(0, layout.num_outputs, 1),)
            return
        for derivatives, places in every(inputs):
            yield chain.from_iterable(derivatives.roots(place, of) for place, of in places)

    def recall(inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        if known is not None:
            return known(inputs)
        logits = None if layout.network is None else layout.network.kept.get(LOGITS)
        if logits is None or logits.most * layout.num_outputs**2 > _CACHED_COVARIANCES:
            return None
        if not cached:
            cached.append(Kept(logits.most))
        block = cached[0].block(inputs)
        if block is None or not len(inputs):
            return None
        if not block.is_known:
            block.put(LOGITS, Rows(compute(inputs)))
            block.finish()
        found: Tensor = block.get(LOGITS).rows
        return found

    return Pulled(roots, recall)


def by_layer_together(layout: ModuleLayout, theta: Tensor, candidates: Sequence[Blocks]) -> Callable[[Tensor], Tensor]:
    """Return a function from inputs (n, ...) to covariances for several Sigma, (C, n, K, K) float64; computes J once.

    Args:
        candidates: the blocks of each Sigma, all with the same places.
    """
    every = _each_block(layout, theta, candidates)
    bins: dict[int, _Bins | None] = {}

    def covariances(inputs: Tensor) -> Tensor:
        if not len(inputs):
            return inputs.new_zeros(len(candidates), 0, *[layout.num_outputs] * 2, dtype=torch.float64)
        found = []
        for derivatives, places in every(inputs):
            total: Tensor | None = None
            for place, blocks in places:
                if place.start not in bins:
                    bins[place.start] = _Bins.of(blocks)
                squares = derivatives.squares(place, blocks, bins[place.start])
                total = squares if total is None else total.add_(squares)
            assert total is not None
            found.append(total)
        return torch.cat(found, dim=1)

    return covariances


def _each_block(
    layout: ModuleLayout, theta: Tensor, candidates: Sequence[Blocks]
) -> Callable[[Tensor], Iterator[tuple[_Derivatives, list[tuple[slice, list[BlockRoot]]]]]]:
    """Return a function that yields, for each block of inputs, the Jacobian there, and the places with each Sigma's block."""
    found: list[_Parts] = []  # filled at the first inputs

    def every_block(inputs: Tensor) -> Iterator[tuple[_Derivatives, list[tuple[slice, list[BlockRoot]]]]]:
        at = theta.to(inputs.device, inputs.dtype if inputs.is_floating_point() else torch.float32)
        kept = find_cache(layout, at, DERIVATIVES)
        if not found:
            found.append(_Parts.of(layout, at, inputs) if kept is None or kept.beside is None else kept.beside[0])
        parts = found[0]
        every = [list(blocks(parts.places)) for blocks in candidates]
        first = [root for _, root in every[0]]
        if kept is not None:
            kept.beside = kept.beside or (parts, first)
            before = kept.beside[1]
            if len(first) != len(before) or not all(map(lambda own, other: own.turns_as(other), first, before)):
                kept = None
        largest = max(root.num_copies * (place.stop - place.start) for place, root in every[0])
        num_others = sum(math.prod(part.shape) for part in parts.others)
        places = [(of[0][0], [root for _, root in of]) for of in zip(*every, strict=True)]
        for some in slices(0, len(inputs), block_size(layout, largest, inputs.device, num_others)[0]):
            raise_if_interrupted("the logits' covariance")
            own = None if kept is None else kept.block(inputs[some])
            yield _Derivatives(layout, at, inputs[some], parts, own), places
            if own is not None:
                own.finish()

    return every_block


class _Parts(NamedTuple):
    """Parts of the Jacobian, each computed in its own way.

    Args:
        known: pieces of modules that use the recorded inputs and gradients.
        others: parameters that need an explicit Jacobian.
        places: in theta, of each piece and parameter, in theta order.
    """

    known: list[Piece]
    others: list[ParamPart]
    places: list[slice]

    @classmethod
    def of(cls, layout: ModuleLayout, theta: Tensor, inputs: Tensor) -> _Parts:
        """Check the pieces at theta (P,), on the first of inputs (n, ...)."""
        known = find_checked(layout, theta, inputs, [*matrices_of(layout), *scales_of(layout)])
        taken = {part.name for piece in known for part in piece.parts}
        others = [part for part in layout.parts if part.name not in taken]
        places = [place_of(piece) for piece in known] + [part.place for part in others]
        return cls(known, others, sorted(places, key=lambda place: place.start))


def block_size(layout: ModuleLayout, largest: int, device: torch.device, num_others: int) -> tuple[int, int]:
    """Return the number of examples in a block, and of values per example.

    Args:
        largest: values per output in the largest block of Sigma.
        num_others: parameters that need an explicit Jacobian, by one backward pass per output, stored separately and
            joined.
    """
    rows = 2 * num_others + layout.widest if num_others else 0
    each = layout.num_outputs * (layout.own_outputs + largest + rows) + 2 * layout.widest
    return max(1, _BLOCK_ELEMENTS.get(device.type, 2**26) // each), each


class MatrixDerivatives(NamedTuple):
    """Jacobian of the logits in a weight (outputs, F) that acts as a matrix, with the bias as a column.

    Args:
        place: in theta.
        uses: each with its output gradients, (n, K, ...).
    """

    place: slice
    uses: list[tuple[Any, Tensor]]

    def in_bases(self, outputs: Tensor | None = None, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the coordinates of output gradients g in U, (n, K, outputs, T), and of inputs x in V, (n, F, T)."""
        slopes, columns = [], []
        for use, of in self.uses:
            columns.append(use.columns() if features is None else use.in_basis(features.to(of)))
            slopes.append(use.outputs(of.flatten(0, 1)).unflatten(0, of.shape[:2]))
        back, going = (one[0] if len(one) == 1 else torch.cat(one, dim=-1) for one in (slopes, columns))
        return (back if outputs is None else coordinates(outputs.to(back), back)), going

    def turned(self, outputs: Tensor, features: Tensor) -> Turned:
        """Return U^T g and V^T x if there is one position, else the sum of their products, as it takes less work."""
        back = [use.outputs(of.flatten(0, 1)).unflatten(0, of.shape[:2]) for use, of in self.uses]
        num_positions = sum(one.shape[3] for one in back)
        if back[0].shape[1] * len(outputs) >= num_positions:
            return build_turned(*self.in_bases(outputs, features))
        turned = [coordinates(outputs.to(one), one) for one in back]
        sums = [
            use.sums(one.flatten(1, 2)).unflatten(1, one.shape[1:3])
            for (use, _), one in zip(self.uses, turned, strict=True)
        ]
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(dim=0)
        return Turned(row_coordinates(features.to(total), total), None)

    @property
    def has_bias(self) -> bool:
        """Return whether the last column is the bias."""
        return bool(self.uses[0][0].has_bias)

    def rows(self) -> Tensor:
        """Return the Jacobian, (n, K, p)."""
        matrix = products(*self.in_bases())
        if not self.has_bias:
            return matrix.flatten(2)
        return torch.cat([matrix[..., :-1].flatten(2), matrix[..., -1]], dim=2)


class Turned(NamedTuple):
    """The Jacobian in a matrix, expressed in bases.

    Args:
        slopes: output gradients, (n, K, outputs, 1); or the whole Jacobian, (n, K, outputs, F).
        columns: inputs, (n, F, 1); None with the whole Jacobian.
        has_bias: whether the last column is the bias.
    """

    slopes: Tensor
    columns: Tensor | None
    has_bias: bool = False

    def whole(self) -> Tensor:
        """Return the whole Jacobian, (n, K, outputs, F)."""
        return self.slopes if self.columns is None else products(self.slopes, self.columns)


class _ScaleDerivatives(NamedTuple):
    """Jacobian of the logits in scale and shift of a normalisation layer."""

    place: slice
    uses: list[tuple[Any, Tensor]]

    def rows(self) -> Tensor:
        """Return the Jacobian, (n, K, p)."""
        found = [torch.stack([use.per_example(one) for one in of.unbind(1)], dim=1) for use, of in self.uses]
        return torch.stack(found).sum(dim=0)


class _OtherDerivatives(NamedTuple):
    """Jacobian of the logits in any parameter, computed explicitly, (n, K, p)."""

    place: slice
    jacobian: Tensor

    def rows(self) -> Tensor:
        """Return the Jacobian, (n, K, p)."""
        return self.jacobian


_Layer: TypeAlias = "MatrixDerivatives | _ScaleDerivatives | _OtherDerivatives"


def products(slopes: Tensor, columns: Tensor) -> Tensor:
    """Return sum_t g_t x_t^T, (n, K, outputs, F), from g (n, K, outputs, T) and x (n, F, T)."""
    return (slopes.flatten(1, 2) @ columns.mT).unflatten(1, slopes.shape[1:3])


def build_turned(slopes: Tensor, columns: Tensor, *, has_bias: bool = False) -> Turned:
    """Keep g (n, K, outputs, T) and x (n, F, T) if T is 1, else sum their products."""
    if slopes.shape[3] == 1:
        return Turned(slopes, columns, has_bias)
    return Turned(products(slopes, columns), None, has_bias)


def weighted_root(derivatives: Turned, variances: Tensor) -> Tensor:
    """Return roots (n, K, r) of a covariance that is diagonal in the bases.

    Args:
        variances: (outputs, F).
    """
    slopes, columns = derivatives.slopes, derivatives.columns
    if columns is None:
        return (slopes * variances.sqrt().to(slopes)).flatten(2)
    of_outputs = columns[:, :, 0].to(variances).square() @ variances.T
    return slopes[..., 0] * of_outputs.sqrt().unsqueeze(1)


_BINS_PER_DECADE = 8
_FLAT = 1e-3  # of the lowest precision: curvatures below this share a bin
_LEAST_IN_BIN = 64  # coordinates, on average; with fewer, products for each Sigma are as fast
_FEW = 4  # Sigma, below which products for each are as fast


class _Bins(NamedTuple):
    """Coordinates with similar curvature, for the covariances under several precisions in one product.

    Each coordinate has its bin's mean variance. On ResNet-20, covariances err by .03% at the precision that val chooses,
    and by less than 1% at any other.

    Args:
        order: (p,), coordinates by bin.
        sizes: of the bins.
        variances: (C, bins), under each precision.
    """

    order: Tensor
    sizes: list[int]
    variances: Tensor

    @classmethod
    def of(cls, blocks: Sequence[BlockRoot]) -> _Bins | None:
        """Return the bins of blocks with one curvature; None if they differ in more than the precision, or are small."""
        spectra = [block.spectrum for block in blocks]
        if len(spectra) < _FEW or any(one is None for one in spectra):
            return None
        curvatures, precisions = zip(*(one for one in spectra if one is not None), strict=True)
        values = curvatures[0].double().flatten()
        if not all(map(blocks[0].turns_as, blocks)) or not all(torch.equal(one, curvatures[0]) for one in curvatures):
            return None
        lowest = _FLAT * min(precisions)
        indices = ((values / lowest).log10() * _BINS_PER_DECADE).floor().clamp(min=-1)
        ordered, order = indices.sort(stable=True)
        sizes = ordered.unique_consecutive(return_counts=True)[1]
        if len(values) < _LEAST_IN_BIN * len(sizes):
            return None
        added = torch.tensor(precisions, dtype=torch.float64, device=values.device).unsqueeze(1)
        places = torch.arange(len(sizes), device=values.device).repeat_interleave(sizes)
        sums = added.new_zeros(len(added), len(sizes)).index_add_(1, places, 1 / (values[order] + added))
        return cls(order, sizes.tolist(), sums / sizes)

    def squares(self, rows: Tensor) -> Tensor:
        """Return J diag(v) J^T, (C, n, K, K) float64, from J (n, K, p)."""
        ordered = rows.flatten(0, 1).index_select(1, self.order).view_as(rows)
        squares = torch.stack([part @ part.mT for part in ordered.split(self.sizes, dim=2)])
        return torch.tensordot(self.variances, squares.double(), dims=1)


def consecutive_places(pieces: Sequence[Covariance]) -> list[slice]:
    """Return the places of consecutive pieces."""
    ends = list(accumulate(piece.num_params for piece in pieces))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _derivatives(
    layout: ModuleLayout, theta: Tensor, inputs: Tensor, *, known: Sequence[Piece], others: Sequence[ParamPart]
) -> list[_Layer]:
    """Return the Jacobian in each layer, at theta (P,) and inputs (n, ...), in theta order."""
    found: list[_Layer] = []
    if known:
        logits, noted = forward(layout, theta, inputs, known)
        every = torch.eye(layout.num_outputs, dtype=logits.dtype, device=logits.device)
        last = layout.num_outputs - 1
        back = [gradients(logits, noted, one.expand_as(logits), is_last=k == last) for k, one in enumerate(every)]
        for piece in known:
            of_outputs = [one.pop(piece.parts[0].name) for one in back]  # popped, so that they are freed once stacked
            uses = [
                (pairs[0][0], torch.stack([slope for _, slope in pairs], dim=1))
                for pairs in zip(*of_outputs, strict=True)
            ]
            kind = MatrixDerivatives if len(piece.parts[0].shape) > 1 else _ScaleDerivatives
            found.append(kind(place_of(piece), uses))
    if others:
        rows = layout.jacobian(inputs, theta, parts=others).split([math.prod(part.shape) for part in others], dim=2)
        found += [_OtherDerivatives(part.place, of) for part, of in zip(others, rows, strict=True)]
    return sorted(found, key=lambda layer: layer.place.start)


@dataclass
class _Derivatives:
    """Jacobian of the logits at a block of inputs (n, ...), computed on first use.

    Args:
        kept: cache entry of these inputs; None without a cache.
    """

    layout: ModuleLayout
    theta: Tensor
    inputs: Tensor
    parts: _Parts
    kept: KeptBlock | None

    @cached_property
    def layers(self) -> list[_Layer]:
        """Jacobians per layer, in theta order."""
        return _derivatives(self.layout, self.theta, self.inputs, known=self.parts.known, others=self.parts.others)

    def roots(self, place: slice, blocks: Sequence[BlockRoot]) -> Iterator[Tensor]:
        """Yield roots for each Sigma's block at a place, which may cover a layer, part of one, or several."""
        yield from self._roots(place, blocks, self._turning(place, blocks[0]))

    def squares(self, place: slice, blocks: Sequence[BlockRoot], bins: _Bins | None) -> Tensor:
        """Return the squares of the roots, (C, n, K, K) float64; by bins, if the Jacobian is that of all coordinates."""
        turning = self._turning(place, blocks[0])
        if bins is not None and isinstance(turning, Turned) and turning.columns is None:
            return bins.squares(turning.slopes.flatten(2))
        return torch.stack([(root @ root.mT).double() for root in self._roots(place, blocks, turning)])

    def _turning(self, place: slice, block: BlockRoot) -> Turned | Rows:
        """Return the Jacobian at a place from the cache, or put it there."""
        if self.kept is not None and self.kept.is_known:
            known: Turned | Rows = self.kept.get(place.start)
            return known
        turning = self._turned(place, block)
        return turning if self.kept is None else self.kept.put(place.start, turning)

    def _roots(self, place: slice, blocks: Sequence[BlockRoot], turning: Turned | Rows) -> Iterator[Tensor]:
        before = blocks[0]
        for block in blocks:
            if not isinstance(turning, Rows) and not block.turns_as(before):
                before, turning = block, self._turned(place, block)
            yield block.of_rows(turning.rows) if isinstance(turning, Rows) else block.of_turned(turning)

    def _turned(self, place: slice, block: BlockRoot) -> Turned | Rows:
        """Return the Jacobian at a place, in the form that the block takes."""
        within = [layer for layer in self.layers if layer.place.start < place.stop and layer.place.stop > place.start]
        if len(within) == 1 and within[0].place == place and isinstance(within[0], MatrixDerivatives):
            return block.turn(within[0])
        first = within[0].place.start
        rows = torch.cat([layer.rows() for layer in within], dim=2)
        return Rows(rows[:, :, place.start - first : place.stop - first])


@dataclass(frozen=True)
class PulledBlock:
    """A block known only through L.

    Args:
        covariance: L L^T.
    """

    # the Jacobian and four float64 copies: the input of L, an intermediate and the output
    num_copies: ClassVar[int] = 9
    covariance: Covariance

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return Jacobians (n, K, p) times L."""
        return self.covariance.pull_back(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])

    def turn(self, layer: MatrixDerivatives) -> Turned:
        """Return the Jacobian as rows, without bases."""
        return Turned(layer.rows().unsqueeze(2), None)

    def of_turned(self, turned: Turned) -> Tensor:
        """Return the rows times L."""
        return self.of_rows(turned.slopes[:, :, 0])

    def turns_as(self, other: BlockRoot) -> bool:
        """Return whether the other block takes rows as well."""
        return isinstance(other, PulledBlock)

    @property
    def spectrum(self) -> None:
        """None: L has no known coordinates."""


LOGITS, DERIVATIVES, COVARIANCES = "logits", "derivatives", "covariances"
Made = TypeVar("Made", bound=tuple[Any, ...])


class Rows(NamedTuple):
    """One tensor, (n, ...)."""

    rows: Tensor


class Kept:
    """Cache at one theta, keyed by a hash of each input's values, independent of how inputs are split into blocks.

    Args:
        most: largest number of inputs.

    Attributes:
        beside: other values cached for this theta.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._theta: Tensor | None = None
        self._forget()

    def at(self, theta: Tensor) -> Kept:
        """Return the cache, emptied unless it belongs to this theta (P,)."""
        if self._theta is None or theta.dtype != self._theta.dtype or not torch.equal(theta, self._theta):
            self._theta = theta
            self._forget()
        return self

    def block(self, inputs: Tensor) -> KeptBlock | None:
        """Return the cache entries of inputs (n, ...), known or to be filled; None if they do not fit."""
        keys = row_keys(inputs).tolist()
        new = [key for key in dict.fromkeys(keys) if key not in self.places]
        there = self.places | {key: len(self.places) + index for index, key in enumerate(new)}
        if len(there) > self.most:
            return None
        index = torch.tensor([there[key] for key in keys], device=inputs.device)
        return KeptBlock(self, index, there, is_known=not new)

    def _forget(self) -> None:
        self.beside: Any = None
        self.places: dict[int, int] = {}
        self.made: dict[Any, tuple[Any, ...]] = {}


class KeptBlock:
    """Cache entries of one block of inputs.

    Args:
        index: (n,), places of the inputs in the cache.
        places: of all inputs, including these.
        is_known: whether all of them are already cached.
    """

    def __init__(self, kept: Kept, index: Tensor, places: dict[int, int], *, is_known: bool) -> None:
        self.is_known = is_known
        self._kept, self._index, self._places = kept, index, places

    def get(self, name: Any) -> Any:
        """Return the value stored under a name, for these inputs."""
        every = self._kept.made[name]
        return type(every)(*(one[self._index] if isinstance(one, torch.Tensor) else one for one in every))

    def put(self, name: Any, made: Made) -> Made:
        """Store a named tuple of tensors (n, ...) and of values shared by all inputs; returns it."""
        if name not in self._kept.made:
            room = [
                one.new_empty(self._kept.most, *one.shape[1:]) if isinstance(one, torch.Tensor) else one for one in made
            ]
            self._kept.made[name] = type(made)(*room)
        for every, one in zip(self._kept.made[name], made, strict=True):
            if isinstance(one, torch.Tensor):
                every[self._index] = one.detach()
        return made

    def finish(self) -> None:
        """Mark these inputs as completely cached."""
        self._kept.places = self._places


class CovariancePath:
    """Covariances of the logits along prior precisions at one theta, computed at some and interpolated between.

    Args:
        log_precisions: of the computed ones, increasing.
        covariances: maps inputs (n, ...) to the computed ones, (G, n, K, K) float64.
        kept: caches them by input.
    """

    def __init__(self, log_precisions: Sequence[float], covariances: Callable[[Tensor], Tensor], kept: Kept) -> None:
        self._log_precisions, self._covariances, self._kept = list(log_precisions), covariances, kept
        self._places: list[tuple[Covariance, float]] = []
        kept.beside = self

    def at(self, inputs: Tensor, log_precisions: Sequence[float]) -> Tensor:
        """Return the covariances of inputs (n, ...) under each precision, (C, n, K, K) float64."""
        weights = [path_weights(self._log_precisions, one)[0] for one in log_precisions]
        computed = self._computed(inputs)
        return torch.tensordot(torch.stack(weights).to(computed.device), computed, dims=([1], [1]))

    def put(self, covariance: Covariance, log_precision: float) -> None:
        """Note the log precision of a covariance on the path."""
        self._places.append((covariance, log_precision))

    def find(self, covariance: Covariance) -> Callable[[Tensor], Tensor] | None:
        """Return a function from inputs (n, ...) to (n, K, K) for a covariance that was put on the path, else None."""
        places = [place for one, place in self._places if one is covariance]
        return (lambda inputs: self.at(inputs, places)[0]) if places else None

    def _computed(self, inputs: Tensor) -> Tensor:
        """Return the computed covariances, (n, G, K, K)."""
        block = self._kept.block(inputs)
        if block is not None and block.is_known and len(inputs):
            rows: Tensor = block.get(COVARIANCES).rows
            return rows
        computed = self._covariances(inputs).transpose(0, 1).contiguous()
        if block is not None and len(inputs):
            block.put(COVARIANCES, Rows(computed))
            block.finish()
        return computed


_REACH = 12.0  # of the log curvatures that weights are fitted at, beyond the log precisions on either side
_POINTS = 600


def path_weights(log_precisions: Sequence[float], log_precision: float) -> tuple[Tensor, float]:
    """Return weights w (G,), float64, and the largest relative error over s >= 0 of sum_g w_g / (s + tau_g).

    Args:
        log_precisions: log tau_g.
        log_precision: log tau, of the approximated 1 / (s + tau).
    """
    nodes = torch.tensor(log_precisions, dtype=torch.float64)
    if (same := (nodes - log_precision).abs() < 1e-9).any():
        return same.double() / same.sum(), 0.0
    points = torch.linspace(float(nodes[0]) - _REACH, float(nodes[-1]) + _REACH, _POINTS, dtype=torch.float64)
    # (s + tau) / (s + tau_g) without overflow, for s from 0 to infinity
    wanted = torch.logaddexp(points, points.new_tensor(log_precision)).unsqueeze(1)
    ratios = wanted - torch.logaddexp(points.unsqueeze(1), nodes)
    ratios = torch.cat([(log_precision - nodes)[None], ratios, torch.zeros_like(nodes)[None]]).exp()
    weights = torch.linalg.lstsq(ratios, ratios.new_ones(len(ratios), 1), driver="gelsd").solution[:, 0]
    return weights, float((ratios @ weights - 1).abs().max())


def find_path(layout: ModuleLayout, theta: Tensor) -> CovariancePath | None:
    """Return the path at theta (P,), if there is one."""
    kept = find_cache(layout, theta, COVARIANCES)
    return None if kept is None else kept.beside


@contextmanager
def keeping(network: ModuleNetwork, most: int, *, most_derivatives: int, most_covariances: int = 0) -> Iterator[None]:
    """Cache values of a linearised network inside the context.

    Args:
        most: inputs whose logits are cached.
        most_derivatives: inputs whose Jacobians are cached.
        most_covariances: inputs whose logits' covariances along a path of prior precisions are cached.
    """
    sizes = ((LOGITS, most), (DERIVATIVES, most_derivatives), (COVARIANCES, most_covariances))
    network.kept.update({name: Kept(count) for name, count in sizes if count})
    try:
        yield
    finally:
        network.kept.clear()


def find_cache(layout: ModuleLayout, theta: Tensor, name: str) -> Kept | None:
    """Return the cache at theta (P,); None without a cache."""
    found: Kept | None = None if layout.network is None else layout.network.kept.get(name)
    return None if found is None else found.at(theta)


def logits_at(layout: ModuleLayout, inputs: Tensor, theta: Tensor) -> Tensor:
    """Return logits (n, K) of inputs (n, ...) under theta (P,), from the cache if possible."""
    kept = find_cache(layout, theta, LOGITS)
    block = None if kept is None else kept.block(inputs)
    if block is not None and block.is_known and len(inputs):
        rows: Tensor = block.get(LOGITS).rows
        return rows
    logits = layout.logits(inputs, theta.unsqueeze(0))[0]
    if block is not None:
        block.put(LOGITS, Rows(logits))
        block.finish()
    return logits

"""The covariance of a network's logits under a Sigma with one block per layer: sum_l J_l Sigma_l J_l^T.

One forward and K backward passes over a block of examples record each layer's inputs, and its output gradients for each
output. From these, the Jacobian in a layer's weights, (n, K, P_l), is formed one layer at a time; that in all of theta
never is. A weight used once per example needs no Jacobian either: J_l Sigma_l J_l^T = G diag(v) G^T, with G (K,
outputs) the output gradients and v the variances of the layer's outputs, in the basis in which Sigma_l is diagonal.
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
    scales_of,
)
from bnncli.system.signals import raise_if_interrupted
from bnncli.targets.blocks import slices

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleNetwork


_CACHED_COVARIANCES = 2**25  # values of the logits' covariances that are cached, at most
_BLOCK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # of a block of examples: recorded values, gradients and Jacobians


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


Blocks: TypeAlias = "Callable[[Sequence[slice]], Sequence[tuple[slice, BlockRoot]]]"


def by_layer(layout: ModuleLayout, theta: Tensor, blocks: Blocks) -> Pulled:
    """Return sum_l J_l Sigma_l J_l^T for a network linearised at theta (P,).

    Args:
        blocks: returns the blocks of Sigma and their places in theta, given the places of parameters that are used
            together.
    """
    rooted = _build_roots(layout, theta, [blocks])
    cached: list[Kept] = []

    def roots(inputs: Tensor) -> Iterator[Iterable[Tensor]]:
        return (chain.from_iterable(block) for block in rooted(inputs))

    def recall(inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
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
    rooted = _build_roots(layout, theta, candidates)

    def covariances(inputs: Tensor) -> Tensor:
        found = []
        for block in rooted(inputs):
            totals: list[Tensor] = []
            for roots in block:
                squares = [(root @ root.mT).double() for root in roots]
                totals = (
                    squares if not totals else [total.add_(one) for total, one in zip(totals, squares, strict=True)]
                )
            found.append(torch.stack(totals))
        return torch.cat(found, dim=1)

    return covariances


def _build_roots(
    layout: ModuleLayout, theta: Tensor, candidates: Sequence[Blocks]
) -> Callable[[Tensor], Iterator[Iterable[Iterable[Tensor]]]]:
    """Return a function that yields, for each block of inputs, each place of theta and each Sigma, the roots (b, K, r)."""
    found: list[_Parts] = []  # filled at the first inputs

    def roots(inputs: Tensor) -> Iterator[Iterable[Iterable[Tensor]]]:
        if not len(inputs):
            yield ([inputs.new_zeros(0, layout.num_outputs, 1)] * len(candidates),)
            return
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
        for some in slices(0, len(inputs), block_size(layout, largest, inputs.device, num_others)[0]):
            raise_if_interrupted("the logits' covariance")
            own = None if kept is None else kept.block(inputs[some])
            derivatives = _Derivatives(layout, at, inputs[some], parts, own)
            yield (derivatives.roots(of[0][0], [root for _, root in of]) for of in zip(*every, strict=True))
            if own is not None:
                own.finish()

    return roots


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
    return max(1, _BLOCK_ELEMENTS.get(device.type, 2**24) // each), each


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
        before = blocks[0]
        if self.kept is not None and self.kept.is_known:
            turning = self.kept.get(place.start)
        else:
            turning = self._turned(place, before)
            if self.kept is not None:
                self.kept.put(place.start, turning)
        for block in blocks:
            if isinstance(turning, Rows):
                yield block.of_rows(turning.rows)
                continue
            if not block.turns_as(before):
                before, turning = block, self._turned(place, block)
            yield block.of_turned(turning)

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


LOGITS, DERIVATIVES = "logits", "derivatives"
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


@contextmanager
def keeping(network: ModuleNetwork, most: int, *, most_derivatives: int) -> Iterator[None]:
    """Cache, inside the context, linearised logits of up to `most` inputs, and Jacobians of up to `most_derivatives`."""
    network.kept.update(
        {name: Kept(count) for name, count in ((LOGITS, most), (DERIVATIVES, most_derivatives)) if count}
    )
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

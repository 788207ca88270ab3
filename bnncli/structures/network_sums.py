"""Per-example gradients of a network, by layer, from which the structures sum H.

A forward pass notes the inputs of every weight that acts as a matrix or a scale, and a backward pass for each column of
the Hessian's root gives the gradients at their outputs. Parameters that do neither are differentiated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from bnncli.lazy import torch
from bnncli.parameters.layouts import ParamPart, consecutive_parts
from bnncli.system.signals import raise_if_interrupted
from bnncli.targets.blocks import slices
from bnncli.targets.curvature_choice import FISHER

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bnncli.parameters.module import ModuleLayout, ModuleNetwork
    from bnncli.targets.network import NetworkTarget


# up to this many columns are all propagated through the network's layers
MOST_EXACT = 3
MOST_EXACT_REST = 2  # the same for parameters with per-example gradients, which take passes of their own
MOST_DRAWN = 2  # random columns per example, if there are more columns
ENOUGH = (
    # random columns of all examples together; factors then err by 3 % (by 3 N^-1/2 with one per example)
    10_000
)


def num_drawn(target: NetworkTarget) -> int:
    """Return the number of random columns per example for the layers' factors; 0 if none are random."""
    return 0 if _num_columns(target) <= MOST_EXACT else max(1, min(MOST_DRAWN, ENOUGH // target.num_examples))


def num_drawn_rest(target: NetworkTarget) -> int:
    """Return the number of random columns per example for parameters with per-example gradients; 0 for all."""
    return 0 if _num_columns(target) <= MOST_EXACT_REST else 1


def _num_columns(target: NetworkTarget) -> int:
    """Return the number of columns of H's root."""
    return 1 if target.choice.kind == FISHER else target.layout.num_outputs - target.likelihood.is_shift_invariant


class Columns:
    """Columns for consecutive blocks of a target's examples.

    Args:
        num_drawn: S, 0 for all.
        seed: of the signs.
    """

    def __init__(self, target: NetworkTarget, *, num_drawn: int, seed: int) -> None:
        self.target, self.num_drawn = target, num_drawn
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, logits: Tensor, rows: slice) -> Iterator[tuple[Tensor, bool]]:
        """Yield columns (n, K) whose outer products sum to H_n, each with whether it is the last.

        Args:
            logits: (n, K), of the examples in `rows`.
        """
        if self.target.choice.kind == FISHER:
            yield self._gradient(logits, rows), True
            return
        likelihood = self.target.likelihood
        with torch.no_grad():
            probabilities = likelihood.normalize_(logits.detach().T.unsqueeze(1).clone())[1][:, 0]
            root = likelihood.hessian_root(probabilities)
            if self.num_drawn:
                size = (root.shape[2], self.num_drawn, root.shape[1])
                signs = torch.randint(2, size, generator=self.generator, dtype=torch.int8) * 2 - 1
                scaled = signs.to(root.device, root.dtype) * self.num_drawn**-0.5
                root = torch.einsum("kmn,nsm->ksn", root, scaled)
            elif likelihood.is_shift_invariant:
                # R sqrt(p) = 0: reflect sqrt(p) to the last unit vector; the last column is then zero.
                sizes = probabilities.sqrt()
                root = root[:, :-1] - root[:, -1:] * (sizes[:-1] / (1 + sizes[-1]))
        last = root.shape[1] - 1
        for index in range(last + 1):
            yield root[:, index].T.contiguous(), index == last

    def _gradient(self, logits: Tensor, rows: slice) -> Tensor:
        """Return the gradients of the labels' log likelihoods in the logits, (n, K)."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            total = self.target.likelihood.log_likelihoods(leaf.unsqueeze(0), self.target.labels[rows]).sum()
            return torch.autograd.grad(total, leaf)[0]


_PROBES = 2  # examples used for the check


class Use(Protocol):
    """One call of a module."""

    @property
    def num_examples(self) -> int:
        """Number of examples, from the first dimension of the inputs."""

    def of(self, some: slice) -> Use:
        """Restrict to some of the examples."""

    def per_example(self, gradient: Tensor) -> Tensor:
        """Return the gradients (n, P) of the piece's parameters, given the gradient at the output."""


class Piece(Protocol):
    """Parameters of one module that are adjacent in theta."""

    @property
    def module(self) -> str:
        """Name of the module."""

    @property
    def parts(self) -> tuple[ParamPart, ...]:
        """The parts of theta, weight first."""

    def use(self, module: Any, inputs: Tensor) -> Use:
        """Record a call of the module with inputs (n, ...)."""


Noted = dict[
    str, list[tuple[Any, Any]]
]  # weight name of each piece to its uses, each with the autograd edge of the output


def place_of(piece: Piece) -> slice:
    """Return the piece's place in theta."""
    return slice(piece.parts[0].place.start, piece.parts[-1].place.stop)


def with_bias(layout: ModuleLayout, index: int) -> tuple[ParamPart, ...]:
    """Return the weight with this index, and the bias of the same module if it directly follows."""
    part, after = layout.parts[index], layout.parts[index + 1 : index + 2]
    return part, *(one for one in after if one.name == f"{part.name.removesuffix('weight')}bias")


def own_weights(layout: ModuleLayout) -> list[tuple[int, str, Any]]:
    """Return index, module name and module of each part that is the weight of a module with torch's own forward.

    Subclasses in libraries may expect other inputs: a norm with channels first, a convolution that pads.
    """
    every = network_of(layout).module.named_modules()
    modules = {name: one for name, one in every if type(one).forward.__module__.startswith("torch.nn.")}
    split = [(index, *part.name.rpartition(".")[::2]) for index, part in enumerate(layout.parts)]
    return [(index, owner, modules[owner]) for index, owner, last in split if last == "weight" and owner in modules]


def network_of(layout: ModuleLayout) -> ModuleNetwork:
    """Return the network that the layout is bound to."""
    assert layout.network is not None
    return layout.network


def forward(layout: ModuleLayout, theta: Tensor, inputs: Tensor, pieces: Sequence[Piece]) -> tuple[Tensor, Noted]:
    """Return logits (n, K) of inputs (n, ...) under theta (P,), with a graph to each piece, and the pieces' uses."""
    modules = dict(network_of(layout).module.named_modules())
    noted: Noted = {piece.parts[0].name: [] for piece in pieces}
    handles = [
        modules[piece.module].register_forward_hook(_noting(noted[piece.parts[0].name], piece), with_kwargs=True)
        for piece in pieces
    ]
    try:
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            logits = layout.logits(inputs, leaf.unsqueeze(0))[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits, noted


def gradients(logits: Tensor, noted: Noted, cotangent: Tensor, *, is_last: bool) -> dict[str, list[tuple[Any, Tensor]]]:
    """Return the uses that affect the logits, with the gradients at their outputs for a cotangent (n, K).

    Args:
        is_last: whether this is the last cotangent for these logits, so that the graph may be freed.
    """
    edges = [edge for of in noted.values() for _, edge in of]
    if not edges:  # autograd raises an error for an empty list
        return {name: [] for name in noted}
    found = iter(torch.autograd.grad(logits, edges, cotangent, retain_graph=not is_last, allow_unused=True))
    pairs = {name: [(use, next(found)) for use, _ in of] for name, of in noted.items()}
    return {name: [(use, one) for use, one in of if one is not None] for name, of in pairs.items()}


def find_checked(layout: ModuleLayout, theta: Tensor, inputs: Tensor, pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces whose gradients at theta (P,), for the first of inputs (n, ...), agree with autograd."""
    assert layout.network is not None
    dtype, tolerance = layout.network.check_dtype, layout.network.check_tolerance
    inputs, theta = inputs[:_PROBES], theta.detach().to(dtype)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    logits, noted = forward(layout, theta, inputs, pieces)
    noted = {name: of for name, of in noted.items() if of and all(use.num_examples == len(inputs) for use, _ in of)}
    if not noted:
        return []
    numbers = torch.arange(1, logits.numel() + 1, dtype=logits.dtype, device=logits.device)
    cotangent = numbers.sin().view_as(logits)  # distinct for all outputs, and not constant, which softmax would lose
    with torch.enable_grad():
        leaf = theta.clone().requires_grad_()
        sums = (layout.logits(inputs, leaf.unsqueeze(0))[0] * cotangent).sum(dim=1)
        true = torch.stack([torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in sums])
    back = gradients(logits, noted, cotangent, is_last=True)
    found = [(piece, back.get(piece.parts[0].name, [])) for piece in pieces]
    return [piece for piece, own in found if _is_gradient(own, true[:, place_of(piece)], tolerance)]


def _is_gradient(pairs: list[tuple[Any, Tensor]], true: Tensor, tolerance: float) -> bool:
    if not pairs:
        return False
    found = torch.stack([use.per_example(gradient) for use, gradient in pairs]).sum(dim=0)
    return bool((found - true).abs().max() <= tolerance * true.abs().max())


def _noting(of: list[tuple[Any, Any]], piece: Piece) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        inputs = args[0] if args else next(iter(named.values()))
        # Keep the edge instead of the output, which an activation may change in place.
        of.append((piece.use(module, inputs.detach()), torch.autograd.graph.get_gradient_edge(output)))

    return note


def is_complete(basis: Tensor) -> bool:
    """Return whether orthonormal columns (F, k) span everything."""
    return basis.shape[0] == basis.shape[1]


def coordinates(basis: Tensor, x: Tensor) -> Tensor:
    """Return the coordinates of columns x (..., F, n) in a basis V (F, k): V^T x, and if k < F also x - V V^T x, (..., k + F, n).

    These are more numbers than F, but lengths and angles stay: a covariance that is isotropic outside the span of V is
    diagonal in them.
    """
    turned = basis.T @ x
    return turned if is_complete(basis) else torch.cat([turned, x - basis @ turned], dim=-2)


def row_coordinates(basis: Tensor, x: Tensor) -> Tensor:
    """Return the coordinates of rows x (..., n, F), (..., n, k + F)."""
    return x @ basis if is_complete(basis) else coordinates(basis, x.mT).mT


def from_coordinates(basis: Tensor, values: Tensor) -> Tensor:
    """Return the columns (..., F, n) that have these coordinates."""
    if is_complete(basis):
        return basis @ values
    inside, rest = values.split([basis.shape[1], basis.shape[0]], dim=-2)
    return basis @ inside + rest


_PATCHES = 2**21  # numbers in the patches extracted at once
_BANDS = 3  # row bands of a product X X^T, each computed from the diagonal on


@dataclass(frozen=True)
class Matrix:
    """A weight (K, D), and its bias if that is chosen too and directly follows.

    Args:
        module: name of the module.
        parts: of theta.
    """

    module: str
    parts: tuple[ParamPart, ...]

    @property
    def name(self) -> str:
        """Name of the weight."""
        return self.parts[0].name

    @property
    def has_bias(self) -> bool:
        """Return whether the bias is included."""
        return len(self.parts) > 1

    @property
    def num_outputs(self) -> int:
        """K."""
        return self.parts[0].shape[0]

    @property
    def num_columns(self) -> int:
        """F: D, plus one for the bias."""
        return (self.parts[-1].place.stop - self.parts[0].place.start) // self.num_outputs

    def use(self, module: Any, inputs: Tensor) -> MatrixUse:
        """Record a call of the module with inputs (n, ...)."""
        return (PatchesUse if _is_convolution(module) else MatrixUse)(module, self.has_bias, inputs)


@dataclass(frozen=True)
class MatrixUse:
    """One call of a linear layer.

    Args:
        module: the module, in its state during the call.
        has_bias: whether the bias is part of the matrix.
        inputs: (n, ..., D).
    """

    module: Any
    has_bias: bool
    inputs: Tensor

    @property
    def num_examples(self) -> int:
        """n."""
        return len(self.inputs)

    def gram(self) -> tuple[Tensor, int]:
        """Return the sum of x x^T over examples and positions, (F, F) float64, and the number of terms."""
        rows = self.inputs.reshape(-1, self.inputs.shape[-1])
        return self._with_ones(_gram(rows.T), rows.sum(dim=0), len(rows)), len(rows)

    def column_blocks(self) -> Iterator[Tensor]:
        """Yield (x, 1) at all positions of some examples, (F, n)."""
        size = self.of(slice(0, 1)).columns().numel()
        for some in slices(0, self.num_examples, max(1, _PATCHES // size)):
            yield self.of(some).columns().transpose(0, 1).flatten(1)

    def in_basis(self, basis: Tensor) -> Tensor:
        """Return the coordinates of (x, 1) at each position, (n, F, T), in a basis V (F, k); see `coordinates`."""
        turned = self.rotated(basis)
        if is_complete(basis):
            return turned
        return torch.cat([turned, self.columns() - basis @ turned], dim=1)

    def rotated(self, basis: Tensor) -> Tensor:
        """Return V^T (x, 1) at each position, (n, k, T), for V (F, k)."""
        turned = self.inputs.reshape(len(self.inputs), -1, self.inputs.shape[-1]) @ basis[: self.inputs.shape[-1]]
        return (turned + basis[-1] if self.has_bias else turned).mT

    def columns(self) -> Tensor:
        """Return (x, 1) at each position, (n, F, T); x without a bias."""
        columns = self._unbiased()
        return torch.cat([columns, torch.ones_like(columns[:, :1])], dim=1) if self.has_bias else columns

    def _unbiased(self) -> Tensor:
        """Return x at each position, (n, D, T)."""
        return self.inputs.reshape(len(self.inputs), -1, self.inputs.shape[-1]).mT

    def outputs(self, gradient: Tensor) -> Tensor:
        """Return the gradient at the output as (n, K, T)."""
        return gradient.reshape(len(gradient), -1, gradient.shape[-1]).mT

    def of(self, some: slice) -> Self:
        """Restrict to some of the examples."""
        return replace(self, inputs=self.inputs[some])

    def sums(self, slopes: Tensor) -> Tensor:
        """Return the sum of g (x, 1)^T over positions, (n, K, F), from g (n, K, T)."""
        products = slopes @ self._unbiased().mT
        return torch.cat([products, slopes.sum(dim=2, keepdim=True)], dim=2) if self.has_bias else products

    def per_example(self, gradient: Tensor) -> Tensor:
        """Return the gradients (n, K F) of weight and bias."""
        matrix = self.sums(self.outputs(gradient))
        if not self.has_bias:
            return matrix.flatten(1)
        return torch.cat([matrix[:, :, :-1].flatten(1), matrix[:, :, -1]], dim=1)

    def _with_ones(self, gram: Tensor, sums: Tensor, count: int) -> Tensor:
        """Extend the Gram matrix (D, D) of x to that of (x, 1) if there is a bias, float64."""
        if not self.has_bias:
            return gram.double()
        beside = torch.cat([sums, sums.new_full((1,), count)]).unsqueeze(1)
        return torch.cat([torch.cat([gram, beside[:-1].T]), beside], dim=1).double()


class PatchesUse(MatrixUse):
    """One call of a convolution over one, two or three dimensions, with inputs (n, channels, sizes)."""

    def gram(self) -> tuple[Tensor, int]:
        """Return the sum of x x^T over examples and positions, (F, F) float64, and the number of terms."""
        padded = self._padded()
        num_columns, num_positions = self._patches(padded[:1]).shape[1:]
        is_dense = self.module.stride[0] == self.module.dilation[0] == 1
        height = self.module.kernel_size[0] if is_dense else 1
        total: Tensor | None = None
        for some in padded.split(max(1, height * _PATCHES // (num_columns * num_positions))):
            gram, sums = (self._gram_of_rows if is_dense else self._gram_of_patches)(some)
            part = self._with_ones(gram, sums, len(some) * num_positions)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total, len(padded) * num_positions

    def _gram_of_patches(self, padded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of x x^T (D, D) and of x (D,) over the patches."""
        # Channels, then patch offsets, then examples and positions: one copy of long runs.
        windows = self._windows(padded.transpose(0, 1).contiguous())
        patches = windows.movedim(1, 1 + len(self.module.kernel_size)).flatten(0, len(self.module.kernel_size))
        patches = patches.flatten(1)
        return _gram(patches), patches.sum(dim=1)

    def _gram_of_rows(self, padded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for patches that move by one along the first dimension: half the work, or less.

        Patches overlap there, so products of their rows depend on the distance of the rows, and on where the patches
        start only through the first and last rows.
        """
        height, others = self.module.kernel_size[0], self.module.kernel_size[1:]
        windows = self._windows(padded.permute(1, 2, 0, *range(3, padded.ndim)).flatten(1, 2).contiguous(), first=1)
        rows = (
            windows.movedim(1, 1 + len(others)).flatten(0, len(others)).unflatten(1, (padded.shape[2], -1)).flatten(2)
        )
        channels, count = padded.shape[1], padded.shape[2] - height + 1
        size = len(rows) // channels
        gram = rows.new_empty(channels, height, size, channels, height, size)
        for distance in range(height):
            first, second = rows[:, :count].flatten(1), rows[:, distance : distance + count].flatten(1)
            products = first @ second.T if distance else _gram(first)
            for start in range(height - distance):
                if start:
                    before, last = start - 1, start - 1 + count
                    products = products - rows[:, before] @ rows[:, before + distance].T
                    products += rows[:, last] @ rows[:, last + distance].T
                block = products.view(channels, size, channels, size)
                gram[:, start, :, :, start + distance] = block
                gram[:, start + distance, :, :, start] = block.permute(2, 3, 0, 1)
        sums = rows.sum(dim=2).unfold(1, count, 1).sum(dim=2).unflatten(0, (channels, size))
        return gram.view(channels * height * size, -1), sums.transpose(1, 2).flatten()

    def _unbiased(self) -> Tensor:
        """Return the patches, (n, D, T)."""
        return self._patches(self._padded())

    def rotated(self, basis: Tensor) -> Tensor:
        """Return V^T (x, 1) at each position, (n, k, T), for V (F, k): a convolution with the columns of V."""
        module = self.module
        weight = basis[: len(basis) - self.has_bias].T.reshape(basis.shape[1], -1, *module.kernel_size)
        bias = basis[-1] if self.has_bias else None
        convolve = getattr(torch.nn.functional, f"conv{len(module.kernel_size)}d")
        turned: Tensor = convolve(self._padded(), weight, bias, module.stride, 0, module.dilation)
        return turned.flatten(2)

    def outputs(self, gradient: Tensor) -> Tensor:
        """Return the gradient at the output as (n, K, T)."""
        return gradient.flatten(2)

    def _patches(self, padded: Tensor) -> Tensor:
        """Return the patches (n, D, T) of padded inputs (n, channels, sizes)."""
        return self._windows(padded).flatten(1, 1 + len(self.module.kernel_size)).flatten(2)

    def _windows(self, images: Tensor, first: int = 0) -> Tensor:
        """Return a view (a, b, kernel, places) of images (a, b, sizes): the kernel's window at each place.

        Args:
            first: of the kernel's dimensions, those before which images do not have.
        """
        module, own = self.module, images.stride()[2:]
        kernel, steps, rates = (one[first:] for one in (module.kernel_size, module.stride, module.dilation))
        reach = [rate * (size - 1) + 1 for rate, size in zip(rates, kernel, strict=True)]
        places = [(side - far) // step + 1 for side, far, step in zip(images.shape[2:], reach, steps, strict=True)]
        inside = [rate * one for rate, one in zip(rates, own, strict=True)]
        between = [step * one for step, one in zip(steps, own, strict=True)]
        sizes = [*images.shape[:2], *kernel, *places]
        return images.as_strided(sizes, [*images.stride()[:2], *inside, *between], images.storage_offset())

    def _padded(self) -> Tensor:
        mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
        return torch.nn.functional.pad(self.inputs, self.module._reversed_padding_repeated_twice, mode=mode)


def matrices_of(layout: ModuleLayout) -> list[Matrix]:
    """Return the weights that act as matrices, in theta order: of linear layers and ungrouped convolutions."""
    return [
        Matrix(name, with_bias(layout, index))
        for index, name, module in own_weights(layout)
        if isinstance(module, torch.nn.Linear) or (_is_convolution(module) and module.groups == 1)
    ]


def _is_convolution(module: Any) -> bool:
    return isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d))


def _gram(columns: Tensor) -> Tensor:
    """Return X X^T (F, F) of X (F, n), computing the upper triangle and copying the lower."""
    size = len(columns)
    if size < 64:
        return columns @ columns.T
    height = -(-size // _BANDS)
    total = columns.new_zeros(size, size)
    for start in range(0, size, height):
        total[start : start + height, start:] = columns[start : start + height] @ columns[start:].T
    return total.triu() + total.triu(1).T


@dataclass(frozen=True)
class Scale:
    """The weight (C,) of a normalisation layer, and its bias if that is chosen too and directly follows.

    Args:
        module: name of the layer.
        parts: of theta.
    """

    module: str
    parts: tuple[ParamPart, ...]

    def use(self, module: Any, inputs: Tensor) -> ScaleUse:
        """Record a call of the layer with inputs (n, ...)."""
        functional, has_bias = torch.nn.functional, len(self.parts) > 1
        if isinstance(module, torch.nn.LayerNorm):
            normalized = functional.layer_norm(inputs, module.normalized_shape, eps=module.eps)
            return ScaleUse(normalized, has_bias, num_last=len(module.normalized_shape))
        if isinstance(module, torch.nn.GroupNorm):
            return ScaleUse(functional.group_norm(inputs, module.num_groups, eps=module.eps), has_bias)
        normalized = functional.batch_norm(inputs, module.running_mean, module.running_var, eps=module.eps)
        return ScaleUse(normalized, has_bias)


@dataclass(frozen=True)
class ScaleUse:
    """One call of a normalisation layer.

    Args:
        normalized: (n, C, ...), before the weight; (n, ..., C) if the weight applies to the last dimensions.
        has_bias: whether the bias is included.
        num_last: number of last dimensions the weight applies to; 0 if it applies to the second dimension.
    """

    normalized: Tensor
    has_bias: bool
    num_last: int = 0

    @property
    def num_examples(self) -> int:
        """n."""
        return len(self.normalized)

    def of(self, some: slice) -> ScaleUse:
        """Restrict to some of the examples."""
        return replace(self, normalized=self.normalized[some])

    def per_example(self, gradient: Tensor) -> Tensor:
        """Return the gradients (n, P) of weight and bias, given the gradient at the output."""
        slopes = gradient * self.normalized
        return torch.cat([self._summed(one) for one in ([slopes, gradient] if self.has_bias else [slopes])], dim=1)

    def _summed(self, tensor: Tensor) -> Tensor:
        """Sum over positions, (n, C)."""
        if self.num_last:
            return (
                tensor.flatten(-self.num_last).flatten(1, -2).sum(dim=1)
                if tensor.ndim > 1 + self.num_last
                else tensor.flatten(1)
            )
        return tensor.flatten(2).sum(dim=2) if tensor.ndim > 2 else tensor


def scales_of(layout: ModuleLayout) -> list[Scale]:
    """Return the scales of batch, layer and group norms, in theta order."""
    nn = torch.nn
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [
        Scale(name, with_bias(layout, index))
        for index, name, module in own_weights(layout)
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm))
        or (isinstance(module, batch_norms) and module.running_mean is not None)
    ]


_REST_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}  # of per-example gradients at once


def diagonal_of(target: NetworkTarget, theta: Tensor, parts: list[ParamPart], columns: Columns) -> list[Tensor]:
    """Return the diagonal for each of `parts`, float64: squared per-example gradients, summed over the columns.

    Takes one forward pass for the columns, another for the gradients, and one backward pass per column.
    """
    layout = target.layout
    network = layout.network
    assert network is not None
    theta = theta.to(target.device, target.dtype)
    if not parts:
        return []
    some = replace(layout, parts=consecutive_parts([(part.name, part.shape, part.is_bias) for part in parts]))
    every = layout.split(theta)
    own = some.join(every)
    total = torch.zeros(some.num_params, dtype=torch.float64, device=target.device)

    def logits(flat: Tensor, example: Tensor) -> Tensor:
        return network(example.unsqueeze(0), {**every, **some.split(flat)})[0]

    def gradients(example: Tensor, cotangents: Tensor) -> Tensor:
        pull = torch.func.vjp(lambda flat: logits(flat, example), own)[1]
        return torch.func.vmap(pull)(cotangents)[0]

    elements = _REST_ELEMENTS.get(target.device.type, 2**24)
    size = max(1, elements // ((columns.num_drawn or target.layout.num_outputs) * some.num_params))
    size = min(size, target.rows_at_once(1, theta.dtype))
    for start in range(0, target.num_examples, size):
        raise_if_interrupted("the Hessian")
        rows = slice(start, start + size)
        inputs = target.inputs[rows].to(target.device).reshape(-1, *layout.input_shape)
        with torch.no_grad():
            outputs = layout.logits(inputs, theta.unsqueeze(0))[0]
        cotangents = torch.stack([column for column, _ in columns.of(outputs, rows)], dim=1)
        total += torch.func.vmap(gradients)(inputs, cotangents).square().sum(dim=(0, 1), dtype=torch.float64)
    return [total[part.place] for part in some.parts]


_ROW_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}  # of rows at once


def weighted_rows(target: NetworkTarget, theta: Tensor) -> Iterator[Tensor]:
    """Yield rows (n M, P) for blocks of examples, whose outer products sum to H at theta (P,).

    R_n^T J_n with R_n R_n^T = H_n for the Gauss-Newton matrix. For the empirical Fisher matrix, each example's gradient
    of the log likelihood of its label, so M is 1.
    """
    theta = theta.to(target.device, target.dtype)
    is_fisher = target.choice.kind == FISHER
    size = examples_at_once(target)
    for start in range(0, target.num_examples, size):
        raise_if_interrupted("the Hessian")
        some = slice(start, start + size)
        inputs = target.inputs[some].to(target.device)
        with torch.no_grad():
            if is_fisher:
                yield _gradients(target, theta, inputs, target.labels[some])
            else:
                yield _roots(target, theta, inputs)


def examples_at_once(target: NetworkTarget) -> int:
    """Return the number of examples whose rows, and the activations for each row, fit at once."""
    num_rows = 1 if target.choice.kind == FISHER else target.layout.num_outputs
    size = _ROW_ELEMENTS.get(target.device.type, 2**24) // (num_rows * target.layout.num_params)
    return max(1, min(target.num_examples, size, target.rows_at_once(num_rows, target.dtype)))


def _roots(target: NetworkTarget, theta: Tensor, inputs: Tensor) -> Tensor:
    """Return R_n^T J_n, (n M, P)."""
    layout, likelihood = target.layout, target.likelihood
    logits = layout.logits(inputs, theta.unsqueeze(0))[0]
    probs = likelihood.normalize_(logits.T.unsqueeze(1).clone())[1][:, 0]
    return torch.einsum("kmn,nkp->nmp", likelihood.hessian_root(probs), layout.jacobian(inputs, theta)).flatten(0, 1)


def _gradients(target: NetworkTarget, theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each example's log likelihood, (n, P)."""
    layout, likelihood = target.layout, target.likelihood

    def log_likelihood(draw: Tensor, example: Tensor, label: Tensor) -> Tensor:
        logits = layout.logits(example.unsqueeze(0), draw.unsqueeze(0))
        return likelihood.log_likelihoods(logits, label.unsqueeze(0)).sum()

    return torch.func.vmap(torch.func.grad(log_likelihood), in_dims=(None, 0, 0))(theta, inputs, labels)

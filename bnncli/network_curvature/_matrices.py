"""The weights of a network that act as matrices: of linear layers, and of convolutions on patches of their input.

Such a layer computes y = W x + b at each of T positions of an example. Its gradient is sum_t g_t (x_t, 1)^T, with g the
gradient at y, from which Kronecker factors are built (Grosse and Martens 2016, arXiv:1602.01407).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from bnncli.lazy import torch
from bnncli.network_curvature._uses import own_weights, with_bias
from bnncli.parameters.layouts import ParamPart

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.parameters.module import ModuleLayout

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

    def rotated(self, basis: Tensor) -> Tensor:
        """Return V^T (x, 1) at each position, (n, F, T), for V (F, F)."""
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
        total: Tensor | None = None
        for some in padded.split(max(1, _PATCHES // (num_columns * num_positions))):
            # Channels, then patch offsets, then examples and positions: one copy of long runs.
            windows = self._windows(some.transpose(0, 1).contiguous())
            patches = windows.movedim(1, 1 + len(self.module.kernel_size)).reshape(num_columns, -1)
            part = self._with_ones(_gram(patches), patches.sum(dim=1), patches.shape[1])
            total = part if total is None else total.add_(part)
        assert total is not None
        return total, len(padded) * num_positions

    def _unbiased(self) -> Tensor:
        """Return the patches, (n, D, T)."""
        return self._patches(self._padded())

    def rotated(self, basis: Tensor) -> Tensor:
        """Return V^T (x, 1) at each position, (n, F, T), for V (F, F): a convolution with the columns of V."""
        module = self.module
        weight = basis[: len(basis) - self.has_bias].T.reshape(len(basis), -1, *module.kernel_size)
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

    def _windows(self, images: Tensor) -> Tensor:
        """Return a view (a, b, kernel, places) of images (a, b, sizes): the kernel's window at each place."""
        module, own = self.module, images.stride()[2:]
        reach = [rate * (size - 1) + 1 for rate, size in zip(module.dilation, module.kernel_size, strict=True)]
        places = [
            (side - far) // step + 1 for side, far, step in zip(images.shape[2:], reach, module.stride, strict=True)
        ]
        inside = [rate * one for rate, one in zip(module.dilation, own, strict=True)]
        between = [step * one for step, one in zip(module.stride, own, strict=True)]
        sizes = [*images.shape[:2], *module.kernel_size, *places]
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

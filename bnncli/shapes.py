"""Shape checks at public boundaries: one axis letter means one size within a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def check_shapes(**tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Return the size of each axis letter, if all tensors agree.

    `check_shapes(features=(features, "N D"), labels=(labels, "N"))` returns {"N": ..., "D": ...}. A number in the
    pattern must match literally.

    Raises:
        ValueError: a shape does not match; names the tensor, the pattern and the shape.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, pattern) in tensors.items():
        axes = pattern.split()
        if tensor.ndim != len(axes):
            raise ValueError(f"{name}: expected shape ({', '.join(axes)}), got {tuple(tensor.shape)}")
        for axis, size in zip(axes, tensor.shape, strict=True):
            expected = int(axis) if axis.isdigit() else sizes.setdefault(axis, size)
            if size != expected:
                raise ValueError(
                    f"{name}: expected shape ({', '.join(axes)}) with {axis} = {expected}, got {tuple(tensor.shape)}"
                )
    return sizes

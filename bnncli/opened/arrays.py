"""Arrays that a caller gives: checked, as tensors, told apart as features or inputs by their shape and type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.errors import DataError
from bnncli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_WHERE = "x"  # what the argument is called


def as_tensor(x: Any) -> Tensor:
    """The tensor (N, ...) of what a caller gives, where it lies, in its own type.

    Raises:
        DataError: no array of numbers, fewer than two axes, no examples.
    """
    tensor = _plain(x) if isinstance(x, torch.Tensor) else _of_array(x)
    if tensor.ndim < 2:
        message = f"{_WHERE}: expected features (N, D) or inputs (N, ...); got shape {tuple(tensor.shape)}"
        raise DataError(message, hint="a single example has N = 1: give x[None]", code="bad_shape")
    if len(tensor) == 0:
        raise DataError(f"{_WHERE}: no examples", code="empty_split")
    return tensor


def is_features(tensor: Tensor, num_features: int) -> bool:
    """Whether examples (N, ...) are features (N, D) of a head: real numbers in rows of its D; else they are inputs."""
    return tensor.ndim == 2 and tensor.shape[1] == num_features and tensor.is_floating_point()


def checked_features(features: Tensor) -> Tensor:
    """Features (N, D) in float16 or float32, all finite. Raises DataError otherwise."""
    stored = features if features.dtype == torch.float16 else features.float()
    check_finite(stored)
    return stored


def check_finite(tensor: Tensor) -> None:
    """Pass when all of (N, ...) is finite. Raises DataError with the first row that is not."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
        return
    bad = (~torch.isfinite(tensor)).flatten(1).any(dim=1).nonzero()
    if len(bad):
        message = f"{_WHERE}: {len(bad)} rows are not finite, the first is row {int(bad[0])}"
        raise DataError(message, hint="leave them out: x[np.isfinite(x).all(axis=1)]", code="not_finite")


def described(tensor: Tensor) -> str:
    """Shape and type of an array, for messages."""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _plain(x: Tensor) -> Tensor:
    if x.is_nested or x.is_meta or x.layout is not torch.strided or x.is_quantized:
        raise _no_numbers("a sparse, nested, quantized or empty tensor")
    if x.is_complex() or x.dtype == torch.bool:
        raise _no_numbers(f"a tensor of {str(x.dtype).removeprefix('torch.')}")
    return x.detach()


def _of_array(x: Any) -> Tensor:
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise _no_numbers(type(x).__name__) from None
    if np.ma.is_masked(x):
        raise _no_numbers("a masked array: fill it or leave the masked rows out")
    if array.dtype.kind not in "fui":
        raise _no_numbers(f"{type(x).__name__} of {array.dtype}" if array.ndim else type(x).__name__)
    native = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(
        np.require(native, requirements=("C", "W"))
    )  # torch takes no array that it may not write to


def _no_numbers(what: str) -> DataError:
    return DataError(f"{_WHERE}: expected an array or tensor of numbers; got {what}", code="bad_dtype")

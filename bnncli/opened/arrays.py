"""Arrays that a caller gives: checked, as tensors, told apart as features or inputs by their shape and type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bnncli.data._sound import clip_of, is_clip
from bnncli.errors import DataError
from bnncli.lazy import torch
from bnncli.progress import Progress

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
        raise DataError(message, hint="for a single example, pass x[None] (N = 1)", code="bad_shape")
    if len(tensor) == 0:
        raise DataError(f"{_WHERE}: no examples", code="empty_split")
    return tensor


@dataclass(frozen=True, eq=False)
class Items:
    """Texts, PIL images or clips of sound, for the preprocessing that a model brings: a data set without labels.

    Attributes:
        items: texts, images or audio.
    """

    given: list[Any]
    items: str
    labels: None = None
    is_labeled: bool = False
    classes: None = None
    is_sized: bool = False
    names: None = None

    def __len__(self) -> int:
        return len(self.given)

    def read(self, rows: np.ndarray) -> tuple[list[Any], None]:
        """Those of the rows (n,)."""
        return [self.given[row] for row in rows.tolist()], None

    def identity(self, rows: np.ndarray, progress: Progress) -> None:
        """None: only reading everything would tell."""


def as_items(x: Any) -> Items | None:
    """The texts, images or sound of what a caller gives; None where it is something else.

    Raises:
        DataError: a single one, which is none of several; an array that is no wave.
    """
    from PIL import Image  # here, for its time

    def is_of(kind: type) -> Callable[[object], bool]:
        return lambda one: isinstance(one, kind)

    for is_one, what in ((is_of(str), "texts"), (is_of(Image.Image), "images"), (is_clip, "audio")):
        if is_one(x):
            message = f"{_WHERE}: expected a list of {what}; got a single item"
            raise DataError(message, hint="give [x]", code="bad_shape")
        given = x.tolist() if isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype.kind in "UO" else x
        if isinstance(given, list | tuple) and given and all(map(is_one, given)):
            clips = (
                [clip_of(one, f"{_WHERE}: row {row}") for row, one in enumerate(given)] if what == "audio" else given
            )
            return Items(list(clips), what)
    return None


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
        message = f"{_WHERE}: {len(bad)} rows are not finite; the first is row {int(bad[0])}"
        raise DataError(message, hint="drop them: x[np.isfinite(x).all(axis=1)]", code="not_finite")


def described(inputs: Tensor | Items) -> str:
    """Shape and type of an array, or how many texts, images or clips, for messages."""
    if isinstance(inputs, Items):
        return f"{len(inputs)} {'clips' if inputs.items == 'audio' else inputs.items}"
    return f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"


def _plain(x: Tensor) -> Tensor:
    if x.is_nested or x.is_meta or x.layout is not torch.strided or x.is_quantized:
        raise _no_numbers("a sparse, nested, quantized or meta tensor")
    if x.is_complex() or x.dtype == torch.bool:
        raise _no_numbers(f"a tensor of type {str(x.dtype).removeprefix('torch.')}")
    return x.detach()


def _of_array(x: Any) -> Tensor:
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise _no_numbers(type(x).__name__) from None
    if np.ma.is_masked(x):
        raise _no_numbers("a masked array: fill it, or drop the masked rows")
    if array.dtype.kind not in "fui":
        raise _no_numbers(f"{type(x).__name__} of type {array.dtype}" if array.ndim else type(x).__name__)
    native = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(
        np.require(native, requirements=("C", "W"))
    )  # torch takes no array that it may not write to


def _no_numbers(what: str) -> DataError:
    return DataError(f"{_WHERE}: expected a numeric array or tensor; got {what}", code="bad_dtype")

"""What a model brings to make its inputs out of images, texts or sound: an image processor, a tokenizer, a feature extractor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from bnncli.data.pixels import SUFFIXES, channels_axis
from bnncli.errors import DataError, UsageError
from bnncli.names import quoted

if TYPE_CHECKING:
    from PIL import Image

    from bnncli.data.splits import Dataset


_MAKERS = {"texts": "tokenizer", "audio": "feature extractor"}  # of what only they make inputs of


class Transformed(NamedTuple):
    """Inputs of n items, one array or one by each name of the network's arguments.

    Attributes:
        num_truncated: texts or clips that were cut.
        num_converted: clips of another sampling rate, or of several channels.
        lengths: (n,) where inputs are padded along their second axis, and how much of it is each item's own: the network
            is to see no more than that. None where it sees all.
    """

    inputs: np.ndarray | Mapping[str, np.ndarray]
    num_truncated: int = 0
    num_converted: int = 0
    lengths: tuple[int, ...] | None = None


class Transform(Protocol):
    """From decoded images, texts or sound to what a network takes. It goes to other processes, so it must be picklable."""

    @property
    def takes(self) -> str:
        """images: PIL images; texts: str, or pairs (str, str); audio: Sound."""

    @property
    def mode(self) -> str:
        """Of the images that it takes: RGB, or L where the network has one channel; empty for others."""

    def __call__(self, items: Sequence[Any]) -> Transformed:
        """Inputs of the items: real numbers as float32, token ids as int64."""

    def to_json(self) -> dict[str, Any]:
        """What it does, for provenance: same JSON, same inputs."""


def check_fits(dataset: Dataset, transform: Transform | None, spec: str) -> None:
    """Nothing, when the model can take what the data have.

    Raises:
        UsageError: texts or sound for a network that takes arrays, or items of another kind than it takes.
    """
    items = items_of(dataset)
    if transform is None and items == "texts" and _has_columns(spec):
        (first,) = cast("Sequence[object]", dataset.read(np.zeros(1, np.int64))[0])
        if isinstance(first, str) and first.lower().endswith(tuple(SUFFIXES)):
            raise UsageError(
                f"{spec}: expected images, because the model has no tokenizer; got text, such as {quoted(first)}",
                hint="if these are image paths, name their column: image=COLUMN",
            )
    if transform is None and items in _MAKERS:
        raise UsageError(
            f"{spec}: the data are {items}, but the model has no {_MAKERS[items]}",
            hint=f"use a model that includes one, such as \0model\0 hf:FOLDER; save the {_MAKERS[items]} to the "
            "folder with its save_pretrained method",
        )
    if transform is not None and items not in ("arrays", transform.takes):
        column = transform.takes.removesuffix("s")
        hint = f"name the column: {column}=COLUMN" if _has_columns(spec) else f"give data of {transform.takes}"
        raise UsageError(f"{spec}: the data are {items}, but the model takes {transform.takes}", hint=hint)


def _has_columns(spec: str) -> bool:
    return spec.partition(":")[0] in ("csv", "tsv", "jsonl", "parquet", "arrow", "hf-dataset", "webdataset")


def items_of(dataset: Dataset) -> str:
    """What the data set's `read` gives: arrays, images, texts or audio; kinds that others have installed give arrays."""
    return cast(str, getattr(dataset, "items", "arrays"))


def transformed(transform: Transform, items: Sequence[Any] | np.ndarray, where: str) -> Transformed:
    """What the model makes of items.

    Args:
        items: what its `takes` says, or uint8 images (n, H, W), (n, H, W, C) or (n, C, H, W) where it takes images.
        where: what they are of, for messages.

    Raises:
        DataError: it cannot take them.
    """
    if isinstance(items, np.ndarray):
        items = pil_images(items, transform, where)
    try:
        found = transform(items)
    except (ValueError, TypeError, LookupError, RuntimeError, ArithmeticError) as error:
        what = "clips" if transform.takes == "audio" else transform.takes
        message = f"{where}: the model's preprocessing failed on these {what}: {_first_line(error)}"
        raise DataError(message, code="wrong_inputs") from error
    inputs = found.inputs
    if isinstance(inputs, Mapping):
        return found._replace(inputs={name: settled(array) for name, array in inputs.items()})
    return found._replace(inputs=settled(inputs))


def settled(array: np.ndarray) -> np.ndarray:
    """Real numbers as float32, whole ones as int64, booleans as they are."""
    kinds = {"f": np.float32, "i": np.int64, "u": np.int64}
    return np.ascontiguousarray(array, kinds.get(array.dtype.kind, array.dtype))


def pil_images(array: np.ndarray, transform: Transform, where: str) -> list[Image.Image]:
    """Images (n, H, W), (n, H, W, C) or (n, C, H, W) of uint8 as PIL images of the transform's mode."""
    from PIL import Image  # here, for its time

    axis = channels_axis(array.shape) if array.ndim != 2 else None
    if transform.takes != "images" or array.ndim == 2:
        what = f"{transform.takes}, but the data are arrays of shape {tuple(array.shape[1:])}"
        raise DataError(f"{where}: the model takes {what}", code="wrong_inputs")
    if axis == 1:
        array = np.moveaxis(array, 1, 3)
    if array.ndim == 4 and array.shape[3] == 1:
        array = array[..., 0]
    if array.ndim == 4 and transform.mode == "L":
        raise DataError(
            f"{where}: the data are colour images, but the model takes greyscale images", code="wrong_inputs"
        )
    return [Image.fromarray(np.ascontiguousarray(image)).convert(transform.mode) for image in array]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]

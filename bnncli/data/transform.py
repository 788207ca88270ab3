"""The model's own preprocessing of images, texts or sound: an image processor, a tokenizer, a feature extractor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from bnncli.data.columns import PAIRS
from bnncli.data.pixels import SUFFIXES, channels_axis
from bnncli.errors import DataError, UsageError
from bnncli.names import quote_name

if TYPE_CHECKING:
    from PIL import Image

    from bnncli.data.splits import Dataset


# what prepares inputs that only it can
_MAKERS = {"texts": "tokenizer", "words": "tokenizer", "audio": "feature extractor"}


class Word(NamedTuple):
    """A word to classify, with its text.

    Attributes:
        words: of the text.
        place: of the word among them.
    """

    words: tuple[str, ...]
    place: int


class TransformedInputs(NamedTuple):
    """Inputs of n items, one array or one per argument name of the network.

    Attributes:
        num_truncated: number of truncated texts or clips.
        num_converted: number of clips that were resampled or mixed down.
        lengths: (n,) length of each item along the padded second axis, beyond which the network must not look; None
            without padding.
    """

    inputs: np.ndarray | Mapping[str, np.ndarray]
    num_truncated: int = 0
    num_converted: int = 0
    lengths: tuple[int, ...] | None = None


class Transform(Protocol):
    """Maps decoded images, texts or sound to network inputs. Must be picklable for worker processes."""

    @property
    def takes(self) -> str:
        """images: PIL images; texts: str, or pairs (str, str); words: Word; audio: Sound.

        pairs: two texts, or a prompt and two answers; each a str or a list of chat messages.
        """

    @property
    def mode(self) -> str:
        """Mode of the images: RGB, or L for a network with one channel; empty for other items."""

    def __call__(self, items: Sequence[Any]) -> TransformedInputs:
        """Return the inputs of the items: real numbers as float32, token ids as int64."""

    def to_json(self) -> dict[str, Any]:
        """Return a description for provenance: same JSON, same inputs."""


def check_fits(dataset: Dataset, transform: Transform | None, spec: str) -> None:
    """Raise unless the model takes the items of the data set.

    Raises:
        UsageError: texts or sound for a network of arrays, or another kind of item.
    """
    items = item_kind(dataset)
    if transform is None and items == "texts" and _has_columns(spec):
        (first,) = cast("Sequence[object]", dataset.read(np.zeros(1, np.int64))[0])
        if isinstance(first, str) and first.lower().endswith(tuple(SUFFIXES)):
            raise UsageError(
                f"{spec}: expected images, because the model has no tokenizer; got text, such as {quote_name(first)}",
                hint="if these are image paths, name their column: image=COLUMN",
            )
    if transform is None and items in _MAKERS:
        raise UsageError(
            f"{spec}: the data are {items}, but the model has no {_MAKERS[items]}",
            hint=f"use a model that includes one, such as \0model\0 hf:FOLDER; save the {_MAKERS[items]} to the "
            "folder with its save_pretrained method",
        )
    is_numbers = transform is not None and items == "arrays" and ":x=" in spec and _is_real(dataset)
    if transform is not None and (is_numbers or items not in ("arrays", transform.takes)):
        items = "numbers" if is_numbers else items
        column = transform.takes if transform.takes == "words" else transform.takes.removesuffix("s")
        hint = f"name the column: {column}=COLUMN" if _has_columns(spec) else f"give data of {transform.takes}"
        if transform.takes == PAIRS:
            hint = "give a table with two columns of texts: text=FIRST+SECOND"
        raise UsageError(f"{spec}: the data are {items}, but the model takes {transform.takes}", hint=hint)


def _is_real(dataset: Dataset) -> bool:
    """Return whether examples are real numbers, rather than token ids or several arrays by name."""
    first = dataset.read(np.zeros(1, np.int64))[0]
    return isinstance(first, np.ndarray) and np.issubdtype(first.dtype, np.floating)


def _has_columns(spec: str) -> bool:
    return spec.partition(":")[0] in ("csv", "tsv", "jsonl", "conll", "parquet", "arrow", "hf-dataset", "webdataset")


def item_kind(dataset: Dataset) -> str:
    """Return the kind of items from `read`: arrays, images, texts, words or audio; arrays for kinds installed by others."""
    return cast(str, getattr(dataset, "items", "arrays"))


def apply_transform(transform: Transform, items: Sequence[Any] | np.ndarray, where: str) -> TransformedInputs:
    """Apply a transform to items.

    Args:
        items: of the kind in `takes`, or uint8 images (n, H, W), (n, H, W, C) or (n, C, H, W) for images.
        where: name for messages.

    Raises:
        DataError: the transform does not support them.
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
        return found._replace(inputs={name: normalise_dtype(array) for name, array in inputs.items()})
    return found._replace(inputs=normalise_dtype(inputs))


def normalise_dtype(array: np.ndarray) -> np.ndarray:
    """Convert real numbers to float32 and integers to int64; booleans stay."""
    kinds = {"f": np.float32, "i": np.int64, "u": np.int64}
    return np.ascontiguousarray(array, kinds.get(array.dtype.kind, array.dtype))


def pil_images(array: np.ndarray, transform: Transform, where: str) -> list[Image.Image]:
    """Convert uint8 images (n, H, W), (n, H, W, C) or (n, C, H, W) to PIL images of the transform's mode."""
    from PIL import Image  # slow import

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

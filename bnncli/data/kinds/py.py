"""`py:module:factory` or `py:file.py:factory`: a torch Dataset from your own code.

Items are (input, label) or just the input. A label is a class, or zeros and ones, one per label. Inputs are what the
network takes, except that uint8 is scaled to [0, 1]; other integers, such as token ids, are passed unchanged. A dict of
inputs is passed by argument name; if it is the whole item, it may have the label as `label` or `labels`. Texts, pairs
of texts, PIL images, and sound as a dict of `array` and `sampling_rate` (also as the only other value of such a dict)
go through the model's own preprocessing. The attributes `classes` (a text per class) and `names` (one per example) are
used if present.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from bnncli.data.labels import check_largest, explain_matrix, is_matrix
from bnncli.data.pixels import Preprocess
from bnncli.data.sound import convert_clip, is_clip
from bnncli.errors import DataError, UsageError
from bnncli.lazy import torch
from bnncli.names import format_names, quote_name
from bnncli.options.declaration import Form
from bnncli.progress import Progress
from bnncli.system import user_code

if TYPE_CHECKING:
    from torch import Tensor

    from bnncli.data.splits import Stored

FORM = Form("py:module:factory", 40, "A torch Dataset that your code creates (or py:file.py:factory).")


@dataclass(frozen=True, eq=False)
class TorchDataset:
    """A map-style data set; labels are known when an example is read."""

    dataset: Any
    spec: str
    is_labeled: bool
    classes: tuple[str, ...] | None
    names: tuple[str, ...] | None = None
    labels: None = None
    is_sized: bool = False
    items: str = "arrays"
    first_labels: np.ndarray | None = None

    @property
    def num_labels(self) -> int | None:
        """L for multi-label data; else None."""
        return None if self.first_labels is None else self.first_labels.shape[1]

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """Return inputs and labels (n,) or (n, L) of the rows. Raises DataError for unequal shapes or invalid labels."""
        inputs: list[Any] = []
        labels: list[int | np.ndarray | None] = []
        for row in rows.tolist():
            with user_code.running_user_code(f"{self.spec} row {row}"):
                item = self.dataset[row]
            value, label = _item(item, f"{self.spec} row {row}", self.items)
            if label is not None and _width(label) != self.num_labels:
                raise DataError(
                    f"{self.spec}: row {row} has {_describe_width(_width(label))}, but row 0 has "
                    f"{_describe_width(self.num_labels)}",
                    code="bad_labels",
                )
            if inputs and self.items == "arrays":
                _check_same(value, inputs[0], f"{self.spec}: row {row}")
            if self.is_labeled != (label is not None):
                raise DataError(f"{self.spec}: some items have labels and some do not (row {row})", code="bad_labels")
            inputs.append(value)
            labels.append(label)
        dtype = np.int64 if self.num_labels is None else np.uint8
        found = np.array(labels, dtype) if self.is_labeled else None
        return inputs if self.items != "arrays" else _stack_inputs(inputs), found

    def identity(self, rows: np.ndarray, progress: Progress) -> None:
        """Return None: the content is whatever the user's code returns."""


def exists(place: str) -> bool:
    """Return False: a factory cannot contain @."""
    return False


def open_dataset(place: str, preprocess: Preprocess) -> TorchDataset:
    """Return the data set that the factory creates.

    Raises:
        UsageError: there is no such factory, or its result has no length or items.
        MissingInput: the Python file does not exist.
        DataError: the first item is not an input, or an input and a label.
    """
    factory = user_code.load_factory(place, option="\0data\0 py")
    user_code.check_arguments(factory, {}, option="\0data\0 py")
    with user_code.running_user_code(f"\0data\0 py: {place!r}"):
        dataset = factory()
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, torch.utils.data.IterableDataset) or not has_items:
        raise UsageError(f"\0data\0 py: {place!r} returned {type(dataset).__name__}, expected a map-style Dataset")
    with user_code.running_user_code(f"py:{place} len()"):
        size = len(dataset)
    if size == 0:
        raise DataError(f"py:{place}: no examples", code="empty_split")
    with user_code.running_user_code(f"py:{place} row 0"):
        first = dataset[0]
    items = _items(first, preprocess)
    _, label = _item(first, f"py:{place} row 0", items)
    with user_code.running_user_code(f"py:{place} its attributes `classes` and `names`"):
        classes, names = (_texts(getattr(dataset, attribute, None)) for attribute in ("classes", "names"))
    if any("\0" in text for text in (*(classes or ()), *(names or ()))):
        raise DataError(f"py:{place}: its attributes `classes` and `names` must not contain NUL characters")
    if names is not None and len(names) != size:
        raise DataError(f"py:{place}: its attribute `names` has {len(names)} names, but there are {size} examples")
    several = label[None] if isinstance(label, np.ndarray) else None
    return TorchDataset(dataset, f"py:{place}", label is not None, classes, names, items=items, first_labels=several)


def _width(label: int | np.ndarray) -> int | None:
    """Return L for multi-label labels; None for a class."""
    return None if isinstance(label, int) else len(label)


def _describe_width(width: int | None) -> str:
    return "a class" if width is None else f"{width} labels"


def _texts(value: Any) -> tuple[str, ...] | None:
    """Return a list of texts as a tuple; None for anything else."""
    is_list = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
    return tuple(value) if is_list else None


def _items(item: Any, preprocess: Preprocess) -> str:
    """Return the kind of items: texts; images or audio if the model has a transform for them; else arrays."""
    value, _ = _divide_item(item)
    if is_clip(value) and preprocess.transform is not None and preprocess.transform.takes == "audio":
        return "audio"
    if _is_text(value):
        return "texts"
    return "images" if preprocess.transform is not None and isinstance(value, Image.Image) else "arrays"


def _divide_item(item: Any) -> tuple[Any, Any]:
    """Split an item into input and optional label. Two texts are a pair."""
    if isinstance(item, Mapping):
        names = [name for name in ("labels", "label") if name in item]
        label = names[0] if len(names) == 1 else None
        rest = {name: value for name, value in item.items() if name != label}
        only = next(iter(rest.values())) if len(rest) == 1 else None
        value = only if _is_text(only) or isinstance(only, Image.Image) or is_clip(only) else rest
        return value, None if label is None else item[label]
    if isinstance(item, (tuple, list)) and len(item) == 2 and not _is_text(item):
        return item[0], item[1]
    return item, None


def _is_text(value: Any) -> bool:
    """Return whether it is a text or a pair of texts."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)
    return isinstance(value, str) or is_pair


def _item(item: Any, where: str, items: str) -> tuple[Any, int | np.ndarray | None]:
    """Return the input, with arrays as tensors, and the label as a number, zeros and ones (L,), or None."""
    value, label = _divide_item(item)
    number = None if label is None else _label(label, where)
    if items == "texts":
        if not _is_text(value):
            raise DataError(f"{where}: expected a string, as in row 0, got {type(value).__name__}")
        return (value if isinstance(value, str) else tuple(value)), number
    if items == "images":
        if not isinstance(value, Image.Image):
            raise DataError(f"{where}: expected an image, as in row 0, got {type(value).__name__}")
        return value, number
    if items == "audio":
        if not is_clip(value):
            raise DataError(f"{where}: expected audio, as in row 0, got {type(value).__name__}")
        return convert_clip(value, where), number
    if isinstance(value, Mapping):
        if not value or not all(isinstance(name, str) for name in value):
            raise DataError(
                f"{where}: expected inputs keyed by the names of the network's arguments, got {format_names(value)}"
            )
        return {name: _tensor(part, f"{where}: {quote_name(name)}") for name, part in value.items()}, number
    return _tensor(value, where), number


def _tensor(value: Any, where: str) -> Tensor:
    """Convert an array of numbers to a tensor."""
    if not isinstance(value, torch.Tensor):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(f"{where}: cannot convert the input to an array: {str(error)[:150]}") from error
        if array.dtype.kind not in "fui":
            raise DataError(f"{where}: expected a tensor, array or image as input, got {type(value).__name__}")
        value = torch.from_numpy(np.array(array))
    if value.is_nested or value.is_meta or value.layout is not torch.strided:
        raise DataError(f"{where}: the input is a sparse, nested or meta tensor, expected a dense one")
    return value


def _check_same(value: Any, first: Any, where: str) -> None:
    """Raise DataError if two inputs differ in names or shapes."""
    named, others = (part if isinstance(part, dict) else {"": part} for part in (value, first))
    if named.keys() != others.keys():
        raise DataError(f"{where} has the inputs {format_names(named)}; others have {format_names(others)}")
    for name, tensor in named.items():
        if tensor.shape != others[name].shape:
            shapes = f"shape {tuple(tensor.shape)}; others have {tuple(others[name].shape)}"
            raise DataError(f"{where} has {shapes}" + (f" for {quote_name(name)}: pad to equal length" if name else ""))


def _stack_inputs(inputs: list[Any]) -> Tensor | dict[str, Tensor]:
    """Stack the inputs of a batch."""
    if isinstance(inputs[0], dict):
        return {name: torch.stack([each[name] for each in inputs]) for name in inputs[0]}
    return torch.stack(inputs)


def _label(label: Any, where: str) -> int | np.ndarray:
    try:
        array = np.asarray(label)
    except (ValueError, TypeError, OverflowError, RuntimeError, RecursionError) as error:
        raise DataError(
            f"{where}: cannot convert the label to a number: {str(error)[:150]}", code="bad_labels"
        ) from error
    if array.ndim == 1 and is_matrix(array[None]):
        return array.astype(np.uint8)
    if array.ndim == 1 and array.size > 1:
        found, hint = explain_matrix(array[None])
        raise DataError(
            f"{where}: labels must be integers, counted from 0; got {array.size} numbers{found}",
            hint=hint, code="bad_labels",
        )  # fmt: skip
    if array.ndim == 0 and array.dtype.kind == "f":
        raise DataError(
            f"{where}: labels must be integers, counted from 0; got {array.item()!r} (a regression target?)",
            hint="return the class number as an int", code="bad_labels",
        )  # fmt: skip
    if array.ndim != 0 or array.dtype.kind not in "iu" or array < 0:
        raise DataError(f"{where}: labels must be integers, counted from 0; got {label!r}"[:300], code="bad_labels")
    check_largest(int(array), f"{where}: labels must be integers, counted from 0; it")
    return int(array)

"""A named set of examples to read: rows of a data set, what is done to them, and batches of them on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from bnncli.data._classes import Numbering
from bnncli.data._known import KnownDataset
from bnncli.data._preprocess import ImageCounts, Preprocess
from bnncli.data._shift import Shift, ShiftedDataset
from bnncli.data._transform import items_of
from bnncli.errors import DataError
from bnncli.numerics.digests import json_sha256, tensor_digest
from bnncli.progress import SILENT, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bnncli.data._loader import Chunk

# What a network takes: one tensor, or several by the names of its arguments. What data sets hold: arrays, or items.
Inputs: TypeAlias = "Tensor | dict[str, Tensor]"
Stored: TypeAlias = "np.ndarray | Tensor | Mapping[str, np.ndarray] | Mapping[str, Tensor] | list[Any]"


class Dataset(Protocol):
    """Stored examples, read by their rows."""

    @property
    def labels(self) -> np.ndarray | None:
        """(rows,) int64, or (rows, L) uint8 of several labels an example; None without, and where they are known only when read."""

    @property
    def is_labeled(self) -> bool:
        """Whether `read` returns labels."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names in the order of the labels; None where it has none."""

    @property
    def is_sized(self) -> bool:
        """Whether images were resized and cropped by `read`."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Of the examples, such as their files; None where they have none."""

    @property
    def items(self) -> str:
        """What `read` gives: arrays; images (a list of PIL images), texts (of str or pairs of it) or audio (of Sound), for a transform."""

    def __len__(self) -> int:
        """Examples stored."""

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """Inputs as stored and labels (n,) int64, or (n, L) uint8, of the rows (n,): an array, arrays by name, or a list of items."""

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray | Tensor] | None:
        """Arrays that change when these rows (n,), or what they hold, do; None where only reading everything would tell."""


class Batch(NamedTuple):
    """Inputs on the device, labels (n,) int64 or (n, L) uint8 on the CPU or None, and what was done to the examples.

    Inputs are (n, ...) in float32, or token ids; or several of them, by the names of the network's arguments.
    num_truncated, num_converted and lengths are those of Transformed; images counts what was done when they were decoded.
    """

    inputs: Inputs
    labels: Tensor | None
    num_truncated: int = 0
    num_converted: int = 0
    lengths: tuple[int, ...] | None = None
    images: ImageCounts = ImageCounts()


@dataclass(frozen=True)
class InputSplit:
    """Rows of a data set in a fixed order: what the network sees of a split.

    Attributes:
        spec: the text that named the data.
        rows: (N,) int64, ascending: the row of each example in the data set, which is its sample id.
        is_labeled: whether batches have labels.
        first_rows: N where the spec asks for the first N rows (@N).
        name: of the split.
        is_ood: whether it is out-of-distribution.
        held_out: the `NEW=OLD:N` that made it or took rows from it, or None.
        numbering: what the labels of the data are renumbered by, see `matched_to`; None leaves them.
        shift: what is done to its images; digests are those of the data as they are.
    """

    spec: str
    dataset: Dataset
    rows: np.ndarray
    preprocess: Preprocess
    is_labeled: bool
    first_rows: int | None = None
    name: str = ""
    is_ood: bool = False
    held_out: str | None = None
    numbering: Numbering | None = None
    shift: Shift | None = None

    def __post_init__(self) -> None:
        if len(self.rows) == 0:
            raise DataError(f"{self.spec}: no examples", code="empty_split")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> np.ndarray | None:
        """Labels (N,) int64, or (N, L) uint8; None without labels, or where they are known only when read (py:)."""
        known = self.dataset.labels
        if not self.is_labeled or known is None:
            return None
        return known[self.rows] if self.numbering is None else self.numbering.of(known[self.rows])

    @property
    def shown_labels(self) -> np.ndarray | None:
        """The labels as far as they are known before any example is read: of user's code (py:) the first; None without."""
        first: np.ndarray | None = getattr(self.dataset, "first_labels", None)
        return self.labels if self.labels is not None or not self.is_labeled else first

    @property
    def num_labels(self) -> int | None:
        """L where an example has several labels; None where it has one class, or none."""
        shown = self.shown_labels
        return shown.shape[1] if shown is not None and shown.ndim == 2 else None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, index = label; None where the data has no names."""
        return self.dataset.classes if self.numbering is None else self.numbering.classes

    @property
    def names(self) -> list[str] | None:
        """Names (N,) of the examples; None where the data have none."""
        every = self.dataset.names
        return None if every is None else [every[row] for row in self.rows.tolist()]

    @property
    def items(self) -> str:
        """What the examples are: arrays, images, texts or audio."""
        return items_of(self.dataset)

    def take(self, positions: np.ndarray) -> InputSplit:
        """The split of the examples at these positions (n,), in this order."""
        return replace(self, rows=self.rows[positions])

    def longest(self, among: int) -> InputSplit:
        """The split of one example: of texts the one with most characters of at most so many across the split, of others the first."""
        if self.items != "texts":
            return self.take(np.arange(1))
        some = np.unique(np.linspace(0, len(self) - 1, num=min(among, len(self)), dtype=np.int64))
        texts = self.dataset.read(self.rows[some])[0]
        lengths = [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
        return self.take(some[[int(np.argmax(lengths))]])

    def as_ood(self) -> InputSplit:
        """The same examples, as out-of-distribution, which have no labels."""
        return replace(self, is_labeled=False, is_ood=True)

    def content_digest(self, progress: Progress = SILENT) -> str | None:
        """Digest of the stored content and of the choice of rows; None for a data set that cannot tell (py:)."""
        identity = self.dataset.identity(self.rows, progress)
        return None if identity is None else tensor_digest(identity)

    @cached_property
    def order_digest(self) -> str:
        """Identity of the examples and their order, as far as it can be told without running user code."""
        return self.content_digest() or json_sha256([self.spec, self.rows.tolist()])

    @cached_property
    def outline_digest(self) -> str:
        """Identity of what is known of the examples before any is read: which rows, their labels, names and classes."""
        known = {"rows": self.rows, "labels": self.labels}
        found = {name: array for name, array in known.items() if array is not None}
        return json_sha256([self.spec, tensor_digest(found), self.names, self.classes])

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        num_workers: int = 0,
        turns: slice = slice(None),
    ) -> Iterator[Batch]:
        """Batches in order, preprocessed on the device; `num_workers` processes read and decode ahead.

        Args:
            turns: which of them, by their place; no other is read.

        Raises:
            DataError: an example cannot be read, or has another shape than the others.
        """
        from bnncli.data._loader import read_ahead  # here, for torch

        dataset = self.dataset.opened if isinstance(self.dataset, KnownDataset) else self.dataset
        chunks = read_ahead(
            dataset if self.shift is None else ShiftedDataset(dataset, self.shift, self.spec),
            self.rows,
            batch_size,
            num_workers=num_workers,
            transform=self.preprocess.transform,
            where=self.spec,
            turns=turns,
        )
        for chunk in chunks:
            labels = chunk.labels if self.is_labeled else None
            if labels is not None and self.numbering is not None:
                labels = labels.new_tensor(self.numbering.of(labels.numpy()))
            inputs = self._ready(chunk, device)
            yield Batch(inputs, labels, chunk.num_truncated, chunk.num_converted, chunk.lengths, chunk.images)

    def _ready(self, chunk: Chunk, device: torch.device | str) -> Inputs:
        """What was read, on the device, as the network takes it."""
        if isinstance(chunk.inputs, dict):
            self.preprocess.check_named(chunk.inputs)
            moved = {name: tensor.to(device) for name, tensor in chunk.inputs.items()}
            return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in moved.items()}
        inputs = chunk.inputs.to(device)
        if chunk.is_ready:
            return inputs
        try:
            return self.preprocess.apply(inputs, is_sized=self.dataset.is_sized)
        except DataError as error:
            raise DataError(f"{self.spec}: {error.message}", hint=error.hint) from error

"""A split, a named set of examples: parse and open `SPLIT=KIND:PLACE[@N]`, hold out rows, and read batches on a device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from bnncli import registry
from bnncli.data.columns import PAIRS
from bnncli.data.labels import Numbering, common_task
from bnncli.data.pixels import ImageCounts, Preprocess
from bnncli.data.shift import Shift, ShiftedDataset
from bnncli.data.transform import check_fits, item_kind
from bnncli.errors import BnnError, DataError, UsageError
from bnncli.lazy import torch
from bnncli.names import near_miss
from bnncli.numerics.digests import file_sha256, json_sha256, tensor_digest
from bnncli.numerics.random import permutation
from bnncli.options.declaration import check_split_name, list_forms
from bnncli.progress import SILENT, Progress
from bnncli.system.devices import has_float64
from bnncli.system.input_files import convert_read_errors, open_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from bnncli.data.loader import Chunk


_REVISION = 1  # increases when a kind reads the same bytes differently
_IDENTITY = "identity."


class Memory(Protocol):
    """A store of arrays by name that outlasts a command."""

    def read(self) -> Mapping[str, np.ndarray]:
        """Return the stored arrays; none if there are none or they are damaged."""

    def offer(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Store arrays when the command has finished."""


@dataclass(frozen=True, eq=False)
class CachedDataset:
    """A data set whose facts are already known; it is opened when its rows are needed."""

    told: Mapping[str, np.ndarray]
    open: Callable[[], Dataset] = field(repr=False)

    @property
    def labels(self) -> np.ndarray | None:
        """Labels (rows,) or (rows, L), or None."""
        return self.told.get("labels")

    @property
    def is_labeled(self) -> bool:
        """Return whether there are labels."""
        return "labels" in self.told

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in the order of the labels."""
        return tuple(self.told["classes"].tolist()) if "classes" in self.told else None

    @property
    def groups(self) -> np.ndarray | None:
        """Group of each example, (rows,) int64, or None."""
        return self.told.get("groups")

    @cached_property
    def names(self) -> tuple[str, ...] | None:
        """Names of the examples."""
        return tuple(self.told["names"].tolist()) if "names" in self.told else None

    @property
    def is_sized(self) -> bool:
        """Return whether images are resized when read."""
        return bool(self.told["is_sized"])

    @property
    def note(self) -> str:
        """What to say about the data set."""
        return str(self.told.get("note", ""))

    @property
    def items(self) -> str:
        """Arrays, images or texts."""
        return str(self.told["items"])

    def __len__(self) -> int:
        return int(self.told["num_rows"])

    @cached_property
    def opened(self) -> Dataset:
        """The opened data set."""
        return self.open()

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """Read from the opened data set."""
        return self.opened.read(rows)

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return the identity stored for the data set."""
        found = {name.removeprefix(_IDENTITY): array for name, array in self.told.items() if name.startswith(_IDENTITY)}
        return {**found, "rows": rows}


def recall_or_open(
    kind: str, module: Any, place: str, preprocess: Preprocess, memory: Memory | None
) -> Dataset | CachedDataset:
    """Return the data set of a place, without opening it if all of its files are unchanged since it was last opened.

    Args:
        module: of the kind. If it has `files(place)`, these contain everything its data sets depend on; otherwise the
            data set is always opened.
        memory: of this place; None to always open.

    Raises:
        BnnError: as raised by the module's `open_dataset`.
    """
    dataset: Dataset
    if memory is None or not hasattr(module, "files"):
        dataset = module.open_dataset(place, preprocess)
        return dataset
    try:
        files = module.files(place)
        states = _states(files)
        key = _key(kind, place, preprocess, files)
    except (BnnError, OSError):  # opening reports the error
        dataset = module.open_dataset(place, preprocess)
        return dataset
    told = memory.read()
    if str(told.get("key")) == key:
        return CachedDataset(told, partial(module.open_dataset, place, preprocess))
    dataset = module.open_dataset(place, preprocess)
    if getattr(dataset, "paths", None) is not None:  # its images are separate files
        return dataset
    if not dataset.is_labeled:  # its other columns may explain why
        return dataset
    told = _collect_facts(dataset, key)
    if _states(files) == states:
        memory.offer(told)
    return CachedDataset(told, lambda: dataset)


def _key(kind: str, place: str, preprocess: Preprocess, files: Sequence[Path]) -> str:
    """Return a key of everything that a data set's facts depend on."""
    digests = []
    for file in files:
        with open_regular(file) as stream:
            digests.append([file.name, file_sha256(stream)])
    transform = preprocess.transform
    takes = None if transform is None else [transform.takes, transform.mode]
    return json_sha256([_REVISION, kind, place, takes, digests])


def _collect_facts(dataset: Dataset, key: str) -> dict[str, np.ndarray]:
    identity = dataset.identity(np.zeros(0, np.int64), SILENT) or {}
    found = {f"{_IDENTITY}{name}": np.asarray(array) for name, array in identity.items() if name != "rows"}
    groups = getattr(dataset, "groups", None)
    parts = {"labels": dataset.labels, "classes": dataset.classes, "names": dataset.names, "groups": groups}
    found |= {name: np.asarray(value) for name, value in parts.items() if value is not None}
    facts = {"key": key, "num_rows": len(dataset), "is_sized": dataset.is_sized, "items": dataset.items}
    facts["note"] = getattr(dataset, "note", "")
    return found | {name: np.asarray(value) for name, value in facts.items()}


def _states(files: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Return inode, size and modification time of files."""
    found = [file.stat() for file in files]
    return [(one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


def hold_out_rows(num_rows: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions that stay (num_rows - count,) and that move (count,), both ascending, chosen by the seed."""
    if not 0 < count < num_rows:
        raise ValueError(f"expected a count between 0 and {num_rows} rows, got {count}")
    order = permutation(num_rows, seed)
    return np.sort(order[count:]), np.sort(order[:count])


def hold_out_groups(groups: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions that stay and that move, both ascending: whole groups, as near to `count` rows as they allow.

    Groups are taken in an order chosen by the seed; at least one stays and at least one moves.

    Args:
        groups: (N,), the group of each row; at least two.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = permutation(len(sizes), seed)
    totals = np.cumsum(sizes[order])[:-1]
    is_moved = np.zeros(len(sizes), dtype=bool)
    is_moved[order[: 1 + int(np.abs(totals - count).argmin())]] = True
    return np.flatnonzero(~is_moved[index]), np.flatnonzero(is_moved[index])


def parse_hold_out(text: str, sizes: Mapping[str, int]) -> tuple[str, str, int]:
    """Parse `NEW=OLD:N` into NEW, OLD and N, for splits of these sizes.

    Raises:
        UsageError: the form is wrong, there is no split OLD, NEW exists, or OLD has at most N rows.
    """
    match = re.fullmatch(r"([^=]+)=([^:]+):(\d+)", text)
    if match is None:
        raise UsageError(f"\0hold_out\0: expected NEW=OLD:N, such as val=test:2000; got {text!r}")
    new, old, count = check_split_name(match[1], "\0hold_out\0"), match[2], int(match[3])
    if old not in sizes:
        have = f"no split {old!r} in this command (have: {', '.join(sizes)})"
        raise UsageError(f"\0hold_out\0: {have}", hint=near_miss(old, list(sizes)))
    if new in sizes:
        raise UsageError(f"\0hold_out\0: split {new!r} already exists")
    if not 0 < count < sizes[old]:
        rows = f"1 to {sizes[old] - 1} of the {sizes[old]} rows left in {old!r}"
        raise UsageError(f"\0hold_out\0 {text}: expected {rows}")
    return new, old, count


def hold_out(splits: Mapping[str, InputSplit], text: str, *, seed: int) -> dict[str, InputSplit]:
    """Move N random rows of OLD into NEW, given `NEW=OLD:N`, and return all splits.

    Rows that have groups move by whole groups, as near to N rows as these allow.

    Raises:
        UsageError: as in parse_hold_out, or all rows of OLD are of one group.
    """
    new, old, count = parse_hold_out(text, {name: len(split) for name, split in splits.items()})
    groups = splits[old].groups
    if groups is not None and (groups == groups[0]).all():
        raise UsageError(f"\0hold_out\0 {text}: all rows of {old!r} are of one group, which is not divided")
    stay, move = (
        hold_out_rows(len(splits[old]), count, seed) if groups is None else hold_out_groups(groups, count, seed)
    )
    kept, moved = (replace(splits[old].take(rows), held_out=text) for rows in (stay, move))
    return {**splits, old: kept, new: replace(moved, name=new)}


# Inputs of a network: one tensor, or several by argument name. Contents of data sets: arrays, or items.
Inputs: TypeAlias = "Tensor | dict[str, Tensor]"
Stored: TypeAlias = "np.ndarray | Tensor | Mapping[str, np.ndarray] | Mapping[str, Tensor] | list[Any]"


class Dataset(Protocol):
    """Stored examples, read by row.

    A data set whose rows are not independent also has `groups`, (rows,) int64: the text, patient or session of each row.
    """

    @property
    def labels(self) -> np.ndarray | None:
        """Labels (rows,) int64, or (rows, L) uint8 for multi-label; None without labels, or if only `read` knows them."""

    @property
    def is_labeled(self) -> bool:
        """Return whether `read` returns labels."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in the order of the labels, or None."""

    @property
    def is_sized(self) -> bool:
        """Return whether `read` resizes and crops images."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the examples, such as their files, or None."""

    @property
    def items(self) -> str:
        """Kind of items from `read`: arrays; or, for a transform, images (PIL), texts (str or pairs), pairs, words (Word) or audio (Sound)."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """Return inputs of the rows (n,) as stored (array, arrays by name, or list of items) and labels (n,) int64 or (n, L) uint8."""

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray | Tensor] | None:
        """Return arrays that change whenever these rows (n,) or their contents do; None if that needs reading everything."""


class Batch(NamedTuple):
    """Inputs on the device, labels (n,) int64 or (n, L) uint8 on the CPU or None, and counts of changes to the examples.

    Inputs are (n, ...) in float32, or token ids; or several by argument name. num_truncated, num_converted and lengths
    are those of Transformed; images counts changes on decoding.
    """

    inputs: Inputs
    labels: Tensor | None
    num_truncated: int = 0
    num_converted: int = 0
    lengths: tuple[int, ...] | None = None
    images: ImageCounts = ImageCounts()


@dataclass(frozen=True)
class InputSplit:
    """Rows of a data set in a fixed order, as the network sees them.

    Attributes:
        spec: the text that named the data.
        rows: (N,) int64, ascending: row of each example in the data set, which is its sample id.
        is_labeled: whether batches have labels.
        first_rows: N if the spec selects the first N rows (@N).
        name: of the split.
        is_ood: whether it is out-of-distribution.
        held_out: the `NEW=OLD:N` that created it or took rows from it, or None.
        numbering: maps labels to outputs, see `matched_to`; None keeps them.
        shift: applied to its images; digests are of the unshifted data.
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
        """Labels (N,) int64, or (N, L) uint8; None without labels, or if they are known only when read (py:)."""
        known = self.dataset.labels
        if not self.is_labeled or known is None:
            return None
        return known[self.rows] if self.numbering is None else self.numbering.of(known[self.rows])

    @property
    def groups(self) -> np.ndarray | None:
        """Group (N,) int64 of each example; None if all are independent."""
        known: np.ndarray | None = getattr(self.dataset, "groups", None)
        return None if known is None else known[self.rows]

    @property
    def shown_labels(self) -> np.ndarray | None:
        """Labels known before any example is read; for user code (py:), the first example's. None without labels."""
        first: np.ndarray | None = getattr(self.dataset, "first_labels", None)
        return self.labels if self.labels is not None or not self.is_labeled else first

    @property
    def num_labels(self) -> int | None:
        """L for multi-label data; else None."""
        shown = self.shown_labels
        return shown.shape[1] if shown is not None and shown.ndim == 2 else None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class name of each label; None if the data has no names."""
        return self.dataset.classes if self.numbering is None else self.numbering.classes

    @property
    def names(self) -> list[str] | None:
        """Names (N,) of the examples, or None."""
        every = self.dataset.names
        return None if every is None else [every[row] for row in self.rows.tolist()]

    @property
    def items(self) -> str:
        """Kind of the examples: arrays, images, texts, words or audio."""
        return item_kind(self.dataset)

    def take(self, positions: np.ndarray) -> InputSplit:
        """Return the split of the examples at these positions (n,), in this order."""
        return replace(self, rows=self.rows[positions])

    def longest(self, among: int) -> InputSplit:
        """Return a split of one example: the one with the longest text of at most `among` across the split; of other items, the first."""
        if self.items not in ("texts", "words", PAIRS):
            return self.take(np.arange(1))
        some = np.unique(np.linspace(0, len(self) - 1, num=min(among, len(self)), dtype=np.int64))
        items: Any = self.dataset.read(self.rows[some])[0]
        texts = [item.words for item in items] if self.items == "words" else items
        lengths = [len(text) if isinstance(text, str) else sum(len(str(part)) for part in text) for text in texts]
        return self.take(some[[int(np.argmax(lengths))]])

    def as_ood(self) -> InputSplit:
        """Return the same examples as out-of-distribution, without labels."""
        return replace(self, is_labeled=False, is_ood=True)

    def content_digest(self, progress: Progress = SILENT) -> str | None:
        """Return a digest of the stored content and the choice of rows; None if unavailable (py:)."""
        identity = self.dataset.identity(self.rows, progress)
        return None if identity is None else tensor_digest(identity)

    @cached_property
    def order_digest(self) -> str:
        """Digest of the examples and their order, as far as available without running user code."""
        return self.content_digest() or json_sha256([self.spec, self.rows.tolist()])

    @cached_property
    def outline_digest(self) -> str:
        """Digest of what is known before reading: rows, labels, names and classes."""
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
        """Yield batches in order, preprocessed on the device; `num_workers` processes read and decode ahead.

        Args:
            turns: which batches to read, by index.

        Raises:
            DataError: an example cannot be read, or has another shape than the others.
        """
        from bnncli.data.loader import read_ahead  # imports torch

        chunks = read_ahead(
            self._opened,
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

    def find_unreadable(self, *, num_workers: int = 0, progress: Progress = SILENT) -> list[tuple[int, str]]:
        """Read every example; return the positions (0 to N - 1) of those that cannot be read, each with the reason.

        Raises:
            DeviceError: a reader process died, or too many files are open.
        """
        from bnncli.data.loader import find_unreadable  # imports torch

        place = {row: position for position, row in enumerate(self.rows.tolist())}
        task = progress.task(f"check {self.name}".strip(), len(self))
        found = []
        for count, rows in find_unreadable(
            self._opened, self.rows, num_workers=num_workers, transform=self.preprocess.transform, where=self.spec
        ):
            found += [(place[row], why) for row, why in rows]
            task.advance(count)
        return found

    @property
    def _opened(self) -> Dataset:
        """The data set, opened, its images shifted."""
        dataset = self.dataset.opened if isinstance(self.dataset, CachedDataset) else self.dataset
        return dataset if self.shift is None else ShiftedDataset(dataset, self.shift, self.spec)

    def _ready(self, chunk: Chunk, device: torch.device | str) -> Inputs:
        """Return what was read, on the device, in the form the network takes."""
        if isinstance(chunk.inputs, dict):
            self.preprocess.check_named(chunk.inputs)
            moved = {name: _move(tensor, device) for name, tensor in chunk.inputs.items()}
            return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in moved.items()}
        inputs = _move(chunk.inputs, device)
        if chunk.is_ready:
            return inputs
        try:
            return self.preprocess.apply(inputs, is_sized=self.dataset.is_sized)
        except DataError as error:
            raise DataError(f"{self.spec}: {error.message}", hint=error.hint) from error


def _move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on the device, in float32 if that has no float64."""
    is_too_wide = tensor.dtype == torch.float64 and not has_float64(device)
    return (tensor.float() if is_too_wide else tensor).to(device)


_FAMILY = "data"
_FOLDER = "images"  # the most common kind of folder


def parse_split(text: str, *, option: str = "\0data\0") -> tuple[str, str]:
    """Split `SPLIT=SPEC` into name and spec.

    Raises:
        UsageError: there is no `=`, or the name is not a valid file name.
    """
    name, equals, spec = text.partition("=")
    if not equals or not spec:
        raise UsageError(f"{option}: expected SPLIT=SPEC, such as train=npz:train.npz; got {text!r}")
    return check_split_name(name, option), spec


def _format_forms() -> str:
    *others, last = list_forms()
    return f"{', '.join(others)} or {last}, optionally followed by @N for the first N rows"


def _suggest_spec(place: str) -> str | None:
    """Suggest what was meant if a file's suffix is the name of a kind, or the place is a folder."""
    suffixes = Path(re.split(r"[:@]", place)[0]).suffixes
    kinds = [suffix[1:] for suffix in suffixes if registry.has_name(_FAMILY, suffix[1:])]
    if not kinds and Path(place).is_dir():
        kinds = [_FOLDER]
    return f"did you mean {kinds[-1]}:{place}?" if kinds else None


def open_stored(spec: str) -> Dataset:
    """Open the data set of `KIND:PLACE[@N]` with all its rows, as stored. Raises as `load_split` does."""
    return _open_spec(spec, Preprocess(), None)[2]


def load_split(
    spec: str,
    *,
    name: str = "",
    preprocess: Preprocess | None = None,
    takes_any_labels: bool = False,
    memory: Memory | None = None,
) -> InputSplit:
    """Load the split that `KIND:PLACE[@N]` names, with its files open or in memory.

    A trailing `@N` belongs to the file name if such a file exists.

    Args:
        takes_any_labels: accept zeros and ones (N, L) of any meaning, which other splits may resolve: see
            `common_task`.
        memory: known facts; data whose bytes are known are opened only when read.

    Raises:
        UsageError: kind or form is unknown, or the model takes another kind of data.
        MissingInput: a file does not exist.
        DataError: a file is damaged, labels break a rule, or there are fewer than N rows.
        Untrusted: reading it would unpickle objects.
    """
    preprocess = preprocess or Preprocess()
    kind, place, dataset, count = _open_spec(spec, preprocess, memory)
    check_fits(dataset, preprocess.transform, spec)
    if count is not None and not 1 <= count <= len(dataset):
        raise DataError(f"{spec}: you asked for {count} rows, but there are only {len(dataset)}", code="too_few_rows")
    rows = np.arange(len(dataset) if count is None else count)
    split = InputSplit(spec, dataset, rows, preprocess, dataset.is_labeled, count, name)
    if not takes_any_labels:
        common_task({f"{kind}:{place}": split.shown_labels}, None)
    return split


def _open_spec(spec: str, preprocess: Preprocess, memory: Memory | None) -> tuple[str, str, Dataset, int | None]:
    """Return kind, place, data set and the N of @N. Raises as `load_split` does."""
    kind, colon, place = spec.partition(":")
    if not colon or not place or not registry.has_name(_FAMILY, kind):
        raise UsageError(f"\0data\0: expected {_format_forms()}; got {spec!r}", hint=_suggest_spec(place or kind))
    module = registry.load_module(_FAMILY, kind)
    match = re.fullmatch(r"(.+)@(\d+)", place)
    count = None
    with convert_read_errors(Path(place)):  # the name may be too long, or the folder not accessible
        if match and not module.exists(place):
            place, count = match[1], int(match[2])
        dataset = recall_or_open(kind, module, place, preprocess, memory)
    return kind, place, dataset, count

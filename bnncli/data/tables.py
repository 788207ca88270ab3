"""Tables as data sets: find input and label columns, convert cells to labels, and read rows on demand."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from bnncli.data.arrays import TOKEN_IDS
from bnncli.data.columns import BESIDE, INPUTS, PAIRS, Columns, Roles, find_roles, split_place
from bnncli.data.labels import IF_UNKNOWN, check_hashed, check_labels, hash_files, number_groups
from bnncli.data.pixels import Preprocess, check_same_size, common_mode, decode_image, open_image, resize_and_crop
from bnncli.data.sound import Sound, check_decodable, decode_sound
from bnncli.data.table_files import FILE, LIST, Blocks, Table, files_of
from bnncli.data.transform import Word, normalise_dtype
from bnncli.errors import DataError, MissingInput, ReadError, UsageError
from bnncli.names import count_noun, format_names, quote_name
from bnncli.progress import Progress
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from bnncli.data.splits import Stored


def split_columns(place: str, kind: str) -> tuple[str, dict[str, str]]:
    """Split off the columns named after a place, as `split_place` does: `FILE:text=COL,label=COL`."""
    expected = f"\0data\0 {kind}: expected columns such as text=COL,label=COL"
    path, named = split_place(place, INPUTS, f"{expected} (keys: {', '.join(f'{key}=' for key in (*INPUTS, *BESIDE))})")
    return (place, {}) if not named or "" in named else (str(path), named)


_WHOLE = re.compile(r"[+-]?\d+")
_LARGEST = 1 << 62
_UNKNOWN = -1
_MOST_DIGITS = 100  # including leading zeros
_TRUTHS = ("true", "false")
# spellings of missing values in tables
_NO_NUMBER = {"", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "none", "?"}
_ONE_LABEL = dict.fromkeys(("1", "1.0", "true", "yes"), 1) | dict.fromkeys(("0", "0.0", "false", "no"), 0)
_ONE_LABEL |= dict.fromkeys([*map(str.casefold, _NO_NUMBER), "-1", "-1.0"], _UNKNOWN)


class Labels(NamedTuple):
    """Labels (N,) int64, or None if no row has one, and class names, or None for numeric labels."""

    numbers: np.ndarray | None
    classes: tuple[str, ...] | None


def convert_labels(values: Sequence[Any], names: tuple[str, ...] | None, *, where: str) -> Labels:
    """Convert a column to labels.

    Args:
        values: integers, booleans, or texts; texts that are all integers are numbers. If classes have names, also lists
            of their numbers: multi-label.
        names: class names, if the table has numbers and states their names.
        where: the column, for messages.

    Raises:
        DataError: some rows have no label, or values have another type.
    """
    if {*map(type, values)} in ({str}, {int}):  # few distinct values: convert each only once
        number_of = {value: number for number, value in enumerate(dict.fromkeys(values))}
        try:
            numbers, classes = _labels_of(list(number_of), names, where)
        except DataError:  # raised again below, with the row among all values
            pass
        else:
            places = np.fromiter(map(number_of.__getitem__, values), np.int64, len(values))
            return Labels(None if numbers is None else numbers[places], classes)
    return _labels_of(values, names, where)


def _labels_of(values: Sequence[Any], names: tuple[str, ...] | None, where: str) -> Labels:
    values = [value.strip() if isinstance(value, str) else value for value in values]
    is_missing = [value is None or value == "" for value in values]
    texts = {value for value in values if isinstance(value, str)}
    if texts - _NO_NUMBER and all(map(_WHOLE.fullmatch, texts - _NO_NUMBER)):
        is_missing = [value is None or (isinstance(value, str) and value in _NO_NUMBER) for value in values]
    if all(is_missing):
        return Labels(None, names)
    if any(is_missing):
        raise DataError(
            f"{where}: row {is_missing.index(True)} has no label", code="bad_labels",
            hint="remove the rows without a label, or use no labels: label=",
        )  # fmt: skip
    if names is not None and all(isinstance(value, list) for value in values):
        return Labels(
            check_labels(indicator_matrix(values, len(names), where), num_rows=len(values), where=where), names
        )
    if all(isinstance(value, str) for value in values):
        if names is None and not all(_WHOLE.fullmatch(value) for value in values):
            folded = [value.casefold() for value in values]
            if {*folded} <= {*_TRUTHS, "0", "1"} and not {*folded} <= {*_TRUTHS}:
                row = next(row for row, value in enumerate(folded) if (value in _TRUTHS) != (folded[0] in _TRUTHS))
                raise _mixed_truths_error(values, row, where)
            return _number_by_name(values, where)
        if names is not None:
            return Labels(_number_known_names(values, names, where), names)
        for row, value in enumerate(values):
            if len(value) > _MOST_DIGITS:
                raise DataError(
                    f"{where}: row {row} has a number with {len(value)} digits; expected class numbers from 0",
                    code="bad_labels",
                )
        values = [int(value) for value in values]
    are_truths = {type(value) is bool for value in values}
    if are_truths == {True}:
        return Labels(np.array(values, np.int64), None)
    if True in are_truths:
        row = next(row for row, value in enumerate(values) if (type(value) is bool) != (type(values[0]) is bool))
        raise _mixed_truths_error(values, row, where)
    numbers = _array(values, where)
    # the usual form of published test splits
    if numbers.dtype.kind in "iuf" and numbers.ndim == 1 and (numbers == -1).all():
        return Labels(None, names)
    found = check_labels(numbers, num_rows=len(values), where=where)
    if names is not None and len(found) and found.max() >= len(names):
        raise DataError(
            f"{where}: row {int(found.argmax())} has label {found.max()}, but there are only {len(names)} classes",
            code="bad_labels",
        )
    return Labels(found, names)


def format_unlabelled_note(columns: Sequence[str]) -> str:
    """Return a note for label columns without any label."""
    return f"{format_names(columns)} has no label in any row (every value is -1 or empty), so the split is treated as unlabelled"


def convert_multi_labels(columns: Mapping[str, Sequence[Any]], *, where: str) -> Labels:
    """Convert one column per label to multi-label labels (N, L) uint8; None if no row has any.

    Args:
        columns: label name to zeros and ones, booleans or yes and no; -1, NaN or empty for unknown.
        where: the table, for messages.

    Raises:
        DataError: a value is invalid, or only some labels are unknown.
    """
    parts = [_convert_indicators(values, f"{where}: column {quote_name(name)}") for name, values in columns.items()]
    matrix = np.stack(parts, axis=1)
    is_unknown = matrix == _UNKNOWN
    if is_unknown.all():
        return Labels(None, None)
    if is_unknown.any():
        row, column = np.argwhere(is_unknown)[0]
        name = quote_name(list(columns)[column])
        message = f"{where}: row {row} has no value for label {name} (-1, NaN or empty)"
        raise DataError(message, code="bad_labels", hint=IF_UNKNOWN)
    return Labels(matrix.astype(np.uint8), tuple(columns))


def _convert_indicators(values: Sequence[Any], where: str) -> np.ndarray:
    """Return for each row 1 or 0 for present or absent, -1 for unknown. Raises DataError for other values."""
    found = np.empty(len(values), np.int8)
    for row, value in enumerate(values):
        number = _ONE_LABEL.get(str(value).strip().casefold())
        if number is None:
            message = (
                f"{where}: row {row} has {quote_name(value)}; expected 0 or 1, false or true, no or yes for each label"
            )
            raise DataError(message, code="bad_labels")
        found[row] = number
    return found


def indicator_matrix(values: Sequence[Sequence[int]], num_classes: int, where: str) -> np.ndarray:
    """Return a matrix (N, C) with a one for each class in a list. Raises DataError for a number that is not a class."""
    found = np.zeros((len(values), num_classes), np.int64)
    for row, numbers in enumerate(values):
        for number in numbers:
            if not isinstance(number, int) or not 0 <= number < num_classes:
                message = f"{where}: row {row} has class {number!r}, but there are only {num_classes} classes"
                raise DataError(message, code="bad_labels")
            found[row, number] = 1
    return found


def _mixed_truths_error(values: Sequence[Any], row: int, where: str) -> DataError:
    """Return the error for labels that mix truth values and numbers."""
    return DataError(
        f"{where}: expected either integers or booleans, not both; row 0 has {quote_name(values[0])}, row {row} has "
            f"{quote_name(values[row])}",
        code="bad_labels", hint="write all of them as 0 and 1",
    )  # fmt: skip


def _number_by_name(values: Sequence[str], where: str) -> Labels:
    """Number texts as class names in sorted order. Raises DataError if they are real numbers."""
    classes = sorted(set(values))
    if all(is_number(name) for name in classes):
        if all(float(name).is_integer() for name in classes):
            row = next(row for row, value in enumerate(values) if not _WHOLE.fullmatch(value))
            message = f"{where}: labels must be integers, counted from 0; row {row} has {quote_name(values[row])}"
            raise DataError(message, code="bad_labels", hint=f"write {float(values[row]):.0f}, without a decimal point")
        check_labels(np.array([float(value) for value in values]), num_rows=len(values), where=where)
    place = {name: number for number, name in enumerate(classes)}
    return Labels(np.array([place[value] for value in values], np.int64), tuple(classes))


def _number_known_names(values: Sequence[str], names: tuple[str, ...], where: str) -> np.ndarray:
    place = {name: number for number, name in enumerate(names)}
    for row, value in enumerate(values):
        if value not in place:
            raise DataError(
                f"{where}: row {row} has {quote_name(value)}, which is not a class of the table", code="bad_labels"
            )
    return np.array([place[value] for value in values], np.int64)


def _array(values: Sequence[Any], where: str) -> np.ndarray:
    """Convert numbers, or lists of equally many numbers, to an array."""
    try:
        numbers = np.array(values)
    except (ValueError, OverflowError):
        numbers = np.array([None])
    if numbers.dtype.kind not in "iufb" or (numbers.dtype.kind in "iu" and np.abs(numbers).max() > _LARGEST):
        odd = next((row for row, value in enumerate(values) if type(value) is not type(values[0])), 0)
        rows = ", ".join(f"row {row} has {values[row]!r:.80}" for row in sorted({0, odd}))
        raise DataError(
            f"{where}: labels must be all integers from 0 or all names; {rows}",
            code="bad_labels",
        )
    return numbers


class _File(NamedTuple):
    """An open file of a row, its long and short name, and the path for errors."""

    stream: IO[bytes]
    where: str
    name: str
    path: Path | None = None


@dataclass(frozen=True, eq=False)
class TableDataset:
    """Texts, images, sound or numbers in the columns of a table.

    Attributes:
        labels, groups: (rows,) int64, or None.
        paths: of the images or sound files (rows,), if the table has paths.
        mode: of the images.
        is_swapped: (rows,) bool, whether the two texts of a pair change places; None for never.
    """

    table: Table
    roles: Roles
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    preprocess: Preprocess
    paths: tuple[str, ...] | None = None
    mode: str = ""
    is_sized: bool = True
    note: str = ""
    groups: np.ndarray | None = None
    is_swapped: np.ndarray | None = None
    _known_digests: list[str] = field(default_factory=list, repr=False)

    @property
    def items(self) -> str:
        """texts, pairs if the model compares them, audio, images if the model has a transform for them, else arrays."""
        if self._has_pairs:
            return PAIRS
        if self.roles.kind in ("text", "audio"):
            return "texts" if self.roles.kind == "text" else "audio"
        is_for_transform = self.roles.kind == "image" and self.preprocess.transform is not None
        return "images" if is_for_transform else "arrays"

    @property
    def names(self) -> tuple[str, ...] | None:
        """Paths of the images or sound files, if the table has them."""
        return self.paths

    @property
    def is_labeled(self) -> bool:
        """Return whether the rows have labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.table)

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """Return texts, images, sound or numbers (n, D) of the rows, and labels (n,). Raises DataError for other values."""
        labels = None if self.labels is None else self.labels[rows]
        values = self.table.read(rows, self.roles.inputs)
        if self.roles.kind == "text":
            return self._texts(rows, values), labels
        if self.roles.kind == "x":
            return self._lists(rows, values) if self._has_names else self._of_one_width(rows, values), labels
        if self.roles.kind == "audio":
            return [self._sound(row, value) for row, value in zip(rows.tolist(), values[0], strict=True)], labels
        return self._images(rows, values[0]), labels

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return digests of the files and of images or sound they name, the columns, class names, and the rows."""
        of_group = () if self.roles.group is None else ("group", self.roles.group)
        found = {
            "sha256": np.array(self._digests(rows, progress)),
            "columns": np.array([self.roles.kind, *self.roles.inputs, "label", *self.roles.labels, *of_group]),
            "classes": np.array(self.classes or (), dtype=str),
            "rows": rows,
        }
        return found if self.roles.kind != "image" else {**found, "mode": np.array([self.mode])}

    def _digests(self, rows: np.ndarray, progress: Progress) -> list[str]:
        """Return digests of the table and of the files that it names, computed once for all splits of a table."""
        places = [self._file(name) for name in self.paths or ()]
        if not self._known_digests:
            self._known_digests.extend(self.table.digests(progress))
            self._known_digests.extend(
                hash_files(places, progress, "audio" if self.roles.kind == "audio" else "images")
            )
        if places:
            check_hashed(places, self._known_digests[-len(places) :], rows)
        return self._known_digests

    def _texts(self, rows: np.ndarray, values: list[list[Any]]) -> list[Any]:
        for name, column in zip(self.roles.inputs, values, strict=True):
            for row, value in zip(rows.tolist(), column, strict=True):
                if not isinstance(value, str) and not (self._has_pairs and _is_chat(value)):
                    raise self._odd(row, name, "a text or chat messages" if self._has_pairs else "a string", value)
        if self._has_pairs:
            swaps = [False] * len(rows) if self.is_swapped is None else self.is_swapped[rows].tolist()
            return [
                (*rest, second, first) if swap else (*rest, first, second)
                for swap, (*rest, first, second) in zip(swaps, zip(*values, strict=True), strict=True)
            ]
        return list(zip(*values, strict=True)) if len(values) == 2 else values[0]

    @property
    def _has_pairs(self) -> bool:
        """Return whether the model compares two texts of each row."""
        return self.roles.kind == "text" and _takes_pairs(self.preprocess)

    @cached_property
    def _width(self) -> int:
        """D of the first row."""
        first = np.arange(1)
        return self._numbers(first, self.table.read(first, self.roles.inputs)).shape[1]

    def _of_one_width(self, rows: np.ndarray, values: list[list[Any]]) -> np.ndarray:
        """Return numbers (n, D), as many as in the first row of the table."""
        found = self._numbers(rows, values)
        if found.shape[1] != self._width:
            raise self._odd(int(rows[0]), self.roles.inputs[0], f"{self._width} numbers as in row 0", values[0][0])
        return found

    def _numbers(self, rows: np.ndarray, values: list[list[Any]]) -> np.ndarray:
        arrays = []
        for name, column in zip(self.roles.inputs, values, strict=True):
            try:
                with np.errstate(over="ignore"):  # an infinity is refused with the features
                    array = np.array(_parse_floats(column), np.float32)
            except (ValueError, TypeError, OverflowError):
                shapes = [_shape_of(value) for value in column]
                odd = next((place for place, shape in enumerate(shapes) if shape is None or shape != shapes[0]), 0)
                expected = f"{shapes[0][0]} numbers as in row {rows[0]}" if shapes[0] else "a number"
                raise self._odd(int(rows[odd]), name, expected, column[odd]) from None
            if array.size == 0:
                raise self._odd(int(rows[0]), name, "numbers", column[0])
            arrays.append(array.reshape(len(rows), -1))
        return np.concatenate(arrays, axis=1)

    @property
    def _has_names(self) -> bool:
        """Return whether the network takes the columns by name: several list columns, or token ids."""
        inputs = self.roles.inputs
        is_lists = all(self.table.columns[name] == LIST for name in inputs)
        return is_lists and (len(inputs) > 1 or inputs == (TOKEN_IDS,))

    def _lists(self, rows: np.ndarray, values: list[list[Any]]) -> dict[str, np.ndarray]:
        found = {}
        for name, column in zip(self.roles.inputs, values, strict=True):
            try:
                found[name] = normalise_dtype(np.array(column))
            except ValueError:
                sizes = [len(value) if isinstance(value, list) else None for value in column]
                odd = next((place for place, size in enumerate(sizes) if size != sizes[0]), 0)
                raise self._odd(
                    int(rows[odd]), name, f"{sizes[0]} numbers as in the first row (pad to equal length)", column[odd]
                ) from None
        return found

    def _images(self, rows: np.ndarray, values: list[Any]) -> np.ndarray | list[Image.Image]:
        images = [self._image(row, value) for row, value in zip(rows.tolist(), values, strict=True)]
        if self.items == "images":
            return images
        arrays = [
            resize_and_crop(image, self.preprocess, f"row {row}")
            for row, image in zip(rows.tolist(), images, strict=True)
        ]
        for row, array in zip(rows.tolist(), arrays, strict=True):
            check_same_size(array, arrays[0], f"row {row}", f"row {rows[0]}")
        return np.stack(arrays)

    def _image(self, row: int, value: Any) -> Image.Image:
        """Decode an image."""
        with self._stored(row, value, "an image") as file, open_image(file.stream, file.where, file.path) as image:
            return decode_image(image, self.mode or common_mode({image.mode}), self.preprocess, file.name)

    def _sound(self, row: int, value: Any) -> Sound:
        """Decode a clip."""
        with self._stored(row, value, "sound") as file:
            return decode_sound(file.stream.read(), file.where, file.path)

    @contextmanager
    def _stored(self, row: int, value: Any, expected: str) -> Iterator[_File]:
        """Open what a value refers to: its bytes if present, else the file at its path."""
        data = value.get("bytes") if isinstance(value, dict) else value
        where = f"row {row} of {quote_name(self.table.path, limit=300)}"
        if data is None and isinstance(value, dict):
            data = value.get("path")
        if isinstance(data, str):
            with open_regular(self._file(data)) as stream:
                yield _File(stream, f"{quote_name(data)}, {where}", data)
        elif isinstance(data, bytes):
            yield _File(io.BytesIO(data), where, f"row {row}", self.table.path)
        else:
            raise self._odd(row, self.roles.inputs[0], expected, data)

    def _file(self, name: str) -> Path:
        folder = self.table.path if self.table.path.is_dir() else self.table.path.parent
        return folder / Path(name).expanduser()

    def _odd(self, row: int, column: str, expected: str, value: Any) -> DataError:
        return _odd_cell(self.table, row, column, expected, value)


@dataclass(frozen=True, eq=False)
class WordDataset:
    """The words of the texts in a table: an example is a word with its text.

    Attributes:
        texts: (rows,) int64, the text of each word: its row in the table.
        places: (rows,) int64, the place of each word in its text.
        labels: (rows,) int64, or None.
        groups: (rows,) int64, the group of each word: its text, unless the table has groups of texts.
    """

    table: Table
    roles: Roles
    texts: np.ndarray
    places: np.ndarray
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    groups: np.ndarray
    note: str = ""
    items: str = "words"
    is_sized: bool = True

    @cached_property
    def names(self) -> tuple[str, ...]:
        """TEXT:WORD, both counted from 0."""
        return tuple(f"{text}:{place}" for text, place in zip(self.texts.tolist(), self.places.tolist(), strict=True))

    @property
    def is_labeled(self) -> bool:
        """Return whether the words have labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.texts)

    def read(self, rows: np.ndarray) -> tuple[list[Word], np.ndarray | None]:
        """Return the words of the rows (n,), each with its text, and labels (n,)."""
        texts, places = np.unique(self.texts[rows], return_inverse=True)
        every = [tuple(words) for words in self.table.read(texts, self.roles.inputs)[0]]
        chosen = zip(places.tolist(), self.places[rows].tolist(), strict=True)
        return [Word(every[text], place) for text, place in chosen], None if self.labels is None else self.labels[rows]

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return digests of the files, the columns, class names, and the rows."""
        return {
            "sha256": np.array(self.table.digests(progress)),
            "columns": np.array([self.roles.kind, *self.roles.inputs, "label", *self.roles.labels]),
            "classes": np.array(self.classes or (), dtype=str),
            "rows": rows,
            **({} if self.roles.group is None else {"groups": self.groups[rows]}),
        }


_NO_TAG = -100  # what the libraries write for a word without a label
_TEXTS_AT_ONCE = 1024


def _word_dataset(table: Table, roles: Roles, where: str) -> WordDataset:
    """Create the data set of the words that have a label; of all words if none has. Raises as `table_dataset` does."""
    names = table.class_names.get(roles.labels[0]) if roles.labels else None
    known: dict[Any, int] = {}  # tags, in the order of their appearance
    lengths: list[int] = []
    numbers: list[int] = []
    for start in range(0, len(table), _TEXTS_AT_ONCE):
        rows = np.arange(start, min(start + _TEXTS_AT_ONCE, len(table)))
        columns = table.read(rows, [*roles.inputs, *roles.labels])
        for row, *cells in zip(rows.tolist(), *columns, strict=True):
            words = _check_words(table, row, roles.inputs[0], cells[0])
            lengths.append(len(words))
            if roles.labels:
                numbers += _number_tags(table, row, roles.labels[0], cells[1], len(words), known, names)
    counts = np.array(lengths, np.int64)
    texts = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(texts)) - np.repeat(np.cumsum(counts) - counts, counts)
    if len(texts) == 0:
        raise DataError(f"{where} has no words", code="empty_split", path=table.path)
    groups = texts
    if roles.group is not None:
        groups = _groups(roles, table.values((roles.group,))[0], where)[texts]
    if not known:
        note = format_unlabelled_note(roles.labels) if roles.labels else ""
        return WordDataset(table, roles, texts, places, None, None, groups, note=note)
    own = convert_labels([*known], names, where=f"{where}: column {quote_name(roles.labels[0])}")
    tags = np.array(numbers, np.int64)
    has_tag = tags != _UNKNOWN
    assert own.numbers is not None
    return WordDataset(
        table, roles, texts[has_tag], places[has_tag], own.numbers[tags[has_tag]], own.classes, groups[has_tag]
    )


def _check_words(table: Table, row: int, column: str, words: Any) -> list[str]:
    """Return the words of a text. Raises DataError unless they are a list of texts that are not empty."""
    if not isinstance(words, list):
        raise _odd_cell(table, row, column, "a list of words", words)
    for word in words:
        if not isinstance(word, str) or not word:
            raise _odd_cell(table, row, column, "a list of words, none of them empty", word)
    return words


def _number_tags(
    table: Table, row: int, column: str, tags: Any, num_words: int, known: dict[Any, int], names: tuple[str, ...] | None
) -> list[int]:
    """Return the number of each tag of a text, -1 for no tag, and add new ones to those known.

    Args:
        names: class names, if the table states them.

    Raises:
        DataError: it is not one tag for each word, or tags are not all names or all class numbers.
    """
    if not isinstance(tags, list):
        raise _odd_cell(table, row, column, "a list with the tag of each word", tags)
    if len(tags) != num_words:
        counts = f"{count_noun(num_words, 'word')}, but {count_noun(len(tags), 'tag')} in column {quote_name(column)}"
        message = f"{quote_name(table.path, limit=300)}: row {row} has {counts}"
        raise DataError(message, code="bad_labels")
    found = []
    for tag in tags:
        if tag is None or tag == _NO_TAG:
            found.append(_UNKNOWN)
            continue
        if not isinstance(tag, str | int):
            raise _odd_cell(table, row, column, _TAG, tag)
        if tag not in known:
            first = next(iter(known), tag)
            is_class = names is None or (tag in names if isinstance(tag, str) else tag < len(names))
            if tag == "" or isinstance(tag, bool) or (isinstance(tag, int) and tag < 0):
                raise _odd_cell(table, row, column, _TAG, tag)
            if isinstance(tag, str) != isinstance(first, str):
                raise _odd_cell(table, row, column, f"a tag like {first!r} before", tag)
            if not is_class:
                raise _odd_cell(table, row, column, f"one of the {len(names or ())} classes that the data name", tag)
            known[tag] = len(known)
        found.append(known[tag])
    return found


_TAG = f"tags that are class names, or class numbers from 0 ({_NO_TAG} or null for no label)"


def _odd_cell(table: Table, row: int, column: str, expected: str, value: Any) -> DataError:
    """Return the error for a cell that holds something else than expected."""
    came = "nothing" if value is None else f"{type(value).__name__} {quote_name(value)}"
    where = quote_name(table.path, limit=300)
    return DataError(f"{where}: row {row}, column {quote_name(column)}: expected {expected}, got {came}")


def table_dataset(
    table: Table, named: Mapping[str, str], preprocess: Preprocess, *, spelled: str, takes: str | None = None
) -> TableDataset | WordDataset:
    """Create the data set of a table, and read its labels.

    Args:
        named: columns named by the user.
        spelled: the kind, for messages.
        takes: what the kind always holds; None for what the model takes.

    Raises:
        DataError: a column is missing, labels break a rule, or there are no rows.
        UsageError: the roles of columns are ambiguous.
    """
    where = quote_name(table.path, limit=300)
    if takes is None and preprocess.transform is not None:
        takes = preprocess.transform.takes
    roles = find_roles(Columns(table.columns, where, spelled), named, takes=takes)
    if _takes_pairs(preprocess) and roles.labels and roles.labels[0] in roles.inputs:
        return _preferring(table, roles, preprocess, where)
    if roles.kind == "words" and len(table):
        return _word_dataset(table, roles, where)
    has_paths = roles.kind in ("image", "audio") and table.columns[roles.inputs[0]] != FILE
    group = () if roles.group is None else (roles.group,)
    values = table.values([*roles.labels, *group, *(roles.inputs if has_paths else ())])
    if len(table) == 0:
        raise DataError(f"{where} has no rows", code="empty_split", path=table.path)
    labels = _labels(table, roles, values[: len(roles.labels)], where)
    paths = tuple(str(value) for value in values[-1]) if has_paths else None
    if roles.kind == "audio":
        check_decodable(paths or ())
    note = format_unlabelled_note(roles.labels) if roles.labels and labels.numbers is None else ""
    groups = _groups(roles, values[len(roles.labels)], where) if group else None
    found = TableDataset(table, roles, labels.numbers, labels.classes, preprocess, paths, note=note, groups=groups)
    if roles.kind != "image":
        return found
    return replace(found, mode=_mode(found, preprocess))


def _takes_pairs(preprocess: Preprocess) -> bool:
    return preprocess.transform is not None and preprocess.transform.takes == PAIRS


def _is_chat(value: Any) -> bool:
    """Return whether a cell has messages of a chat."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _preferring(table: Table, roles: Roles, preprocess: Preprocess, where: str) -> TableDataset:
    """Return the pairs of a table that prefers the same column in every row, half of them swapped so that labels differ.

    Of rows 2k and 2k + 1 one is swapped, chosen by k, so the first N rows are balanced for every N.
    """
    if len(roles.labels) > 1 or roles.labels[0] not in roles.inputs[-2:]:
        expected = f"expected one of {format_names(roles.inputs[-2:])}, or a column of labels"
        raise UsageError(f"{where}: label={'+'.join(roles.labels)}: {expected}")
    if len(table) == 0:
        raise DataError(f"{where} has no rows", code="empty_split", path=table.path)
    coins = np.frombuffer(hashlib.shake_256(b"pairs").digest(len(table) // 2 + 1), np.uint8) % 2 == 1
    is_swapped = np.stack([coins, ~coins], axis=1).flatten()[: len(table)]
    labels = (is_swapped != (roles.labels[0] == roles.inputs[-1])).astype(np.int64)
    note = f"{quote_name(roles.labels[0])} is preferred in every row, so half of the pairs are swapped to balance the labels"
    groups = None if roles.group is None else _groups(roles, table.values((roles.group,))[0], where)
    return TableDataset(table, roles, labels, None, preprocess, note=note, is_swapped=is_swapped, groups=groups)


def _groups(roles: Roles, values: list[Any], where: str) -> np.ndarray:
    """Return the number (rows,) of each row's group."""
    return number_groups(values, where=f"{where}: column {quote_name(str(roles.group))}")


def _mode(dataset: TableDataset, preprocess: Preprocess) -> str:
    """Return the image mode of the model; without one, grey if the first readable image is."""
    if preprocess.transform is not None:
        return preprocess.transform.mode or "RGB"
    for row in range(len(dataset)):
        with suppress(DataError, MissingInput, ReadError):
            return dataset._image(row, dataset.table.read(np.array([row]), dataset.roles.inputs)[0][0]).mode
    return "RGB"  # reading says what is wrong


def _labels(table: Table, roles: Roles, values: list[list[Any]], where: str) -> Labels:
    """Return the labels of one column, or of several as a matrix, one per class."""
    if not roles.labels:
        return Labels(None, None)
    if len(roles.labels) == 1:
        (name,) = roles.labels
        return convert_labels(values[0], table.class_names.get(name), where=f"{where}: column {quote_name(name)}")
    return convert_multi_labels(dict(zip(roles.labels, values, strict=True)), where=where)


def is_number(value: Any) -> bool:
    """Return whether a cell is a number."""
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True


def _shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a cell of numbers; None for any other cell."""
    try:
        return np.array(float(value) if isinstance(value, str) else value, np.float32).shape
    except (ValueError, TypeError, OverflowError):
        return None


def _parse_floats(values: list[Any]) -> list[Any]:
    """Return numbers for texts, several times faster than NumPy does; other values unchanged."""
    return [*map(float, values)] if values and isinstance(values[0], str) else values


@dataclass(frozen=True)
class TableKind:
    """A kind of data set whose files are tables.

    Attributes:
        suffixes: of the files in a folder; none if a place is always a single file.
        takes: what it always holds; None for what the model takes.
    """

    name: str
    open: Callable[[Path], Blocks]
    suffixes: tuple[str, ...] = ()
    takes: str | None = None

    def exists(self, place: str) -> bool:
        """Return whether the text as it stands is a file or folder."""
        path = Path(place).expanduser()
        return path.exists() if self.suffixes else path.is_file()

    def files(self, place: str) -> list[Path]:
        """Return all files that it is read from."""
        return self._files(split_columns(place, self.name)[0])[1]

    def open_dataset(self, place: str, preprocess: Preprocess) -> TableDataset | WordDataset:
        """Open texts, words, images, sound or numbers, and labels, from named or inferred columns.

        Raises:
            MissingInput: there is no such file or folder.
            DataError: there are no files, one is damaged, a column is missing, or labels break a rule.
            UsageError: the roles of columns are ambiguous.
        """
        text, named = split_columns(place, self.name)
        table = Table(*self._files(text), self.open, self.name)
        return table_dataset(table, named, preprocess, spelled=self.name, takes=self.takes)

    def _files(self, text: str) -> tuple[Path, list[Path]]:
        path = Path(text).expanduser()
        return files_of(text, self.suffixes, self.name) if self.suffixes else (path, [path])

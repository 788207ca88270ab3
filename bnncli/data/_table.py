"""Tables as data sets: rows read when they are asked for, of the columns that are needed, and nothing else held."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from bnncli.data._arrays import TOKEN_IDS
from bnncli.data._columns import FILE, LIST, Roles, find_roles
from bnncli.data._label_values import Labels, labels_of, several_labels, unlabelled_note
from bnncli.data._pixels import check_same_size, decoded_image, mode_of, opened_image, sized
from bnncli.data._preprocess import Preprocess
from bnncli.data._sound import Sound, check_decodable, decoded
from bnncli.data._transform import settled
from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.numerics.digests import file_sha256
from bnncli.progress import Progress
from bnncli.system.input_files import open_regular

if TYPE_CHECKING:
    from bnncli.data._split import Stored


class StoredTable(Protocol):
    """Rows of named columns in files."""

    @property
    def path(self) -> Path:
        """The file or folder, for messages; paths of images and sound are relative to its folder."""

    @property
    def columns(self) -> Mapping[str, str]:
        """What each column holds, in the words of `_columns`."""

    @property
    def class_names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the classes whose numbers a column has, where the table tells them."""

    def values(self, names: Sequence[str]) -> tuple[int, list[list[Any]]]:
        """How many rows there are, and all values of some columns; every row is looked at."""

    def read(self, rows: np.ndarray, names: Sequence[str]) -> list[list[Any]]:
        """Values of columns in the rows (n,)."""

    def digests(self, progress: Progress) -> list[str]:
        """Of the content, wherever it lies."""


class _File(NamedTuple):
    """An open file of a row, what it is called at length and for short, and where an error is said to be."""

    stream: IO[bytes]
    where: str
    name: str
    path: Path | None = None


@dataclass(frozen=True, eq=False)
class TableDataset:
    """Texts, images, sound or numbers in the columns of a table.

    Attributes:
        num_rows: stored.
        labels: (rows,) int64, or None.
        paths: of the images or sound files (rows,), where the table has their paths.
        mode: of the images.
    """

    table: StoredTable
    roles: Roles
    num_rows: int
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    preprocess: Preprocess
    paths: tuple[str, ...] | None = None
    mode: str = ""
    is_sized: bool = True
    note: str = ""
    _known_digests: list[str] = field(default_factory=list, repr=False)

    @property
    def items(self) -> str:
        """Texts; sound; images where the model brings a transform for them; else arrays."""
        if self.roles.kind in ("text", "audio"):
            return "texts" if self.roles.kind == "text" else "audio"
        is_for_transform = self.roles.kind == "image" and self.preprocess.transform is not None
        return "images" if is_for_transform else "arrays"

    @property
    def names(self) -> tuple[str, ...] | None:
        """The paths of the images or sound files, where the table has them."""
        return self.paths

    @property
    def is_labeled(self) -> bool:
        """Whether the rows have labels."""
        return self.labels is not None

    def __len__(self) -> int:
        return self.num_rows

    def read(self, rows: np.ndarray) -> tuple[Stored, np.ndarray | None]:
        """Texts, images, sound or numbers (n, D) of the rows, and labels (n,). Raises DataError for a value of another kind."""
        labels = None if self.labels is None else self.labels[rows]
        values = self.table.read(rows, self.roles.inputs)
        if self.roles.kind == "text":
            return self._texts(rows, values), labels
        if self.roles.kind == "x":
            return self._numbers(rows, values) if not self._has_names else self._lists(rows, values), labels
        if self.roles.kind == "audio":
            return [self._sound(row, value) for row, value in zip(rows.tolist(), values[0], strict=True)], labels
        return self._images(rows, values[0]), labels

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Digests of the files and of image or sound files they name, the columns, what the classes are called, and the rows."""
        found = {
            "sha256": np.array(self._digests(progress)),
            "columns": np.array(self.roles.to_texts()),
            "classes": np.array(self.classes or (), dtype=str),
            "rows": rows,
        }
        return found if self.roles.kind != "image" else {**found, "mode": np.array([self.mode])}

    def _digests(self, progress: Progress) -> list[str]:
        """Of the table and of the files that it names; taken once for all splits of one table."""
        if not self._known_digests:
            self._known_digests.extend(self.table.digests(progress))
            task = progress.task(f"hash {'audio' if self.roles.kind == 'audio' else 'images'}", len(self.paths or ()))
            for name in self.paths or ():
                with open_regular(self._file(name)) as stream:
                    self._known_digests.append(file_sha256(stream))
                task.advance()
        return self._known_digests

    def _texts(self, rows: np.ndarray, values: list[list[Any]]) -> list[Any]:
        for name, column in zip(self.roles.inputs, values, strict=True):
            for row, value in zip(rows.tolist(), column, strict=True):
                if not isinstance(value, str):
                    raise self._odd(row, name, "a string", value)
        return list(zip(*values, strict=True)) if len(values) == 2 else values[0]

    def _numbers(self, rows: np.ndarray, values: list[list[Any]]) -> np.ndarray:
        arrays = []
        for name, column in zip(self.roles.inputs, values, strict=True):
            try:
                array = np.array(column, np.float32)
            except (ValueError, TypeError):
                odd = next((place for place, value in enumerate(column) if not _is_number(value)), 0)
                raise self._odd(int(rows[odd]), name, "a number", column[odd]) from None
            arrays.append(array.reshape(len(rows), -1))
        return np.concatenate(arrays, axis=1)

    @property
    def _has_names(self) -> bool:
        """Whether the network takes the columns by their names: several of lists, and token ids."""
        inputs = self.roles.inputs
        is_lists = all(self.table.columns[name] == LIST for name in inputs)
        return is_lists and (len(inputs) > 1 or inputs == (TOKEN_IDS,))

    def _lists(self, rows: np.ndarray, values: list[list[Any]]) -> dict[str, np.ndarray]:
        found = {}
        for name, column in zip(self.roles.inputs, values, strict=True):
            try:
                found[name] = settled(np.array(column))
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
        arrays = [sized(image, self.preprocess, f"row {row}") for row, image in zip(rows.tolist(), images, strict=True)]
        for row, array in zip(rows.tolist(), arrays, strict=True):
            check_same_size(array, arrays[0], f"row {row}", f"row {rows[0]}")
        return np.stack(arrays)

    def _image(self, row: int, value: Any) -> Image.Image:
        """One image, decoded."""
        with self._stored(row, value, "an image") as file, opened_image(file.stream, file.where, file.path) as image:
            return decoded_image(image, self.mode or mode_of({image.mode}), self.preprocess, file.name)

    def _sound(self, row: int, value: Any) -> Sound:
        """One clip, decoded."""
        with self._stored(row, value, "sound") as file:
            return decoded(file.stream.read(), file.where, file.path)

    @contextmanager
    def _stored(self, row: int, value: Any, expected: str) -> Iterator[_File]:
        """What a value stands for: its bytes where they are there, else the file of its path."""
        data = value.get("bytes") if isinstance(value, dict) else value
        where = f"row {row} of {quoted(self.table.path, limit=300)}"
        if data is None and isinstance(value, dict):
            data = value.get("path")
        if isinstance(data, str):
            with open_regular(self._file(data)) as stream:
                yield _File(stream, f"{quoted(data)}, {where}", data)
        elif isinstance(data, bytes):
            yield _File(io.BytesIO(data), where, f"row {row}", self.table.path)
        else:
            raise self._odd(row, self.roles.inputs[0], expected, data)

    def _file(self, name: str) -> Path:
        folder = self.table.path if self.table.path.is_dir() else self.table.path.parent
        return folder / Path(name).expanduser()

    def _odd(self, row: int, column: str, expected: str, value: Any) -> DataError:
        came = "nothing" if value is None else f"{type(value).__name__} {quoted(value)}"
        where = quoted(self.table.path, limit=300)
        return DataError(f"{where}: row {row}, column {quoted(column)}: expected {expected}, got {came}")


def table_dataset(
    table: StoredTable, named: Mapping[str, str], preprocess: Preprocess, *, spelled: str
) -> TableDataset:
    """The data set of a table, its labels read.

    Args:
        named: columns that the user names.
        spelled: the kind, for messages.

    Raises:
        DataError: a column is missing, labels break a rule, or there are no rows.
        UsageError: it cannot be told which column is what.
    """
    where = quoted(table.path, limit=300)
    takes = None if preprocess.transform is None else preprocess.transform.takes
    roles = find_roles(table.columns, named, takes=takes, where=where, spelled=spelled)
    has_paths = roles.kind in ("image", "audio") and table.columns[roles.inputs[0]] != FILE
    num_rows, values = table.values([*roles.labels, *(roles.inputs if has_paths else ())])
    if num_rows == 0:
        raise DataError(f"{where} has no rows", code="empty_split", path=table.path)
    labels = _labels(table, roles, values[: len(roles.labels)], where)
    paths = tuple(str(value) for value in values[-1]) if has_paths else None
    if roles.kind == "audio":
        check_decodable(paths or ())
    note = unlabelled_note(roles.labels) if roles.labels and labels.numbers is None else ""
    found = TableDataset(table, roles, num_rows, labels.numbers, labels.classes, preprocess, paths, note=note)
    if roles.kind != "image":
        return found
    return replace(found, mode=_mode(found, preprocess))


def _mode(dataset: TableDataset, preprocess: Preprocess) -> str:
    """What the model takes; else grey when the first image is."""
    if preprocess.transform is not None:
        return preprocess.transform.mode or "RGB"
    first = dataset.table.read(np.zeros(1, np.int64), dataset.roles.inputs)[0][0]
    return dataset._image(0, first).mode


def _labels(table: StoredTable, roles: Roles, values: list[list[Any]], where: str) -> Labels:
    """Of one column; several are a matrix, one a class."""
    if not roles.labels:
        return Labels(None, None)
    if len(roles.labels) == 1:
        (name,) = roles.labels
        return labels_of(values[0], table.class_names.get(name), where=f"{where}: column {quoted(name)}")
    return several_labels(dict(zip(roles.labels, values, strict=True)), where=where)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True

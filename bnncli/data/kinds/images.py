"""`images:DIR`: image files in one folder per class, or unlabelled images directly in DIR.

Classes are the folder names, sorted. Images are grey if the first readable image of every class is, else RGB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from bnncli.data.labels import check_hashed, files_in, hash_files
from bnncli.data.pixels import (
    SUFFIXES,
    Preprocess,
    check_same_size,
    common_mode,
    decode_image,
    open_image,
    resize_and_crop,
)
from bnncli.errors import BnnError, DataError, MissingInput, ReadError
from bnncli.names import quote_name
from bnncli.options.declaration import Form
from bnncli.progress import Progress
from bnncli.system.input_files import open_regular

FORM = Form("images:DIR", 30, "A folder of image files, one subfolder per class.")


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """Image files, decoded when read."""

    folder: Path
    files: tuple[str, ...]
    labels: np.ndarray | None
    classes: tuple[str, ...] | None
    mode: str
    preprocess: Preprocess
    is_sized: bool = True
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The files, as paths in the folder."""
        return self.files

    @property
    def items(self) -> str:
        """images if the model has a transform for them, else arrays."""
        return "arrays" if self.preprocess.transform is None else "images"

    @property
    def is_labeled(self) -> bool:
        """Return whether there are class folders."""
        return self.labels is not None

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray | list[Image.Image], np.ndarray | None]:
        """Return images (n, H, W, C) uint8, or PIL images for a transform, and labels (n,).

        Raises:
            DataError: a file is damaged or, without a transform, has another size.
        """
        labels = None if self.labels is None else self.labels[rows]
        if self.items == "images":
            return [self._image(self.files[row]) for row in rows.tolist()], labels
        arrays: list[np.ndarray] = []
        for row in rows.tolist():
            arrays.append(resize_and_crop(self._image(self.files[row]), self.preprocess, self.files[row]))
            check_same_size(arrays[-1], arrays[0], self.files[row], self.files[int(rows[0])])
        return np.stack(arrays), labels

    def identity(self, rows: np.ndarray, progress: Progress) -> Mapping[str, np.ndarray]:
        """Return names and digests of all files, the mode they are decoded to, and the rows."""
        places = [self.folder / name for name in self.files]
        hashes = hash_files(places, progress, "images")
        check_hashed(places, hashes, rows)
        return {"files": np.array(self.files), "sha256": np.array(hashes), "mode": np.array([self.mode]), "rows": rows}

    def _image(self, name: str) -> Image.Image:
        """Decode an image."""
        with _open_file(self.folder, name) as image:
            return decode_image(image, self.mode, self.preprocess, name)


def exists(place: str) -> bool:
    """Return whether the text as it stands is a folder."""
    return Path(place).expanduser().is_dir()


def open_dataset(place: str, preprocess: Preprocess) -> ImageDataset:
    """Open the images of a folder, in sorted order within sorted classes.

    Raises:
        MissingInput: there is no such folder.
        DataError: it has no images, or has some both directly and in class folders.
    """
    folder = Path(place).expanduser()
    files, labels, classes, note = files_in(folder, SUFFIXES, "images")
    return replace(image_dataset(folder, files, labels, classes, preprocess), note=note)


def image_dataset(
    folder: Path,
    files: Sequence[str],
    labels: np.ndarray | None,
    classes: tuple[str, ...] | None,
    preprocess: Preprocess,
) -> ImageDataset:
    """Create a data set of image files with labels (N,), decoded to the transform's mode, else like each class's first readable one."""
    if preprocess.transform is not None:
        mode = preprocess.transform.mode or "RGB"
    else:
        mode = _mode(folder, files, np.zeros(len(files), np.int64) if labels is None else labels)
    return ImageDataset(folder, tuple(files), labels, classes, mode, preprocess)


@contextmanager
def _open_file(folder: Path, name: str) -> Iterator[Image.Image]:
    """Open an image file; anything that cannot be decoded, here or inside the block, raises DataError.

    Raises:
        MissingInput, DeviceError, ReadError: it cannot be read; see open_regular.
        DataError: it is not an image, is damaged, or exceeds PIL's pixel limit.
    """
    with (
        open_regular(folder / name) as stream,
        open_image(stream, f"{quote_name(name)} in {folder}", folder / name) as image,
    ):
        yield image


def _mode(folder: Path, files: Sequence[str], labels: np.ndarray) -> str:
    """Return L if the first readable image of every class is grey, else RGB. What is not readable is reported when it is read.

    Raises:
        DataError, MissingInput, ReadError: no image can be read.
    """
    modes: dict[int, str] = {}
    first: BnnError | None = None
    for name, label in zip(files, labels.tolist(), strict=True):
        if label not in modes:
            try:
                with _open_file(folder, name) as image:
                    modes[label] = image.mode
            except (DataError, MissingInput, ReadError) as error:
                first = first or error
    if first is not None and not modes:
        raise first
    return common_mode({*modes.values()})

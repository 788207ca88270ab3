"""Published data sets that are image files, laid out as torchvision.datasets keeps them; read without torchvision."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bnncli.data._labels import check_labels
from bnncli.data._matlab import read_mat
from bnncli.data._preprocess import Preprocess
from bnncli.data.images import ImageDataset, image_dataset
from bnncli.data.images import open_dataset as open_images
from bnncli.errors import DataError
from bnncli.names import quoted
from bnncli.system.input_files import open_regular

_FLOWER_SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}


def folders(root: Path, preprocess: Preprocess) -> ImageDataset:
    """A folder for each class."""
    return open_images(str(root), preprocess)


def flowers102(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Flowers102: ROOT/flowers-102/jpg, the splits and labels in MATLAB files; the set has no names of its classes."""
    folder = root / "flowers-102"
    key = _FLOWER_SPLITS[split]
    numbers = read_mat(folder / "setid.mat", (key,))[key].reshape(-1).astype(np.int64)
    every = read_mat(folder / "imagelabels.mat", ("labels",))["labels"].reshape(-1).astype(np.int64) - 1
    if len(numbers) and not 1 <= numbers.min() <= numbers.max() <= len(every):
        raise DataError(
            f"{quoted(folder / 'setid.mat', limit=300)} names images without labels", path=folder / "setid.mat"
        )
    files = [f"jpg/image_{number:05d}.jpg" for number in numbers.tolist()]
    return image_dataset(folder, files, _checked(every[numbers - 1], folder), None, preprocess)


def pets(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """OxfordIIITPet: ROOT/oxford-iiit-pet/annotations/SPLIT.txt with names, classes from 1 on; 37 breeds."""
    folder = root / "oxford-iiit-pet"
    path = folder / "annotations" / f"{split}.txt"
    try:
        rows = [(words[0], int(words[1]) - 1) for words in map(str.split, _lines(path)) if words]
    except (IndexError, ValueError) as error:
        raise DataError(
            f"{quoted(path, limit=300)}: expected lines of the form NAME CLASS SPECIES BREED ({error})", path=path
        ) from error
    names = {label: image.rpartition("_")[0].replace("_", " ").title() for image, label in rows}
    classes = tuple(names[label] for label in sorted(names))
    labels = _checked(np.array([label for _, label in rows], np.int64), path)
    is_whole = sorted(names) == list(range(len(names)))
    return image_dataset(
        folder, [f"images/{image}.jpg" for image, _ in rows], labels, classes if is_whole else None, preprocess
    )


def food101(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Food101: ROOT/food-101/meta/SPLIT.json with the images of each class."""
    folder = root / "food-101"
    path = folder / "meta" / f"{split}.json"
    try:
        found = json.loads("\n".join(_lines(path)))
        pairs = [(str(name), f"images/{image}.jpg") for name, images in found.items() for image in images]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(
            f"{quoted(path, limit=300)}: expected JSON with the images of each class ({error})", path=path
        ) from error
    return _named(folder, pairs, preprocess)


def textures(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """DTD, the describable textures, in its first partition: ROOT/dtd/dtd/labels/SPLIT1.txt with a path a line."""
    folder = root / "dtd" / "dtd"
    files = [line for line in map(str.strip, _lines(folder / "labels" / f"{split}1.txt")) if line]
    return _named(folder, [(file.partition("/")[0], f"images/{file}") for file in files], preprocess)


def traffic_signs(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """GTSRB: class folders in ROOT/gtsrb/GTSRB/Training, or the test images with a table of their classes."""
    folder = root / "gtsrb" / "GTSRB"
    if split == "train":
        return folders(folder / "Training", preprocess)
    path = root / "gtsrb" / "GT-final_test.csv"
    try:
        rows = [(row["Filename"], int(row["ClassId"])) for row in csv.DictReader(_lines(path), delimiter=";")]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            f"{quoted(path, limit=300)}: expected the columns Filename and ClassId ({error})", path=path
        ) from error
    labels = _checked(np.array([label for _, label in rows], np.int64), path)
    classes = tuple(f"{number:05d}" for number in range(43))  # the folders of the training images
    return image_dataset(folder / "Final_Test" / "Images", [name for name, _ in rows], labels, classes, preprocess)


def _named(folder: Path, pairs: Sequence[tuple[str, str]], preprocess: Preprocess) -> ImageDataset:
    """Images with the name of their class each."""
    classes = sorted({name for name, _ in pairs})
    place = {name: number for number, name in enumerate(classes)}
    labels = np.array([place[name] for name, _ in pairs], np.int64)
    return image_dataset(folder, [file for _, file in pairs], labels, tuple(classes), preprocess)


def _checked(labels: np.ndarray, path: Path) -> np.ndarray:
    return check_labels(labels, num_rows=len(labels), where=str(path))


def _lines(path: Path) -> list[str]:
    """Lines of a text file. Raises MissingInput, DataError."""
    with open_regular(path) as stream:
        try:
            return stream.read().decode().splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{quoted(path, limit=300)} is not UTF-8 text ({error})", path=path) from error

"""`torchvision:NAME:ROOT[:split]`: a torchvision dataset on disk, read without torchvision."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bnncli.data.arrays import ArrayDataset, array_dataset, read_mat
from bnncli.data.kinds.idx import read_idx
from bnncli.data.kinds.images import ImageDataset, image_dataset
from bnncli.data.kinds.images import open_dataset as open_images
from bnncli.data.labels import check_labels
from bnncli.data.pixels import Preprocess
from bnncli.errors import DataError, MissingInput, Untrusted, UsageError
from bnncli.names import quote_name
from bnncli.options.declaration import Form
from bnncli.system.input_files import is_failure, open_regular

DIGITS = tuple(map(str, range(10)))  # torchvision's "0 - zero", ... match no model's class names
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
_IDX_PARTS = {"train": "train", "test": "t10k"}
# What pickles of NumPy arrays refer to, for Python 2 and 3 and NumPy 1 and 2; nothing else is called.
_OF_ARRAYS = {
    ("numpy.core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy._core.multiarray", "_reconstruct"): "numpy._core.multiarray",
    ("numpy", "ndarray"): "numpy",
    ("numpy", "dtype"): "numpy",
    ("_codecs", "encode"): "_codecs",  # bytes
}
_DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, OSError,
    MemoryError, ImportError, NotImplementedError,
)  # fmt: skip


def mnist(name: str, classes: tuple[str, ...], root: Path, split: str) -> ArrayDataset:
    """Read MNIST or a data set of its form: four idx files in ROOT/NAME/raw, gzipped or not."""
    folder = root / name / "raw"
    names = (f"{_IDX_PARTS[split]}-{what}-ubyte" for what in ("images-idx3", "labels-idx1"))
    images, labels = (read_idx(_find_existing(folder / file, folder / f"{file}.gz")) for file in names)
    return replace(array_dataset(images, labels, where=str(folder)), classes=classes)


def cifar10(root: Path, split: str) -> ArrayDataset:
    """Read CIFAR-10: six pickles of arrays in ROOT/cifar-10-batches-py, and one of the names."""
    names = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    return _cifar(root / "cifar-10-batches-py", names, "labels", ("batches.meta", "label_names"))


def cifar100(root: Path, split: str) -> ArrayDataset:
    """Read CIFAR-100 with its 100 fine classes: pickles of arrays in ROOT/cifar-100-python."""
    return _cifar(root / "cifar-100-python", [split], "fine_labels", ("meta", "fine_label_names"))


def svhn(root: Path, split: str) -> ArrayDataset:
    """Read SVHN's cropped digits: ROOT/SPLIT_32x32.mat, whose label 10 is the digit 0."""
    path = root / f"{split}_32x32.mat"
    found = read_mat(path, ("X", "y"))
    images, labels = np.moveaxis(found["X"], -1, 0), found["y"].reshape(-1).astype(np.int64)
    return replace(array_dataset(images, np.where(labels == 10, 0, labels), where=str(path)), classes=DIGITS)


def stl10(root: Path, split: str) -> ArrayDataset:
    """Read STL-10: bytes of 3 x 96 x 96 images, column-major, in ROOT/stl10_binary."""
    folder = root / "stl10_binary"
    path = folder / f"{split}_X.bin"
    data = np.frombuffer(_bytes(path), np.uint8)
    if data.size % (3 * 96 * 96):
        raise DataError(
            f"{quote_name(path, limit=300)} has {data.size} bytes, expected a multiple of {3 * 96 * 96}", path=path
        )
    images = data.reshape(-1, 3, 96, 96).swapaxes(2, 3)
    labels = None
    if split != "unlabeled":
        labels = np.frombuffer(_bytes(folder / f"{split}_y.bin"), np.uint8).astype(np.int64) - 1
    names = _bytes(folder / "class_names.txt").decode(errors="replace").splitlines()
    return replace(array_dataset(images, labels, where=str(folder)), classes=tuple(names))


def _cifar(folder: Path, files: list[str], labels_key: str, named: tuple[str, str]) -> ArrayDataset:
    """Read images (N, 3, 32, 32) from pickled dictionaries, with labels and classes."""
    meta, names_key = named
    images, labels = [], []
    for file in files:
        batch = _entries(folder / file, {"data": np.ndarray, labels_key: list})
        if batch["data"].dtype != np.uint8 or batch["data"].ndim != 2 or batch["data"].shape[1] != 3 * 32 * 32:
            came = f"{batch['data'].dtype} of shape {batch['data'].shape}"
            raise DataError(f"{quote_name(folder / file, limit=300)} has images as {came}, expected uint8 (N, 3072)")
        images.append(batch["data"].reshape(-1, 3, 32, 32))
        labels.append(np.array(batch[labels_key]))
    classes = _entries(folder / meta, {names_key: list})[names_key]
    dataset = array_dataset(np.concatenate(images), np.concatenate(labels), where=str(folder))
    return replace(dataset, classes=tuple(map(str, classes)))


class _ArraysOnly(pickle.Unpickler):
    """Loads numbers, texts, lists, dictionaries and NumPy arrays; refuses anything else a pickle refers to."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_ARRAYS:
            raise Untrusted(
                f"it would call {module}.{name}, which is not part of this data set's format", code="needs_code"
            )
        return super().find_class(_OF_ARRAYS[module, name], name)


def _entries(path: Path, expected: dict[str, type]) -> dict[str, Any]:
    """Return entries of these types from a Python 2 or 3 pickle. Raises MissingInput, DataError, Untrusted."""
    with open_regular(path) as stream:
        try:
            found = _ArraysOnly(stream, encoding="latin1").load()
        except Untrusted as error:
            raise Untrusted(f"{quote_name(path, limit=300)}: {error.message}", code=error.code, path=path) from None
        except _DAMAGE as error:
            if is_failure(error):
                raise
            raise _damage_error(path, "pickle of arrays", error) from error
    for name, kind in expected.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            raise DataError(
                f"{quote_name(path, limit=300)} has no {name!r}; it is not a file of this data set", path=path
            )
    return found


def _damage_error(path: Path, what: str, error: BaseException) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(
        f"{quote_name(path, limit=300)} is not a complete {what}: {reason}", path=path, hint="copy or download it again"
    )


def _bytes(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read()


def _find_existing(*paths: Path) -> Path:
    """Return the first existing file. Raises MissingInput with the first if none exists."""
    for path in paths:
        if path.is_file():
            return path
    raise MissingInput(f"no file {quote_name(paths[0], limit=300)}, gzipped or not", path=paths[0])


_FLOWER_SPLITS = {"train": "trnid", "val": "valid", "test": "tstid"}


def folders(root: Path, preprocess: Preprocess) -> ImageDataset:
    """Open one folder per class."""
    return open_images(str(root), preprocess)


def flowers102(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Open Flowers102: ROOT/flowers-102/jpg, with splits and labels in MATLAB files; classes have no names."""
    folder = root / "flowers-102"
    key = _FLOWER_SPLITS[split]
    numbers = read_mat(folder / "setid.mat", (key,))[key].reshape(-1).astype(np.int64)
    every = read_mat(folder / "imagelabels.mat", ("labels",))["labels"].reshape(-1).astype(np.int64) - 1
    if len(numbers) and not 1 <= numbers.min() <= numbers.max() <= len(every):
        raise DataError(
            f"{quote_name(folder / 'setid.mat', limit=300)} names images without labels", path=folder / "setid.mat"
        )
    files = [f"jpg/image_{number:05d}.jpg" for number in numbers.tolist()]
    return image_dataset(folder, files, _check_label_array(every[numbers - 1], folder), None, preprocess)


def pets(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Open OxfordIIITPet: ROOT/oxford-iiit-pet/annotations/SPLIT.txt with names, classes from 1; 37 breeds."""
    folder = root / "oxford-iiit-pet"
    path = folder / "annotations" / f"{split}.txt"
    try:
        rows = [(words[0], int(words[1]) - 1) for words in map(str.split, _lines(path)) if words]
    except (IndexError, ValueError) as error:
        raise DataError(
            f"{quote_name(path, limit=300)}: expected lines of the form NAME CLASS SPECIES BREED ({error})", path=path
        ) from error
    names = {label: image.rpartition("_")[0].replace("_", " ").title() for image, label in rows}
    classes = tuple(names[label] for label in sorted(names))
    labels = _check_label_array(np.array([label for _, label in rows], np.int64), path)
    is_whole = sorted(names) == list(range(len(names)))
    return image_dataset(
        folder, [f"images/{image}.jpg" for image, _ in rows], labels, classes if is_whole else None, preprocess
    )


def food101(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Open Food101: ROOT/food-101/meta/SPLIT.json with the images of each class."""
    folder = root / "food-101"
    path = folder / "meta" / f"{split}.json"
    try:
        found = json.loads("\n".join(_lines(path)))
        pairs = [(str(name), f"images/{image}.jpg") for name, images in found.items() for image in images]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(
            f"{quote_name(path, limit=300)}: expected JSON with the images of each class ({error})", path=path
        ) from error
    return _open_named_images(folder, pairs, preprocess)


def textures(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Open DTD, the describable textures, partition 1: ROOT/dtd/dtd/labels/SPLIT1.txt with one path per line."""
    folder = root / "dtd" / "dtd"
    files = [line for line in map(str.strip, _lines(folder / "labels" / f"{split}1.txt")) if line]
    return _open_named_images(folder, [(file.partition("/")[0], f"images/{file}") for file in files], preprocess)


def traffic_signs(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Open GTSRB: class folders in ROOT/gtsrb/GTSRB/Training, or the test images with a table of their classes."""
    folder = root / "gtsrb" / "GTSRB"
    if split == "train":
        return folders(folder / "Training", preprocess)
    path = root / "gtsrb" / "GT-final_test.csv"
    try:
        rows = [(row["Filename"], int(row["ClassId"])) for row in csv.DictReader(_lines(path), delimiter=";")]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            f"{quote_name(path, limit=300)}: expected the columns Filename and ClassId ({error})", path=path
        ) from error
    labels = _check_label_array(np.array([label for _, label in rows], np.int64), path)
    classes = tuple(f"{number:05d}" for number in range(43))  # the folders of the training images
    return image_dataset(folder / "Final_Test" / "Images", [name for name, _ in rows], labels, classes, preprocess)


def _open_named_images(folder: Path, pairs: Sequence[tuple[str, str]], preprocess: Preprocess) -> ImageDataset:
    """Open images, each with its class name."""
    classes = sorted({name for name, _ in pairs})
    place = {name: number for number, name in enumerate(classes)}
    labels = np.array([place[name] for name, _ in pairs], np.int64)
    return image_dataset(folder, [file for _, file in pairs], labels, tuple(classes), preprocess)


def _check_label_array(labels: np.ndarray, path: Path) -> np.ndarray:
    return check_labels(labels, num_rows=len(labels), where=str(path))


def _lines(path: Path) -> list[str]:
    """Return the lines of a text file. Raises MissingInput, DataError."""
    with open_regular(path) as stream:
        try:
            return stream.read().decode().splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{quote_name(path, limit=300)} is not UTF-8 text ({error})", path=path) from error


FORM = Form("torchvision:NAME:ROOT[:split]", 80, "A torchvision.datasets dataset on disk.")

_BOTH = ("train", "test")
_Dataset = ArrayDataset | ImageDataset


class _Set(NamedTuple):
    """The splits of a data set (none if undivided), and the function that opens one of them."""

    splits: tuple[str, ...]
    open: Callable[[Path, str, Preprocess], _Dataset]


def _arrays(read: Callable[[Path, str], ArrayDataset]) -> Callable[[Path, str, Preprocess], ArrayDataset]:
    return lambda root, split, preprocess: read(root, split)


def _folders(*within: str) -> Callable[[Path, str, Preprocess], ImageDataset]:
    """Open class folders in a folder of ROOT, with {split} replaced by the split."""
    return lambda root, split, preprocess: folders(
        root.joinpath(*(name.format(split=split) for name in within)), preprocess
    )


_SETS = {
    "MNIST": _Set(_BOTH, _arrays(partial(mnist, "MNIST", DIGITS))),
    "FashionMNIST": _Set(_BOTH, _arrays(partial(mnist, "FashionMNIST", FASHION))),
    "KMNIST": _Set(_BOTH, _arrays(partial(mnist, "KMNIST", KUZUSHIJI))),
    "CIFAR10": _Set(_BOTH, _arrays(cifar10)),
    "CIFAR100": _Set(_BOTH, _arrays(cifar100)),
    "SVHN": _Set(("train", "test", "extra"), _arrays(svhn)),
    "STL10": _Set(("train", "test", "unlabeled"), _arrays(stl10)),
    "Flowers102": _Set(("train", "val", "test"), flowers102),
    "OxfordIIITPet": _Set(("trainval", "test"), pets),
    "Food101": _Set(_BOTH, food101),
    "DTD": _Set(("train", "val", "test"), textures),
    "GTSRB": _Set(_BOTH, traffic_signs),
    "Country211": _Set(("train", "valid", "test"), _folders("country211", "{split}")),
    "EuroSAT": _Set((), _folders("eurosat", "2750")),
    "ImageNet": _Set(("train", "val"), _folders("{split}")),
    "ImageFolder": _Set((), _folders()),
}


def exists(place: str) -> bool:
    """Return whether the text as it stands names a data set and a folder."""
    name, _, root = place.partition(":")
    return name in _SETS and Path(root).expanduser().is_dir()


def open_dataset(place: str, preprocess: Preprocess) -> _Dataset:
    """Open a split of a data set.

    Raises:
        UsageError: the data set or split is unknown, or no split is named of several.
        MissingInput: there is no such folder, or it lacks the files that torchvision stores.
        DataError: a file is damaged or does not belong to the data set.
        Untrusted: a pickle that does not belong to the data set would call something.
    """
    name, _, rest = place.partition(":")
    if name not in _SETS or not rest:
        raise UsageError(
            f"\0data\0 torchvision: expected NAME:ROOT[:split], where NAME is one of {', '.join(_SETS)}; got {place!r}"
        )
    root, _, split = (rest, "", "") if Path(rest).expanduser().is_dir() else rest.rpartition(":")
    root, split = (root, split) if root else (split, "")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise MissingInput(f"no folder {quote_name(root, limit=300)}", path=folder)
    known = _SETS[name].splits
    if known and split not in known:
        came = f"got {split!r}" if split else "got none"
        raise UsageError(
            f"\0data\0 torchvision:{name}: expected one of the splits {', '.join(known)}, such as "
            f"{name}:{root}:{known[-1]}; {came}"
        )
    if split and not known:
        folder = folder / split
    return _SETS[name].open(folder, split, preprocess)

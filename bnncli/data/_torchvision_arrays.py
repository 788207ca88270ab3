"""Published data sets that are arrays in files, laid out as torchvision.datasets keeps them; read without torchvision.

Sources: torchvision.datasets (mnist, cifar, svhn, stl10) for names of folders and files; the pages of the sets for the formats.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bnncli.data._arrays import ArrayDataset, array_dataset
from bnncli.data._matlab import read_mat
from bnncli.data.idx import read_idx
from bnncli.errors import DataError, MissingInput, Untrusted
from bnncli.names import quoted
from bnncli.system.input_files import is_failure, open_regular

DIGITS = tuple(map(str, range(10)))  # torchvision's "0 - zero", ... fit no model's names
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
_IDX_PARTS = {"train": "train", "test": "t10k"}
# What pickles of NumPy arrays name, of Python 2 and 3 and of NumPy 1 and 2; nothing else is called.
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
    """MNIST and the sets of its form: four idx files in ROOT/NAME/raw, gzipped or not."""
    folder = root / name / "raw"
    names = (f"{_IDX_PARTS[split]}-{what}-ubyte" for what in ("images-idx3", "labels-idx1"))
    images, labels = (read_idx(_either(folder / file, folder / f"{file}.gz")) for file in names)
    return replace(array_dataset(images, labels, where=str(folder)), classes=classes)


def cifar10(root: Path, split: str) -> ArrayDataset:
    """CIFAR-10: six pickles of arrays in ROOT/cifar-10-batches-py, and one of the names."""
    names = [f"data_batch_{number}" for number in range(1, 6)] if split == "train" else ["test_batch"]
    return _cifar(root / "cifar-10-batches-py", names, "labels", ("batches.meta", "label_names"))


def cifar100(root: Path, split: str) -> ArrayDataset:
    """CIFAR-100 with its 100 fine classes: pickles of arrays in ROOT/cifar-100-python."""
    return _cifar(root / "cifar-100-python", [split], "fine_labels", ("meta", "fine_label_names"))


def svhn(root: Path, split: str) -> ArrayDataset:
    """SVHN's cropped digits: ROOT/SPLIT_32x32.mat, whose label 10 is the digit 0."""
    path = root / f"{split}_32x32.mat"
    found = read_mat(path, ("X", "y"))
    images, labels = np.moveaxis(found["X"], -1, 0), found["y"].reshape(-1).astype(np.int64)
    return replace(array_dataset(images, np.where(labels == 10, 0, labels), where=str(path)), classes=DIGITS)


def stl10(root: Path, split: str) -> ArrayDataset:
    """STL-10: bytes of 3 x 96 x 96 images, columns first, in ROOT/stl10_binary."""
    folder = root / "stl10_binary"
    path = folder / f"{split}_X.bin"
    data = np.frombuffer(_bytes(path), np.uint8)
    if data.size % (3 * 96 * 96):
        raise DataError(
            f"{quoted(path, limit=300)} has {data.size} bytes, expected a multiple of {3 * 96 * 96}", path=path
        )
    images = data.reshape(-1, 3, 96, 96).swapaxes(2, 3)
    labels = None
    if split != "unlabeled":
        labels = np.frombuffer(_bytes(folder / f"{split}_y.bin"), np.uint8).astype(np.int64) - 1
    names = _bytes(folder / "class_names.txt").decode(errors="replace").splitlines()
    return replace(array_dataset(images, labels, where=str(folder)), classes=tuple(names))


def _cifar(folder: Path, files: list[str], labels_key: str, named: tuple[str, str]) -> ArrayDataset:
    """Images (N, 3, 32, 32) of pickled dictionaries, their labels, and the classes."""
    meta, names_key = named
    images, labels = [], []
    for file in files:
        batch = _entries(folder / file, {"data": np.ndarray, labels_key: list})
        if batch["data"].dtype != np.uint8 or batch["data"].ndim != 2 or batch["data"].shape[1] != 3 * 32 * 32:
            came = f"{batch['data'].dtype} of shape {batch['data'].shape}"
            raise DataError(f"{quoted(folder / file, limit=300)} has images as {came}, expected uint8 (N, 3072)")
        images.append(batch["data"].reshape(-1, 3, 32, 32))
        labels.append(np.array(batch[labels_key]))
    classes = _entries(folder / meta, {names_key: list})[names_key]
    dataset = array_dataset(np.concatenate(images), np.concatenate(labels), where=str(folder))
    return replace(dataset, classes=tuple(map(str, classes)))


class _ArraysOnly(pickle.Unpickler):
    """Loads numbers, texts, lists, dictionaries and NumPy arrays; refuses whatever else a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _OF_ARRAYS:
            raise Untrusted(
                f"it would call {module}.{name}, which is not part of this data set's format", code="needs_code"
            )
        return super().find_class(_OF_ARRAYS[module, name], name)


def _entries(path: Path, expected: dict[str, type]) -> dict[str, Any]:
    """Entries of the dictionary in a pickle of Python 2 or 3, of these types. Raises MissingInput, DataError, Untrusted."""
    with open_regular(path) as stream:
        try:
            found = _ArraysOnly(stream, encoding="latin1").load()
        except Untrusted as error:
            raise Untrusted(f"{quoted(path, limit=300)}: {error.message}", code=error.code, path=path) from None
        except _DAMAGE as error:
            if is_failure(error):
                raise
            raise _damaged(path, "pickle of arrays", error) from error
    for name, kind in expected.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            raise DataError(f"{quoted(path, limit=300)} has no {name!r}; it is not a file of this data set", path=path)
    return found


def _damaged(path: Path, what: str, error: BaseException) -> DataError:
    reason = " ".join(str(error).split())[:200]
    return DataError(
        f"{quoted(path, limit=300)} is not a complete {what}: {reason}", path=path, hint="copy or download it again"
    )


def _bytes(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read()


def _either(*paths: Path) -> Path:
    """The first that is there. Raises MissingInput with the first where none is."""
    for path in paths:
        if path.is_file():
            return path
    raise MissingInput(f"no file {quoted(paths[0], limit=300)}, gzipped or not", path=paths[0])

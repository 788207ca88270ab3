"""Published data sets as torchvision keeps them, against torchvision's own classes on the same files."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from problems.optional_libraries import library
from scipy.io import savemat

from bnncli.data.kinds.torchvision import _SETS
from bnncli.data.pixels import Preprocess
from bnncli.data.splits import load_split
from bnncli.errors import BnnError, DataError, MissingInput, Untrusted, UsageError

pytestmark = [pytest.mark.core, pytest.mark.libraries]

N = 6
RNG = np.random.default_rng(3)


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def write_idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = head + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(name: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        for part, suffix in (("train", ""), ("t10k", "")):
            write_idx(root / name / f"raw/{part}-images-idx3-ubyte{suffix}", pixels(N, 28, 28))
            write_idx(root / name / f"raw/{part}-labels-idx1-ubyte{suffix}", np.arange(N, dtype=np.uint8))

    return write


def python_2_pickle(key: str, array: np.ndarray, labels: list[int]) -> bytes:
    """{"data": array, key: labels} as Python 2 pickled it, with texts of bytes and the places of NumPy 1."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = (
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\0K\1\x87R(K\3" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\0tb"
    )
    shape = b"(" + b"".join(map(number, array.shape)) + b"t"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    made += b"(K\1" + shape + dtype + b"\x89" + text(array.tobytes()) + b"tb"
    return b"\x80\2}(" + text(b"data") + made + text(key.encode()) + b"](" + b"".join(map(number, labels)) + b"eu."


def write_pickles(folder: str, files: list[str], key: str, meta: tuple[str, str]) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        (root / folder).mkdir()
        for file in files:
            labels = [int(label) for label in RNG.integers(0, 4, N)]
            (root / folder / file).write_bytes(python_2_pickle(key, pixels(N, 3072), labels))
        (root / folder / meta[0]).write_bytes(pickle.dumps({meta[1]: ["ape", "bat", "cow", "dog"]}, protocol=2))

    return write


def write_svhn(root: Path) -> None:
    for split in ("train", "test", "extra"):
        savemat(root / f"{split}_32x32.mat", {"X": pixels(32, 32, 3, N), "y": np.array([[10, 1, 2, 3, 9, 10]]).T})


def write_stl10(root: Path) -> None:
    folder = root / "stl10_binary"
    folder.mkdir()
    for split in ("train", "test", "unlabeled"):
        (folder / f"{split}_X.bin").write_bytes(pixels(N, 3, 96, 96).tobytes())
        (folder / f"{split}_y.bin").write_bytes(bytes(range(1, N + 1)))
    (folder / "class_names.txt").write_text("airplane\nbird\ncar\ncat\ndeer\ndog\n")


def write_images(root: Path, names: list[str], size: int = 8) -> list[str]:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(size, size, 3)).save(path)
    return names


def write_flowers(root: Path) -> None:
    folder = root / "flowers-102"
    write_images(folder, [f"jpg/image_{number:05d}.jpg" for number in range(1, N + 1)])
    savemat(folder / "imagelabels.mat", {"labels": np.array([[3, 1, 2, 1, 3, 2]], np.uint8)})
    savemat(folder / "setid.mat", {"trnid": [[5, 1]], "valid": [[2, 6]], "tstid": [[4, 3]]})


def write_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    names = ["Abyssinian_1", "shiba_inu_7", "Abyssinian_2"]
    write_images(folder, [f"images/{name}.jpg" for name in names])
    for split, rows in (("trainval", (0, 1, 2)), ("test", (2, 1))):
        lines = [f"{names[row]} {1 + row % 2} {1 + row % 2} 1" for row in rows]
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")


def write_food(root: Path) -> None:
    folder = root / "food-101"
    found = {"pie": ["pie/3", "pie/1"], "apple": ["apple/2"]}
    write_images(folder, [f"images/{name}.jpg" for names in found.values() for name in names])
    (folder / "meta").mkdir()
    for split in ("train", "test"):
        (folder / "meta" / f"{split}.json").write_text(json.dumps(found))


def write_textures(root: Path) -> None:
    folder = root / "dtd/dtd"
    names = ["dotted/dotted_2.jpg", "banded/banded_1.jpg", "dotted/dotted_1.jpg"]
    write_images(folder / "images", names)
    (folder / "labels").mkdir()
    for split in ("train", "val", "test"):
        (folder / "labels" / f"{split}1.txt").write_text("\n".join(names) + "\n")


def write_signs(root: Path) -> None:
    folder = root / "gtsrb/GTSRB"
    write_images(folder / "Training", ["00000/a.ppm", "00001/b.ppm", "00001/a.ppm"])
    write_images(folder / "Final_Test/Images", ["00000.ppm", "00001.ppm"])
    with open(root / "gtsrb/GT-final_test.csv", "w", newline="") as file:
        csv.writer(file, delimiter=";").writerows(
            [["Filename", "Width", "ClassId"], ["00001.ppm", 8, 42], ["00000.ppm", 8, 3]]
        )


def write_folders(*within: str) -> Callable[[Path], None]:
    return lambda root: [write_images(root / folder, ["x/1.png", "a/2.png", "x/0.png"]) for folder in within] and None


CIFAR10 = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
WRITERS: dict[str, Callable[[Path], None]] = {
    "MNIST": write_mnist("MNIST"), "FashionMNIST": write_mnist("FashionMNIST"), "KMNIST": write_mnist("KMNIST"),
    "CIFAR10": write_pickles("cifar-10-batches-py", CIFAR10, "labels", ("batches.meta", "label_names")),
    "CIFAR100": write_pickles("cifar-100-python", ["train", "test"], "fine_labels", ("meta", "fine_label_names")),
    "SVHN": write_svhn, "STL10": write_stl10, "Flowers102": write_flowers, "OxfordIIITPet": write_pets,
    "Food101": write_food, "DTD": write_textures, "GTSRB": write_signs,
    "Country211": write_folders("country211/train", "country211/valid", "country211/test"),
    "EuroSAT": write_folders("eurosat/2750"), "ImageNet": write_folders("train", "val"),
    "ImageFolder": write_folders("."),
}  # fmt: skip
BY_TRAIN = ("MNIST", "FashionMNIST", "KMNIST", "CIFAR10", "CIFAR100")


def theirs(name: str, root: Path, split: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The set as torchvision opens it, but for its check that the files are the published ones."""
    from torchvision import datasets
    from torchvision.datasets import cifar, stl10, svhn, utils

    for module in (cifar, svhn, utils, stl10, datasets.flowers102):
        monkeypatch.setattr(module, "check_integrity", lambda *given, **named: True)
    made = getattr(datasets, name if name != "ImageNet" else "ImageFolder")
    if name in BY_TRAIN:
        return made(root, train=split == "train")
    if name == "ImageNet":
        return made(root / split)
    return made(root, split=split) if split else made(root)


def test_every_set_has_files_here() -> None:
    assert set(WRITERS) == set(_SETS)


@pytest.mark.parametrize("name", WRITERS)
def test_every_split_is_torchvisions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("torchvision")
    WRITERS[name](tmp_path)
    for split in _SETS[name].splits or ("",):
        ours = load_split(f"torchvision:{name}:{tmp_path}" + (f":{split}" if split else ""))
        dataset = theirs(name, tmp_path, split, monkeypatch)
        images, labels = ours.dataset.read(ours.rows)
        found = [dataset[row] for row in range(len(dataset))]
        images = np.asarray(images)
        if images.ndim == 4 and images.shape[1] == 3:
            images = images.transpose(0, 2, 3, 1)
        assert np.array_equal(images, np.stack([np.array(image) for image, _ in found]))
        assert (
            [-1] * len(found) == [label for _, label in found]
            if labels is None
            else labels.tolist() == [label for _, label in found]
        )


@pytest.mark.parametrize(
    ("name", "split"), [("FashionMNIST", ":test"), ("KMNIST", ":test"), ("CIFAR10", ":test"), ("CIFAR100", ":train"),
    ("STL10", ":test"), ("OxfordIIITPet", ":test"), ("Food101", ":test"), ("DTD", ":val"), ("EuroSAT", "")],
)  # fmt: skip
def test_class_names_are_torchvisions(name: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("torchvision")
    WRITERS[name](tmp_path)
    dataset = theirs(name, tmp_path, split.removeprefix(":"), monkeypatch)
    assert load_split(f"torchvision:{name}:{tmp_path}{split}").classes == tuple(dataset.classes)


def test_gzipped_files_and_rows_are_read_as_they_are(tmp_path: Path) -> None:
    images = pixels(N, 28, 28)
    write_idx(tmp_path / "MNIST/raw/t10k-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte", np.arange(N, dtype=np.uint8))
    split = load_split(f"torchvision:MNIST:{tmp_path}:test@4")
    assert (split.labels.tolist(), split.classes) == ([0, 1, 2, 3], tuple("0123456789"))
    assert next(split.batches(4)).inputs.mul(255).round().numpy().astype(np.uint8)[:, 0].tolist() == images[:4].tolist()


def test_pickles_of_arrays_that_python_3_made_are_read(tmp_path: Path) -> None:
    WRITERS["CIFAR10"](tmp_path)
    images = pixels(N, 3072)
    path = tmp_path / "cifar-10-batches-py/test_batch"
    for protocol in (2, 4):
        path.write_bytes(pickle.dumps({"data": images, "labels": [0] * N}, protocol=protocol))
        read, _ = load_split(f"torchvision:CIFAR10:{tmp_path}:test").dataset.read(np.arange(N))
        assert np.array_equal(read, images.reshape(N, 3, 32, 32))


class Trap:
    def __reduce__(self) -> Any:
        return (print, ("it was called",))


def test_a_pickle_that_would_call_something_is_never_loaded(tmp_path: Path, capsys: Any) -> None:
    WRITERS["CIFAR10"](tmp_path)
    (tmp_path / "cifar-10-batches-py/test_batch").write_bytes(pickle.dumps({"data": Trap(), "labels": []}))
    with pytest.raises(Untrusted, match=r"test_batch': it would call builtins.print"):
        load_split(f"torchvision:CIFAR10:{tmp_path}:test")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "file", "size", "told"),
    [
        ("CIFAR10", "cifar-10-batches-py/test_batch", 40, "is not a complete pickle of arrays"),
        ("SVHN", "test_32x32.mat", 40, "is not a complete MATLAB file"),
        ("STL10", "stl10_binary/test_X.bin", 40, "expected a multiple of 27648"),
        ("Food101", "food-101/meta/test.json", 13, "expected JSON with the images of each class"),
        ("OxfordIIITPet", "oxford-iiit-pet/annotations/test.txt", 13, "expected lines of the form NAME CLASS"),
        ("GTSRB", "gtsrb/GT-final_test.csv", 34, "expected the columns Filename and ClassId"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(name: str, file: str, size: int, told: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:size])
    with pytest.raises(DataError, match=told) as error:
        load_split(f"torchvision:{name}:{tmp_path}:test")
    assert "\n" not in error.value.message
    (tmp_path / file).unlink()
    with pytest.raises(MissingInput, match=Path(file).name):
        load_split(f"torchvision:{name}:{tmp_path}:test")


@pytest.mark.parametrize(
    ("spec", "kind", "told"),
    [
        ("MNIST:FOLDER", UsageError, "expected one of the splits train, test, such as MNIST:.*:test; got none"),
        ("MNIST:FOLDER:val", UsageError, "expected one of the splits train, test.*got 'val'"),
        ("Mnist:FOLDER:test", UsageError, "where NAME is one of MNIST, FashionMNIST"),
        ("MNIST", UsageError, "expected NAME:ROOT"),
        ("MNIST:FOLDER/none:test", MissingInput, "no folder '.*/none'"),
        ("MNIST:FOLDER:test", MissingInput, r"no file '.*MNIST/raw/t10k-images-idx3-ubyte', gzipped or not"),
        ("Flowers102:FOLDER:val", MissingInput, "no file '.*setid.mat'"),
    ],
)
def test_what_is_not_there_is_told(spec: str, kind: type[BnnError], told: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=told):
        load_split(f"torchvision:{spec.replace('FOLDER', str(tmp_path))}")


def test_images_of_a_set_are_resized_as_those_of_folders_are(tmp_path: Path) -> None:
    WRITERS["EuroSAT"](tmp_path)
    preprocess = Preprocess(resize=4)
    split, folder = (
        load_split(spec, preprocess=preprocess)
        for spec in (f"torchvision:EuroSAT:{tmp_path}", f"images:{tmp_path}/eurosat/2750")
    )
    assert next(split.batches(3)).inputs.equal(next(folder.batches(3)).inputs)
    assert split.content_digest() == folder.content_digest()
